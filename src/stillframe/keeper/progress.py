"""Signs that a part is being carried to a tier: so nobody takes a keeper that is slow for one that is gone.

Whoever carries a part for long puts now and then how many bytes have gone, beside the part.  Rank 0's keeper looks at
the signs of parts that are missing still (:class:`Signs`).  They are hints: one that is lost costs work done twice.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection, Sequence

from stillframe.errors import StorageError
from stillframe.format import names
from stillframe.model import SaveId
from stillframe.store.protocol import Store, read_range

SIGN_S = 10.0
"""Between two signs, and before the first: most parts are there before that."""
_LOOKED_AT = 16
"""So many of the parts that are missing are looked at: if more are, there is no hurry."""
_SIGN_BYTES = 32


class Sign:
    """Of whoever carries.  Thread: :meth:`count` from any."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._key = ""
        self._bytes = 0
        self._put_s = 0.0
        self._is_there = False

    def begin(self, save: SaveId, rank: int) -> None:
        """The part of this rank is carried from here on."""
        with self._lock:
            self._key, self._bytes, self._put_s = names.key(save, names.progress(rank)), 0, time.monotonic()
            self._is_there = False

    def count(self, nbytes: int) -> None:
        """So many bytes more have gone.  Blocks for a small write, seldom."""
        with self._lock:
            self._bytes += nbytes
            if not self._key or time.monotonic() - self._put_s < SIGN_S:
                return
            self._put_s, self._is_there = time.monotonic(), True
            key, data = self._key, str(self._bytes).encode()
        with contextlib.suppress(StorageError):
            self._store.put(key, data, durable=False)

    def end(self) -> None:
        """It is there, or could not be carried.  Raises nothing."""
        with self._lock:
            key, self._key = self._key, ""
        if key and self._is_there:
            with contextlib.suppress(StorageError):
                self._store.delete([key])


class Signs:
    """What rank 0's keeper has seen of the others.  Thread: one."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._looked_s = 0.0
        self._seen: dict[int, tuple[bytes, float]] = {}
        """By rank: the last sign, and when it was new."""

    def begin(self) -> None:
        """Of another save."""
        self._looked_s, self._seen = time.monotonic(), {}

    def look(self, save: SaveId, missing: Sequence[int], having: Collection[int]) -> None:
        """At the parts that are missing; ``having``: the ranks whose parts have a sign.  Not at every turn."""
        if time.monotonic() - self._looked_s < SIGN_S:
            return
        self._looked_s = time.monotonic()
        for rank in missing[:_LOOKED_AT]:
            if rank in having:
                with contextlib.suppress(StorageError):  # it has just come, or is seen next time
                    sign = read_range(self._store, names.key(save, names.progress(rank)), 0, _SIGN_BYTES)
                    if sign != self._seen.get(rank, (b"", 0.0))[0]:
                        self._seen[rank] = sign, time.monotonic()

    def last_s(self, ranks: Collection[int]) -> float:
        """When a new sign of one of these was last seen; 0 if none was."""
        return max((self._seen[rank][1] for rank in ranks if rank in self._seen), default=0.0)

    def stalled(self, missing: Sequence[int], since_s: float, patience_s: float) -> list[int]:
        """Those of whom nothing was seen for so long."""
        now = time.monotonic()
        return [rank for rank in missing[:_LOOKED_AT] if now - max(since_s, self.last_s([rank])) > patience_s]
