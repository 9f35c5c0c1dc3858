"""Strides, shared memory and lazy bits: values come back, and what was one memory is one again."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stillframe.state.memory import row_slices
from tests.property.exact import exact, tensor_bytes
from tests.property.states import RoundTrip, examples, filled, round_trips

DTYPES = [torch.float32, torch.int64, torch.uint8, torch.bfloat16, torch.complex64, torch.int16, torch.float8_e4m3fn]


@pytest.fixture(scope="module")
def trip(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoundTrip]:
    with round_trips(tmp_path_factory.mktemp("layouts")) as made:
        yield made


@st.composite
def storages(draw: st.DrawFn) -> torch.Tensor:
    """A row of bytes: a multiple of eight, or any number."""
    count = draw(st.integers(1, 40).map(lambda words: 8 * words) | st.integers(1, 300))
    return filled(torch.uint8, count, draw(st.binary(min_size=1, max_size=13)))


@st.composite
def views(draw: st.DrawFn, storage: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A window of the storage: strided, transposed, expanded, narrowed, overlapping itself."""
    count = storage.numel() // dtype.itemsize
    row = storage[: count * dtype.itemsize].view(dtype)
    offset = draw(st.integers(0, count - 1))
    room = count - 1 - offset
    shape: list[int] = []
    stride: list[int] = []
    for _ in range(draw(st.integers(0, 3))):
        step = draw(st.integers(0, max(min(room, 9), 0)))
        size = draw(st.integers(1, 1 + (room // step if step else 3)).filter(lambda size: size <= 40))
        room -= (size - 1) * step
        shape.append(size)
        stride.append(step)
    return row.as_strided(shape, stride, row.storage_offset() + offset)


@st.composite
def sharing(draw: st.DrawFn, dtypes: list[torch.dtype] = DTYPES, least: int = 1) -> list[torch.Tensor]:
    storage = draw(storages())
    fitting = [dtype for dtype in dtypes if dtype.itemsize <= storage.numel()]
    if not fitting:
        return [storage]
    return [draw(views(storage, draw(st.sampled_from(fitting)))) for _ in range(draw(st.integers(least, 4)))]


def addresses(tensor: torch.Tensor) -> list[int]:
    """Where each byte of the content lies, in row-major order."""
    at = torch.tensor(tensor.data_ptr())
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        at = at.unsqueeze(-1) + torch.arange(size) * (stride * tensor.element_size())
    return (at.reshape(-1, 1) + torch.arange(tensor.element_size())).reshape(-1).tolist()


def shared(left: torch.Tensor, right: torch.Tensor) -> set[tuple[int, int]]:
    """Which byte of one is which byte of the other."""
    where: dict[int, list[int]] = {}
    for index, address in enumerate(addresses(left)):
        where.setdefault(address, []).append(index)
    return {(index, other) for other, address in enumerate(addresses(right)) for index in where.get(address, ())}


def assert_shares_again(saved: list[torch.Tensor], loaded: list[torch.Tensor]) -> None:
    for one, other in combinations(range(len(saved)), 2):
        assert shared(saved[one], saved[other]) <= shared(loaded[one], loaded[other]), (one, other)


@examples(120)
@given(made=sharing())
def test_views_of_one_storage_come_back_with_their_values(trip: RoundTrip, made: list[torch.Tensor]) -> None:
    assert exact(trip.load(made)) == exact(made)


@examples(80)
@given(data=st.data())
def test_views_beside_the_whole_share_its_memory_again(trip: RoundTrip, data: st.DataObject) -> None:
    made = data.draw(sharing())
    storage = made[0].untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8).set_(storage)
    made.insert(data.draw(st.integers(0, len(made))), whole)
    loaded = trip.load(made)
    assert exact(loaded) == exact(made)
    assert_shares_again(made, loaded)


@examples(60)
@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_dense_overlapping_views_of_one_dtype_share_memory_again(
    trip: RoundTrip, data: st.DataObject, dtype: torch.dtype
) -> None:
    row = filled(dtype, 60, data.draw(st.binary(min_size=1, max_size=13)))
    made = []
    for _ in range(data.draw(st.integers(2, 4))):
        start = data.draw(st.integers(0, 29))
        rows = row[start : start + 30].reshape(5, 6)
        made.append(
            data.draw(st.sampled_from([rows, rows.t(), rows.reshape(-1), rows.reshape(2, 3, 5).transpose(0, 2)]))
        )
    loaded = trip.load({"made": made})["made"]
    assert exact(loaded) == exact(made)
    assert_shares_again(made, loaded)


@examples(30)
@given(made=sharing(least=2))
def test_tied_tensors_are_one_again(trip: RoundTrip, made: list[torch.Tensor]) -> None:
    loaded = trip.load({"once": made, "again": [tensor.detach() for tensor in made]})
    assert exact(loaded["again"]) == exact(made)
    for one, other in zip(loaded["once"], loaded["again"], strict=True):
        assert one.data_ptr() == other.data_ptr()


def test_writing_through_one_is_seen_in_the_other(trip: RoundTrip) -> None:
    weight = torch.randn(30, 40)
    state = {"embedding": weight, "head": weight.t(), "part": weight[3:7], "row": weight[5]}
    loaded = trip.load(state)
    loaded["head"][2, 5] = 42.0
    assert loaded["embedding"][5, 2] == loaded["part"][2, 2] == loaded["row"][2] == 42.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8], ids=str)
