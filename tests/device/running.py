"""Tests that run where the device is: in a process of their own, so that no other test sees an accelerator."""

from __future__ import annotations

import functools
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.device.build import CannotBuild, build
from tests.device.worker import TEST_S

REPOSITORY = Path(__file__).resolve().parent.parent.parent
_START_S = 60.0
_GRACE_S = 10.0
_FRESH = ("tests.device.test_pinning", "tests.device.test_graphs")
"""These count what is pinned: what a test with a dead device leaves stays until the process ends."""


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY)])
    # One thread each: every stream has its own, and sums must not depend on how many there are.
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}


def need_device() -> None:
    """Built here, so that no test waits for it in a child; skips the test where there is no compiler."""
    try:
        build()
    except CannotBuild as why:
        pytest.skip(str(why))


class _Worker:
    """One process, for all tests of this one; started again if a test ended it."""

    def __init__(self, module: str) -> None:
        self.module = module
        """Whose test it was started for."""
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.device.worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=environment(), cwd=REPOSITORY,
        )  # fmt: skip
        self._has_run = False

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def run(self, module: str, name: str, arguments: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = json.dumps({"module": module, "name": name, "arguments": arguments}, default=str)
        self._process.stdin.write(asked.encode() + b"\n")
        self._process.stdin.flush()
        end = time.monotonic() + TEST_S + _GRACE_S + (0 if self._has_run else _START_S)
        answer = b""
        while not answer.endswith(b"\n"):
            ready = select.select([self._process.stdout], [], [], max(end - time.monotonic(), 0))[0]
            got = os.read(self._process.stdout.fileno(), 65536) if ready else b""
            if not got:
                self.end()
                raise AssertionError(f"the process that has the device is gone, or hangs:\n{self._said()}")
            answer += got
        self._has_run = True
        troubles = json.loads(answer)["troubles"]
        assert not troubles, f"{troubles}\n{self._said()[-3000:]}"

    def _said(self) -> str:
        fd = self._errors.fileno()
        return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")[-10000:]

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


@functools.cache
def _workers() -> list[_Worker]:
    return []


def on_device(body: Callable[..., None]) -> Callable[..., None]:
    """The test runs in the worker; its arguments go there as JSON, so of fixtures it may have ``tmp_path``."""

    @functools.wraps(body)
    def test(**arguments: Any) -> None:
        need_device()
        workers, module = _workers(), body.__module__
        if not workers or not workers[-1].is_running or (module in _FRESH and workers[-1].module != module):
            workers.append(_Worker(module))
        workers[-1].run(module, body.__name__, arguments)

    test.body = body  # type: ignore[attr-defined]
    return test


def end_workers() -> None:
    for each in _workers():
        each.end()
