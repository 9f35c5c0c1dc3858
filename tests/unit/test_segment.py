"""Segments: safetensors files whose data starts at a block."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from stillframe.errors import FormatError, UnsupportedStateError
from stillframe.format import limits
from stillframe.format.segment import ITEM_BYTES, Shard, check_shards, encode_header, file_shape
from stillframe.model import BLOCK_BYTES
from stillframe.state.dtypes import DTYPE_NAMES

deserialize: Any = safetensors.deserialize


def laid_out(forms: list[tuple[str, tuple[int, ...]]]) -> list[Shard]:
    """Shards end to end, by falling item size."""
    shards: list[Shard] = []
    at = 0
    for number, (dtype, shape) in enumerate(sorted(forms, key=lambda form: -ITEM_BYTES[form[0]])):
        size = ITEM_BYTES[dtype]
        for length in shape:
            size *= length
        shards.append(Shard(f"t{number}/é", dtype, shape, at, at + size))
        at += size
    return shards


def data_bytes(shards: list[Shard]) -> int:
    return shards[-1].end if shards else 0


forms = st.lists(
    st.tuples(st.sampled_from(sorted(ITEM_BYTES)), st.lists(st.integers(0, 4), max_size=4).map(tuple)), max_size=12
)


def test_item_sizes_are_those_of_torch() -> None:
    missing = {name for name in ("F4", "F8_E8M0") if name not in DTYPE_NAMES.values()}  # in an older torch
    known = {name: count for name, count in ITEM_BYTES.items() if name not in missing}
    assert {name: dtype.itemsize for dtype, name in DTYPE_NAMES.items()} == known


@given(forms)
def test_the_safetensors_library_reads_what_the_header_says(made: list[tuple[str, tuple[int, ...]]]) -> None:
    shards = laid_out(made)
    data = bytes(index % 251 for index in range(data_bytes(shards)))
    read = dict(deserialize(encode_header(shards, {"stillframe": "1"}) + data))
    assert set(read) == {shard.name for shard in shards}
    for shard in shards:
        entry: Any = read[shard.name]
        assert (entry["dtype"], tuple(entry["shape"])) == (shard.dtype, file_shape(shard.dtype, shard.shape))
        assert bytes(entry["data"]) == data[shard.start : shard.end]


@given(forms)
def test_the_data_starts_at_a_block(made: list[tuple[str, tuple[int, ...]]]) -> None:
    header = encode_header(laid_out(made), {})
    assert len(header) % BLOCK_BYTES == 0
    assert struct.unpack("<Q", header[:8])[0] == len(header) - 8


def test_the_header_says_what_wrote_the_file() -> None:
    header = encode_header([], {"stillframe": "1"})
    assert json.loads(header[8:])["__metadata__"] == {"format": "pt", "stillframe": "1"}


@pytest.mark.parametrize("length", range(4096 - 90, 4096 + 10))
def test_the_padding_is_right_whatever_the_length_of_the_names(length: int) -> None:
    header = encode_header([Shard("n" * length, "U8", (1,), 0, 1)], {})
    assert len(header) % BLOCK_BYTES == 0
    ((name, _),) = deserialize(header + b"\x07")
    assert name == "n" * length


def test_a_header_beyond_the_limit_of_safetensors_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_HEADER_BYTES", 2 * BLOCK_BYTES)
    encode_header([Shard("n" * 5000, "U8", (1,), 0, 1)], {})
    with pytest.raises(UnsupportedStateError, match="at most"):
        encode_header([Shard("n" * 9000, "U8", (1,), 0, 1)], {})


@given(forms)
def test_shards_laid_end_to_end_are_accepted(made: list[tuple[str, tuple[int, ...]]]) -> None:
    shards = laid_out(made)
    check_shards(shards, data_bytes(shards))


@pytest.mark.parametrize(
    ("shards", "size"),
    [
        ([], 1),
        ([Shard("a", "U8", (4,), 0, 4)], 5),
        ([Shard("a", "U8", (4,), 0, 4)], 3),
        ([Shard("a", "U8", (4,), 1, 5)], 5),
        ([Shard("a", "U8", (5,), 0, 4)], 4),
        ([Shard("a", "U8", (2, 2), 4, 0)], 0),
        ([Shard("a", "U8", (4,), 0, 4), Shard("b", "U8", (4,), 0, 4)], 4),
        ([Shard("a", "U8", (4,), 0, 4), Shard("b", "U8", (4,), 5, 9)], 9),
        ([Shard("a", "U8", (1,), 0, 1), Shard("b", "F32", (1,), 1, 5)], 5),
        ([Shard("a", "F128", (1,), 0, 16)], 16),
        ([Shard("a", "U8", (-1, -4), 0, 4)], 4),
        ([Shard("a", "U8", (1,) * (limits.MAX_DIMENSIONS + 1), 0, 1)], 1),
    ],
    ids=[
        "data of nobody", "data left over", "data cut short", "hole before the first", "shape too large",
        "negative length", "overlap", "hole between", "not at a multiple of its item", "unknown dtype", "negative size",
        "too many dimensions",
    ],
)  # fmt: skip
def test_shards_that_do_not_cover_the_data_in_order_are_refused(shards: list[Shard], size: int) -> None:
    with pytest.raises(FormatError):
        check_shards(shards, size)
