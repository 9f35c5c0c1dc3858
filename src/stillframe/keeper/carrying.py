"""What a keeper carries to the tiers, noted in its root: the next one may save, and prune, before it reaches them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import TypeAlias

from stillframe.errors import StillframeError
from stillframe.format import limits, names
from stillframe.format.epochs import Carried, Carrying, decode_carrying, encode_carrying
from stillframe.model import SaveId
from stillframe.store.protocol import Store, read_all

Pinned: TypeAlias = "tuple[SaveId | None, SaveId | None]"
"""What is carried to a tier, and what comes next."""


class CarryingNote:
    """Thread: safe from any.  Not durable: it is for the end of a process, and of a machine only the work is lost."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._key = names.carrying(rank)
        self._lock = threading.Lock()
        self._known: dict[str, Pinned] | None = None

    def inherited(self) -> dict[str, Pinned]:
        """What the keeper before has noted, by the roots of the tiers; nothing when asked again.  Raises nothing."""
        with self._lock:
            if self._known is not None:
                return {}
            self._known = {}
            with contextlib.suppress(StillframeError):  # there is none, or it tells nothing
                data = read_all(self._store, self._key, limits.MAX_NOTE_BYTES)
                found = decode_carrying(data, file=self._store.where(self._key))
                self._known = {each.root: (each.save, each.waiting) for each in found.tiers}
            return dict(self._known)

    def put(self, pinned: Callable[[], Mapping[str, Pinned]], is_ours: Callable[[], bool] = lambda: True) -> None:
        """If it differs from what is there.  Raises nothing: a root that takes no note takes no saves, either.

        ``is_ours``: whether nobody else notes what is carried by now; it may raise.
        """
        with self._lock:  # asked and written as one: a later note never gets under an earlier one
            now = {root: saves for root, saves in pinned().items() if any(saves)}
            if now != self._known:
                note = Carrying([Carried(root, *saves) for root, saves in now.items()])
                with contextlib.suppress(StillframeError):
                    if is_ours():
                        self._store.put(self._key, encode_carrying(note), durable=False)
                        self._known = now
