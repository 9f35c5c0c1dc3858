"""What one layout over one number of ranks saved, any other restores: bit for bit, on real ranks."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import stillframe
from stillframe.checkpoint.catalog import Catalog
from stillframe.state.dtypes import DTYPE_NAMES
from tests import layout
from tests.property.states import examples
from tests.ranks import reshard_worker
from tests.ranks.launch import LAUNCH_S, Launch
from tests.ranks.reshard_worker import Drawn, Layout, assert_alike, content, flat, reference_path
from tests.support import bytes_of, until

pytestmark = pytest.mark.timeout(300)

ANSWER_S = 60.0
SPREADABLE = [dtype for dtype, name in DTYPE_NAMES.items() if name != "F4"]
"""torch itself cannot distribute 4-bit numbers."""


class World:
    """So many ranks that carry out orders; one alone is this process itself."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._connections: list[Connection[Any, Any]] = []
        self._is_whole = True
        self._dir = tempfile.TemporaryDirectory()
        self._launch = Launch(size, "reshard_worker.py", self._dir.name) if size > 1 else None

    def __call__(self, name: str, *arguments: Any) -> list[Any]:
        """What each rank answers; fails the test if one of them fails."""
        if self._launch is None:
            return [reshard_worker.ORDERS[name](*arguments)]
        if not self._connections:
            self._connections = [self._meet(self._launch, rank) for rank in range(self.size)]
        assert self._is_whole, "a rank has not answered before"
        self._is_whole = False
        for connection in self._connections:
            connection.send((name, arguments))
        answers = [self._answer(self._launch, connection) for connection in self._connections]
        self._is_whole = True
        failed = [f"rank {rank}: {answer}" for rank, (is_done, answer) in enumerate(answers) if not is_done]
        assert not failed, "\n".join([f"{name}{arguments}", *failed])
        return [answer for _, answer in answers]

    def _meet(self, launch: Launch, rank: int) -> Connection[Any, Any]:
        address = f"{self._dir.name}/rank-{rank}"
        until(lambda: os.path.exists(address) or launch.process.poll() is not None, f"{address} appears", LAUNCH_S)
        assert launch.process.poll() is None, launch.output[-8000:]
        return Client(address)

    def _answer(self, launch: Launch, connection: Connection[Any, Any]) -> tuple[bool, Any]:
        assert connection.poll(ANSWER_S), f"no answer:\n{launch.output[-8000:]}"
        try:
            answer: tuple[bool, Any] = connection.recv()
        except EOFError:
            raise AssertionError(f"a rank ended:\n{launch.output[-8000:]}") from None
        return answer

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._connections:
            connection.close()
        if self._launch is not None:
            with self._launch:
                pass  # its end is that of the ranks
        self._dir.cleanup()


Worlds = dict[int, World]


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    """Of one, two and four ranks; all start at once."""
    with World(1) as one, World(2) as two, World(4) as four:
        yield {1: one, 2: two, 4: four}


# --- any tensor, any layout ----------------------------------------------------------------

MESHES: dict[int, list[Any]] = {
    1: [],
    2: [(0, 1), (1, 0), ((0, 1),), ((0,), (1,))],
    4: [
        (0, 1, 2, 3), (3, 1, 0, 2), ((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 1, 2, 3),), ((0,), (1,), (2,), (3,)),
        (((0, 1),), ((2, 3),)),
    ],
}  # fmt: skip
PARTIAL_MESHES: list[Any] = [(0, 1), (1, 3), (2,), (3, 2, 1), ((1, 2),), ((3,), (0,))]
"""Of some of four ranks."""

sizes = st.integers(0, 9) | st.sampled_from([64, 65, 127])
shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple) | st.tuples(sizes, st.integers(1, 9)) | st.tuples(sizes)


