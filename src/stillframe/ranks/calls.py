"""Calls of torch's store, by threads that may still run when the interpreter ends.

Python ends such a thread where it next takes the interpreter's lock.  If that is on its way back from torch, C++ aborts
the whole process: the script ends with SIGABRT instead of its own exit code.  So when the interpreter is about to end,
no more calls are begun, and those that are under way are waited for, for a moment: a store whose host hangs answers
long after the process has gone.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

_EXIT_S = 2.0
_AT_ONCE = 512
"""Keys in one request.  The server of a TCPStore parses a request anew with each piece of it that arrives: to get
16,384 keys took 0.6 s in one request, and 0.06 s in requests of 512."""


class InterpreterEnds(BaseException):
    """Raised instead of a call.  Only daemon threads see it."""


class GuardedStore:
    """A store of torch.distributed with the same methods.  Thread: any."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._store, name)

        def call(*arguments: Any) -> Any:
            token = _calls.begin()
            try:
                return method(*arguments)
            finally:
                _calls.end(token)

        return call

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        get = self.__getattr__("multi_get")
        return [each for at in range(0, len(keys), _AT_ONCE) for each in get(keys[at : at + _AT_ONCE])]

    def multi_set(self, keys: Sequence[str], values: Sequence[str]) -> None:
        put = self.__getattr__("multi_set")
        for at in range(0, len(keys), _AT_ONCE):
            put(keys[at : at + _AT_ONCE], values[at : at + _AT_ONCE])


class _Calls:
    """Of all stores of this process.  No lock: a forked child could inherit it taken."""

    def __init__(self) -> None:
        self._under_way: dict[object, None] = {}
        self._is_over = False
        atexit.register(self._leave)  # with the import: what checkpointers do at the exit comes first
        os.register_at_fork(after_in_child=self._under_way.clear)

    def begin(self) -> object:
        token = object()
        self._under_way[token] = None  # first: whoever ends the calls looks for it after it has said so
        if self._is_over:
            self.end(token)
            raise InterpreterEnds
        return token

    def end(self, token: object) -> None:
        self._under_way.pop(token, None)

    def _leave(self) -> None:
        self._is_over = True
        deadline_s = time.monotonic() + _EXIT_S
        while self._under_way and time.monotonic() < deadline_s:
            time.sleep(0.001)


_calls = _Calls()
