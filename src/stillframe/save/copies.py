"""The copies that fill a segment: shards cut into chunks, chunks into copies of adjacent bytes of one device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch

from stillframe.format.segment import BoxOf
from stillframe.model import CHUNK_BYTES
from stillframe.save.device import Device
from stillframe.state.boxes import Box
from stillframe.state.memory import as_bytes, is_byte_row, is_plain, pieces
from stillframe.units import MIB

_COALESCE_BYTES = MIB
"""Pieces below this size are copied together: a call each would fight for the GIL (30,000 of 16 KiB:
117 ms as a loop, 92 ms as one ``torch.cat`` per chunk, and the training thread keeps its speed)."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy: adjacent sources of one device, end to end, to a place in the chunk."""

    device: Device
    offset: int
    nbytes: int
    sources: tuple[torch.Tensor, ...]
    captured: int | None = None
    """Instead of sources: the offset in what the device's ``gather`` returned."""


@dataclass(frozen=True, slots=True)
class Chunk:
    nbytes: int
    copies: tuple[Copy, ...]


CaptureSource: TypeAlias = "torch.Tensor | int | tuple[int, Box]"
"""A stable byte view, or which tensor of the walk at hand, or which part of it."""


@dataclass(slots=True)
class Target:
    """A shard in the making."""

    source: torch.Tensor
    device: Device
    name: str
    is_captured: bool
    index: int | None
    """Which tensor of the walk it is captured from; ``None`` if a view of the source, made once, will do."""
    box: Box | None = None
    """Which part of that tensor; ``None``: all of it."""
    whole: BoxOf | None = None
    shard: int = -1
    start: int = 0

    @property
    def nbytes(self) -> int:
        return self.source.nbytes

    @property
    def capture_source(self) -> CaptureSource:
        if self.index is not None:
            return self.index if self.box is None else (self.index, self.box)
        return as_bytes(self.source)


@dataclass(frozen=True, slots=True)
class Capture:
    """What ``save`` copies at once from one device: stable byte views, or tensors of this very walk."""

    device: Device
    nbytes: int
    sources: tuple[CaptureSource, ...]


def captures_of(order: list[Target]) -> tuple[list[Capture], dict[int, int]]:
    """What each device gathers at ``save``, and at which offset in it each captured shard lies."""
    captures: dict[Device, list[Target]] = {}
    captured_at: dict[int, int] = {}
    for target in order:
        if target.is_captured and target.nbytes:
            before = captures.setdefault(target.device, [])
            last = before[-1] if before else None
            captured_at[target.shard] = captured_at[last.shard] + last.nbytes if last else 0
            before.append(target)
    return [
        Capture(
            device,
            sum(target.nbytes for target in targets),
            tuple(target.capture_source for target in targets),
        )
        for device, targets in captures.items()
    ], captured_at


def chunks_of(order: list[Target], captured_at: dict[int, int], data_bytes: int) -> list[Chunk]:
    copies: list[list[Copy]] = [[] for _ in range(-(-data_bytes // CHUNK_BYTES))]
    for target in order:
        at, end = target.start, target.start + target.nbytes
        flat = as_bytes(target.source) if not target.is_captured and is_plain(target.source) else None
        while at < end:
            number, offset = divmod(at, CHUNK_BYTES)
            count = min(end - at, CHUNK_BYTES - offset)
            begin = at - target.start
            if target.is_captured:
                copy = Copy(target.device, offset, count, (), captured_at[target.shard] + begin)
                _append(copies[number], copy)
            elif flat is not None:
                _append(copies[number], Copy(target.device, offset, count, (flat[begin : begin + count],)))
            else:
                item_bytes = target.source.element_size()
                for piece in pieces(target.source.detach(), begin // item_bytes, count // item_bytes):
                    copies[number].append(Copy(target.device, offset, piece.nbytes, (piece,)))
                    offset += piece.nbytes
            at += count
    return [
        Chunk(min(CHUNK_BYTES, data_bytes - number * CHUNK_BYTES), tuple(_coalesced(each)))
        for number, each in enumerate(copies)
    ]


def _append(copies: list[Copy], copy: Copy) -> None:
    """Add a copy, as one with the last where both are captured and adjacent in the gathered bytes."""
    last = copies[-1] if copies else None
    if (
        last is not None
        and last.captured is not None
        and copy.captured is not None
        and last.device is copy.device
        and last.captured + last.nbytes == copy.captured
    ):
        copies[-1] = Copy(copy.device, last.offset, last.nbytes + copy.nbytes, (), last.captured)
    else:
        copies.append(copy)


def _coalesced(copies: list[Copy]) -> Iterator[Copy]:
    """Neighbouring small plain pieces become one copy: one call that copies them all, without the GIL."""
    for (device, is_small), group in itertools.groupby(copies, key=lambda copy: (copy.device, _is_small(copy))):
        members = list(group)
        if is_small and len(members) > 1:
            sources = tuple(source for copy in members for source in copy.sources)
            yield Copy(device, members[0].offset, sum(copy.nbytes for copy in members), sources)
        else:
            yield from members


def _is_small(copy: Copy) -> bool:
    return copy.captured is None and copy.nbytes < _COALESCE_BYTES and is_byte_row(copy.sources[0])
