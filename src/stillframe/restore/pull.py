"""Stored tensors one after another, verified, never many of them in memory at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from stillframe.format.tree import ArrayNode, ShardedNode, TensorNode
from stillframe.restore.place import Placement
from stillframe.restore.stored import Stored
from stillframe.units import MIB

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
