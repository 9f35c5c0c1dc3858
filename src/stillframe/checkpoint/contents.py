"""What is in a checkpoint: its tree, leaf by leaf, from seals alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from stillframe.checkpoint.catalog import Checkpoint
from stillframe.checkpoint.stored import Located, Stored, StoredBox
from stillframe.errors import FormatError, NotFoundError
from stillframe.format import tree
from stillframe.format.segment import ITEM_BYTES
from stillframe.format.values import TAG

Kind = Literal["tensor", "array", "value"]
_EMPTY = {tree.DictNode: {}, tree.ListNode: [], tree.TupleNode: {TAG: "tuple", "items": []}}
_MAX_TEXT = 60


@dataclass(frozen=True, slots=True)
class Entry:
    """One leaf of the state."""

    path: tree.Path
    kind: Kind
    leaf: Located
    """A leaf of the stored tree; or an empty container, which counts as a value."""
    containers: tuple[str, ...] = ()
    """What it lies in, from the top: the kinds of containers, and the names of registered types."""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    bytes: int = 0
    """Of the whole tensor; 0 if it aliases another entry."""
    boxes: tuple[StoredBox, ...] = ()
    """The stored boxes of a tensor; one if it is not divided."""
    tied_to: str = ""
    """The name of an earlier entry that it aliases."""
    value: Any = None
    """Still encoded."""
    rank: int | None = None
    """The rank that stored it, where a listing has the same path of several ranks."""

    @property
    def name(self) -> str:
        plain = tree.render(self.path) or "~"
        return plain if self.rank is None else f"{plain} (rank {self.rank})"

    @property
    def key(self) -> tuple[object, ...]:
        """Unique among the entries of a state; the keys ``0`` and ``"0"`` of a dict stay apart."""
        return (self.rank, *((type(key).__name__, key) for key in self.path))

    @property
    def is_sharded(self) -> bool:
        return isinstance(self.leaf.node, tree.ShardedNode)

    @property
    def sharding(self) -> str:
        """How a tensor lies over the ranks; empty if it is one rank's alone."""
        if not self.is_sharded:
            return ""
        ranks = {box.rank for box in self.boxes}
        if len(self.boxes) == 1:
            return "replicated" if self.boxes[0].shape == self.shape else "one box"
        split = [dim for dim in range(len(self.shape)) if len({box.offset[dim] for box in self.boxes}) > 1]
        on = "1 rank" if len(ranks) == 1 else f"{len(ranks)} ranks"
        return f"{len(self.boxes)} boxes by dim {', '.join(map(str, split))} on {on}"


def entries(stored: Stored) -> list[Entry]:
    """Every leaf, in the order of the state."""
    names: dict[object, str] = {}
    return [_entry(stored, *found, names) for found in _leaves(stored.tree)]


def entries_of_all(checkpoint: Checkpoint) -> list[Entry]:
    """Every leaf of every rank.

    A sharded tensor is listed once.  Anything else is listed once for each rank that stored it, except that equal
    plain values are listed once.
    """
    first = checkpoint.ranks[0]
    found = entries(Stored(checkpoint, first, is_merged=True))
    shared = {entry.key: entry for entry in found}
    for rank in checkpoint.ranks[1:]:
        for entry in entries(Stored(checkpoint, rank, is_merged=False)):
            common = shared.get(entry.key)
            if entry.is_sharded or (common is not None and is_same(common, entry)):
                continue
            is_listed = common is not None and (common.leaf.rank, common.leaf.node) == (rank, entry.leaf.node)
            if not is_listed:
                found.append(dataclasses.replace(entry, rank=rank))
    return found


def is_same(one: Entry, other: Entry) -> bool:
    """Whether both are plain values in the same place of the same structure, with the same bits."""
    return (
        (one.kind, other.kind) == ("value", "value")
        and one.containers == other.containers
        and msgspec.json.encode(one.value) == msgspec.json.encode(other.value)
    )


