"""The copies that fill a segment: its data is cut into chunks, and each chunk is filled by copies from devices.

What lies in host memory is kept as rows of bytes, made once.  Of an accelerator's memory nothing is kept: a *place*
says where it was when the plan was made, and the storages of the save at hand are taken there.  So a plan keeps no
device memory alive, and a loop may move its state away between two saves.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from stillframe.format.segment import BoxOf
from stillframe.format.tree import View
from stillframe.model import CHUNK_BYTES
from stillframe.save.device import Device
from stillframe.save.places import Place, is_kept
from stillframe.state.boxes import Box
from stillframe.state.memory import as_bytes, as_row, is_byte_row, is_plain, row_slices
from stillframe.state.torch_internals import flattened
from stillframe.units import MIB

_COALESCE_BYTES = MIB
"""Sources below this size are copied together: a call each would fight for the GIL (30,000 of 16 KiB:
117 ms as a loop, 92 ms as one ``torch.cat`` per chunk, and the training thread keeps its speed)."""


@dataclass(slots=True)
class Target:
    """A shard in the making: where its bytes come from, and where they go."""

    source: torch.Tensor
    device: Device
    name: str
    item_bytes: int
    nbytes: int
    members: tuple[tuple[int, View | None], ...]
    """The tensors of the walk that lie in it, each whole or as a view; none if the tree names it by its box."""
    is_captured: bool
    is_volatile: bool
    index: int
    """A tensor of the walk that lies in the same storage."""
    loose: int | None
    """The tensor of the walk that it is captured from, if that may be another object at the next save."""
    box: Box | None = None
    """Which box of that tensor it is; ``None``: all of it."""
    box_of: BoxOf | None = None
    number: int = -1
    start: int = 0


@dataclass(slots=True)
class Copy:
    """Adjacent sources of one device, copied end to end to one place in the chunk."""

    device: Device
    offset: int
    nbytes: int
    sources: list[torch.Tensor | Place]
    captured: int | None = None
    """Instead of sources: the offset in what the device's ``gather`` returned."""


@dataclass(slots=True)
class Chunk:
    """The copies that fill it, end to end."""

    nbytes: int = 0
    copies: list[Copy] = field(default_factory=list)
    _takes_small: bool = False
    """Whether the last copy is of small rows, and may take more of them."""

    def add(self, device: Device, source: torch.Tensor | Place, nbytes: int, *, is_row: bool) -> None:
        """Copy ``source`` next; ``is_row``: it is a row of bytes.  Small rows go into one copy."""
        is_small = is_row and nbytes < _COALESCE_BYTES
        if is_small and self._takes_small and self.copies[-1].device is device:
            last = self.copies[-1]
            last.sources.append(source)
            last.nbytes += nbytes
        else:
            self.copies.append(Copy(device, self.nbytes, nbytes, [source]))
        self._takes_small = is_small
        self.nbytes += nbytes

    def add_captured(self, device: Device, captured: int, nbytes: int) -> None:
        """Copy next what was gathered at ``captured``; what is adjacent there goes into one copy."""
        last = self.copies[-1] if self.copies else None
        is_adjacent = (
            last is not None
            and last.captured is not None
            and last.device is device
            and last.captured + last.nbytes == captured
        )
        if last is not None and is_adjacent:
            last.nbytes += nbytes
        else:
            self.copies.append(Copy(device, self.nbytes, nbytes, [], captured))
        self._takes_small = False
        self.nbytes += nbytes


@dataclass(slots=True)
class _Run:
    """Small tensors of an accelerator, of one dtype, that follow one another: one row, made in one call."""

    position: int
    dtype: torch.dtype
    nbytes: int
    indexes: list[int]

    def add(self, index: int, target: Target) -> None:
        self.indexes.append(index)
        self.nbytes += target.nbytes

    def takes(self, position: int, dtype: torch.dtype, nbytes: int) -> bool:
        return self.position == position - 1 and self.dtype is dtype and self.nbytes + nbytes <= _COALESCE_BYTES


