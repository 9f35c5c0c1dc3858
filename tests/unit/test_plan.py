"""The plan: where everything goes, which copies put it there, and when it may be used again."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors
import torch

from stillframe.errors import UnsupportedStateError
from stillframe.format.segment import ITEM_BYTES, check_shards
from stillframe.model import CHUNK_BYTES
from stillframe.save.copies import Chunk
from stillframe.save.device import DeviceTable
from stillframe.save.places import Sources
from stillframe.save.plan import Plan, make_plan
from stillframe.save.targets import SMALL_BYTES
from stillframe.state.walk import Walk
from stillframe.units import MIB
from tests.property.exact import tensor_bytes

deserialize: Any = safetensors.deserialize


class Fresh:
    """An object whose state dict holds new tensors every time."""

    def __init__(self, *shapes: tuple[int, ...], is_tied: bool = False) -> None:
        self.shapes = shapes
        self.is_tied = is_tied

    def state_dict(self) -> dict[str, Any]:
        tensors = [torch.ones(shape) for shape in self.shapes]
        return {"tensors": [tensors[0]] * len(tensors) if self.is_tied else tensors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def plan_of(state: Any) -> Plan:
    return make_plan(Walk(state), DeviceTable())


def staged(plan: Plan, state: Any) -> bytes:
    """What the stager would put into the arena, chunk after chunk."""
    walk = Walk(state)
    survey = plan.survey(walk)
    captured = plan.capture(walk, survey)
    found = Sources(walk.tensors, plan.slots, survey.storages)
    data = bytearray()
    for chunk in plan.chunks:
        memory = torch.full((chunk.nbytes,), 0xEE, dtype=torch.uint8)
        for copy in chunk.copies:
            sources = found.rows(copy.sources) if copy.captured is None else []
            if copy.captured is not None:
                sources = captured[copy.device].rows(copy.captured, copy.nbytes)
            copy.device.copy(sources, memory[copy.offset : copy.offset + copy.nbytes])
        data += memory.numpy().tobytes()
    return bytes(data)


def by_name(plan: Plan, data: bytes) -> dict[str, bytes]:
    return {shard.name: data[shard.start : shard.end] for shard in plan.shards}


def mixed_state() -> dict[str, Any]:
    model = torch.nn.BatchNorm1d(50)
    return {
        "bytes": torch.arange(100, dtype=torch.uint8),
        "model": model,
        "half": torch.randn(7, 9).half(),
        "double": torch.randn(30, 5, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(5, dtype=torch.int64),
        "transposed": torch.randn(20, 30).t(),
        "array": np.arange(40, dtype=np.uint16),
        "fresh": Fresh((3, 3), (100,)),
        "strided": torch.arange(1000, dtype=torch.int16)[::3],
    }


# --- layout --------------------------------------------------------------------------------


def test_shards_lie_by_falling_item_size_each_at_a_multiple_of_its_own() -> None:
    plan = plan_of(mixed_state())
    sizes = [ITEM_BYTES[shard.dtype] for shard in plan.shards]
    assert sizes == sorted(sizes, reverse=True)
    assert all(shard.start % size == 0 for shard, size in zip(plan.shards, sizes, strict=True))
    check_shards(plan.shards, plan.data_bytes)


def test_within_one_item_size_the_captured_ones_lie_first() -> None:
    plan = plan_of({"lazy": torch.ones(100), "small": torch.ones(1), "fresh": Fresh((50,)), "lazy2": torch.ones(100)})
    assert [shard.name for shard in plan.shards] == ["small", "fresh/tensors/0", "lazy", "lazy2"]


def test_small_tensors_are_captured_and_larger_ones_are_not() -> None:
    at_limit = torch.zeros(SMALL_BYTES, dtype=torch.uint8)
    above = torch.zeros(SMALL_BYTES + 1, dtype=torch.uint8)
    plan = plan_of({"at": at_limit, "above": above})
    assert plan.captured_bytes == SMALL_BYTES
    assert plan.lazy == ((SMALL_BYTES, 2 * SMALL_BYTES + 1),)


def test_lazy_ranges_are_exactly_the_shards_not_captured() -> None:
    plan = plan_of(mixed_state())
    lazy = {"bytes", "half", "double", "transposed", "strided", "model/weight", "model/bias"}
    covered = bytearray(plan.data_bytes)
    for start, end in plan.lazy:
        covered[start:end] = b"\x01" * (end - start)
    for shard in plan.shards:
        assert set(covered[shard.start : shard.end]) <= {int(shard.name in lazy)}, shard.name
    assert plan.captured_bytes == covered.count(0)


def test_the_header_is_that_of_a_safetensors_file_with_these_tensors() -> None:
    state = mixed_state()
    plan = plan_of(state)
    read: dict[str, Any] = dict(deserialize(plan.header + staged(plan, state)))
    assert bytes(read["double"]["data"]) == tensor_bytes(state["double"])
    assert bytes(read["transposed"]["data"]) == tensor_bytes(state["transposed"])
    assert read["transposed"]["shape"] == [30, 20]


def test_keys_that_read_alike_get_names_of_their_own() -> None:
    plan = plan_of({0: torch.ones(1), "0": torch.ones(2), "a/b": torch.ones(3), "a": {"b": torch.ones(4)}})
    assert sorted(shard.name for shard in plan.shards) == ["0", "0~2", "a/b", "a~1b"]


@pytest.mark.parametrize("key", ["__metadata__", "", "~", "0~2", "a\x00b", "🎉"])
def test_any_key_gives_a_name_that_safetensors_takes(key: str) -> None:
    plan = plan_of({key: torch.ones(3), "0": torch.ones(3), 0: torch.ones(3)})
    assert len(deserialize(plan.header + bytes(plan.data_bytes))) == 3


def test_a_bare_tensor_is_a_state() -> None:
    assert len(plan_of(torch.ones(3)).shards) == 1


def test_a_state_without_tensors_has_no_chunks() -> None:
    plan = plan_of({"a": 1, "b": torch.zeros(0)})
    assert (plan.data_bytes, plan.chunks, plan.lazy) == (0, [], ())


def test_a_tensor_that_cannot_be_stored_is_named() -> None:
    with pytest.raises(UnsupportedStateError, match=r"state\['a/1'\].*complex128"):
        plan_of({"a": [1, torch.zeros(3, dtype=torch.complex128)]})


# --- chunks and copies -----------------------------------------------------------------------


def covers(chunk: Chunk) -> bool:
    at = 0
    for copy in chunk.copies:
        if copy.offset != at or (
            copy.captured is None and sum(source.nbytes for source in copy.sources) != copy.nbytes
        ):
            return False
        at += copy.nbytes
    return at == chunk.nbytes


def large_state() -> dict[str, Any]:
    """Tensors that straddle chunk boundaries, plain and not, with small ones between."""
    return {
        "plain": torch.randint(0, 255, (2 * CHUNK_BYTES + 12_345,), dtype=torch.uint8),
        "transposed": torch.randn(1500, 3001).t(),
        "fresh": Fresh((7,), (CHUNK_BYTES // 8 + 3,)),
        "small": [torch.full((size,), size, dtype=torch.int16) for size in range(1, 200)],
        "conjugate": torch.randn(2000, 1001, dtype=torch.complex64).conj(),
    }


@pytest.mark.parametrize("make", [mixed_state, large_state])
def test_the_copies_of_the_chunks_cover_the_data_exactly_once(make: Any) -> None:
    plan = plan_of(make())
    assert all(map(covers, plan.chunks))
    assert [chunk.nbytes for chunk in plan.chunks[:-1]] == [CHUNK_BYTES] * (len(plan.chunks) - 1)
    assert sum(chunk.nbytes for chunk in plan.chunks) == plan.data_bytes


def test_what_is_staged_is_the_content_of_every_tensor() -> None:
    state = large_state()
    plan = plan_of(state)
    found = by_name(plan, staged(plan, state))
    for name in ("plain", "transposed", "conjugate"):
        assert found[name] == tensor_bytes(state[name]), name
    for index, tensor in enumerate(state["small"]):
        assert found[f"small/{index}"] == tensor_bytes(tensor)
    assert found["fresh/tensors/1"] == tensor_bytes(torch.ones(CHUNK_BYTES // 8 + 3))


def test_small_neighbours_are_copied_in_one_call() -> None:
    plan = plan_of([torch.zeros(1000) for _ in range(50)])
    (chunk,) = plan.chunks
    (copy,) = chunk.copies
    assert len(copy.sources) == 50


def test_large_pieces_are_copied_by_themselves() -> None:
    small, large = torch.zeros(1000, dtype=torch.uint8), torch.zeros(MIB, dtype=torch.uint8)
    (chunk,) = plan_of([small, small.clone(), large, large.clone(), small.clone(), small.clone()]).chunks
    assert [len(copy.sources) for copy in chunk.copies] == [2, 1, 1, 2]


def test_adjacent_captured_tensors_are_one_copy() -> None:
    (chunk,) = plan_of([torch.tensor(float(number)) for number in range(100)]).chunks
    (copy,) = chunk.copies
    assert (copy.captured, copy.nbytes) == (0, 400)


def test_no_view_of_a_strided_source_is_larger_than_its_part_of_the_chunk() -> None:
    plan = plan_of(large_state())
    assert all(
        source.nbytes <= CHUNK_BYTES for chunk in plan.chunks for copy in chunk.copies for source in copy.sources
    )


# --- shared memory -------------------------------------------------------------------------


def nodes(plan: Plan) -> Any:
    return msgspec.json.decode(plan.tree_json)["items"]


def test_tied_tensors_are_written_once() -> None:
    weight = torch.randn(100)
    plan = plan_of({"a": weight, "b": weight, "c": weight.detach(), "d": weight.view(100)})
    assert plan.data_bytes == 400
    assert all(node == {"kind": "tensor", "shard": 0, "view": None} for node in nodes(plan))


def test_a_part_of_a_tensor_is_a_view_of_the_whole() -> None:
    whole = torch.randn(10, 10)
    plan = plan_of({"part": whole[2:5], "whole": whole})
    assert [shard.name for shard in plan.shards] == ["whole"]
    assert nodes(plan)[0]["view"] == {"dtype": "F32", "shape": [3, 10], "stride": [10, 1], "offset": 20}


def test_overlapping_parts_are_views_of_the_memory_they_span() -> None:
    memory = torch.randn(100)
    plan = plan_of({"left": memory[10:60], "right": memory[40:90]})
    assert [(shard.name, shard.shape) for shard in plan.shards] == [("left~memory", (80,))]


def test_disjoint_parts_of_one_storage_are_written_by_themselves() -> None:
    memory = torch.randn(100)
    plan = plan_of({"left": memory[:50], "right": memory[50:]})
    assert [shard.shape for shard in plan.shards] == [(50,), (50,)]


def test_a_small_part_of_a_large_storage_costs_only_its_own_bytes() -> None:
    memory = torch.randn(100_000)
    assert plan_of({"a": memory[:10], "b": memory[-10:]}).data_bytes == 80


def test_volatile_tensors_that_are_one_are_written_once() -> None:
    assert plan_of(Fresh((50,), (50,), is_tied=True)).data_bytes == 200


@pytest.mark.parametrize("bend", [torch.Tensor.conj, lambda tensor: torch._neg_view(tensor)], ids=["conj", "neg"])
def test_a_volatile_tensor_and_its_lazy_opposite_are_not_one(bend: Any) -> None:
    class Both(Fresh):
        def state_dict(self) -> dict[str, Any]:
            plain = torch.complex(torch.arange(20.0), torch.ones(20))
            return {"plain": plain, "bent": bend(plain)}

    state = Both()
    plan = plan_of(state)
    found = by_name(plan, staged(plan, state))
    expected = state.state_dict()
    tree = msgspec.json.decode(plan.tree_json)["item"]["items"]
    for node, name in zip(tree, ("plain", "bent"), strict=True):
        assert found[plan.shards[node["shard"]].name] == tensor_bytes(expected[name]), name
