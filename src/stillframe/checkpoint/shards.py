"""Where the boxes of every tensor lie: what is kept of the seals of a checkpoint that thousands of ranks have written.

A parsed seal is large: names, trees, values, digests.  Each is read, what locates its shards is noted here, and it is
let go.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Collection, Iterable

import msgspec

from stillframe.format.records import Seal
from stillframe.format.segment import Shard


class StoredBox(msgspec.Struct, frozen=True, gc=False):
    """One box of a tensor, and the shard that holds it: its number in the seal of ``rank``, and its place there."""

    rank: int
    shard: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    end: int
    dtype: str
    device: str


class ShardIndex:
    """The stored boxes of sharded tensors, as far as seals have been added.  Thread: one at a time."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._missing = dict.fromkeys(ranks)
        self._chunk_bytes: dict[int, int] = {}
        self._boxes: dict[str, list[StoredBox]] = defaultdict(list)
        self._shapes: dict[tuple[int, ...], tuple[int, ...]] = {}

    def add(self, rank: int, seal: Seal) -> None:
        """Note what this seal says, unless that is known."""
        if rank not in self._missing:
            return
        self._chunk_bytes[rank] = seal.segment.chunk_bytes
        for number, shard in enumerate(seal.shards):
            if shard.box_of is not None:
                box = self.box(rank, number, shard, shard.box_of.offset)
                self._boxes[shard.box_of.tensor].append(box)
        del self._missing[rank]

    def box(self, rank: int, number: int, shard: Shard, offset: tuple[int, ...]) -> StoredBox:
        shape = self._shapes.setdefault(shard.shape, shard.shape)
        dtype, device = sys.intern(shard.dtype), sys.intern(shard.device)
        return StoredBox(rank, number, offset, shape, shard.start, shard.end, dtype, device)

    def missing(self, ranks: Collection[int] | None = None) -> list[int]:
        """Of these ranks, or of all, those whose seals have not been added."""
        if ranks is None:
            return list(self._missing)
        return [rank for rank in ranks if rank in self._missing] if self._missing else []

    def boxes(self, tensor: str, ranks: Collection[int] | None = None) -> list[StoredBox]:
        """Of a tensor, in the seals of these ranks, or of all."""
        found = self._boxes.get(tensor, [])
        return sorted(found if ranks is None else [box for box in found if box.rank in ranks], key=_place)

    def chunk_bytes(self, rank: int) -> int:
        return self._chunk_bytes[rank]


def _place(box: StoredBox) -> tuple[int, int]:
    return box.rank, box.shard