def dimensions_of(ranks: Any) -> int:
    return 1 + dimensions_of(ranks[0]) if isinstance(ranks, tuple) else 0


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...], meshes: list[Any], can_be_plain: bool = True) -> Layout:
    is_transposed = draw(st.booleans())
    ranks = draw(st.sampled_from([*([None] if can_be_plain else []), *meshes]))
    if ranks is None:
        return Layout(is_transposed=is_transposed)
    count = dimensions_of(ranks)
    dims = st.integers(0, len(shape) - 1)
    forms: list[st.SearchStrategy[Any]] = [st.just(Replicate())]
    if shape:
        forms += [st.builds(Shard, dims), st.builds(strided, dims, st.integers(2, 4))]
    placements = st.tuples(*[st.one_of(forms)] * count)
    if shape and count == 2:  # as FSDP2 with tensor parallelism makes them
        placements |= dims.map(lambda dim: (strided(dim, len(ranks[0])), Shard(dim)))
    return Layout(ranks, draw(placements), is_transposed)


def strided(dim: int, factor: int) -> Placement:
    return _StridedShard(dim, split_factor=factor)


@st.composite
def drawn(draw: st.DrawFn, saving: list[Any], restoring: list[Any], can_be_plain: bool = True) -> Drawn:
    shape = draw(shapes)
    return Drawn(
        shape,
        draw(st.sampled_from(SPREADABLE)),
        draw(st.integers(0, 1000)),
        draw(layouts(shape, saving, can_be_plain)),
        draw(layouts(shape, restoring)),
    )


class Drawing:
    """Tensors saved by one world and restored by another, a step for each; every world has a root of its own."""

    def __init__(self, worlds: Worlds, root: Path) -> None:
        self._worlds = worlds
        self._root = root
        self._steps = itertools.count(1)
        self._used: set[int] = set()

    def check(self, saving: int, restoring: int, tensors: list[Drawn]) -> None:
        step = next(self._steps)
        self._used |= {saving, restoring}
        root = self.root(saving)
        self._worlds[saving]("save_drawn", root, step, tensors)
        for each, loaded in zip(tensors, stillframe.load(root, step), strict=True):
            full = content(each.shape, each.dtype, each.seed)
            assert (loaded.dtype, loaded.shape) == (full.dtype, full.shape)
            assert bytes_of(loaded) == bytes_of(full), f"load: {each}"
        if saving != restoring:
            self._give(step, root, self.root(restoring))
        self._worlds[restoring]("restore_drawn", self.root(restoring), step, tensors)

    def root(self, world: int) -> Path:
        return self._root / f"{world}"

    def _give(self, step: int, source: Path, to: Path) -> None:
        """A whole checkpoint appears in another root at once."""
        to.mkdir(exist_ok=True)
        found = layout.step_dir(source, step)
        shutil.copytree(found, to / "copying")
        os.rename(to / "copying", to / found.name)

    def end(self) -> None:
        for world in self._used:
            self._worlds[world]("end_drawing", self.root(world))


@pytest.fixture(scope="module")
def drawing(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drawing]:
    made = Drawing(worlds, tmp_path_factory.mktemp("drawn"))
    yield made
    made.end()


@examples(80)
@given(tensors=st.lists(drawn(MESHES[4], MESHES[4]), min_size=1, max_size=3))
def test_a_tensor_saved_under_any_layout_is_restored_under_any_other(drawing: Drawing, tensors: list[Drawn]) -> None:
    drawing.check(4, 4, tensors)


@examples(50)
@given(data=st.data(), worlds_of_both=st.sampled_from([(4, 2), (2, 4), (4, 1), (1, 4), (2, 1)]))
def test_a_tensor_is_restored_by_another_number_of_ranks(
    drawing: Drawing, data: st.DataObject, worlds_of_both: tuple[int, int]
) -> None:
    saving, restoring = worlds_of_both
    tensors = st.lists(drawn(MESHES[saving], MESHES[restoring]), min_size=1, max_size=3)
    drawing.check(saving, restoring, data.draw(tensors))