@dataclass(slots=True)
class Capture:
    """What ``save`` copies at once from one device."""

    device: Device
    nbytes: int = 0
    _rows: list[torch.Tensor] = field(default_factory=list)
    """The bytes of every source; empty where they are made anew at each save."""
    # Rows that are made once of loose tensors; they serve as long as the same objects have the same memory.
    _positions: list[int] = field(default_factory=list)
    _indexes: list[int] = field(default_factory=list)
    _tensors: list[torch.Tensor] = field(default_factory=list)
    _addresses: list[int] = field(default_factory=list)
    _anew: list[tuple[int, int, Box | None]] = field(default_factory=list)
    """Their position, the index of the tensor in the walk, and the box of it."""
    _runs: list[_Run] = field(default_factory=list)
    _places: list[tuple[int, Place]] = field(default_factory=list)

    def add(self, target: Target, tensors: Sequence[torch.Tensor]) -> None:
        position = len(self._rows)
        self.nbytes += target.nbytes
        if not is_kept(target.source):
            self._add_place(position, target, tensors)
        elif target.loose is None:
            self._rows.append(as_bytes(target.source))
        elif not target.is_volatile and target.box is None and is_plain(target.source):
            self._rows.append(as_bytes(target.source))
            self._positions.append(position)
            self._indexes.append(target.loose)
            self._tensors.append(tensors[target.loose])
            self._addresses.append(target.source.data_ptr())
        else:
            self._rows.append(_NOTHING)
            self._anew.append((position, target.loose, target.box))

    def _add_place(self, position: int, target: Target, tensors: Sequence[torch.Tensor]) -> None:
        index = target.index if target.loose is None else target.loose
        if target.box is None and target.source is tensors[index]:
            is_small, last = target.nbytes < _COALESCE_BYTES, self._runs[-1] if self._runs else None
            if last is not None and is_small and last.takes(position, target.source.dtype, target.nbytes):
                last.add(index, target)
                return
            self._runs.append(_Run(position, target.source.dtype, target.nbytes, [index]))
        elif target.loose is None:
            self._places.append((position, Place.of(index, target.source)))
        else:
            self._anew.append((position, target.loose, target.box))
        self._rows.append(_NOTHING)

    def rows(self, tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> list[torch.Tensor]:
        """The bytes of every source, given the tensors of a walk that the plan fits, and where they are."""
        rows = list(self._rows)
        live = [tensors[index] for index in self._indexes]
        is_same = all(map(operator.is_, live, self._tensors))
        if not is_same or [addresses[index] for index in self._indexes] != self._addresses:
            for position, tensor in zip(self._positions, live, strict=True):
                rows[position] = as_row(tensor)
        for position, index, box in self._anew:
            rows[position] = as_row(tensors[index] if box is None else box.of(tensors[index]))
        with torch.no_grad():
            for run in self._runs:
                found = [tensors[index] for index in run.indexes]
                row = found[0] if len(found) == 1 else flattened(found)
                rows[run.position] = as_row(row)
        for position, place in self._places:
            rows[position] = as_row(place.tensor(tensors[place.index].untyped_storage()))
        return rows


_NOTHING = torch.empty(0, dtype=torch.uint8)


def captures_of(order: Sequence[Target], tensors: Sequence[torch.Tensor]) -> tuple[list[Capture], dict[int, int]]:
    """What each device gathers at ``save``, and at which offset in it each captured shard lies."""
    captures: dict[Device, Capture] = {}
    captured_at: dict[int, int] = {}
    for target in order:
        if target.is_captured and target.nbytes:
            capture = captures.get(target.device)
            if capture is None:
                capture = captures[target.device] = Capture(target.device)
            captured_at[target.number] = capture.nbytes
            capture.add(target, tensors)
    return list(captures.values()), captured_at


def chunks_of(order: Sequence[Target], captured_at: dict[int, int], data_bytes: int) -> list[Chunk]:
    """The targets lie end to end, in this order."""
    chunks = [Chunk() for _ in range(0, data_bytes, CHUNK_BYTES)]
    for target in order:
        source, device = target.source, target.device
        if not (target.is_captured or is_kept(source)):
            _add_places(chunks, target)
            continue
        row = as_bytes(source) if not target.is_captured and target.nbytes and is_plain(source) else None
        at, end = target.start, target.start + target.nbytes
        while at < end:
            begin = at - target.start
            chunk = chunks[at // CHUNK_BYTES]
            count = min(end - at, CHUNK_BYTES - at % CHUNK_BYTES)
            if target.is_captured:
                chunk.add_captured(device, captured_at[target.number] + begin, count)
            elif row is not None:
                chunk.add(device, row if count == target.nbytes else row[begin : begin + count], count, is_row=True)
            else:
                for rows in row_slices(source.detach(), begin // target.item_bytes, count // target.item_bytes):
                    chunk.add(device, rows, rows.nbytes, is_row=is_byte_row(rows))
            at += count
    return chunks


def _add_places(chunks: Sequence[Chunk], target: Target) -> None:
    """An accelerator's tensor, from chunk to chunk."""
    at, end = target.start, target.start + target.nbytes
    place = Place.of(target.index, target.source)
    while at < end:
        count = min(end - at, CHUNK_BYTES - at % CHUNK_BYTES)
        part = place if count == target.nbytes else place.part(at - target.start, count)
        chunks[at // CHUNK_BYTES].add(target.device, part, count, is_row=place.is_plain)
        at += count
