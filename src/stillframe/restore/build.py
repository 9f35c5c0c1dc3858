"""Building plain values and tensors from a stored tree, with no live objects."""

from __future__ import annotations

import fnmatch
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from stillframe.errors import FormatError, UnsupportedStateError
from stillframe.format import values
from stillframe.format.leaves import leaf_named
from stillframe.format.tree import (
    ArrayNode,
    DictNode,
    LeafNode,
    ListNode,
    Node,
    ObjectNode,
    Path,
    ShardedNode,
    TensorNode,
    TupleNode,
    ValueNode,
    render,
)
from stillframe.restore.place import Placement
from stillframe.restore.stored import Stored

Later = Callable[[], Any]
"""Gives its value once the placement has been filled."""


class Builder:
    """Reserves tensors now; gives the finished values later, when their bytes are there."""

    def __init__(self, stored: Stored, placement: Placement, only: Sequence[str] | None = None) -> None:
        self._stored = stored
        self._placement = placement
        self._only = only
        self.paths: list[str] = []

    def build(self, node: Node, path: Path = ()) -> Later | None:
        """``None`` if nothing in it is wanted."""
        if isinstance(node, TensorNode | ShardedNode | ArrayNode | ValueNode):
            return self._leaf(node) if self._is_wanted(path) else None
        if isinstance(node, ObjectNode):
            return self.build(node.item, path)
        if isinstance(node, LeafNode):
            item = self.build(node.item, path)
            return None if item is None else self.decoded(node, item)
        if isinstance(node, DictNode):
            keys = self.keys(node)
            found = [(key, self.build(item, (*path, key))) for key, item in zip(keys, node.items, strict=True)]
            items = [(key, item) for key, item in found if item is not None]
            if self._only is not None and not items and (keys or not self._is_wanted(path)):
                return None
            kind = OrderedDict if node.is_ordered else dict
            return lambda: kind((key, item()) for key, item in items)
        rows = [self.build(item, (*path, index)) for index, item in enumerate(node.items)]
        if self._only is not None and not any(rows) and (rows or not self._is_wanted(path)):
            return None
        made = tuple if isinstance(node, TupleNode) else list
        return lambda: made(None if row is None else row() for row in rows)

    def keys(self, node: DictNode) -> list[Any]:
        keys = [values.decode(key) for key in node.keys]
        try:
            if len(set(keys)) == len(keys):
                return keys
        except TypeError:
            pass
        raise FormatError("a dict has keys that cannot be keys, or the same key twice")

    def value(self, node: ValueNode) -> Any:
        return values.decode(self._stored.value(node))

    def array(self, node: ArrayNode) -> Later:
        tensor = self._placement.fresh(TensorNode(node.shard))
        return tensor.numpy

    def decoded(self, node: LeafNode, item: Later) -> Later:
        leaf = leaf_named(node.name)
        if leaf is None:
            raise UnsupportedStateError(
                f"the checkpoint holds a leaf named {node.name!r}; call register_leaf for it before loading"
            )
        return lambda: leaf.decode(item())

    def _leaf(self, node: TensorNode | ShardedNode | ArrayNode | ValueNode) -> Later:
        if isinstance(node, ValueNode):
            value = self.value(node)
            return lambda: value
        if isinstance(node, ArrayNode):
            return self.array(node)
        tensor: torch.Tensor = self._placement.fresh(node)
        return lambda: tensor

    def _is_wanted(self, path: Path) -> bool:
        if self._only is None:
            return True
        name = render(path)
        self.paths.append(name)
        return any(
            name == pattern or name.startswith(pattern + "/") or fnmatch.fnmatchcase(name, pattern)
            for pattern in self._only
        )


def has_live_parts(node: Node) -> bool:
    """Whether a stored tree holds tensors, objects or registered leaves, which want a live counterpart."""
    if isinstance(node, DictNode | ListNode | TupleNode):
        return any(map(has_live_parts, node.items))
    return isinstance(node, TensorNode | ShardedNode | ObjectNode)
