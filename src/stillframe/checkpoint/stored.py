"""A checkpoint as one reader sees it: a tree, and for every tensor in it the shards that hold its boxes.

A rank sees the tree that it saved.  A rank that did not exist at save time, or a process that wants the whole
checkpoint, sees the ranks' trees merged.  Where several ranks stored the same path, the reader's own value wins.

Only the seals that are needed are read.  Of ranks whose trees have the same structure one is merged for all of them;
which these are, the manifest says.  Who may have written a box of a tensor, its layout says; where there is none (the
caller has divided the tensor himself), every seal is read.  Only the reader's own seal is held on to.  Of the others,
what the merged tree and the places of boxes need is kept, so that memory does not grow by a whole seal for each.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from stillframe.checkpoint.catalog import Checkpoint
from stillframe.checkpoint.located import Kept, Merged
from stillframe.checkpoint.located import Located as Located
from stillframe.checkpoint.shards import StoredBox as StoredBox
from stillframe.errors import FormatError
from stillframe.format import tree
from stillframe.format.layout import Layout, holders, make_up, writers_of
from stillframe.format.records import Seal
from stillframe.format.segment import Shard


class Stored:
    """``is_merged``: the trees of all ranks as one, in which values of ``rank`` come first.

    A method that takes a ``leaf`` wants one whose node is of the kind that the method is about.
    """

    def __init__(self, checkpoint: Checkpoint, rank: int, is_merged: bool) -> None:
        self.checkpoint = checkpoint
        self.rank = rank if rank in checkpoint.ranks else rank % checkpoint.world_size
        self.is_merged = is_merged and checkpoint.world_size > 1
        self._ranks = set(checkpoint.ranks)
        self._kept = Kept()
        self._own = checkpoint.of(self.rank).seal
        self._index = checkpoint.index
        self._index.add(self.rank, self._own)
        self.tree = self._merge() if self.is_merged else Located(self.rank, self._own.tree)

    def _merge(self) -> Located:
        merged = Merged(self._kept)
        merged.add(self.rank, self._own.tree, self._own)
        alike = {self.checkpoint.like(self.rank): self._own.structure}
        for rank in self.checkpoint.ranks:
            if rank != self.rank and self.checkpoint.like(rank) not in alike:
                seal = self.checkpoint.of(rank).seal
                merged.add(rank, seal.tree, seal)
                self._index.add(rank, seal)
                alike[rank] = seal.structure
        known = [each for each in alike.values() if each]
        if len(set(known)) < len(known):
            raise FormatError(f"{self.checkpoint.path}: manifest and seals tell different ranks alike")
        return merged.result()

    def value(self, leaf: Located) -> Any:
        """A plain value, still encoded."""
        assert isinstance(leaf.node, tree.ValueNode)
        number = leaf.node.value
        if leaf.rank == self.rank:
            return self._own.values[number]
        kept = self._kept.values.get((leaf.rank, number))
        return self._seal(leaf.rank).values[number] if kept is None else kept

    def shard(self, leaf: Located) -> Shard:
        """The one shard of a tensor that is not divided, or of an array."""
        assert isinstance(leaf.node, tree.SHARDS)
        number = leaf.node.shard
        if leaf.rank == self.rank:
            return self._own.shards[number]
        return self._kept.shards.get((leaf.rank, number)) or self._seal(leaf.rank).shards[number]

    def _seal(self, rank: int) -> Seal:
        """Of a leaf that the caller has located in another rank's tree: that one is not kept here."""
        seal = self.checkpoint.of(rank).seal
        self._index.add(rank, seal)
        return seal

    def form(self, leaf: Located) -> tuple[str, tuple[int, ...]]:
        """Dtype and shape of the whole tensor or array."""
        form = leaf.node if isinstance(leaf.node, tree.ShardedNode) else leaf.view or self.shard(leaf)
        return form.dtype, form.shape

    def device_type(self, leaf: Located) -> str:
        """The type of the device that a tensor was saved from."""
        if isinstance(leaf.node, tree.ShardedNode):
            return next((box.device for box in self._own_boxes(leaf.node, leaf.node.boxes[:1])), "cpu")
        return self.shard(leaf).device

    def boxes(self, leaf: Located) -> list[StoredBox]:
        """Boxes that make up the tensor; if none do (other roots hold the rest), all that are here."""
        node = leaf.node
        if not isinstance(node, tree.ShardedNode):
            return [self._only_box(leaf)]
        found: list[StoredBox] = []
        for found in self.sources(leaf, (0,) * len(node.shape), node.shape):
            if make_up([(box.offset, box.shape) for box in found], node.shape):
                break
        return found

    def _once(self, node: tree.ShardedNode, ranks: set[int] | None) -> list[StoredBox]:
        found: dict[tuple[tuple[int, ...], tuple[int, ...]], StoredBox] = {}
        for box in self._boxes_in(node, ranks):
            found.setdefault((box.offset, box.shape), box)
        return list(found.values())

    def sources(self, leaf: Located, offset: Sequence[int], shape: Sequence[int]) -> Iterator[list[StoredBox]]:
        """Boxes to read a box of a tensor from: the next ones if those before do not make it up.

        First those that the saving rank itself held, whose ranks the tree names; then those of the ranks that may have
        written any of it by the layout; last those of all ranks.  If the last are needed in spite of a layout, seals
        contradict each other, or this version knows less of layouts than the one that wrote them: a warning says so.
        """
        node = leaf.node
        if not isinstance(node, tree.ShardedNode):
            yield [self._only_box(leaf)]
            return
        counts = [_common(box.offset, box.shape, offset, shape) for box in node.boxes]
        if sum(counts) >= math.prod(shape):
            yield self._own_boxes(node, itertools.compress(node.boxes, counts))
        layout = self._layout(leaf)
        if layout is not None:
            yield self._once(node, self._writers(node, layout, offset, shape))
            if self._index.missing() and len(self._ranks) == self.checkpoint.world_size:
                warnings.warn(
                    f"{self.checkpoint.path}: the boxes of tensor {node.tensor!r} are not where its layout says; the "
                    "seals of all ranks are read, which takes long if they are many. Please report this",
                    RuntimeWarning, stacklevel=2,
                )  # fmt: skip
        yield self._once(node, None)

    def _layout(self, leaf: Located) -> Layout | None:
        assert isinstance(leaf.node, tree.ShardedNode)
        number = leaf.node.layout
        if number is None:
            return None
        if leaf.rank == self.rank:
            return self._own.layouts[number]
        return self._kept.layouts.get((leaf.rank, number)) or self._seal(leaf.rank).layouts[number]

    def _writers(self, node: tree.ShardedNode, layout: Layout, offset: Sequence[int], shape: Sequence[int]) -> set[int]:
        """The ranks, of those whose parts are here, that may have written anything of this box."""
        held = holders(layout, node.shape, offset, shape)
        return self._ranks & {rank for ranks in held for rank in writers_of(ranks)}

    def chunk_bytes(self, rank: int) -> int:
        """How long the chunks of a rank's segment are, if a box in it has been asked for."""
        return self._index.chunk_bytes(rank)

    def _only_box(self, leaf: Located) -> StoredBox:
        node, shard = leaf.node, self.shard(leaf)
        assert isinstance(node, tree.SHARDS)
        return self._index.box(leaf.rank, node.shard, shard, (0,) * len(shard.shape))

    def _own_boxes(self, node: tree.ShardedNode, boxes: Iterable[tree.RankBox]) -> list[StoredBox]:
        held = {(box.rank, box.offset, box.shape) for box in boxes}
        ranks = {rank for rank, _, _ in held}
        for rank in sorted(ranks):
            if rank not in self._ranks:
                raise FormatError(f"{self.checkpoint.path}: tensor {node.tensor!r} has a box of rank {rank}")
        return [box for box in self._boxes_in(node, ranks) if (box.rank, box.offset, box.shape) in held]

    def _boxes_in(self, node: tree.ShardedNode, ranks: set[int] | None) -> list[StoredBox]:
        for rank in self._index.missing(ranks):
            self._index.add(rank, self.checkpoint.of(rank).seal)
        found = self._index.boxes(node.tensor, ranks)
        if any(box.dtype != node.dtype for box in found):
            raise FormatError(f"{self.checkpoint.path}: the boxes of tensor {node.tensor!r} differ in dtype")
        return found


def _common(one: Sequence[int], its_shape: Sequence[int], other: Sequence[int], shape: Sequence[int]) -> int:
    """How many items two boxes have in common."""
    bounds = zip(one, its_shape, other, shape, strict=True)
    return math.prod(max(min(a + m, b + n) - max(a, b), 0) for a, m, b, n in bounds)
