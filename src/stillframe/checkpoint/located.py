"""A node of a stored tree, with the rank whose seal it comes from; and the trees of several ranks merged into one.

Shards and values are numbered within one rank's seal, so a node of a tree means nothing without its rank.
:class:`Located` holds both.  No tree is copied: nodes are located as they are visited, and only containers that
were joined from several ranks are made anew.
"""

from __future__ import annotations

from typing import Any

import msgspec

from stillframe.format import tree, values
from stillframe.format.layout import Layout
from stillframe.format.records import Seal
from stillframe.format.segment import Shard


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


class Kept:
    """The values and shards of leaves, by rank and number: what is needed of a seal once its tree has been merged."""

    def __init__(self) -> None:
        self.values: dict[tuple[int, int], Any] = {}
        self.shards: dict[tuple[int, int], Shard] = {}
        self.layouts: dict[tuple[int, int], Layout] = {}

    def keep(self, rank: int, node: tree.Node, seal: Seal) -> None:
        for each in tree.nodes(node, tree.ValueNode):
            self.values[rank, each.value] = seal.values[each.value]
        leaves: list[tree.TensorNode | tree.ArrayNode] = [
            *tree.nodes(node, tree.TensorNode),
            *tree.nodes(node, tree.ArrayNode),
        ]
        for leaf in leaves:
            self.shards[rank, leaf.shard] = seal.shards[leaf.shard]
        for sharded in tree.nodes(node, tree.ShardedNode):
            if sharded.layout is not None:
                self.layouts[rank, sharded.layout] = seal.layouts[sharded.layout]


class Merged:
    """One tree of what the ranks have at one path.  Their trees are added one by one, and let go.

    Dicts are joined, and lists that hold placeholders for items of other ranks.  Of everything else the first wins,
    and is kept.
    """

    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        self._rank = -1
        self._node: tree.Node | None = None
        """Of the first, but for its items if it is joined."""
        self._is_placeholder = False
        self._count = 0
        self._joined = 0
        """How many are joined."""
        self._keys: list[Any] = []
        self._items: dict[object, Merged] | None = None
        """By key or index; ``None`` if the first is taken as it is."""

    def add(self, rank: int, node: tree.Node, seal: Seal) -> None:
        """What the next rank has here.  Its seal is only read."""
        self._count += 1
        is_placeholder = _is_elsewhere(node, seal)
        if self._node is None or (self._is_placeholder and not is_placeholder):
            self._is_placeholder = is_placeholder
            self._begin(rank, node, seal)
        elif is_placeholder or type(node) is not type(self._node):
            return
        if self._items is not None:
            self._joined += 1
            self._join(rank, node, seal, self._items)

    def _begin(self, rank: int, node: tree.Node, seal: Seal) -> None:
        self._rank = rank
        if isinstance(node, tree.DictNode):
            self._node, self._items = tree.DictNode([], [], is_ordered=node.is_ordered), {}
        elif isinstance(node, tree.ObjectNode):
            self._node, self._items = tree.ObjectNode(node.type, tree.ListNode([])), {}
        elif isinstance(node, tree.ListNode) and any(_is_elsewhere(item, seal) for item in node.items):
            self._node, self._items = tree.ListNode([]), {}
        else:
            self._node = node
            self._kept.keep(rank, node, seal)

    def _join(self, rank: int, node: tree.Node, seal: Seal, items: dict[object, Merged]) -> None:
        keys: list[Any] | None = node.keys if isinstance(node, tree.DictNode) else None
        for at, item in enumerate(tree.children(node)):
            name: object = at if keys is None else msgspec.json.encode(keys[at])
            found = items.get(name)
            if found is None:
                found = items[name] = Merged(self._kept)
                if keys is not None:
                    self._keys.append(keys[at])
            found.add(rank, item, seal)

    def result(self, is_partial: bool = False) -> Located:
        node, items = self._node, self._items
        assert node is not None
        if items is None:
            return Located(self._rank, node, None, is_partial)
        merged = list(items.values())
        if isinstance(node, tree.DictNode):
            children = [each.result(is_partial=each._count < self._joined) for each in merged]
            node = tree.DictNode(self._keys, _nodes(children), is_ordered=node.is_ordered)
        elif isinstance(node, tree.ObjectNode):
            children = [each.result() for each in merged]
            node = tree.ObjectNode(node.type, children[0].node)
        else:
            while merged and merged[-1]._is_placeholder:
                merged.pop()  # a placeholder at the end only says that other ranks may have more items
            children = [each.result() for each in merged]
            node = tree.ListNode(_nodes(children))
        return Located(self._rank, node, children, is_partial)


def _is_elsewhere(node: tree.Node, seal: Seal) -> bool:
    return isinstance(node, tree.ValueNode) and values.is_elsewhere(seal.values[node.value])


def _nodes(located: list[Located]) -> list[tree.Node]:
    return [each.node for each in located]