@examples(50)
@given(tensors=st.lists(drawn(PARTIAL_MESHES, MESHES[4] + PARTIAL_MESHES), min_size=1, max_size=2))
def test_a_tensor_of_some_of_the_ranks_is_restored_by_others(drawing: Drawing, tensors: list[Drawn]) -> None:
    drawing.check(4, 4, tensors)


@pytest.mark.parametrize(
    "restored", [(0, 1), (2, 3), (1, 2, 3), (0, 1, 2, 3), (1,)], ids=lambda ranks: "-".join(map(str, ranks))
)
def test_what_only_some_ranks_have_moves_to_others(worlds: Worlds, tmp_path: Path, restored: tuple[int, ...]) -> None:
    """As stages of a pipeline do: the other ranks do not have its key at all."""
    worlds[4]("save_some", tmp_path, Layout((0, 1), (Shard(0),)))
    loaded = stillframe.load(tmp_path)
    assert bytes_of(loaded["some"]) == bytes_of(content((7, 5), torch.float32, 1))
    worlds[4]("restore_some", tmp_path, Layout(restored, (Shard(1),)))


# --- models --------------------------------------------------------------------------------

MATRIX = [
    ("fsdp", 2, "fsdp", 4),
    ("fsdp", 4, "fsdp", 2),
    ("fsdp", 4, "fsdp", 4),
    ("fsdp", 4, "plain", 1),
    ("fsdp", 2, "ddp", 4),
    ("plain", 1, "fsdp", 4),
    ("plain", 1, "ddp", 2),
    ("plain", 1, "tp fsdp", 4),
    ("tp", 2, "plain", 1),
    ("tp", 2, "tp fsdp", 4),
    ("hsdp", 4, "fsdp", 2),
    ("hsdp", 4, "fsdp", 4),
    ("tp fsdp", 4, "plain", 1),
    ("tp fsdp", 4, "fsdp", 4),
    ("tp fsdp", 4, "tp", 2),
    ("ddp", 2, "fsdp", 2),
    ("ddp", 4, "fsdp", 2),
    ("ddp", 4, "plain", 1),
]


class Saved:
    """Checkpoints of trained models, each made when first asked for."""

    def __init__(self, worlds: Worlds, root: Path) -> None:
        self._worlds = worlds
        self._root = root

    def __call__(self, kind: str, world: int, form: str = "TrainState") -> Path:
        root = self._root / f"{kind.replace(' ', '+')}-{world}-{form}"
        if not root.exists():
            self._worlds[world]("save_model", root, kind, form)
        return root


