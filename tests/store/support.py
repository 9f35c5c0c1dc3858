"""A file system that fails on request: every system call of the store on the file system can be refused, done and then
reported as failed, or done later."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from stillframe.store import blob
from stillframe.store.calls import Calls
from stillframe.store.memory import Fault
from stillframe.store.posix import PosixStore
from stillframe.testing.store_contract import Clients

_CAN_LAND_LATE = {"rename", "rename_new", "link", "unlink", "mkdir"}
_STEPS = _CAN_LAND_LATE | {
    "open",
    "stat",
    "fstat",
    "entries",
    "rmdir",
    "fsync",
    "pwrite",
    "pread",
    "truncate",
    "reserve",
}
SPARE = "blob.spare"


def fast_directory() -> str:
    """A new directory in memory, if there is such a place."""
    return tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)


class FaultyCalls(Calls):
    """Fails at one call of the next operation.  ``has_links``: whether link(2) works."""

    def __init__(self, is_local: bool = True, has_links: bool = True) -> None:
        self._is_local, self._has_links = is_local, has_links
        self._fault: Fault | None = None
        self._step = 0
        self._late: list[Callable[[], None]] = []

    def arm(self, fault: Fault, step: int) -> None:
        self._fault, self._step = fault, step

    def disarm(self) -> None:
        self._fault = None

    def land(self) -> None:
        late, self._late = self._late, []
        for work in late:
            work()

    def is_local(self, fd: int) -> bool:
        return self._is_local

    def open(self, name: str, flags: int, dir_fd: int | None = None) -> int:
        return super().open(name, flags & ~os.O_DIRECT if flags & os.O_WRONLY else flags, dir_fd)

    def link(self, old: str, new: str, dir_fd: int) -> None:
        if not self._has_links:
            raise OSError(errno.EPERM, "no links here")
        super().link(old, new, dir_fd)

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in _STEPS or super().__getattribute__("_fault") is None:
            return found
        return partial(self._call, name, found)

    def _call(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        self._step -= 1
        if self._step >= 0 or self._fault is None:
            return call(*args)
        fault, self._fault = self._fault, None
        if fault is Fault.REPLY_LOST:
            answer = call(*args)
            if name == "open":
                os.close(answer)
        elif fault is Fault.LATE and name in _CAN_LAND_LATE:
            held = [os.dup(each) if isinstance(each, int) else each for each in args]
            self._late.append(partial(_perform, call, held))
        raise OSError(errno.EIO, "injected")


def _perform(call: Callable[..., Any], args: list[Any]) -> None:
    with contextlib.suppress(OSError):
        call(*args)
    for each in args:
        if isinstance(each, int):
            os.close(each)


def posix_clients(
    *, is_local: bool = True, has_links: bool = True, spare: str = "", store: Any = PosixStore
) -> Clients:
    """Two clients of a root that does not exist yet."""
    top = Path(fast_directory())
    calls = FaultyCalls(is_local, has_links)
    first, second = (store(top / "above" / "root", spare=spare, calls=calls) for _ in range(2))

    def close() -> None:
        calls.land()
        first.close()
        second.close()
        shutil.rmtree(top)

    return Clients((first, second), calls, close, frozenset({spare} if spare else ()))


@contextlib.contextmanager
def small_blobs_reused(modules: tuple[Any, ...] = (blob,), size: int = 1) -> Any:
    """Blobs of any size are kept as spares."""
    before = [module._REUSED_BYTES for module in modules]
    for module in modules:
        module._REUSED_BYTES = size
    try:
        yield
    finally:
        for module, each in zip(modules, before, strict=True):
            module._REUSED_BYTES = each
