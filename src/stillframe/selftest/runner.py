"""Starts the parts of the self-test, and judges what they say.  Without torch, within its deadline."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from stillframe.selftest.checks import Check, parse

DEADLINE_S = 120.0
_KILL_AFTER = 4
"""Saves that were requested and are still on their way."""
_END_S = 10.0


class Ended(Exception):
    """The process is gone, or was ended: its text says how."""


def run_all(scratch: str, deadline_s: float = DEADLINE_S) -> Iterator[Check]:
    """Every check, as it comes.  ``scratch``: an empty directory for checkpoints.

    Each part is a process; one that ends badly or too late is a check that failed.
    """
    end_s = time.monotonic() + deadline_s
    try:
        with _part("checks", os.path.join(scratch, "order"), end_s) as lines:
            for check in lines:
                yield check
                if check.verdict == "none":
                    return
    except Ended as why:
        yield Check("checks", "fail", str(why))
    yield _killed_and_restored(os.path.join(scratch, "killed"), end_s)


def _killed_and_restored(root: str, end_s: float) -> Check:
    name = "killed and restored"
    states: dict[object, str] = {}
    try:
        saved = 0
        with _part("train", root, end_s) as lines:
            for check in lines:
                if check.name == "state":
                    states[check.figures["step"]] = check.said
                saved += check.name == "saved"
                if saved == _KILL_AFTER:
                    break
        with _part("resume", root, end_s) as lines:
            found = next(lines, None)
            for _ in lines:
                pass
    except Ended as why:
        return Check(name, "fail", str(why))
    if found is None or found.figures.get("step") is None:
        return Check(name, "fail", "nothing was restored")
    step = found.figures["step"]
    if states.get(step) != found.said:
        return Check(name, "fail", f"step {step} was restored with other bytes than it had", {"step": step})
    return Check(name, "pass", f"step {step} of {len(states)} is bit for bit what it was", {"step": step})


@contextlib.contextmanager
def _part(what: str, root: str, end_s: float) -> Iterator[Iterator[Check]]:
    """What a process says.  It is killed when the block is left."""
    command = [sys.executable, "-m", "stillframe.selftest", what, root]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        yield _said(process, end_s)
    finally:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process can be stuck in a driver
            process.wait(_END_S)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def _said(process: subprocess.Popen[bytes], end_s: float) -> Iterator[Check]:
    """Raises :class:`Ended` unless it ends well, in time."""
    assert process.stdout is not None
    assert process.stderr is not None
    lines, errors = b"", b""
    with selectors.DefaultSelector() as ready:
        ready.register(process.stdout, selectors.EVENT_READ)
        ready.register(process.stderr, selectors.EVENT_READ)
        while ready.get_map():
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise Ended(f"not done by the deadline, and ended; it said: {_tail(errors)}")
            for key, _ in ready.select(left_s):
                data = os.read(key.fd, 65536)
                if not data:
                    ready.unregister(key.fileobj)
                elif key.fileobj is process.stderr:
                    errors = (errors + data)[-65536:]
                else:
                    *whole, lines = (lines + data).split(b"\n")
                    for line in whole:
                        with contextlib.suppress(ValueError):
                            yield parse(line)
    code = process.wait(_END_S)
    if code:
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        raise Ended(f"the process ended {how}: {_tail(errors)}")


def _tail(errors: bytes) -> str:
    lines = errors.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "nothing"
