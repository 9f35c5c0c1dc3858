"""What a rank has put into the group's store for each save, and when that goes again.

Ranks count in the store how many have come so far with a save, and each leaves its own word.  A rank that has seen the
count complete asks no more.  When the last one has seen it, the count goes, and that tells each rank that its own word
may go.  So the store holds what is under way, and the newest of what never completed.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import Any

MAX_TOLD = 1000
"""Words of a rank that stay if other ranks never see them: of saves that failed."""


class Told:
    """Thread: one at a time."""

    def __init__(self, store: Any, world_size: int) -> None:
        self._store = store
        self._world_size = world_size
        self._words: deque[tuple[str, str]] = deque()
        """The key of each word, and that of the count it is part of (or empty); oldest first."""

    def add(self, word: str, count: str = "") -> None:
        """This rank has put this word."""
        self._words.append((word, count))
        self._forget()

    def seen(self, count: str) -> None:
        """This rank has seen that the count is complete."""
        if int(self._store.add(f"{count}/seen", 1)) == self._world_size:
            self._delete(count, f"{count}/seen")
        self._forget()

    def _forget(self) -> None:
        while self._words:
            word, count = self._words[0]
            if len(self._words) > MAX_TOLD:
                self._delete(word, *([count, f"{count}/seen"] if count else []))
            elif not count or self._store.check([count]):
                return
            else:
                self._delete(word)
            self._words.popleft()

    def _delete(self, *keys: str) -> None:
        for key in keys:
            with contextlib.suppress(RuntimeError):  # a store that cannot, or is gone: who needs an answer is told
                self._store.delete_key(key)
