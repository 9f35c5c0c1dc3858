"""Any mesh of ranks to any other: the same bytes as by reading every seal, and few seals are read.

Each rank is played in turn, in a process group without communication, by the code that plans and places on real ones.
"""

from __future__ import annotations

import dataclasses
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from stillframe.checkpoint import opened
from stillframe.checkpoint.catalog import Catalog
from stillframe.checkpoint.contents import items_of
from stillframe.checkpoint.stored import Stored
from stillframe.errors import FormatError
from stillframe.format import layout, names
from stillframe.format.digest import digest
from stillframe.format.records import (
    SealBrief,
    SealDraft,
    Segment,
    decode_manifest,
    encode_manifest,
    encode_seal,
    make_manifest,
)
from stillframe.model import CHUNK_BYTES, SaveId
from stillframe.restoring.place import Placement as Placing
from stillframe.save.device import DeviceTable
from stillframe.save.plan import Plan, make_plan
from stillframe.state import spread
from stillframe.state.spread import Seat
from stillframe.state.torch_internals import local_of
from stillframe.state.walk import Walk
from tests.property.states import examples
from tests.unit.saved import begun

SAVE = SaveId(7)


@dataclass(frozen=True)
class Spreading:
    """A mesh (its shape, and its ranks in row-major order), and how a tensor lies on it."""

    mesh: tuple[int, ...]
    ranks: tuple[int, ...]
    placements: tuple[Placement, ...]

    def of(self, full: torch.Tensor) -> torch.Tensor:
        """Under the process group of a rank."""
        ranks = torch.tensor(self.ranks).reshape(self.mesh)
        # torch remembers what it has worked out for a mesh, and takes two for the same if their names are.
        called = tuple(f"{dim} of rank {dist.get_rank()}, {dist.get_world_size()}" for dim in range(len(self.mesh)))
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=called, _init_backend=False)
        made: torch.Tensor = distribute_tensor(full, mesh, self.placements, src_data_rank=None)
        return made


