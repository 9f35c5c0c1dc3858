"""A checkpoint as one reader sees it: a tree, and for every tensor in it the shards that hold its boxes.

A rank sees the tree that it saved.  A rank that did not exist at save time, or a process that wants the whole
checkpoint, sees the ranks' trees merged.  Where several ranks stored the same path, the reader's own value wins.

Only the reader's own seal is held on to.  Of the others, what the merged tree and the places of boxes need is kept, so
that memory does not grow by a whole seal for each rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stillframe.checkpoint.catalog import Checkpoint
from stillframe.checkpoint.located import Kept, Merged
from stillframe.checkpoint.located import Located as Located
from stillframe.checkpoint.shards import StoredBox as StoredBox
from stillframe.errors import FormatError
from stillframe.format import tree
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
        for rank in self.checkpoint.ranks:
            if rank != self.rank:
                seal = self.checkpoint.of(rank).seal
                merged.add(rank, seal.tree, seal)
                self._index.add(rank, seal)
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
            return next((box.device for box in self._own_boxes(leaf.node)), "cpu")
        return self.shard(leaf).device

    def boxes(self, leaf: Located) -> list[StoredBox]:
        """Boxes that make up the tensor, of all ranks; a box that several ranks have written is given once."""
        node = leaf.node
        if not isinstance(node, tree.ShardedNode):
            return [self._only_box(leaf)]
        found: dict[tuple[tuple[int, ...], tuple[int, ...]], StoredBox] = {}
        for box in self._boxes_in(node.tensor, None):
            found.setdefault((box.offset, box.shape), box)
        if any(box.dtype != node.dtype for box in found.values()):
            raise FormatError(f"{self.checkpoint.path}: the boxes of tensor {node.tensor!r} differ in dtype")
        return list(found.values())

    def sources(self, leaf: Located) -> Iterator[list[StoredBox]]:
        """Boxes to read a tensor from: first those that the saving rank itself held, then those of all ranks.

        The tree names the first, so that one seal is enough for them.  For the second every seal is read.
        """
        if isinstance(leaf.node, tree.ShardedNode):
            yield self._own_boxes(leaf.node)
            yield self.boxes(leaf)
        else:
            yield [self._only_box(leaf)]

    def chunk_bytes(self, rank: int) -> int:
        """How long the chunks of a rank's segment are, if a box in it has been asked for."""
        return self._index.chunk_bytes(rank)

    def _only_box(self, leaf: Located) -> StoredBox:
        node, shard = leaf.node, self.shard(leaf)
        assert isinstance(node, tree.SHARDS)
        return self._index.box(leaf.rank, node.shard, shard, (0,) * len(shard.shape))

    def _own_boxes(self, node: tree.ShardedNode) -> list[StoredBox]:
        held = {(box.rank, box.offset, box.shape) for box in node.boxes}
        ranks = {box.rank for box in node.boxes}
        for rank in sorted(ranks):
            if rank not in self._ranks:
                raise FormatError(f"{self.checkpoint.path}: tensor {node.tensor!r} has a box of rank {rank}")
        return [box for box in self._boxes_in(node.tensor, ranks) if (box.rank, box.offset, box.shape) in held]

    def _boxes_in(self, tensor: str, ranks: set[int] | None) -> list[StoredBox]:
        for rank in self._index.missing(ranks):
            self._index.add(rank, self.checkpoint.of(rank).seal)
        return self._index.boxes(tensor, ranks)