def test_one_item_comes_back_whatever_its_stride(trip: RoundTrip, dtype: torch.dtype) -> None:
    table = torch.arange(1, 101).reshape(10, 10).to(dtype)
    state = [table[:1, 3], table[4:5, 4:5], table[7, 7].expand(1), table[:1, ::3][:, :1]]
    assert exact(trip.load(state)) == exact(state)
    assert exact(trip.load(Holder(state))["tensors"]) == exact(state)


def test_a_wider_view_of_a_length_that_is_no_multiple_of_it_comes_back(trip: RoundTrip) -> None:
    floats = torch.arange(7.0)
    state = {"floats": floats, "doubles": floats[:6].view(torch.float64), "bytes": floats.view(torch.uint8)[3:11]}
    loaded = trip.load(state)
    assert exact(loaded) == exact(state)
    assert_shares_again(list(state.values()), list(loaded.values()))


def test_tensors_that_shared_nothing_do_not_share_now(trip: RoundTrip) -> None:
    loaded = trip.load([torch.zeros(50), torch.zeros(50), torch.zeros(50)[10:]])
    loaded[0].fill_(1.0)
    assert not loaded[1].any()
    assert not loaded[2].any()


class Holder:
    """Its tensors are captured by ``save`` itself."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors

    def state_dict(self) -> dict[str, Any]:
        return {"tensors": self.tensors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensors = state["tensors"]


@examples(60)
@given(made=sharing())
def test_captured_views_come_back_with_their_values(trip: RoundTrip, made: list[torch.Tensor]) -> None:
    assert exact(trip.load(Holder(made))["tensors"]) == exact(made)


@st.composite
def bent(draw: st.DrawFn) -> list[torch.Tensor]:
    """A complex tensor with its conjugate, its parts, and their lazy negatives, in any layout."""
    count = draw(st.integers(1, 12))
    numbers = torch.arange(1, 2 * count * count + 1).float() * draw(st.sampled_from([1.0, -0.5, 1e30]))
    plain = torch.view_as_complex(numbers.reshape(count, count, 2))
    plain = draw(st.sampled_from([plain, plain.t(), plain[::2], plain[0]]))
    forms = [plain, plain.conj(), plain.real, plain.imag, plain.conj().imag, torch._neg_view(plain), plain.mH.conj()
             if plain.dim() == 2 else plain]  # fmt: skip
    return draw(st.lists(st.sampled_from(forms), min_size=1, max_size=6))


@examples(50)
@given(made=bent())
def test_conjugate_and_negative_views_come_back_with_their_values(trip: RoundTrip, made: list[torch.Tensor]) -> None:
    assert exact(trip.load(made)) == exact(made)


@examples(50)
@given(made=bent())
def test_captured_conjugate_and_negative_views_come_back_too(trip: RoundTrip, made: list[torch.Tensor]) -> None:
    assert exact(trip.load(Holder(made))["tensors"]) == exact(made)


# --- the geometry of cutting a tensor at chunk boundaries ----------------------------------


@st.composite
def cuts(draw: st.DrawFn) -> tuple[torch.Tensor, int, int]:
    tensor = draw(sharing())[0]
    start = draw(st.integers(0, tensor.numel()))
    return tensor, start, draw(st.integers(0, tensor.numel() - start))


@examples(300)
@given(cut=cuts())
def test_pieces_end_to_end_are_the_flattened_slice(cut: tuple[torch.Tensor, int, int]) -> None:
    tensor, start, count = cut
    item = tensor.element_size()
    joined = b"".join(map(tensor_bytes, row_slices(tensor, start, count)))
    assert joined == tensor_bytes(tensor)[start * item : (start + count) * item]


@examples(100)
@given(cut=cuts())
def test_pieces_are_views_and_few(cut: tuple[torch.Tensor, int, int]) -> None:
    tensor, start, count = cut
    made = list(row_slices(tensor, start, count))
    assert all(piece.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for piece in made)
    assert len(made) <= max(2 * tensor.dim(), 1)


@examples(60)
@given(data=st.data())
def test_cutting_anywhere_changes_nothing(data: st.DataObject) -> None:
    tensor, _, _ = data.draw(cuts())
    marks = sorted(data.draw(st.lists(st.integers(0, tensor.numel()), max_size=5)))
    joined = b"".join(
        tensor_bytes(piece)
        for start, end in zip([0, *marks], [*marks, tensor.numel()], strict=True)
        for piece in row_slices(tensor, start, end - start)
    )
    assert joined == tensor_bytes(tensor)
