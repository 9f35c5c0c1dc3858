"""Two checkpoints side by side: what was added, what was removed, what may have changed.

No tensor is read.  A tensor is equal in both if it lies at the same place of chunks with equal checksums.  Otherwise
the checksums do not tell, because a chunk holds several tensors: the caller has to read both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from stillframe.checkpoint.catalog import Checkpoint
from stillframe.checkpoint.contents import Entry, entries_of_all, is_same
from stillframe.errors import MismatchError
from stillframe.format.records import Segment

Change = Literal["equal", "changed", "added", "removed", "unread"]
"""``unread``: two tensors of the same dtype and shape whose checksums do not tell."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The entries with one path in both checkpoints; ``None`` where a side has none."""

    change: Change
    left: Entry | None
    right: Entry | None

    @property
    def name(self) -> str:
        either = self.right or self.left
        assert either is not None
        return either.name

    @property
    def bytes(self) -> int:
        """How much has to be read to compare the content."""
        return sum(each.bytes for each in (self.left, self.right) if each is not None)


def compare(left: Checkpoint, right: Checkpoint) -> list[Pair]:
    """The entries of all ranks: those of the right checkpoint in its order, then those that only the left one has.

    Raises: :class:`MismatchError` if boxes of a tensor lie in other roots, because the ranks did not share one.
    """
    segments = _Segments(left), _Segments(right)
    before = {entry.key: entry for entry in entries_of_all(left)}
    after = {entry.key: entry for entry in entries_of_all(right)}
    pairs = [
        Pair(_change(*segments, before[key], entry), before[key], entry)
        if key in before
        else Pair("added", None, entry)
        for key, entry in after.items()
    ]
    return pairs + [Pair("removed", entry, None) for key, entry in before.items() if key not in after]


class _Segments(dict[int, Segment]):
    """By rank: their digests, without the rest of the seals."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    def __missing__(self, rank: int) -> Segment:
        segment = self[rank] = self.checkpoint.of(rank).seal.segment
        return segment


def _change(left: _Segments, right: _Segments, one: Entry, other: Entry) -> Change:
    if (one.kind, one.containers, one.dtype, one.shape) != (other.kind, other.containers, other.dtype, other.shape):
        return "changed"
    if one.kind == "value":
        return "equal" if is_same(one, other) else "changed"
    if one.leaf.view == other.leaf.view and _checksums(left, one) == _checksums(right, other):
        return "equal"
    return "unread"


def _checksums(segments: _Segments, entry: Entry) -> list[tuple[object, ...]]:
    """The checksums of the chunks that hold each box, and its place in them; equal only if the bytes are."""
    if entry.is_sharded and sum(math.prod(box.shape) for box in entry.boxes) < math.prod(entry.shape):
        root = segments.checkpoint.root
        raise MismatchError(f"boxes of {entry.name!r} are not in {root}: its ranks did not share it")
    found: list[tuple[object, ...]] = []
    for box in sorted(entry.boxes, key=lambda box: (box.offset, box.shape)):
        segment = segments[box.rank]
        if box.end > box.start:
            first, last = box.start // segment.chunk_bytes, (box.end - 1) // segment.chunk_bytes
            place = box.start - first * segment.chunk_bytes, segment.chunk_bytes
            found.append((box.offset, box.shape, place, *segment.chunks[first : last + 1]))
    return found