@pytest.fixture(scope="module")
def saved(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(worlds, tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(("kind", "world", "to", "to_world"), MATRIX)
def test_a_trained_model_is_restored_under_another_wrapping(
    worlds: Worlds, saved: Saved, kind: str, world: int, to: str, to_world: int
) -> None:
    worlds[to_world]("restore_model", saved(kind, world), to, "TrainState", 0)


@pytest.mark.parametrize(("kind", "world", "to", "to_world"), MATRIX[:1] + MATRIX[4:8] + MATRIX[12:14])
def test_a_model_that_has_trained_already_takes_the_state_over(
    worlds: Worlds, saved: Saved, kind: str, world: int, to: str, to_world: int
) -> None:
    worlds[to_world]("restore_model", saved(kind, world), to, "TrainState", 2)


@pytest.mark.parametrize(("kind", "world"), list(dict.fromkeys((kind, world) for kind, world, _, _ in MATRIX)))
def test_one_process_loads_what_all_ranks_have_saved(saved: Saved, kind: str, world: int) -> None:
    root = saved(kind, world)
    assert_alike(dict(flat(stillframe.load(root))), torch.load(reference_path(root)))


@pytest.mark.parametrize("trained", [0, 2])
@pytest.mark.parametrize("world", [2, 4])
def test_a_dict_of_model_and_optimizer_is_restored_by_as_many_ranks_or_more(
    worlds: Worlds, saved: Saved, world: int, trained: int
) -> None:
    worlds[world]("restore_model", saved("fsdp", 2, "dict"), "fsdp", "dict", trained)


@pytest.mark.parametrize(
    ("kind", "world"),
    [
        ("plain", 1), ("compile", 1), ("ddp", 2), ("compile ddp", 2), ("ddp compile", 2), ("fsdp", 2),
        ("fsdp compile", 2), ("hsdp", 4), ("tp fsdp", 4),
    ],
)  # fmt: skip
def test_names_are_those_of_torch_whatever_the_wrapping(worlds: Worlds, kind: str, world: int) -> None:
    for ours, theirs in worlds[world]("keys_of_both", kind):
        assert ours == theirs


# --- what is read and written --------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 4])
def test_the_same_layout_opens_only_the_own_part(worlds: Worlds, saved: Saved, world: int) -> None:
    assert worlds[world]("restore_recorded", saved("fsdp", world), "fsdp") == [{rank} for rank in range(world)]


def test_another_layout_reads_only_the_chunks_it_needs(worlds: Worlds, tmp_path: Path) -> None:
    """Two ranks wrote two chunks of 16 MiB each: of four ranks, each reads one of them."""
    worlds[2]("save_rows", tmp_path, 64)
    read = [chunks for _, chunks in worlds[4]("restore_rows", tmp_path, 64)]
    assert read == [{(0, 0)}, {(0, 1)}, {(1, 0)}, {(1, 1)}]


def test_the_same_layout_reads_only_its_own_chunks(worlds: Worlds, tmp_path: Path) -> None:
    worlds[2]("save_rows", tmp_path, 64)
    assert worlds[2]("restore_rows", tmp_path, 64) == [({0}, {(0, 0), (0, 1)}), ({1}, {(1, 0), (1, 1)})]


@pytest.mark.parametrize("kind", ["ddp", "ddp compile", "hsdp"])
def test_what_ranks_hold_alike_is_written_once_and_evenly(worlds: Worlds, tmp_path: Path, kind: str) -> None:
    """A huge embedding is cut, so that no rank writes more than the others."""
    one_copy = worlds[4]("save_lopsided", tmp_path, kind)[0]
    with Catalog(tmp_path).open() as checkpoint:
        written = [checkpoint.of(rank).seal.segment.data_bytes for rank in range(4)]
    assert one_copy <= sum(written) <= 1.01 * one_copy
    assert all(abs(each - one_copy / 4) <= 0.1 * one_copy / 4 for each in written), written


# --- what each rank keeps for itself -------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "to_world", "whose"), [(4, 4, [0, 1, 2, 3]), (4, 2, [0, 1]), (2, 4, [0, 1, 0, 1]), (2, 1, [0])]
)
def test_each_rank_gets_its_own_back_or_that_of_one_that_was_there(
    worlds: Worlds, tmp_path: Path, world: int, to_world: int, whose: list[int]
) -> None:
    worlds[world]("save_own", tmp_path)
    assert worlds[to_world]("restore_own", tmp_path) == list(enumerate(whose))


# --- what changes between save() and the update --------------------------------------------


def test_loops_of_ddp_and_fsdp_change_nothing_before_the_update(worlds: Worlds, tmp_path: Path) -> None:
    assert worlds[2]("save_sound_loops", tmp_path) == [list(range(1, 10))] * 2


def test_what_is_changed_by_hand_on_ranks_fails_the_save(worlds: Worlds, tmp_path: Path) -> None:
    """A DTensor counts its changes apart from its local tensor; and both ranks learn of it."""
    for told in worlds[2]("save_changed_by_hand", tmp_path):
        assert len(told) == 3, told
        for error, name in zip(told, ("model/layers.0.weight", "model/layers.0.weight", "average/"), strict=True):
            assert error.startswith("TornError"), error
            assert f"'{name}" in error, error
