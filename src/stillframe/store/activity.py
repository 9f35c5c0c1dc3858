"""Which system call each thread is in, and since when: so that a process can say that its storage is slow."""

from __future__ import annotations

import functools
import itertools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from stillframe.store.calls import Calls

_MAX_TEXT: Final = 300
_WATCHED: Final = (
    "open", "close", "stat", "fstat", "entries", "mkdir", "rmdir", "unlink", "rename", "rename_new", "link",
    "link_to", "fsync", "pwrite", "append", "pread", "truncate", "reserve", "lock", "lease", "is_local", "space",
)  # fmt: skip
"""All calls that may wait for the storage."""


@dataclass(frozen=True, slots=True)
class Operation:
    number: int
    """Counts all operations of the process."""
    verb: str
    target: object
    """A name, or a descriptor."""
    began_s: float

    def describe(self) -> str:
        """ "in fsync of /data/step-…/rank-00000.safetensors for 12 s".  Does not touch the storage."""
        target = self.target
        if isinstance(target, int):
            try:
                target = os.readlink(f"/proc/self/fd/{target}")
            except OSError:  # closed meanwhile, or no /proc
                target = f"descriptor {target}"
        name = str(target).encode("utf-8", "backslashreplace").decode()[-_MAX_TEXT:]
        return f"in {self.verb} of {name} for {time.monotonic() - self.began_s:.0f} s"


class Activity:
    """Thread: safe from any."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._by_thread: dict[int, Operation] = {}

    def begin(self, verb: str, target: object) -> None:
        number = next(self._numbers)
        self._by_thread[threading.get_ident()] = Operation(number, verb, target, time.monotonic())

    def end(self) -> None:
        self._by_thread.pop(threading.get_ident(), None)

    def oldest(self) -> Operation | None:
        """Of the operations that some thread is in now, the one that has lasted longest."""
        return min(list(self._by_thread.values()), key=lambda each: each.number, default=None)


class WatchedCalls(Calls):
    """Takes note of every call that may wait for the storage."""

    def __init__(self, activity: Activity) -> None:
        self.activity = activity


def _watched(verb: str) -> Callable[..., Any]:
    @functools.wraps(getattr(Calls, verb))
    def call(self: WatchedCalls, *arguments: Any) -> Any:
        self.activity.begin(verb, arguments[0])
        try:
            return getattr(super(WatchedCalls, self), verb)(*arguments)
        finally:
            self.activity.end()

    return call


for _verb in _WATCHED:
    setattr(WatchedCalls, _verb, _watched(_verb))
