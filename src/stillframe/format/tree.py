"""The structure of a state: nested nodes whose leaves are indexes of shards and of plain values.

A tree holds structure only.  It stays the same from save to save, so it is encoded once and reused.  Plain values
change, so they are stored in a list beside it (:mod:`.values`).  Every module that visits trees does it through
:func:`children` and :func:`nodes`.  A tree that was read from a file has passed :func:`check_tree`, so it is at most
``limits.MAX_DEPTH`` containers deep and a recursive visitor is safe.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any, TypeVar, Union

import msgspec

from stillframe.errors import FormatError
from stillframe.format import limits
from stillframe.format.digest import digest
from stillframe.format.layout import Layout, check_divides
from stillframe.format.segment import ITEM_BYTES, NUMPY_DTYPES, Shard, check_box
from stillframe.units import MIB

_MAX_REPEATS = 16
_ALWAYS_ALLOWED_BYTES = 64 * MIB
Path = tuple[Any, ...]
"""Keys and indexes from the top of a state to something in it."""


def render(path: Path) -> str:
    """A path as a JSON pointer without its first slash (RFC 6901): ``optimizer/state/0/exp_avg``."""
    return "/".join(str(key).replace("~", "~0").replace("/", "~1") for key in path)


def is_match(name: str, pattern: str) -> bool:
    """Whether a rendered path is the one named, lies below it, or fits the glob."""
    return name == pattern or name.startswith(pattern.rstrip("/") + "/") or fnmatch.fnmatchcase(name, pattern)


class _Node(msgspec.Struct, frozen=True, tag_field="kind", forbid_unknown_fields=True, gc=False):
    """Not looked at by the garbage collector: nodes refer to one another downward only, and there are many."""


class View(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A tensor that is a strided view of a shard, because it aliases another; counted in items of ``dtype``."""

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


