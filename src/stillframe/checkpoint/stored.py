"""A checkpoint as one reader sees it: a tree, and for every tensor in it the shards that hold its parts.

A rank sees its own tree.  A reader whose rank there was not, or one process that wants everything, sees all trees
as one: what stands in several is taken from the reader's own, what stands in one only is added.  Indexes of shards
and values are *located*: they tell the rank, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from stillframe.checkpoint.catalog import Checkpoint
from stillframe.errors import FormatError
from stillframe.format import values
from stillframe.format.segment import Shard
from stillframe.format.tree import (
    ArrayNode,
    DictNode,
    LeafNode,
    ListNode,
    Node,
    ObjectNode,
    ShardedNode,
    TensorNode,
    TupleNode,
    ValueNode,
)

_RANK_SHIFT = 40
_INDEX = (1 << _RANK_SHIFT) - 1
Keys = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A shard, and which box of the tensor it is."""

    rank: int
    shard: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class Stored:
    """``is_merged``: all ranks' trees as one, with ``rank``'s own first."""

    def __init__(self, checkpoint: Checkpoint, rank: int, is_merged: bool) -> None:
        self.checkpoint = checkpoint
        self.rank = rank if rank in checkpoint.ranks else rank % checkpoint.world_size
        self.is_merged = is_merged and checkpoint.world_size > 1
        self.partial: set[Keys] = set()
        """Where dicts of different ranks were joined: the keys, as stored, that only some of them have."""
        self._indexes: dict[int, dict[str, list[Piece]]] = {}
        self.tree: Node = _located(checkpoint.of(self.rank).seal.tree, self.rank)
        if self.is_merged:
            others = [each for each in checkpoint.ranks if each != self.rank]
            self.tree = self._joined([self.tree, *(_located(checkpoint.of(each).seal.tree, each) for each in others)])

    def value(self, node: ValueNode) -> Any:
        """Still encoded."""
        return self.checkpoint.of(node.value >> _RANK_SHIFT).seal.values[node.value & _INDEX]

    def shard(self, located: int) -> Shard:
        return self.checkpoint.of(located >> _RANK_SHIFT).seal.shards[located & _INDEX]

    def form(self, node: TensorNode | ShardedNode) -> tuple[str, tuple[int, ...]]:
        """Dtype and shape of the whole tensor."""
        if isinstance(node, ShardedNode):
            return node.dtype, node.shape
        form = node.view or self.shard(node.shard)
        return form.dtype, form.shape

    def device_type(self, node: TensorNode | ShardedNode) -> str:
        if isinstance(node, TensorNode):
            return self.shard(node.shard).device
        return next((self._shard_of(piece).device for piece in self._own_pieces(node)), "cpu")

    def pieces(self, node: TensorNode | ShardedNode) -> Iterator[list[Piece]]:
        """Shards that hold parts of the tensor: first what was this rank's own, then those of all ranks.

        Of its own, the tree itself says where it lies; for the rest every seal is read.
        """
        if isinstance(node, TensorNode):
            stored = self.shard(node.shard).shape
            yield [Piece(node.shard >> _RANK_SHIFT, node.shard & _INDEX, (0,) * len(stored), stored)]
        else:
            yield self._own_pieces(node)
            yield list(self.all_pieces(node))

    def _shard_of(self, piece: Piece) -> Shard:
        return self.checkpoint.of(piece.rank).seal.shards[piece.shard]

    def _own_pieces(self, node: ShardedNode) -> list[Piece]:
        boxes = {(part.rank, part.offset, part.shape) for part in node.parts}
        found: list[Piece] = []
        for rank in sorted({part.rank for part in node.parts}):
            if rank not in self.checkpoint.ranks:
                raise FormatError(f"{self.checkpoint.path}: tensor {node.tensor!r} has a part of rank {rank}")
            found += [
                piece for piece in self._pieces_in(rank, node.tensor) if (rank, piece.offset, piece.shape) in boxes
            ]
        return found

    def all_pieces(self, node: ShardedNode) -> Iterator[Piece]:
        """Of all ranks; a box that several have written is taken once."""
        seen: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        for rank in self.checkpoint.ranks:
            for piece in self._pieces_in(rank, node.tensor):
                if (piece.offset, piece.shape) not in seen:
                    seen.add((piece.offset, piece.shape))
                    if self._shard_of(piece).dtype != node.dtype:
                        raise FormatError(
                            f"{self.checkpoint.path}: the parts of tensor {node.tensor!r} differ in dtype"
                        )
                    yield piece

    def _pieces_in(self, rank: int, tensor: str) -> list[Piece]:
        if rank not in self._indexes:
            index: dict[str, list[Piece]] = defaultdict(list)
            for number, shard in enumerate(self.checkpoint.of(rank).seal.shards):
                if shard.whole is not None:
                    index[shard.whole.tensor].append(Piece(rank, number, shard.whole.offset, shard.shape))
            self._indexes[rank] = index
        return self._indexes[rank].get(tensor, [])

    def _joined(self, nodes: list[Node], path: Keys = ()) -> Node:
        """One tree of several: dicts are joined, and lists that say so; of everything else the first is taken."""
        nodes = [node for node in nodes if not self._is_elsewhere(node)] or nodes
        first = nodes[0]
        if isinstance(first, ListNode) and any(map(self._is_elsewhere, first.items)):
            return self._joined_lists([node for node in nodes if isinstance(node, ListNode)], path)
        if isinstance(first, ObjectNode):
            items = [node.item for node in nodes if isinstance(node, ObjectNode)]
            return ObjectNode(first.type, self._joined(items, path))
        if not isinstance(first, DictNode):
            return first
        dicts = [node for node in nodes if isinstance(node, DictNode)]
        keys: dict[str, Any] = {}
        items_of: dict[str, list[Node]] = defaultdict(list)
        for each in dicts:
            for key, item in zip(each.keys, each.items, strict=True):
                text = msgspec.json.encode(key).decode()
                keys.setdefault(text, key)
                items_of[text].append(item)
        self.partial.update((*path, text) for text, found in items_of.items() if len(found) < len(dicts))
        joined = [self._joined(items_of[text], (*path, text)) for text in keys]
        return DictNode(list(keys.values()), joined, is_ordered=first.is_ordered)

    def _joined_lists(self, lists: list[ListNode], path: Keys) -> Node:
        length = max(len(each.items) for each in lists)
        rows = [[each.items[at] for each in lists if at < len(each.items)] for at in range(length)]
        while rows and all(map(self._is_elsewhere, rows[-1])):
            rows.pop()  # only there to say that there may be more
        return ListNode([self._joined(row, (*path, str(at))) for at, row in enumerate(rows)])

    def _is_elsewhere(self, node: Node) -> bool:
        return isinstance(node, ValueNode) and values.is_elsewhere(self.value(node))


def _located(node: Node, rank: int) -> Node:
    """The same tree, whose indexes tell the rank."""
    if rank == 0 or isinstance(node, ShardedNode):
        return node
    base = rank << _RANK_SHIFT
    if isinstance(node, TensorNode):
        return TensorNode(base | node.shard, node.view)
    if isinstance(node, ArrayNode):
        return ArrayNode(base | node.shard, node.dtype)
    if isinstance(node, ValueNode):
        return ValueNode(base | node.value)
    if isinstance(node, DictNode):
        return DictNode(node.keys, [_located(item, rank) for item in node.items], is_ordered=node.is_ordered)
    if isinstance(node, ObjectNode):
        return ObjectNode(node.type, _located(node.item, rank))
    if isinstance(node, LeafNode):
        return LeafNode(node.name, _located(node.item, rank))
    items = [_located(item, rank) for item in node.items]
    return ListNode(items) if isinstance(node, ListNode) else TupleNode(items)
