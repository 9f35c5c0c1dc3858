"""Every dtype that safetensors names: stored exactly, restored exactly, and read by the safetensors library itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import stillframe
from stillframe import Checkpointer, UnsupportedStateError
from stillframe.restoring.statistics import difference, statistics
from stillframe.spi import BoxReader, TensorBox
from stillframe.state.dtypes import DTYPE_NAMES, DTYPES
from tests import layout

LOW = [torch.float8_e8m0fnu, torch.float4_e2m1fn_x2]


def made(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Every pattern of bits may be in it, but those that a bool cannot have."""
    torch.manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, high, (count,), dtype=torch.uint8).view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def state(dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor]:
    whole = made(dtype, 12, 10, seed=seed)
    return {
        "matrix": made(dtype, 33, 6, seed=seed + 1), "one": made(dtype, seed=seed + 2), "none": made(dtype, 3, 0),
        "rows": made(dtype, 5, seed=seed + 3), "turned": made(dtype, 8, 9, seed=seed + 4).t(), "whole": whole,
        "part": whole[2:6, 1:7], "large": made(dtype, 300, 200, seed=seed + 5),
    }  # fmt: skip


def test_the_dtypes_of_low_precision_have_safetensors_names() -> None:
    assert [DTYPE_NAMES[each] for each in LOW] == ["F8_E8M0", "F4"]
    assert len(DTYPES) == 20


def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path) -> None:
    saved, live = ({name: state(dtype, seed) for dtype, name in DTYPE_NAMES.items()} for seed in (0, 50))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, saved)
    stillframe.restore(tmp_path, live)
    for found in (live, stillframe.load(tmp_path)):
        for dtype, tensors in saved.items():
            for name, tensor in tensors.items():
                other = found[dtype][name]
                assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape), (dtype, name)
                assert torch.equal(bits(other), bits(tensor)), (dtype, name)


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_the_safetensors_library_reads_the_segment(tmp_path: Path, dtype: torch.dtype) -> None:
    saved = state(dtype)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, saved)
    with safe_open(layout.segment(tmp_path, 1), "pt") as file:
        for name in saved.keys() - {"part"}:  # which lies in another
            found = file.get_tensor(name)
            assert found.dtype == dtype
            # Two 4-bit numbers share a byte, and safetensors knows no shape of half a dimension.
            assert found.shape == ((1,) if name == "one" and dtype == LOW[1] else saved[name].shape)
            assert torch.equal(bits(found), bits(saved[name])), name
        factor = 2 if dtype == LOW[1] else 1
        assert file.get_slice("matrix").get_shape() == [33, 6 * factor]
        assert file.get_slice("none").get_shape() == [3, 0]


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_boxes_of_it_are_taken_and_put_together(tmp_path: Path, dtype: torch.dtype) -> None:
    whole = made(dtype, 6, 10)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"w": TensorBox(whole[2:5, 3:9], whole.shape, (2, 3)), "plain": whole})
    with BoxReader(tmp_path) as reader:
        into, other = made(dtype, 2, 4, seed=1), made(dtype, 4, 5, seed=2)
        reader.want(reader.outline["w"], (3, 4), into)
        reader.want(reader.outline["plain"], (1, 2), other)
        reader.read()
    assert torch.equal(bits(into), bits(whole[3:5, 4:8]))
    assert torch.equal(bits(other), bits(whole[1:5, 2:7]))


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_a_torch_without_the_dtype_says_so_and_calls_nothing_damaged(
    tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"w": torch.zeros(3)})
        checkpointer.save(2, {"w": torch.ones(3), "new": made(dtype, 4, 4)})
    monkeypatch.delitem(DTYPES, DTYPE_NAMES[dtype])
    live = {"w": torch.zeros(3), "new": torch.zeros(4, 4)}
    for read in (lambda: stillframe.load(tmp_path), lambda: stillframe.restore(tmp_path, live)):
        with pytest.raises(
            UnsupportedStateError, match=f"stored as {DTYPE_NAMES[dtype]}, a dtype that torch .* newer torch"
        ):
            read()
    assert not live["w"].any()
    assert stillframe.Catalog(tmp_path).steps() == [1, 2]
    assert torch.equal(stillframe.load(tmp_path, only="w")["w"], torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.complex128, torch.bits8, torch.bits16], ids=str)
def test_what_safetensors_cannot_hold_is_refused_by_name(tmp_path: Path, dtype: torch.dtype) -> None:
    with (
        Checkpointer(tmp_path) as checkpointer,
        pytest.raises(UnsupportedStateError, match=f"dtype {dtype}, which safet"),
    ):
        checkpointer.save(1, {"w": torch.empty(4, dtype=dtype)})


def test_statistics_of_4_bit_numbers() -> None:
    every: Any = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8).view(LOW[1])
    found = statistics(every)
    assert (found.min, found.max, found.mean, found.nan, found.inf) == (-6.0, 6.0, 0.0, 0, 0)
    other = every.view(torch.uint8).clone()
    other[0] = 0x20  # 0.5 becomes 1
    assert difference(every, other.view(LOW[1])).max_abs == 0.5