@contextmanager
def playing(rank: int, world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def content(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def plan_of(rank: int, world_size: int, state: dict[str, Any]) -> Plan:
    return make_plan(Walk(state), DeviceTable(), Seat(rank, world_size, knows_ranks=True, writes_once=True))


def save(root: Path, world_size: int, full: dict[str, torch.Tensor], spreads: dict[str, Spreading]) -> None:
    """What so many ranks would leave of these tensors, each of which is spread in its own way."""
    assert begun(root) == SAVE.epoch
    directory = root / names.step_dir(SAVE)
    directory.mkdir()
    seals: list[tuple[SealBrief, str]] = []
    for rank in range(world_size):
        with playing(rank, world_size):
            state = {name: spreads[name].of(tensor) for name, tensor in full.items()}
            own = {f"of {rank % 2}": rank}  # two structures
            plan = plan_of(rank, world_size, {"model": state, "own": own, "seed": rank})
        data = b""
        for shard in plan.shards:
            assert shard.box_of is not None
            box = full[shard.name.split("/")[1].split("~")[0]]
            for dim, (start, size) in enumerate(zip(shard.box_of.offset, shard.shape, strict=True)):
                box = box.narrow(dim, start, size)
            data += box.contiguous().numpy().tobytes()
        draft = SealDraft(
            rank, world_size, 0.0, plan.shards_json, plan.tree_json, msgspec.Raw(msgspec.json.encode([rank, rank])),
            plan.teams, layouts=plan.layouts, structure=plan.structure,
        )  # fmt: skip
        chunks = [digest(data)] if data else []
        segment = Segment(
            len(plan.header) + len(data), len(plan.header), digest(plan.header), CHUNK_BYTES, chunks
        )  # fmt: skip
        (directory / names.segment(rank)).write_bytes(plan.header + data)
        seal, brief, known_by = encode_seal(draft, SAVE, None, segment)
        (directory / names.seal(rank)).write_bytes(seal)
        seals.append((brief, known_by))
    (directory / names.MANIFEST).write_bytes(encode_manifest(make_manifest(seals, {})))


@contextmanager
def counting() -> Iterator[set[int]]:
    """The ranks whose seals are read."""
    found: set[int] = set()
    real = opened._read_seal

    def read(store: Any, manifest: Any, entry: Any) -> Any:
        found.add(entry.rank)
        return real(store, manifest, entry)

    with mock.patch.object(opened, "_read_seal", read):
        yield found


def restored(
    root: Path, rank: int, world_size: int, full: dict[str, torch.Tensor], spreads: dict[str, Spreading]
) -> tuple[dict[str, torch.Tensor], set[int], Any]:
    """What one rank of another number of ranks gets of each tensor, whose seals it has read, and its seed."""
    with playing(rank, world_size), Catalog(root).open_save(SAVE) as checkpoint, counting() as read:
        stored = Stored(checkpoint, rank, is_merged=True)
        placing = Placing(stored)
        live = {name: spreads[name].of(torch.zeros_like(tensor)) for name, tensor in full.items()}
        top = dict(items_of(stored.tree))
        assert [key for key, _ in items_of(top["own"])] == [f"of {stored.rank % 2}", f"of {1 - stored.rank % 2}"]
        for name, leaf in items_of(top["model"]):
            placing.add(leaf, live[name], name)
        placing.fill()
        return {name: local_of(each) for name, each in live.items()}, read, stored.value(top["seed"])


def expected(rank: int, world_size: int, full: dict[str, torch.Tensor], spreads: dict[str, Spreading]) -> Any:
    with playing(rank, world_size):
        return {name: local_of(spreads[name].of(tensor)) for name, tensor in full.items()}


@st.composite
def spreadings(draw: st.DrawFn, world_size: int, dims: int) -> Spreading:
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    outer = draw(st.sampled_from(sizes))
    mesh = draw(st.sampled_from([(world_size,), (outer, world_size // outer)]))
    ranks = draw(st.just(tuple(range(world_size))) | st.permutations(range(world_size)).map(tuple))
    if world_size > 2 and draw(st.booleans()):  # some of the ranks hold nothing of it
        mesh, ranks = (world_size // 2,), ranks[: world_size // 2]
    each = st.integers(0, dims - 1)
    kinds = st.just(Replicate()) | each.map(Shard) | each.map(lambda dim: _StridedShard(dim, split_factor=2))
    return Spreading(mesh, ranks, tuple(draw(kinds) for _ in mesh))


@examples(25)
@given(data=st.data(), before=st.integers(2, 12), after=st.integers(1, 8), seed=st.integers(0, 99))
def test_any_mesh_to_any_other(data: st.DataObject, before: int, after: int, seed: int) -> None:
    shapes = data.draw(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=2), min_size=1, max_size=3))
    full = {f"w{at}": content(tuple(shape), seed + at) for at, shape in enumerate(shapes)}
    saved = {name: data.draw(spreadings(before, tensor.dim())) for name, tensor in full.items()}
    wanted = {name: data.draw(spreadings(after, tensor.dim())) for name, tensor in full.items()}
    with tempfile.TemporaryDirectory() as home:
        root = Path(home)
        save(root, before, full, saved)
        for rank in range(after):
            found, _, seed_of = restored(root, rank, after, full, wanted)
            with mock.patch.object(Stored, "_layout", return_value=None):
                by_all, _, _ = restored(root, rank, after, full, wanted)
            own = expected(rank, after, full, wanted)
            for name in full:
                assert torch.equal(found[name], own[name]), (rank, name)
                assert torch.equal(by_all[name], own[name]), (rank, name)
            assert seed_of == rank % before


# --- how many seals --------------------------------------------------------------------------

ROWS = 4096
LAYERS = {f"w{number}": (ROWS, 2) for number in range(4)}


def rows_of(count: int) -> Spreading:
    return Spreading((count,), tuple(range(count)), (Shard(0),))


def seals_read(root: Path, ranks: Sequence[int], world_size: int, wanted: Spreading) -> int:
    """The most that one of these ranks reads."""
    full = {name: content(shape, 3) for name, shape in LAYERS.items()}
    most = 0
    for rank in ranks:
        found, read, _ = restored(root, rank, world_size, full, dict.fromkeys(full, wanted))
        own = expected(rank, world_size, full, dict.fromkeys(full, wanted))
        assert all(torch.equal(found[name], own[name]) for name in full)
        most = max(most, len(read))
    return most


def saved_by(root: Path, count: int, spreading: Spreading) -> Path:
    full = {name: content(shape, 3) for name, shape in LAYERS.items()}
    save(root, count, full, dict.fromkeys(full, spreading))
    return root


def test_a_rank_reads_the_seals_of_those_whose_rows_it_wants(tmp_path: Path) -> None:
    """Its own of before, one for the other structure, and those that have its rows."""
    root = saved_by(tmp_path, 128, rows_of(128))
    some = random.Random(1).sample(range(64), 8)
    assert seals_read(root, some, 64, rows_of(64)) <= 4
    assert seals_read(root, some, 128, rows_of(128)) <= 2
    assert seals_read(root, [0, 31], 32, rows_of(32)) <= 6
    tensor_parallel = Spreading((32, 2), tuple(range(64)), (Shard(0), Shard(1)))
    assert seals_read(root, some, 64, tensor_parallel) <= 6
    assert seals_read(root, [0], 1, rows_of(1)) == 128


def test_replicas_are_written_by_few(tmp_path: Path) -> None:
    """However many ranks hold the same, who wants it reads the seals of a few."""
    both = Spreading((4, 32), tuple(range(128)), (Shard(0), Replicate()))
    with mock.patch.object(layout, "MOST_WRITERS", 8):
        root = saved_by(tmp_path, 128, both)
        assert seals_read(root, [3, 40], 128, both) <= 8 + 2
        assert seals_read(root, [0, 7], 8, rows_of(8)) <= 8 + 2
        assert seals_read(root, [0], 1, rows_of(1)) <= 4 * 8 + 2


def test_a_tensor_without_a_layout_is_looked_for_everywhere(tmp_path: Path) -> None:
    with mock.patch("stillframe.state.spread.division_of", return_value=None):
        spread._seats.cache_clear()
        root = saved_by(tmp_path, 16, rows_of(16))
        assert seals_read(root, [0], 8, rows_of(8)) == 16
    spread._seats.cache_clear()


def test_a_layout_that_is_wrong_is_told_and_costs_nothing_but_time(tmp_path: Path) -> None:
    real = layout.make_layout

    def reversed_ranks(mesh: Sequence[int], ranks: Sequence[int], *how: Any) -> Any:
        return real(mesh, list(reversed(ranks)), *how)

    spread._seats.cache_clear()
    with (
        mock.patch("stillframe.state.spread.make_layout", reversed_ranks),
        mock.patch("stillframe.state.spread.holders", return_value=[(rank,) for rank in range(16)]),
    ):
        root = saved_by(tmp_path, 16, rows_of(16))
    spread._seats.cache_clear()
    with pytest.warns(RuntimeWarning, match="not where its layout says"):
        assert seals_read(root, [0], 8, rows_of(8)) == 16
    with Catalog(root).open_save(SAVE) as checkpoint:
        stored = Stored(checkpoint, 0, is_merged=True)
        leaf = dict(items_of(dict(items_of(stored.tree))["model"]))["w0"]
        with (
            mock.patch.object(Stored, "_writers", return_value={0}),
            pytest.warns(RuntimeWarning, match="not where its layout says"),
        ):
            found = stored.boxes(leaf)  # as DCP asks
        assert sorted(box.offset[0] for box in found) == list(range(0, ROWS, ROWS // 16))


def test_a_process_that_gets_another_rank_writes_as_that_one() -> None:
    """Its row of a larger mesh is another one then, although torch takes the two for equal."""

    def teams(rank: int) -> set[str]:
        with playing(rank, 6):
            row = init_device_mesh("cpu", (3, 2), mesh_dim_names=("pp", "tp"))["tp"]
            return {
                team.ranks for team in plan_of(rank, 6, {"x": distribute_tensor(torch.ones(64), row, [Shard(0)])}).teams
            }

    spread._seats.cache_clear()
    alone = teams(0)
    spread._seats.cache_clear()
    others = teams(2)
    assert alone != others
    assert teams(0) == alone


def test_a_kind_of_placement_that_readers_do_not_know_is_not_taken_for_one_that_they_know() -> None:
    class Odd(Shard):
        pass

    spread._seats.cache_clear()
    with playing(0, 4):
        mesh = DeviceMesh("cpu", torch.arange(4), _init_backend=False)
        known, odd = (distribute_tensor(torch.ones(8), mesh, [Shard(0)], src_data_rank=None) for _ in range(2))
        odd._spec = dataclasses.replace(odd._spec, placements=(Odd(0),))
        assert spread.spread_of(known).recorded is not None
        assert spread.spread_of(odd).recorded is None


def test_a_manifest_that_says_two_trees_are_alike_is_not_taken_at_its_word(tmp_path: Path) -> None:
    saved_by(tmp_path, 2, rows_of(2))
    path = tmp_path / names.step_dir(SAVE) / names.MANIFEST
    said = decode_manifest(path.read_bytes(), file="")
    assert [entry.like for entry in said.ranks] == [None, None]
    ranks = [said.ranks[0], msgspec.structs.replace(said.ranks[1], like=0)]
    path.write_bytes(encode_manifest(msgspec.structs.replace(said, ranks=ranks)))
    with Catalog(tmp_path).open_save(SAVE) as checkpoint:
        checkpoint.of(0)
        with pytest.raises(FormatError, match="another structure"):
            checkpoint.of(1)
