"""Two checkpoints side by side: what appeared, what went, what may have changed.

Where both have a tensor's bytes at the same place of chunks with the same checksums, it is the same, and nothing
is read.  All others have to be read by whoever wants to know; a checksum is of a chunk, and others lie in it, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from stillframe.checkpoint.catalog import Checkpoint
from stillframe.checkpoint.contents import Entry, entries_of_all, is_same
from stillframe.errors import MismatchError

Outcome = Literal["equal", "changed", "added", "removed", "unread"]
"""``unread``: two tensors of the same form whose checksums do not tell."""


@dataclass(frozen=True, slots=True)
class Pair:
    """What has the same path in both; one side may be missing."""

    outcome: Outcome
    left: Entry | None
    right: Entry | None

    @property
    def name(self) -> str:
        either = self.right or self.left
        assert either is not None
        return either.name

    @property
    def bytes(self) -> int:
        """To be read to know more."""
        return sum(each.bytes for each in (self.left, self.right) if each is not None)


def compare(left: Checkpoint, right: Checkpoint) -> list[Pair]:
    """Of all ranks; in the order of the right one, then what only the left one has.

    Raises: :class:`MismatchError` if parts of a tensor lie elsewhere, in roots that are not shared.
    """
    before = {entry.key: entry for entry in entries_of_all(left)}
    after = {entry.key: entry for entry in entries_of_all(right)}
    pairs = [
        Pair(_outcome(left, right, before[key], entry), before[key], entry)
        if key in before
        else Pair("added", None, entry)
        for key, entry in after.items()
    ]
    return pairs + [Pair("removed", entry, None) for key, entry in before.items() if key not in after]


def _outcome(left: Checkpoint, right: Checkpoint, one: Entry, other: Entry) -> Outcome:
    if (one.kind, one.holders, one.dtype, one.shape) != (other.kind, other.holders, other.dtype, other.shape):
        return "changed"
    if one.kind == "value":
        return "equal" if is_same(one, other) else "changed"
    is_same_view = getattr(one.node, "view", None) == getattr(other.node, "view", None)
    if is_same_view and _checksums(left, one) == _checksums(right, other):
        return "equal"
    return "unread"


def _checksums(checkpoint: Checkpoint, entry: Entry) -> list[tuple[object, ...]]:
    """Equal only if the bytes are: the checksums of the chunks that hold each part, and where in them it lies."""
    if entry.sharding and sum(math.prod(part.shape) for part in entry.parts) < math.prod(entry.shape):
        raise MismatchError(f"parts of {entry.name!r} are not in {checkpoint.path.parent}: its ranks did not share it")
    found: list[tuple[object, ...]] = []
    for part in sorted(entry.parts, key=lambda part: (part.offset, part.shape)):
        seal = checkpoint.of(part.rank).seal
        shard, segment = seal.shards[part.shard], seal.segment
        if shard.nbytes:
            first, last = shard.start // segment.chunk_bytes, (shard.end - 1) // segment.chunk_bytes
            place = shard.start - first * segment.chunk_bytes, segment.chunk_bytes
            found.append((part.offset, part.shape, place, *segment.chunks[first : last + 1]))
    return found
