"""The plan of a save: where every tensor goes in the segment, and which copies put it there.

Made from a :class:`Walk` when the structure is new, and reused as long as it stays the same.

Layout: shards by falling item size (so each starts at a multiple of its own), within one item
size the captured ones first (so they form at most four runs).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from stillframe.errors import UnsupportedStateError
from stillframe.format.digest import digest_of
from stillframe.format.records import Team, encode_shards, encode_tree
from stillframe.format.segment import BoxOf, Shard, encode_header
from stillframe.format.tree import Holding, Path, ShardedNode, TensorNode, View, render
from stillframe.format.values import Unencodable
from stillframe.save.copies import Capture, CaptureSource, Chunk, Target, captures_of, chunks_of
from stillframe.save.device import Device, DeviceTable
from stillframe.save.signature import Signature
from stillframe.state.boxes import Box, Spread
from stillframe.state.division import ALONE, Assigned, Seat, SpreadBase, assign, find_spreads, teams_of
from stillframe.state.dtypes import DTYPE_NAMES, check_tensor
from stillframe.state.memory import Base, as_bytes, as_row, is_plain, share_memory
from stillframe.state.walk import TreeBuilder, Walk, refusal

SMALL_BYTES = 64
"""Tensors up to this size are captured by ``save`` itself: Adam's ``step``, counters, scales."""


@dataclass(slots=True)
class Plan:
    """Never changed once made.  Keeps its sources alive, so it must not outlive its checkpointer."""

    layout: str
    """Equal for plans that put the same things in the same places, whenever they were made."""
    shards: list[Shard]
    header: bytes
    shards_json: msgspec.Raw
    tree_json: msgspec.Raw
    teams: list[Team]
    data_bytes: int
    chunks: list[Chunk]
    lazy: tuple[tuple[int, int], ...]
    captured_bytes: int
    devices: list[Device]
    _captures: list[Capture]
    _tokens: list[tuple[object, ...]] = field(repr=False)
    _is_volatile: list[bool] = field(repr=False)
    _signature: Signature = field(repr=False)
    _tensors: list[torch.Tensor | None] = field(repr=False)
    """Those of the walk that it was made from, kept alive; but not the volatile ones."""
    _rows: dict[int, torch.Tensor] = field(repr=False)
    """The bytes of small loose tensors, for as long as the same ones stand there."""

    def fits(self, walk: Walk) -> bool:
        """Whether the walk found the same structure in the same memory, so that this plan serves it too."""
        if walk.tokens != self._tokens or walk.is_volatile != self._is_volatile:
            return False
        return self._signature.fits(walk.tensors)

    def capture(self, walk: Walk) -> dict[Device, torch.Tensor]:
        """Copy what may change before the next update, in the order of each device's compute."""
        return {
            capture.device: capture.device.gather([self._row(each, walk) for each in capture.sources], capture.nbytes)
            for capture in self._captures
        }

    def _row(self, source: CaptureSource, walk: Walk) -> torch.Tensor:
        if isinstance(source, torch.Tensor):
            return source
        if isinstance(source, tuple):
            return as_row(source[1].of(walk.tensors[source[0]]))
        index = source
        tensor = walk.tensors[index]
        row = self._rows.get(index)
        if row is not None and tensor is self._tensors[index] and tensor.data_ptr() == row.data_ptr():
            return row
        return as_row(tensor)


def make_plan(walk: Walk, devices: DeviceTable, seat: Seat = ALONE) -> Plan:
    """Raises :class:`UnsupportedStateError`, naming the tensor that cannot be stored."""
    paths = TreeBuilder(walk.tokens).paths()
    for tensor, path in zip(walk.tensors, paths, strict=True):
        try:
            check_tensor(tensor)
        except Unencodable as reason:
            raise UnsupportedStateError(refusal(reason, path)) from None
    spreads = find_spreads(walk, paths, seat)
    bases = share_memory(walk.tensors, walk.is_volatile, _unique_names(paths), spreads, walk.dtensors)
    targets, found = _targets(bases, spreads, devices, seat)
    order = sorted(targets, key=lambda target: (-target.source.element_size(), not target.is_captured))
    at = 0
    for number, target in enumerate(order):
        target.shard, target.start = number, at
        at += target.nbytes
    shards = [
        Shard(
            name=target.name,
            dtype=DTYPE_NAMES[target.source.dtype],
            shape=tuple(target.source.shape),
            start=target.start,
            end=target.start + target.nbytes,
            device=target.source.device.type,
            whole=target.whole,
        )
        for target in order
    ]
    captures, captured_at = captures_of(order)
    leaves = [leaf.node if leaf.target is None else TensorNode(leaf.target.shard, leaf.view) for leaf in found]
    is_loose = [leaf.is_loose for leaf in found]
    tensors = [
        None if is_volatile else tensor for tensor, is_volatile in zip(walk.tensors, walk.is_volatile, strict=True)
    ]
    header = encode_header(shards, {"stillframe": "1"})
    tree = encode_tree(TreeBuilder(walk.tokens).build(leaves))
    return Plan(
        layout=digest_of([header, bytes(tree)]),
        shards=shards,
        header=header,
        shards_json=encode_shards(shards),
        tree_json=tree,
        teams=teams_of(bases, spreads, seat),
        data_bytes=at,
        chunks=chunks_of(order, captured_at, at),
        lazy=_merged((target.start, target.start + target.nbytes) for target in order if not target.is_captured),
        captured_bytes=sum(capture.nbytes for capture in captures),
        devices=list(dict.fromkeys(target.device for target in order)),
        _captures=captures,
        _tokens=walk.tokens,
        _is_volatile=walk.is_volatile,
        _signature=Signature(walk.tensors, is_loose, tensors),
        _tensors=tensors,
        _rows={
            index: as_bytes(tensor)
            for index, tensor in enumerate(tensors)
            if tensor is not None and is_loose[index] and is_plain(tensor)
        },
    )