def items_of(located: Located) -> list[tuple[Any, Located]]:
    """The items of a dict, list or tuple by key or index, the inner tensors of a wrapper; none of anything else."""
    node = located.node
    if isinstance(node, tree.DictNode):
        return list(zip(map(key_of, node.keys), located.children, strict=True))
    if isinstance(node, tree.WrapperNode):
        return list(zip(node.names, located.children, strict=True))
    return list(enumerate(located.children)) if isinstance(node, tree.ListNode | tree.TupleNode) else []


def _leaves(
    located: Located, path: tree.Path = (), containers: tuple[str, ...] = ()
) -> Iterator[tuple[tree.Path, tuple[str, ...], Located]]:
    """Leaves and empty containers, each with its path and the containers that it lies in."""
    node = located.node
    if isinstance(node, tree.ObjectNode):
        yield from _leaves(located.content, path, containers)
    elif isinstance(node, tree.LeafNode):
        yield from _leaves(located.children[0], path, (*containers, node.name))
    elif not tree.children(node):
        yield path, containers, located
    else:
        kind = _container(node)
        for key, item in items_of(located):
            yield from _leaves(item, (*path, key), (*containers, kind))


def _container(node: tree.Node) -> str:
    """Equal for containers that hold their items in the same way."""
    if isinstance(node, tree.WrapperNode):
        form = {"dtype": node.dtype, "shape": node.shape, "context": node.context, "part_of": node.part_of}
        return f"{node.type} {msgspec.json.encode(form).decode()}"
    return "ordered dict" if isinstance(node, tree.DictNode) and node.is_ordered else type(node).__name__


def matching(found: Sequence[Entry], patterns: Sequence[str]) -> list[Entry]:
    """The entries that fit a pattern: a name, the name of a container, or a glob.

    Raises: :class:`NotFoundError` if a pattern fits none.
    """
    chosen: set[int] = set()
    for pattern in patterns:
        hits = [at for at, entry in enumerate(found) if tree.is_match(entry.name, pattern)]
        if not hits:
            some = ", ".join(entry.name for entry in found[:3])
            raise NotFoundError(f"{pattern!r} matches nothing; there are {some or 'no entries at all'}, …")
        chosen.update(hits)
    return [found[at] for at in sorted(chosen)]


def _entry(
    stored: Stored, path: tree.Path, containers: tuple[str, ...], leaf: Located, names: dict[object, str]
) -> Entry:
    """``names``: the first name of everything stored that has been seen so far."""
    if isinstance(leaf.node, tree.ValueNode):
        return Entry(path, "value", leaf, containers, value=stored.value(leaf))
    if not tree.is_leaf(leaf.node):
        return Entry(path, "value", leaf, containers, value=_EMPTY[type(leaf.node)])
    dtype, shape = stored.form(leaf)
    if dtype not in ITEM_BYTES:
        raise FormatError(f"tensor {tree.render(path)!r} has an unknown dtype {dtype!r}")
    identity = leaf.identity
    tied_to = names.get(identity, "")
    if not tied_to:
        names[identity] = tree.render(path) or "~"
    size = 0 if tied_to else math.prod(shape) * ITEM_BYTES[dtype]
    kind: Kind = "tensor" if leaf.is_tensor else "array"
    return Entry(path, kind, leaf, containers, dtype, shape, size, tuple(stored.boxes(leaf)), tied_to)


class OddKey(str):
    """The encoded text of a dict's key that is no JSON scalar, such as a tuple; the same text may be a string key."""


def key_of(encoded: Any) -> Any:
    """A dict's key for display."""
    return OddKey(msgspec.json.encode(encoded).decode()) if isinstance(encoded, dict | list) else encoded


def text_of(value: Any, limit: int = _MAX_TEXT) -> str:
    """An encoded value for people: JSON's own as Python writes them, others with their tag in front."""
    if isinstance(value, dict) and TAG in value:
        inner = {key: item for key, item in value.items() if key != TAG}
        only = next(iter(inner.values())) if len(inner) == 1 else inner
        text = f"{value.get(TAG, '')}({text_of(only, limit)})"
    elif isinstance(value, list):
        text = f"[{', '.join(text_of(item, limit) for item in value[:limit])}]"
    else:
        text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