class RankBox(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A box of a tensor, and the rank whose segment holds it."""

    rank: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class ShardedNode(_Node, frozen=True, tag="sharded"):
    """A tensor that is divided into boxes over the ranks, or replicated; ``boxes`` make up what this rank held.

    The shards of all seals whose ``box_of`` names this ``tensor`` make up the tensor.
    """

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    boxes: list[RankBox] = msgspec.field(name="parts")
    layout: int | None = None
    """Which of the seal's layouts tells who holds which boxes; ``None``: that is not known."""


class ArrayNode(_Node, frozen=True, tag="array"):
    """A numpy array; ``dtype`` is numpy's, ``shard`` holds its bytes."""

    shard: int
    dtype: str


class ValueNode(_Node, frozen=True, tag="value"):
    value: int


class PartBox(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A box of a tensor, and where it begins in what the rank held of it."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    local: tuple[int, ...]


class PartOf(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which boxes of a tensor of this shape a wrapper is."""

    shape: tuple[int, ...]
    boxes: list[PartBox]


class WrapperNode(_Node, frozen=True, tag="wrapper"):
    """A tensor that wraps others (``__tensor_flatten__``): ``items`` are these, under ``names``.

    ``type`` is its class, which is never imported; ``dtype`` and ``shape`` are what the class shows to the outside.
    """

    type: str
    dtype: str
    shape: tuple[int, ...]
    names: list[str]
    items: list[Node]
    context: Any = None
    """What else ``__tensor_flatten__`` gave, encoded; it is compared, and need not be decodable."""
    part_of: PartOf | None = None
    """It is what one rank held of a DTensor."""


Node = Union[  # noqa: UP007
    DictNode, ListNode, TupleNode, ObjectNode, LeafNode, TensorNode, ShardedNode, ArrayNode, ValueNode, WrapperNode
]


_Kind = TypeVar("_Kind")

# Tuples made once: a union in a call of isinstance is made anew each time, which takes longer than the call.
_WITH_ITEMS = (DictNode, ListNode, TupleNode, WrapperNode)
_WITH_ITEM = (ObjectNode, LeafNode)
_LEAVES = (TensorNode, ShardedNode, ArrayNode, ValueNode)
TENSORS = (TensorNode, ShardedNode)
SHARDS = (TensorNode, ArrayNode)


def children(node: Node) -> Sequence[Node]:
    """The nodes directly below a container, in order; none below a leaf."""
    if isinstance(node, _WITH_ITEMS):
        return node.items
    if isinstance(node, _WITH_ITEM):
        return (node.item,)
    return ()


def is_leaf(node: Node) -> bool:
    """Whether it refers to a shard or a value; a container, even an empty one, does not."""
    return isinstance(node, _LEAVES)


def nodes(tree: Node, kind: type[_Kind]) -> Iterator[_Kind]:
    """Every node of this kind in a tree, parents before their children, each in the order of the state."""
    stack = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, kind):
            yield node
        stack.extend(reversed(children(node)))


def structure_of(tree: Node, elsewhere: Collection[int] = ()) -> str:
    """A digest, equal for trees that have the same keys and the same kinds of nodes in the same places.

    Of ranks with the same structure one tree tells which paths all of them have: trees are merged by keys and kinds,
    and what a tensor or a value is does not matter.  ``elsewhere``: the values that stand for items of other ranks.
    """
    found: list[object] = []
    stack = [tree]
    while stack:
        node = stack.pop()
        found.append(node.keys if isinstance(node, DictNode) else len(children(node)))
        is_elsewhere = isinstance(node, ValueNode) and node.value in elsewhere
        found.append("elsewhere" if is_elsewhere else _KINDS[type(node)])
        stack.extend(reversed(children(node)))
    return digest(msgspec.json.encode(found))


_KINDS = {kind: kind.__struct_config__.tag for kind in (*_WITH_ITEMS, *_WITH_ITEM, *_LEAVES)}


def check_tree(tree: Node, shards: Sequence[Shard], values: Sequence[Any], layouts: Sequence[Layout] = ()) -> None:
    """Every index is in range, arrays have numpy's dtypes, the nesting is within limits; else :class:`FormatError`."""
    _check_depth(values)
    stack = [(tree, 1)]
    while stack:
        node, depth = stack.pop()
        if isinstance(node, ShardedNode):  # most nodes are one of these two
            _check_sharded(node, layouts)
        elif isinstance(node, ValueNode):
            _check_value(node, values)
        else:
            if depth > limits.MAX_DEPTH and not is_leaf(node):
                raise FormatError(f"the state is nested deeper than {limits.MAX_DEPTH} levels")
            _check_node(node, shards)
            depth += 1
            stack += [(item, depth) for item in children(node)]


def _check_value(node: ValueNode, values: Sequence[Any]) -> None:
    if not 0 <= node.value < len(values):
        raise FormatError(f"the tree names value {node.value} of {len(values)}")


def _check_node(node: Node, shards: Sequence[Shard]) -> None:
    if isinstance(node, DictNode):
        if len(node.keys) != len(node.items):
            raise FormatError("a dict has more keys than items")
        _check_depth(node.keys)
    elif isinstance(node, WrapperNode):
        _check_wrapper(node)
    elif isinstance(node, TensorNode | ArrayNode):
        if not 0 <= node.shard < len(shards):
            raise FormatError(f"the tree names shard {node.shard} of {len(shards)}")
        if isinstance(node, TensorNode) and node.view is not None:
            _check_view(node.view, shards[node.shard])
        if isinstance(node, ArrayNode) and NUMPY_DTYPES.get(shards[node.shard].dtype) != node.dtype:
            raise FormatError(f"a numpy array of dtype {node.dtype!r} is stored as {shards[node.shard].dtype}")


def max_view_bytes(shard_bytes: int) -> int:
    """How much a view of a shard may hold: its items may repeat, but a few bytes must not ask for any amount of memory.

    A tensor that holds more is stored by itself.
    """
    return max(_MAX_REPEATS * shard_bytes, _ALWAYS_ALLOWED_BYTES)


def _check_view(view: View, shard: Shard) -> None:
    item_bytes = ITEM_BYTES.get(view.dtype)
    if item_bytes is None:
        raise FormatError(f"a view of {shard.name!r} has an unknown dtype {view.dtype!r}")
    numbers = (view.offset, *view.shape, *view.stride)
    if len(view.shape) != len(view.stride) or not all(0 <= number < 1 << 62 for number in numbers):
        raise FormatError(f"a view of {shard.name!r} is malformed")
    last = view.offset + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride, strict=True))
    items = math.prod(view.shape[: limits.MAX_DIMENSIONS])
    if len(view.shape) > limits.MAX_DIMENSIONS or not items or (last + 1) * item_bytes > shard.nbytes:
        raise FormatError(f"a view of {shard.name!r} reaches outside of it")
    if items * item_bytes > max_view_bytes(shard.nbytes):
        raise FormatError(f"a view of {shard.name!r} repeats its {shard.nbytes} bytes up to {items * item_bytes}")


def _check_sharded(node: ShardedNode, layouts: Sequence[Layout]) -> None:
    if node.dtype not in ITEM_BYTES:
        raise FormatError(f"tensor {node.tensor!r} has an unknown dtype {node.dtype!r}")
    check_box(node.shape, (0,) * len(node.shape), node.shape, node.tensor)
    if math.prod([size or 1 for size in node.shape]) * ITEM_BYTES[node.dtype] >= 1 << 63:
        raise FormatError(f"tensor {node.tensor!r} has an impossible shape {node.shape}")
    for box in node.boxes:
        check_box(node.shape, box.offset, box.shape, node.tensor)
    if node.layout is not None:
        if not 0 <= node.layout < len(layouts):
            raise FormatError(f"the tree names layout {node.layout} of {len(layouts)}")
        check_divides(layouts[node.layout], len(node.shape), node.tensor)


def _check_wrapper(node: WrapperNode) -> None:
    if len(node.names) != len(node.items) or len(set(node.names)) != len(node.names):
        raise FormatError(f"a {node.type} has not one name for each of its tensors")
    if not all(isinstance(item, (*TENSORS, WrapperNode)) for item in node.items):
        raise FormatError(f"a {node.type} holds something that is no tensor")
    check_box(node.shape, (0,) * len(node.shape), node.shape, node.type)
    part = node.part_of or PartOf(node.shape, [])
    for box in part.boxes:
        check_box(part.shape, box.offset, box.shape, node.type)
        check_box(node.shape, box.local, box.shape, node.type)
    _check_depth([node.context])


def _check_depth(values: Sequence[Any]) -> None:
    """Encoded values are limited in depth because their decoder is recursive."""
    stack: list[tuple[Any, int]] = [(value, 1) for value in values]
    while stack:
        value, depth = stack.pop()
        if depth > 2 * limits.MAX_DEPTH:  # a tuple takes two levels of JSON
            raise FormatError(f"a value is nested deeper than {limits.MAX_DEPTH} levels")
        if isinstance(value, dict):
            stack.extend((item, depth + 1) for item in value.values())
        elif isinstance(value, list):
            stack.extend((item, depth + 1) for item in value if isinstance(item, list | dict))
