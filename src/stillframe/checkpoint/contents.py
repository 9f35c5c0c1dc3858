"""What is in a checkpoint: its tree, leaf by leaf, from seals alone."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from stillframe.checkpoint.catalog import Checkpoint
from stillframe.checkpoint.stored import Piece, Stored
from stillframe.errors import FormatError, NotFoundError
from stillframe.format.segment import ITEM_BYTES, Shard
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
from stillframe.format.values import TAG

Kind = Literal["tensor", "array", "value"]
_EMPTY = {DictNode: {}, ListNode: [], TupleNode: {TAG: "tuple", "items": []}}
_MAX_TEXT = 60


@dataclass(frozen=True, slots=True)
class Entry:
    """One leaf of the state."""

    path: Path
    kind: Kind
    node: Node
    """A leaf; or a container that is empty, which counts as a value."""
    holders: tuple[str, ...] = ()
    """What it lies in, from the top: kinds of containers, and the names of registered leaves."""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    bytes: int = 0
    """Of the whole tensor; 0 if the memory is another entry's."""
    parts: tuple[Piece, ...] = ()
    """Where a tensor's bytes lie: one shard, or one for each box."""
    tied_to: str = ""
    """An entry before it that has the same memory."""
    value: Any = None
    """Still encoded."""
    rank: int | None = None
    """Whose it is, where each rank has its own and others' are listed, too."""

    @property
    def name(self) -> str:
        plain = render(self.path) or "~"
        return plain if self.rank is None else f"{plain} (rank {self.rank})"

    @property
    def key(self) -> tuple[object, ...]:
        """Different for all entries of a state, also for those under the keys ``0`` and ``"0"``."""
        return (self.rank, *((type(part).__name__, part) for part in self.path))

    @property
    def sharding(self) -> str:
        """How a tensor lies over the ranks; empty if it is one rank's alone."""
        if not isinstance(self.node, ShardedNode):
            return ""
        ranks = {part.rank for part in self.parts}
        if len(self.parts) == 1:
            return "replicated" if self.parts[0].shape == self.shape else "part"
        split = [dim for dim in range(len(self.shape)) if len({part.offset[dim] for part in self.parts}) > 1]
        on = "1 rank" if len(ranks) == 1 else f"{len(ranks)} ranks"
        return f"{len(self.parts)} parts by dim {', '.join(map(str, split))} on {on}"


def entries(stored: Stored) -> list[Entry]:
    """Every leaf, in the order of the state."""
    seen: dict[str, str] = {}
    return [_entry(stored, *found, seen) for found in leaves(stored.tree)]


def entries_of_all(checkpoint: Checkpoint) -> list[Entry]:
    """Every leaf of every rank: what they hold together once, what each keeps for itself once for each, unless it is a
    plain value that is the same."""
    first = checkpoint.ranks[0]
    found = entries(Stored(checkpoint, first, is_merged=True))
    shared = {entry.key: entry for entry in found}
    for rank in checkpoint.ranks[1:]:
        own = Stored(checkpoint, rank, is_merged=False)
        for entry in entries(own):
            common = shared.get(entry.key)
            if isinstance(entry.node, ShardedNode) or (common is not None and is_same(common, entry)):
                continue
            if common is None or common.node != entry.node:  # not the merged tree's own copy of it
                found.append(dataclasses.replace(entry, rank=rank))
    return found


def is_same(one: Entry, other: Entry) -> bool:
    """Plain values, in the same place of the same structure, with the same bits."""
    return (
        (one.kind, other.kind) == ("value", "value")
        and one.holders == other.holders
        and msgspec.json.encode(one.value) == msgspec.json.encode(other.value)
    )


def leaves(tree: Node, path: Path = (), holders: tuple[str, ...] = ()) -> Iterator[tuple[Path, tuple[str, ...], Node]]:
    """Everything that holds nothing."""
    if isinstance(tree, ObjectNode):
        yield from leaves(tree.item, path, holders)
    elif isinstance(tree, LeafNode):
        yield from leaves(tree.item, path, (*holders, tree.name))
    elif isinstance(tree, DictNode | ListNode | TupleNode) and tree.items:
        keys = map(key_of, tree.keys) if isinstance(tree, DictNode) else range(len(tree.items))
        kind = "ordered dict" if isinstance(tree, DictNode) and tree.is_ordered else type(tree).__name__
        for key, item in zip(keys, tree.items, strict=True):
            yield from leaves(item, (*path, key), (*holders, kind))
    else:
        yield path, holders, tree


def matching(found: Sequence[Entry], patterns: Sequence[str]) -> list[Entry]:
    """Those of these names, below them, or of these globs; :class:`NotFoundError` if a pattern matches none."""
    chosen: set[int] = set()
    for pattern in patterns:
        hits = [at for at, entry in enumerate(found) if _matches(entry.name, pattern)]
        if not hits:
            some = ", ".join(entry.name for entry in found[:3])
            raise NotFoundError(f"{pattern!r} matches nothing; there are {some or 'no entries at all'}, …")
        chosen.update(hits)
    return [found[at] for at in sorted(chosen)]


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or name.startswith(pattern.rstrip("/") + "/") or fnmatch.fnmatchcase(name, pattern)


def _entry(stored: Stored, path: Path, holders: tuple[str, ...], node: Node, seen: dict[str, str]) -> Entry:
    if isinstance(node, ValueNode):
        return Entry(path, "value", node, holders, value=stored.value(node))
    if not isinstance(node, TensorNode | ShardedNode | ArrayNode):
        return Entry(path, "value", node, holders, value=_EMPTY[type(node)])
    if isinstance(node, ShardedNode):
        parts = tuple(stored.all_pieces(node))
        identity = f"={node.tensor}"
        dtype, shape = node.dtype, node.shape
    else:
        parts = tuple(next(iter(stored.pieces(TensorNode(node.shard)))))
        identity = str(node.shard)
        shard: Shard = stored.shard(node.shard)
        form = node.view if isinstance(node, TensorNode) and node.view is not None else shard
        dtype, shape = form.dtype, form.shape
    if dtype not in ITEM_BYTES:
        raise FormatError(f"tensor {render(path)!r} has an unknown dtype {dtype!r}")
    tied_to = seen.get(identity, "")
    seen.setdefault(identity, render(path) or "~")
    size = 0 if tied_to else math.prod(shape) * ITEM_BYTES[dtype]
    kind: Kind = "array" if isinstance(node, ArrayNode) else "tensor"
    return Entry(path, kind, node, holders, dtype, shape, size, parts, tied_to)


class OddKey(str):
    """A dict's key that is none of JSON's own, such as a tuple, as its encoded text; which may be a key, too."""


def key_of(encoded: Any) -> Any:
    """A dict's key as it reads."""
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
