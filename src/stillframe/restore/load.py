"""A checkpoint as nested plain values and tensors, with no live objects: all of it, or tensor by tensor."""

from __future__ import annotations

import fnmatch
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from stillframe.checkpoint.catalog import Catalog
from stillframe.checkpoint.stored import Stored
from stillframe.errors import FormatError, NotFoundError, UnsupportedStateError
from stillframe.format import values
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
from stillframe.state.codecs import codec_named
from stillframe.units import MIB

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
        codec = codec_named(node.name)
        if codec is None:
            raise UnsupportedStateError(
                f"the checkpoint holds a leaf named {node.name!r}; call register_leaf for it before loading"
            )
        return lambda: codec.decode(item())

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


def load(
    root: str | os.PathLike[str],
    step: int | None = None,
    *,
    only: str | Sequence[str] | None = None,
    rank: int = 0,
    merge: bool = True,
) -> Any:
    """The state of a step (the newest if none is given), verified, on the CPU, with no live objects.

    An object that had a ``state_dict`` comes back as that dict.  ``only`` names the parts wanted, by path
    (``"model"``, ``"optimizer/state/0"``) or pattern (``"model/*.bias"``): only their chunks are read; an
    item of a list that is not wanted comes back as ``None``.

    A checkpoint of several ranks comes back as one state: sharded tensors are assembled; of what each rank kept for
    itself (a generator's state, a plain tensor) it is ``rank``'s.  ``merge=False``: only what that rank saved.

    Blocks until everything is read.
    Raises: :class:`NotFoundError`, :class:`IntegrityError`, :class:`VersionError`.
    """
    patterns = None if only is None else (only,) if isinstance(only, str) else tuple(only)
    with Catalog(root).open(step) as checkpoint:
        if rank not in checkpoint.ranks:
            raise NotFoundError(f"step {checkpoint.step} has no rank {rank}; it was saved by {checkpoint.world_size}")
        stored = Stored(checkpoint, rank, is_merged=merge)
        placement = Placement(stored)
        builder = Builder(stored, placement, patterns)
        later = builder.build(stored.tree)
        if later is None:
            some = ", ".join(builder.paths[:5]) or "nothing at all"
            raise NotFoundError(f"only={only!r} matches nothing in step {checkpoint.step}; it holds {some}, …")
        placement.fill()
        return later()


BATCH_BYTES = 256 * MIB
"""Small tensors are read together: they share chunks, and a chunk is read as a whole."""


def pull(stored: Stored, nodes: Sequence[TensorNode | ShardedNode | ArrayNode]) -> Iterator[torch.Tensor]:
    """Each of them on the CPU, in this order.  Raises :class:`IntegrityError`."""
    at = 0
    while at < len(nodes):
        placement = Placement(stored)
        batch: list[torch.Tensor] = []
        size = 0
        while at < len(nodes) and (not batch or size + _bytes(placement, nodes[at]) <= BATCH_BYTES):
            node = _as_tensor(nodes[at])
            size += _bytes(placement, node)
            batch.append(placement.fresh(node))
            at += 1
        placement.fill()
        yield from batch


def _as_tensor(node: TensorNode | ShardedNode | ArrayNode) -> TensorNode | ShardedNode:
    return TensorNode(node.shard) if isinstance(node, ArrayNode) else node


def _bytes(placement: Placement, node: TensorNode | ShardedNode | ArrayNode) -> int:
    dtype, shape = placement.form(_as_tensor(node))
    return torch.Size(shape).numel() * dtype.itemsize