@dataclass(frozen=True, slots=True)
class _Leaf:
    """Where a tensor of the walk is stored: in a target of its own, or in parts that ranks share."""

    target: Target | None
    view: View | None
    node: ShardedNode
    is_loose: bool


_NOWHERE = ShardedNode("", "U8", (), [])


def _targets(
    bases: list[Base], spreads: dict[int, Spread], devices: DeviceTable, seat: Seat
) -> tuple[list[Target], list[_Leaf]]:
    """The shards to be, and for each tensor of the walk where it is stored."""
    targets: list[Target] = []
    leaves: dict[int, _Leaf] = {}
    spread_bases: list[SpreadBase] = []
    for base in bases:
        first = base.leaves[0][0]
        is_captured = base.is_volatile or base.source.nbytes <= SMALL_BYTES
        # A small tensor that shares memory with another is one with it; alone, it may be replaced from save to save.
        # One whose memory is not its content is straightened anew at each save.
        is_alone = len(base.leaves) == 1
        index = first if base.is_volatile or is_alone or not is_plain(base.source) else None
        is_loose = index is not None and is_captured
        if first in spreads:
            spread_bases.append(SpreadBase(base, spreads[first], is_captured, is_loose))
            continue
        target = Target(base.source, devices.of(base.source), base.name, is_captured, index)
        targets.append(target)
        leaves.update((each, _Leaf(target, view, _NOWHERE, is_loose)) for each, view in base.leaves)
    for spread_base, parts in assign(spread_bases, seat):
        base, spread = spread_base.base, spread_base.spread
        targets.extend(_own_targets(spread_base, parts, devices, seat))
        node = ShardedNode(
            spread_base.tensor(seat),
            DTYPE_NAMES[base.source.dtype],
            spread.shape,
            [Holding(*each.where) for each in parts],
        )
        leaves.update((each, _Leaf(None, None, node, spread_base.is_loose)) for each, _ in base.leaves)
    return targets, [leaves[index] for index in range(len(leaves))]


def _own_targets(each: SpreadBase, parts: list[Assigned], devices: DeviceTable, seat: Seat) -> Iterator[Target]:
    """The shards that this rank writes of a tensor."""
    base = each.base
    for part in parts:
        if part.rank == seat.rank:
            box = Box(part.offset, part.shape, part.local)
            source = box.of(base.source.detach())
            is_part = source.shape != base.source.shape
            yield Target(
                source=source,
                device=devices.of(base.source),
                name=base.name if part.number == 0 else f"{base.name}~{part.number + 1}~box",
                is_captured=each.is_captured,
                index=base.leaves[0][0] if each.is_captured else None,
                box=box if is_part else None,
                whole=BoxOf(each.tensor(seat), each.spread.shape, part.offset),
            )


def _unique_names(paths: Sequence[Path]) -> list[str]:
    """Paths as text; where two read alike (``0`` and ``"0"``), the later one gets a number."""
    names: list[str] = []
    taken = {"__metadata__"}
    for path in paths:
        plain = name = render(path) or "~"
        for number in itertools.count(2):
            if name not in taken:
                break
            name = f"{plain}~{number}"  # no path reads like this: a lone ~ is written ~0
        taken.add(name)
        names.append(name)
    return names


def _merged(ranges: Iterator[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    merged: list[tuple[int, int]] = []
    for start, end in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = merged[-1][0], end
        elif start < end:
            merged.append((start, end))
    return tuple(merged)
