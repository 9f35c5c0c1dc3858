"""A segment: one rank's tensors as a safetensors file whose data starts at a multiple of 4096.

    8 bytes   length of the JSON that follows, little endian
    JSON      {"__metadata__": {...}, name: {"dtype", "shape", "data_offsets"}, ...}, padded with spaces
    data      the tensors end to end, without holes, row-major, little endian

Everything is known before the first byte of data is, so a segment is written as a stream.
Shards are laid out by falling item size, so each starts at a multiple of its own.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import msgspec

from stillframe.errors import FormatError, UnsupportedStateError
from stillframe.format import limits
from stillframe.model import BLOCK_BYTES
from stillframe.units import round_up

ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8,
    "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "F8_E8M0": 1, "F4": 1,
}  # fmt: skip
"""An item of ``F4`` is a byte with two numbers, as in torch; safetensors counts the numbers (:func:`file_shape`)."""


NUMPY_DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "C64": "<c8", "BOOL": "|b1",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1",
}  # fmt: skip
"""How numpy writes the dtypes that it has too."""


OF_TEAM = "~@"
"""Stands between the name of a tensor that some of the ranks hold and the digest of these; no path reads like this."""


class BoxOf(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """The tensor that a shard is a box of: its name in every seal, its shape, and where in it the box begins."""

    tensor: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]


class Shard(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One tensor, or one rank's box of it, in a segment; ``start`` and ``end`` count from the first data byte."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    device: str = "cpu"
    """Type of the device it was copied from, so that a restore can allocate it there again."""
    box_of: BoxOf | None = msgspec.field(default=None, name="whole")
    """``None``: it is all there is of this rank's tensor."""

    @property
    def nbytes(self) -> int:
        return self.end - self.start


def encode_header(shards: Sequence[Shard], about: dict[str, str]) -> bytes:
    """The first bytes of the file, up to the data."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **about}}
    for shard in shards:
        entries[shard.name] = {
            "dtype": shard.dtype,
            "shape": file_shape(shard.dtype, shard.shape),
            "data_offsets": (shard.start, shard.end),
        }
    text = msgspec.json.encode(entries)
    size = round_up(8 + len(text), BLOCK_BYTES)
    if size > limits.MAX_HEADER_BYTES:
        raise UnsupportedStateError(
            f"the state has {len(shards)} tensors, whose names and shapes take {size} bytes; "
            f"a safetensors header holds at most {limits.MAX_HEADER_BYTES}: shorten names or stack small tensors"
        )
    return struct.pack("<Q", size - 8) + text.ljust(size - 8)


def hide(shards: Sequence[Shard], path: str) -> list[Shard]:
    """The same for a header, where all that lies under this path of the state, end to end, is one tensor of bytes."""
    found: list[Shard] = []
    count = 0
    is_within = False
    for shard in shards:
        was_within, is_within = is_within, shard.name.startswith(f"{path}/")
        if not is_within:
            found.append(shard)
            continue
        if not was_within:
            count += 1
        start = found.pop().start if was_within else shard.start
        name = path if count == 1 else f"{path}~{count}"  # no path of a state reads like this
        found.append(Shard(name, "U8", (shard.end - start,), start, shard.end))
    return found


def file_shape(dtype: str, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape that safetensors writes."""
    if dtype != "F4":
        return tuple(shape)
    *rows, last = shape or (1,)
    return (*rows, 2 * last)


def check_shards(shards: Sequence[Shard], data_bytes: int) -> None:
    """The shards cover the data exactly, in order, each as long as its shape says; else :class:`FormatError`."""
    at = 0
    for shard in shards:
        item_bytes = ITEM_BYTES.get(shard.dtype)
        if item_bytes is None:
            raise FormatError(f"tensor {shard.name!r} has an unknown dtype {shard.dtype!r}")
        extent = math.prod([max(size, 1) for size in shard.shape[: limits.MAX_DIMENSIONS]]) * item_bytes
        if len(shard.shape) > limits.MAX_DIMENSIONS or min(shard.shape, default=0) < 0 or extent >= 1 << 63:
            raise FormatError(f"tensor {shard.name!r} has an impossible shape {shard.shape}")
        if shard.start != at or shard.start % item_bytes or shard.nbytes != math.prod(shard.shape) * item_bytes:
            raise FormatError(f"tensor {shard.name!r} does not lie where its shape puts it")
        if shard.box_of is not None:
            check_box(shard.box_of.shape, shard.box_of.offset, shard.shape, shard.name)
        at = shard.end
    if at != data_bytes:
        raise FormatError(f"the tensors take {at} bytes, the data has {data_bytes}")


def check_box(tensor: Sequence[int], offset: Sequence[int], shape: Sequence[int], name: str) -> None:
    """The box lies within a tensor of shape ``tensor``; else :class:`FormatError`."""
    is_inside = len(tensor) == len(offset) == len(shape) <= limits.MAX_DIMENSIONS
    if is_inside:
        for at, size, extent in zip(offset, shape, tensor, strict=True):  # a generator took twice as long
            if at < 0 or size < 0 or at + size > extent or extent >= 1 << 62:
                is_inside = False
    if not is_inside:
        raise FormatError(f"a box of tensor {name!r} at {tuple(offset)} of shape {tuple(shape)} lies outside of it")
