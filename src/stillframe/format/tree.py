"""The shape of a state: nested nodes whose leaves point at shards and at plain values.

The tree holds structure only.  It stays the same from save to save, so it is encoded once
and reused; the plain values, which change, stand in a list beside it (:mod:`.values`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Union

import msgspec

from stillframe.errors import FormatError
from stillframe.format import limits
from stillframe.format.segment import ITEM_BYTES, NUMPY_DTYPES, Shard, check_box

Path = tuple[Any, ...]
"""Keys and indexes from the top of a state to something in it."""


def render(path: Path) -> str:
    """A path as a JSON pointer without its first slash (RFC 6901): ``optimizer/state/0/exp_avg``."""
    return "/".join(str(key).replace("~", "~0").replace("/", "~1") for key in path)


class _Node(msgspec.Struct, frozen=True, tag_field="kind", forbid_unknown_fields=True):
    pass


class View(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor that is a strided window of a shard (tied or overlapping memory); counted in items of ``dtype``."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class DictNode(_Node, frozen=True, tag="dict"):
    """``keys`` are encoded values, in the order of the dict."""

    keys: list[Any]
    items: list[Node]
    is_ordered: bool = False
    """It was a ``collections.OrderedDict``."""


class ListNode(_Node, frozen=True, tag="list"):
    items: list[Node]


class TupleNode(_Node, frozen=True, tag="tuple"):
    items: list[Node]


class ObjectNode(_Node, frozen=True, tag="object"):
    """What ``state_dict()`` of an object gave; ``type`` is its class, for people to read, never imported."""

    type: str
    item: Node


class LeafNode(_Node, frozen=True, tag="leaf"):
    """What ``encode`` of a registered leaf type gave."""

    name: str
    item: Node


class TensorNode(_Node, frozen=True, tag="tensor"):
    shard: int
    view: View | None = None


class Holding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A box of a tensor, and the rank whose segment holds it."""

    rank: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class ShardedNode(_Node, frozen=True, tag="sharded"):
    """A tensor of which every rank holds boxes, or that all of them hold; ``parts`` make up what this rank held.

    The shards of all seals whose ``whole`` names this ``tensor`` make up the tensor.
    """

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    parts: list[Holding]


class ArrayNode(_Node, frozen=True, tag="array"):
    """A numpy array; ``dtype`` is numpy's, ``shard`` holds its bytes."""

    shard: int
    dtype: str


class ValueNode(_Node, frozen=True, tag="value"):
    value: int


Node = Union[DictNode, ListNode, TupleNode, ObjectNode, LeafNode, TensorNode, ShardedNode, ArrayNode, ValueNode]  # noqa: UP007


LEAVES = (TensorNode, ShardedNode, ArrayNode, ValueNode)


def check_tree(tree: Node, shards: Sequence[Shard], values: Sequence[Any]) -> None:
    """Every index is in range, arrays have numpy's dtypes, the nesting is within limits; else :class:`FormatError`."""
    _check_depth(values)
    stack: list[tuple[Node, int]] = [(tree, 1)]
    while stack:
        node, depth = stack.pop()
        if depth > limits.MAX_DEPTH and not isinstance(node, LEAVES):
            raise FormatError(f"the state is nested deeper than {limits.MAX_DEPTH} levels")
        if isinstance(node, DictNode):
            if len(node.keys) != len(node.items):
                raise FormatError("a dict has more keys than items")
            _check_depth(node.keys)
            stack.extend((item, depth + 1) for item in node.items)
        elif isinstance(node, ListNode | TupleNode):
            stack.extend((item, depth + 1) for item in node.items)
        elif isinstance(node, ObjectNode | LeafNode):
            stack.append((node.item, depth + 1))
        elif isinstance(node, ValueNode):
            if not 0 <= node.value < len(values):
                raise FormatError(f"the tree names value {node.value} of {len(values)}")
        elif isinstance(node, ShardedNode):
            _check_sharded(node)
        elif not 0 <= node.shard < len(shards):
            raise FormatError(f"the tree names shard {node.shard} of {len(shards)}")
        elif isinstance(node, ArrayNode) and NUMPY_DTYPES.get(shards[node.shard].dtype) != node.dtype:
            raise FormatError(f"a numpy array of dtype {node.dtype!r} is stored as {shards[node.shard].dtype}")


def _check_sharded(node: ShardedNode) -> None:
    if node.dtype not in ITEM_BYTES:
        raise FormatError(f"tensor {node.tensor!r} has an unknown dtype {node.dtype!r}")
    check_box(node.shape, (0,) * len(node.shape), node.shape, node.tensor)
    for part in node.parts:
        check_box(node.shape, part.offset, part.shape, node.tensor)


def _check_depth(values: Sequence[Any]) -> None:
    """Of encoded values; their decoder is recursive."""
    stack: list[tuple[Any, int]] = [(value, 1) for value in values]
    while stack:
        value, depth = stack.pop()
        if depth > 2 * limits.MAX_DEPTH:  # a tuple takes two levels of JSON
            raise FormatError(f"a value is nested deeper than {limits.MAX_DEPTH} levels")
        if isinstance(value, dict):
            stack.extend((item, depth + 1) for item in value.values())
        elif isinstance(value, list):
            stack.extend((item, depth + 1) for item in value if isinstance(item, list | dict))
