"""For every test: Ctrl-C means Ctrl-C, also where the tests run in the background of a shell that ignores it.

And no keeper that a test has started is left when all have ended: each has a bounded life.
"""

from __future__ import annotations

import gc
import os
import secrets
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stillframe.save.keeper_process import KeeperProcess

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_MARK = secrets.token_hex(8)
os.environ["STILLFRAME_TESTS"] = _MARK  # whatever these tests start inherits it
_LEAVE_S = 90.0
"""A keeper that a test has left with a server that is down repeats a request for 30 s, twice."""


@pytest.fixture(scope="session", autouse=True)
def no_keeper_stays() -> Iterator[None]:
    yield
    end_s = time.monotonic() + _LEAVE_S
    while (left := _keepers()) and time.monotonic() < end_s:
        time.sleep(0.2)
    assert not left, f"keepers that the tests have started live on: {left}"


def _keepers() -> list[str]:
    """The command lines of the keepers that these tests have started, that live, and that nobody has open."""
    processes = [each for each in gc.get_objects() if type(each) is KeeperProcess]
    is_open = {each.pid for each in processes if not each._is_closing}  # a plug-in's, until this process ends
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            told, command = (process / "environ").read_bytes(), (process / "cmdline").read_bytes()
        except OSError:  # it has ended, or is somebody else's
            continue
        is_ours = f"STILLFRAME_TESTS={_MARK}".encode() in told.split(b"\0")
        if is_ours and b"stillframe-keeper" in command.split(b"\0") and int(process.name) not in is_open:
            found.append(f"{process.name}: {command.decode(errors='replace')[-200:]}")
    return found
