"""A checkpoint as one reader sees it: a tree, and for every tensor in it the shards that hold its boxes.

A rank sees the tree that it saved.  A rank that did not exist at save time, or a process that wants the whole
checkpoint, sees the ranks' trees merged.  Where several ranks stored the same path, the reader's own value wins.

Shards and values are numbered within one rank's seal, so a node of a tree means nothing without its rank.
:class:`Located` holds both.  No tree is copied: nodes are located as they are visited, and only containers that
were joined from several ranks are made anew.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from stillframe.checkpoint.catalog import Checkpoint
from stillframe.errors import FormatError
from stillframe.format import tree, values
from stillframe.format.segment import Shard


@dataclass(frozen=True, slots=True)
class StoredBox:
    """One box of a tensor, and the shard that holds it."""

    rank: int
    shard: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class Located(msgspec.Struct, frozen=True):
    """A node, and the rank whose seal its indexes of shards and values refer to.

    One is made for every node that is visited: as a struct, that takes a tenth of the time of a frozen dataclass.
    """

    rank: int
    node: tree.Node
    joined: list[Located] | None = None
    """The children of a container that was joined from several ranks; ``None`` if all of them are of ``rank``."""
    is_partial: bool = False
    """It is an item of a joined dict that some of the ranks do not have."""

    @property
    def children(self) -> list[Located]:
        """What :func:`tree.children` gives for the node, located."""
        if self.joined is not None:
            return self.joined
        return [Located(self.rank, item) for item in tree.children(self.node)]

    @property
    def content(self) -> Located:
        """Of an object what its ``state_dict()`` gave; of anything else itself."""
        return self.children[0] if isinstance(self.node, tree.ObjectNode) else self

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.node, tree.TENSORS)

    @property
    def view(self) -> tree.View | None:
        """How a tensor lies in its shard; ``None`` if it fills it, or is no tensor."""
        return self.node.view if isinstance(self.node, tree.TensorNode) else None

    @property
    def identity(self) -> tuple[str, ...] | tuple[str, int, int]:
        """Equal for tensors that alias: they are stored in the same shards."""
        node = self.node
        if isinstance(node, tree.ShardedNode):
            return "tensor", node.tensor
        assert isinstance(node, tree.SHARDS)
        return "shard", self.rank, node.shard


class Stored:
    """``is_merged``: the trees of all ranks as one, in which values of ``rank`` come first.

    A method that takes a ``leaf`` wants one whose node is of the kind that the method is about.
    """

    def __init__(self, checkpoint: Checkpoint, rank: int, is_merged: bool) -> None:
        self.checkpoint = checkpoint
        self.rank = rank if rank in checkpoint.ranks else rank % checkpoint.world_size
        self.is_merged = is_merged and checkpoint.world_size > 1
        self._indexes: dict[int, dict[str, list[StoredBox]]] = {}
        self.tree = Located(self.rank, checkpoint.of(self.rank).seal.tree)
        if self.is_merged:
            others = [each for each in checkpoint.ranks if each != self.rank]
            self.tree = self._join([self.tree, *(Located(each, checkpoint.of(each).seal.tree) for each in others)])

    def value(self, leaf: Located) -> Any:
        """A plain value, still encoded."""
        assert isinstance(leaf.node, tree.ValueNode)
        return self.checkpoint.of(leaf.rank).seal.values[leaf.node.value]

    def shard(self, leaf: Located) -> Shard:
        """The one shard of a tensor that is not divided, or of an array."""
        assert isinstance(leaf.node, tree.SHARDS)
        return self.checkpoint.of(leaf.rank).seal.shards[leaf.node.shard]

    def form(self, leaf: Located) -> tuple[str, tuple[int, ...]]:
        """Dtype and shape of the whole tensor or array."""
        form = leaf.node if isinstance(leaf.node, tree.ShardedNode) else leaf.view or self.shard(leaf)
        return form.dtype, form.shape

    def device_type(self, leaf: Located) -> str:
        """The type of the device that a tensor was saved from."""
        if isinstance(leaf.node, tree.ShardedNode):
            return next((self._shard_of(box).device for box in self._own_boxes(leaf.node)), "cpu")
        return self.shard(leaf).device

    def boxes(self, leaf: Located) -> list[StoredBox]:
        """Boxes that make up the tensor, of all ranks; a box that several ranks have written is given once."""
        node = leaf.node
        if not isinstance(node, tree.ShardedNode):
            return [self._only_box(leaf)]
        found: dict[tuple[tuple[int, ...], tuple[int, ...]], StoredBox] = {}
        for rank in self.checkpoint.ranks:
            for box in self._boxes_in(rank, node.tensor):
                found.setdefault((box.offset, box.shape), box)
        if any(self._shard_of(box).dtype != node.dtype for box in found.values()):
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

    def _only_box(self, leaf: Located) -> StoredBox:
        node, shape = leaf.node, self.shard(leaf).shape
        assert isinstance(node, tree.SHARDS)
        return StoredBox(leaf.rank, node.shard, (0,) * len(shape), shape)

    def _shard_of(self, box: StoredBox) -> Shard:
        return self.checkpoint.of(box.rank).seal.shards[box.shard]

    def _own_boxes(self, node: tree.ShardedNode) -> list[StoredBox]:
        held = {(box.rank, box.offset, box.shape) for box in node.boxes}
        found: list[StoredBox] = []
        for rank in sorted({box.rank for box in node.boxes}):
            if rank not in self.checkpoint.ranks:
                raise FormatError(f"{self.checkpoint.path}: tensor {node.tensor!r} has a box of rank {rank}")
            found += [box for box in self._boxes_in(rank, node.tensor) if (rank, box.offset, box.shape) in held]
        return found

    def _boxes_in(self, rank: int, tensor: str) -> list[StoredBox]:
        if rank not in self._indexes:
            index: dict[str, list[StoredBox]] = defaultdict(list)
            for number, shard in enumerate(self.checkpoint.of(rank).seal.shards):
                if shard.box_of is not None:
                    index[shard.box_of.tensor].append(StoredBox(rank, number, shard.box_of.offset, shard.shape))
            self._indexes[rank] = index
        return self._indexes[rank].get(tensor, [])

    # --- several trees as one --------------------------------------------------------------

    def _join(self, found: list[Located], is_partial: bool = False) -> Located:
        """One tree of those that several ranks have at one path.

        Dicts are joined, and lists that hold placeholders for items of other ranks.  Of everything else the first wins.
        """
        found = [each for each in found if not self._is_elsewhere(each)] or found
        first = found[0]
        alike = [each for each in found if type(each.node) is type(first.node)]
        node: tree.Node = first.node
        children: list[Located] | None = None
        if isinstance(node, tree.DictNode):
            keys, children = self._join_dicts(alike)
            node = tree.DictNode(keys, _nodes(children), is_ordered=node.is_ordered)
        elif isinstance(node, tree.ObjectNode):
            children = [self._join([each.content for each in alike])]
            node = tree.ObjectNode(node.type, children[0].node)
        elif isinstance(node, tree.ListNode) and any(map(self._is_elsewhere, first.children)):
            children = self._join_lists(alike)
            node = tree.ListNode(_nodes(children))
        return Located(first.rank, node, children, is_partial)

    def _join_dicts(self, dicts: list[Located]) -> tuple[list[Any], list[Located]]:
        """Keys and items of the dict that has the keys of all of them."""
        keys: dict[bytes, Any] = {}
        items: dict[bytes, list[Located]] = defaultdict(list)
        for each in dicts:
            assert isinstance(each.node, tree.DictNode)
            for key, item in zip(each.node.keys, each.children, strict=True):
                text = msgspec.json.encode(key)
                keys.setdefault(text, key)
                items[text].append(item)
        joined = [self._join(found, is_partial=len(found) < len(dicts)) for found in items.values()]
        return list(keys.values()), joined

    def _join_lists(self, lists: list[Located]) -> list[Located]:
        columns = [each.children for each in lists]
        length = max(map(len, columns))
        rows = [[column[at] for column in columns if at < len(column)] for at in range(length)]
        while rows and all(map(self._is_elsewhere, rows[-1])):
            rows.pop()  # a placeholder at the end only says that other ranks may have more items
        return [self._join(row) for row in rows]

    def _is_elsewhere(self, each: Located) -> bool:
        return isinstance(each.node, tree.ValueNode) and values.is_elsewhere(self.value(each))


def _nodes(located: list[Located]) -> list[tree.Node]:
    return [each.node for each in located]
