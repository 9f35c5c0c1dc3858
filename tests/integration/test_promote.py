"""A save carried to another root: the same bytes, the same branch; whole or not at all, whatever comes in between."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import obstore
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from obstore import store as objects
from torch._C._distributed_c10d import HashStore

import stillframe
from stillframe import BusyError, Catalog, Checkpointer, ExistsError, IntegrityError, StorageError, load, spi
from stillframe.checkpoint import epochs, removal
from stillframe.checkpoint.promote import Pace, carry_part, introduce, promote
from stillframe.format import names
from stillframe.format.epochs import Aside, decode_parent, encode_aside, encode_parent
from stillframe.latch import Latch
from stillframe.model import CHUNK_BYTES, SaveId
from stillframe.ranks import joining
from stillframe.store.memory import Fault, MemoryBackend, MemoryStore
from stillframe.store.object_writer import ObjectWriter
from stillframe.store.objects import ObjectStore
from tests import layout
from tests.support import assert_same, run_fresh, start_child

RANKS = (0, 1)
SMALL, LARGE = 1, 2
"""Steps: one of a few bytes, and one of two chunks for each rank."""


def state(rank: int, step: int) -> dict[str, Any]:
    count = 1000 if step == SMALL else CHUNK_BYTES // 4 + 5000
    return {"w": torch.arange(count, dtype=torch.float32) + 1000 * rank + step, "rank": rank}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of two ranks; not to be changed."""
    root = tmp_path_factory.mktemp("promote") / "pair"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joining, "_store", lambda *_: HashStore())  # they never talk
        save_pair(root)
    return root


def save_pair(root: Path) -> None:
    runs = [spi.Run(root, "0123abcd", rank=rank, world_size=len(RANKS), arena="64MiB") for rank in RANKS]
    for step in (SMALL, LARGE):
        for save in [spi.save(run, state(rank, step), step, metadata={"loss": 0.5}) for rank, run in enumerate(runs)]:
            save.wait()
    for run in runs:
        run.close()


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rank, three epochs: it went back, took another way, and was started again; not to be changed."""
    root = tmp_path_factory.mktemp("promote") / "lives"
    live_lives(root)
    return root


def live_lives(root: Path) -> None:
    with Checkpointer(root, arena="64MiB") as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {"w": torch.full((10,), float(step)), "n": step}).wait()
        checkpointer.rewind(1)
        for step in (2, 4):
            checkpointer.save(step, {"w": torch.full((10,), step + 0.5), "n": -step}).wait()
    with Checkpointer(root, arena="64MiB") as checkpointer:
        assert checkpointer.restore({"w": torch.zeros(10), "n": 0}).step == 4
        checkpointer.save(5, {"w": torch.full((10,), 5.5), "n": -5}).wait()


def saves(root: Path) -> list[SaveId]:
    catalog = Catalog(root)
    return [save for save in catalog.look().saves if catalog.is_committed(save)]


def files(root: Path) -> dict[str, bytes]:
    """Everything in a root, by its path."""
    found = [Path(place, name) for place, _, inside in os.walk(root) for name in inside]
    return {str(path.relative_to(root)): path.read_bytes() for path in found}


def files_of(root: Path, save: SaveId) -> dict[str, bytes]:
    there = root / names.step_dir(save)
    return {name: (there / name).read_bytes() for name in os.listdir(there)} if there.exists() else {}


def assert_carried(source: Path, target: Path, save: SaveId) -> None:
    assert Catalog(target).is_committed(save)
    assert_same_files(files_of(target, save), files_of(source, save))


def assert_same_files(found: dict[str, bytes], wanted: dict[str, bytes]) -> None:
    """Without a look at where megabytes differ."""
    assert sorted(found) == sorted(wanted)
    assert [name for name in wanted if found[name] != wanted[name]] == []


def assert_none(target: Path, save: SaveId) -> None:
    catalog = Catalog(target)
    assert not catalog.is_committed(save)
    assert catalog.steps() == []


# --- what is carried ---------------------------------------------------------------------------


def test_every_file_is_the_same_and_restores_bit_for_bit(pair: Path, tmp_path: Path) -> None:
    told: list[int] = []
    for save in saves(pair):
        assert promote(Catalog(pair), Catalog(tmp_path), save, on_bytes=told.append) == []
        assert_carried(pair, tmp_path, save)
        assert sum(told) == Catalog(pair).manifest(save).bytes
        told.clear()
        assert promote(Catalog(pair), Catalog(tmp_path), save, on_bytes=told.append) == []
        assert sum(told) == Catalog(pair).manifest(save).bytes
        told.clear()
    assert Catalog(tmp_path).steps() == Catalog(pair).steps() == [SMALL, LARGE]
    for step in (SMALL, LARGE):
        for rank in RANKS:
            assert_same(load(tmp_path, step, rank=rank), state(rank, step))
    into = {"w": torch.zeros_like(state(0, LARGE)["w"]), "rank": -1}
    assert stillframe.restore(tmp_path, into).step == LARGE
    assert_same(into, state(0, LARGE))


def test_the_same_branch_after_a_rewind_and_a_restart(lives: Path, tmp_path: Path) -> None:
    source, target = Catalog(lives), Catalog(tmp_path)
    assert source.steps() == [1, 2, 4, 5]
    assert len({save.epoch for save in saves(lives)}) == 3
    for save in saves(lives):
        assert promote(source, target, save) == []
    assert target.steps() == source.steps()
    assert target.look().off_branch == source.look().off_branch != []
    for save in saves(lives):
        assert_carried(lives, tmp_path, save)
    for step in source.steps():
        assert_same(load(tmp_path, step), load(lives, step))
    with Checkpointer(tmp_path, arena="64MiB") as checkpointer:
        into = {"w": torch.zeros(10), "n": 0}
        assert checkpointer.restore(into).step == 5
        assert_same(into, {"w": torch.full((10,), 5.5), "n": -5})
        checkpointer.save(6, into).wait()
    assert target.steps() == [1, 2, 4, 5, 6]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_branch_does_not_depend_on_the_order(lives: Path, order: tuple[int, ...]) -> None:
    """One checkpoint of each epoch, in any order."""
    source, target = Catalog(lives), Catalog(MemoryStore())
    chosen = [SaveId(1, 1), SaveId(4, 2), SaveId(5, 3)]
    for at in order:
        assert promote(source, target, chosen[at]) == []
    assert target.steps() == [1, 4, 5]


# --- interrupted -------------------------------------------------------------------------------


class Stopped(Exception):
    pass


class Counted:
    """A target in memory that counts how often each blob was finished."""

    def __init__(self) -> None:
        self.finished: dict[str, int] = {}
        self.backend = MemoryBackend()
        self.catalog = Catalog(MemoryStore(self.backend, self._note))

    def _note(self, verb: str, key: str) -> None:
        if verb == "finish":
            self.finished[key] = self.finished.get(key, 0) + 1


def test_a_promotion_interrupted_at_any_chunk_goes_on_where_it_was(pair: Path) -> None:
    save = Catalog(pair).find(LARGE)
    for stop_at in range(1, 7):  # a header and two chunks for each rank
        target = Counted()
        calls = itertools.count(1)

        def on_bytes(_count: int, calls: Iterator[int] = calls, stop_at: int = stop_at) -> None:
            if next(calls) == stop_at:
                raise Stopped

        with pytest.raises(Stopped):
            promote(Catalog(pair), target.catalog, save, on_bytes=on_bytes)
        assert not target.catalog.is_committed(save)
        assert target.catalog.steps() == []
        assert (names.key(save, names.seal(0)) in target.backend.blobs) == (stop_at > 3)
        assert promote(Catalog(pair), target.catalog, save) == []
        assert target.finished == {names.key(save, names.segment(rank)): 1 for rank in RANKS}
        assert_in_memory(pair, target.backend, save)


def assert_in_memory(source: Path, backend: MemoryBackend, save: SaveId) -> None:
    there = names.step_dir(save) + "/"
    found = {key.removeprefix(there): data for key, data in backend.blobs.items() if key.startswith(there)}
    assert_same_files(found, files_of(source, save))


PROMOTE = """
import sys
from stillframe.checkpoint.catalog import Catalog
from stillframe.checkpoint.promote import Pace, promote
source, target = Catalog(sys.argv[1]), Catalog(sys.argv[2])
print("begins", flush=True)
assert promote(source, target, source.find(int(sys.argv[3])), pace=Pace(float(sys.argv[4]))) == []
"""


def test_sigkill_at_any_moment(pair: Path, tmp_path: Path) -> None:
    """A killed promoter leaves no checkpoint; the next one sends no part again that was whole."""
    save = Catalog(pair).find(LARGE)
    chance = random.Random(4)
    target, inodes, cut = tmp_path / "0", dict[Path, int](), 0
    for number in range(10):
        child = start_child(PROMOTE, pair, target, LARGE, 100e6)
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "begins\n"
            time.sleep(chance.uniform(0.0, 0.4))
        finally:
            child.kill()
            child.communicate()
        segments = [target / names.step_dir(save) / names.segment(rank) for rank in RANKS]
        for path in filter(Path.exists, segments):
            assert inodes.setdefault(path, path.stat().st_ino) == path.stat().st_ino
        if Catalog(target).is_committed(save):
            assert promote(Catalog(pair), Catalog(target), save) == []
            assert_carried(pair, target, save)
            target, inodes = tmp_path / str(number + 1), {}
        else:
            cut += 1
            assert Catalog(target).steps() == []
    assert cut, "every one was faster than the signal"
    assert promote(Catalog(pair), Catalog(target), save) == []
    for path, inode in inodes.items():
        assert path.stat().st_ino == inode
    assert_carried(pair, target, save)  # nothing is left of the dead
    for rank in RANKS:
        assert_same(load(target, LARGE, rank=rank), state(rank, LARGE))


def test_one_that_is_stopped_does_not_wait_for_its_pace(pair: Path) -> None:
    calls = itertools.count()

    def stop(_count: int) -> None:
        if next(calls):  # after the header comes a chunk, and the next one would come in hours
            raise Stopped

    began = time.monotonic()
    with pytest.raises(Stopped):
        promote(Catalog(pair), Catalog(MemoryStore()), SaveId(LARGE), pace=Pace(1.0), on_bytes=stop)
    assert time.monotonic() - began < 20


def test_the_pace_is_kept(pair: Path) -> None:
    rate, last = 10e6, CHUNK_BYTES
    size = Catalog(pair).manifest(SaveId(LARGE)).bytes
    began = time.monotonic()
    promote(Catalog(pair), Catalog(MemoryStore()), SaveId(LARGE), pace=Pace(rate))
    assert time.monotonic() - began > 0.9 * (size - last) / rate
    over = Latch()
    over.unlock()
    pace = Pace(1.0)
    for _ in range(3):
        pace.take(1000, over)


# --- two at once -------------------------------------------------------------------------------


def test_two_threads_carry_the_same_save(pair: Path, tmp_path: Path) -> None:
    failures: list[BaseException] = []
    for step in (SMALL, LARGE, SMALL):
        target = tmp_path / f"{len(os.listdir(tmp_path))}"
        ready = threading.Barrier(3)

        def work(ready: threading.Barrier = ready, target: Path = target, step: int = step) -> None:
            ready.wait()
            try:
                assert promote(Catalog(pair), Catalog(target), Catalog(pair).find(step)) == []
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert_carried(pair, target, Catalog(pair).find(step))


def test_two_processes_carry_the_same_save(pair: Path, tmp_path: Path) -> None:
    children = [start_child(PROMOTE, pair, tmp_path, LARGE, 0) for _ in range(2)]
    for child in children:
        _, err = child.communicate(timeout=60)
        assert child.returncode == 0, err
    assert_carried(pair, tmp_path, Catalog(pair).find(LARGE))


def test_one_whose_partial_files_a_faster_one_has_swept_up_is_done(pair: Path, tmp_path: Path) -> None:
    save = Catalog(pair).find(SMALL)
    is_first = threading.Lock()

    def overtaken(_count: int) -> None:
        if is_first.acquire(blocking=False):
            assert promote(Catalog(pair), Catalog(tmp_path), save) == []

    assert promote(Catalog(pair), Catalog(tmp_path), save, on_bytes=overtaken) == []
    assert_carried(pair, tmp_path, save)


# --- a source that is damaged ------------------------------------------------------------------


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path, int], object]] = {
    "chunk": lambda root, rank: flip(layout.segment(root, SMALL, rank), -100),
    "header": lambda root, rank: flip(layout.segment(root, SMALL, rank), 20),
    "size": lambda root, rank: os.truncate(layout.segment(root, SMALL, rank), 4096),
    "segment": lambda root, rank: layout.segment(root, SMALL, rank).unlink(),
    "seal": lambda root, rank: flip(layout.seal(root, SMALL, rank), 200),
    "no seal": lambda root, rank: layout.seal(root, SMALL, rank).unlink(),
    "seal of another": lambda root, rank: layout.seal(root, SMALL, rank).write_bytes(
        layout.seal(root, LARGE, rank).read_bytes()
    ),
    "manifest": lambda root, rank: flip(layout.manifest(root, SMALL), 200 + rank),
    "parent": lambda root, rank: flip(root / names.parent(1), 100 + rank),
}


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("what", DAMAGES)
def test_damage_is_not_carried(pair: Path, tmp_path: Path, what: str, rank: int) -> None:
    source = Path(shutil.copytree(pair, tmp_path / "source"))
    save = Catalog(source).find(SMALL)
    DAMAGES[what](source, rank)
    with pytest.raises(IntegrityError):
        promote(Catalog(source), Catalog(tmp_path / "target"), save)
    assert_none(tmp_path / "target", save)
    assert promote(Catalog(pair), Catalog(tmp_path / "target"), save) == []
    assert_carried(pair, tmp_path / "target", save)


# --- a target that is not for it ---------------------------------------------------------------


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another run, which has lived the same number of epochs; not to be changed."""
    root = tmp_path_factory.mktemp("promote") / "other"
    live_lives(root)
    return root


@pytest.mark.parametrize("epochs_there", [(1,), (1, 2), (2,), (3,), (1, 2, 3)])
@pytest.mark.parametrize("has_run", [True, False])
def test_a_target_of_another_run_is_refused(
    lives: Path, other: Path, tmp_path: Path, epochs_there: tuple[int, ...], has_run: bool
) -> None:
    """Whichever epochs of it are there, and whichever epoch of ours comes."""
    for save in saves(other):
        if save.epoch in epochs_there:
            promote(Catalog(other), Catalog(tmp_path), save)
    if not has_run:  # somebody has copied the steps alone
        shutil.rmtree(tmp_path / names.RUN)
    before = files(tmp_path)
    for save in saves(lives):
        if not has_run and save.epoch in epochs_there and save not in saves(tmp_path):
            continue  # nothing tells
        if not has_run and save.epoch not in epochs_there:
            continue
        with pytest.raises(ExistsError, match="another run"):
            promote(Catalog(lives), Catalog(tmp_path), save)
        assert files(tmp_path) == before


def test_steps_without_a_run_that_have_nothing_in_common_are_refused(lives: Path, tmp_path: Path) -> None:
    (tmp_path / names.step_dir(SaveId(7, 9))).mkdir()
    (tmp_path / names.step_dir(SaveId(7, 9)) / names.MANIFEST).write_bytes(b"{}")
    before = files(tmp_path)
    with pytest.raises(ExistsError, match="another run"):
        promote(Catalog(lives), Catalog(tmp_path), SaveId(1, 1))
    assert files(tmp_path) == before


def test_a_part_of_another_save_is_not_taken_for_ours(lives: Path, other: Path, tmp_path: Path) -> None:
    """Of a save of the same name whose run is not told of any more."""
    promote(Catalog(other), Catalog(tmp_path), SaveId(1, 1))
    shutil.rmtree(tmp_path / names.RUN)
    (tmp_path / names.key(SaveId(1, 1), names.MANIFEST)).unlink()
    with pytest.raises(ExistsError):
        promote(Catalog(lives), Catalog(tmp_path), SaveId(1, 1))
    assert_none(tmp_path, SaveId(1, 1))


def test_a_target_that_has_gone_on_takes_only_what_counts_there(lives: Path, tmp_path: Path) -> None:
    promote(Catalog(lives), Catalog(tmp_path), SaveId(4, 2))
    with Checkpointer(tmp_path, arena="64MiB") as checkpointer:
        into = {"w": torch.zeros(10), "n": 0}
        assert checkpointer.restore(into).step == 4
        checkpointer.save(7, into).wait()
    before = files(tmp_path)
    with pytest.raises(ExistsError, match="another run"):  # which has claimed the same epoch
        promote(Catalog(lives), Catalog(tmp_path), SaveId(5, 3))
    assert files(tmp_path) == before
    shutil.copytree(lives, tmp_path / "early")
    shutil.rmtree(tmp_path / "early" / names.epoch_dir(3))
    for name in os.listdir(tmp_path / "early"):
        save = names.parse_step_dir(name)
        if save is not None and save.epoch == 3:
            shutil.rmtree(tmp_path / "early" / name)
    assert promote(Catalog(tmp_path / "early"), Catalog(tmp_path), SaveId(2, 2)) == []
    assert Catalog(tmp_path).steps() == [2, 4, 7]
    with pytest.raises(ExistsError, match="gone on by itself"):
        promote(Catalog(tmp_path / "early"), Catalog(tmp_path), SaveId(3, 1))
    assert not Catalog(tmp_path).is_committed(SaveId(3, 1))


def entomb(catalog: Catalog, save: SaveId) -> None:
    catalog.store.put(catalog.aside_key(save), encode_aside(Aside("removed", True, save.epoch, time.time())))


@pytest.mark.parametrize("is_there", [True, False])
def test_what_was_removed_is_not_put_there_again(pair: Path, is_there: bool) -> None:
    backend = MemoryBackend()
    target = Catalog(MemoryStore(backend))
    save = Catalog(pair).find(SMALL)
    if is_there:
        assert promote(Catalog(pair), target, save) == []
    entomb(target, save)
    before = sorted(backend.blobs)
    for _ in range(2):
        with pytest.raises(BusyError, match="removed"):
            promote(Catalog(pair), target, save)
        assert not target.is_committed(save)
        assert sorted(backend.blobs) == before
    target.store.delete([target.aside_key(save)])
    assert promote(Catalog(pair), target, save) == []


def test_a_tombstone_that_came_too_late_does_not_count(pair: Path) -> None:
    target = Catalog(MemoryStore())
    save = Catalog(pair).find(SMALL)
    promote(Catalog(pair), target, save)
    epoch = epochs.claim(target, "ffffffff", 0)
    epochs.begin(target, epoch, "ffffffff", 0, save, is_shared=True)
    entomb(target, save)
    assert target.is_committed(save)
    assert promote(Catalog(pair), target, save) == []


def test_a_removal_in_the_middle_wins(pair: Path) -> None:
    """Whoever sets the save aside at any moment: either it is a whole checkpoint, or none, and the promoter is told."""
    save = Catalog(pair).find(SMALL)
    for moment in itertools.count(1):
        backend = MemoryBackend()
        asked = itertools.count(1)
        other = Catalog(MemoryStore(backend))

        def remove(other: Catalog = other) -> None:
            epoch = epochs.begin_by_hand(other)
            if not other.is_committed(save):
                removal.set_aside(other, save, "left over", epoch)
                removal.remove_all(other, save, keeps_tombstone=True)

        def inject(_verb: str, _key: str, asked: Iterator[int] = asked, moment: int = moment) -> None:
            if next(asked) == moment:
                remove()

        is_told = False
        try:
            assert promote(Catalog(pair), Catalog(MemoryStore(backend, inject)), save) == []
        except (BusyError, ExistsError, StorageError):
            is_told = True
        assert is_told != other.is_committed(save), moment
        if not is_told:
            assert_in_memory(pair, backend, save)
        if next(asked) <= moment:
            assert moment > 10
            break


# --- storage that fails ------------------------------------------------------------------------


def check(source: Path, backend: MemoryBackend, save: SaveId) -> None:
    """No manifest without all that it names, and no byte that is not the source's."""
    wanted = {names.key(save, name): data for name, data in files_of(source, save).items()}
    there = {key: data for key, data in backend.blobs.items() if key.startswith(names.step_dir(save))}
    assert there.items() <= wanted.items()
    for rank in RANKS:
        if names.key(save, names.seal(rank)) in there:
            assert names.key(save, names.segment(rank)) in there
    if names.key(save, names.MANIFEST) in there:
        assert there == wanted


def attempt(source: Path, backend: MemoryBackend, save: SaveId, faults: dict[int, Fault]) -> int:
    """One promotion with faults at these operations.  Returns how many operations there were."""
    asked = itertools.count(1)
    lock = threading.Lock()

    def inject(_verb: str, _key: str) -> Fault | None:
        with lock:
            return faults.get(next(asked))

    with contextlib.suppress(StorageError):
        assert promote(Catalog(source), Catalog(MemoryStore(backend, inject)), save) == []
        assert Catalog(MemoryStore(backend)).is_committed(save)
    check(source, backend, save)
    return next(asked) - 1


@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("lands_first", [True, False])
def test_any_single_fault_leaves_all_or_nothing(pair: Path, fault: Fault, lands_first: bool) -> None:
    """What lands later does so before the promotion is repeated, or when that is done."""
    save = Catalog(pair).find(SMALL)
    whole = MemoryBackend()
    count = attempt(pair, whole, save, {})
    assert count > 20
    for at in range(1, count + 1):
        backend = MemoryBackend(lands_late=True)
        attempt(pair, backend, save, {at: fault})
        if lands_first:
            backend.land()
            check(pair, backend, save)
        assert promote(Catalog(pair), Catalog(MemoryStore(backend)), save) == []
        backend.land()
        check(pair, backend, save)
        assert backend.blobs == whole.blobs


faults = st.dictionaries(st.integers(1, 40), st.sampled_from(Fault), max_size=3)


@settings(max_examples=60, deadline=None)
@given(tries=st.lists(st.tuples(faults, st.booleans()), max_size=5))
def test_any_faults_in_any_tries(pair: Path, tries: list[tuple[dict[int, Fault], bool]]) -> None:
    save = Catalog(pair).find(SMALL)
    backend = MemoryBackend(lands_late=True)
    for chosen, lands in tries:
        attempt(pair, backend, save, chosen)
        if lands:
            backend.land()
            check(pair, backend, save)
    assert promote(Catalog(pair), Catalog(MemoryStore(backend)), save) == []
    backend.land()
    check(pair, backend, save)
    assert Catalog(MemoryStore(backend)).is_committed(save)


# --- roots that the ranks do not share ---------------------------------------------------------


def unshared(pair: Path, to: Path, rank: int) -> Path:
    """What the node of one rank would hold: its parts, and no manifest."""
    root = Path(shutil.copytree(pair, to))
    parent = root / names.parent(1)
    told = decode_parent(parent.read_bytes(), file=str(parent))
    parent.write_bytes(encode_parent(msgspec.structs.replace(told, is_shared=False)))
    for step in (SMALL, LARGE):
        layout.segment(root, step, 1 - rank).unlink()
        layout.seal(root, step, 1 - rank).unlink()
        layout.manifest(root, step).unlink()
    return root


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("is_of_rank", [True, False])
def test_parts_of_roots_that_are_not_shared_meet(
    pair: Path, tmp_path: Path, order: tuple[int, int], is_of_rank: bool
) -> None:
    save, target = Catalog(pair).find(SMALL), tmp_path / "target"
    sources = [unshared(pair, tmp_path / str(rank), rank) for rank in RANKS]
    catalogs = [Catalog(root, rank if is_of_rank else None) for rank, root in enumerate(sources)]
    first, second = order
    for _ in range(2):
        assert promote(catalogs[first], Catalog(target), save) == [second]
        assert_none(target, save)
    assert promote(catalogs[second], Catalog(target), save) == []
    assert_carried(pair, target, save)
    for rank in RANKS:
        assert promote(catalogs[rank], Catalog(target), save) == []
        assert_same(load(target, rank=rank), state(rank, SMALL))
    with Checkpointer(target, arena="64MiB") as checkpointer:
        into = {"w": torch.zeros(1000), "rank": -1}
        assert checkpointer.restore(into).step == SMALL
        assert_same(into, state(0, SMALL))


def test_the_root_of_one_rank_is_no_target(pair: Path, tmp_path: Path) -> None:
    sources = [unshared(pair, tmp_path / str(rank), rank) for rank in RANKS]
    before = files(sources[0])
    with pytest.raises(ExistsError, match="some ranks only"):
        promote(Catalog(sources[1]), Catalog(sources[0]), Catalog(pair).find(SMALL))
    assert files(sources[0]) == before


def test_a_part_that_is_there_is_not_read_again(pair: Path, tmp_path: Path) -> None:
    """Not even its seal: on its way are those of the ranks that are missing."""
    source, save = Path(shutil.copytree(pair, tmp_path / "source")), Catalog(pair).find(SMALL)
    target = Catalog(tmp_path / "target")
    with Catalog(source).open_save(save) as checkpoint:
        assert carry_part(checkpoint, target, 0, Pace()) == checkpoint.manifest.ranks[0].segment_bytes
        layout.segment(source, SMALL, 0).unlink()
        layout.seal(source, SMALL, 0).unlink()
        assert carry_part(checkpoint, target, 0, Pace()) == 0
    assert promote(Catalog(source), target, save) == []
    assert_carried(pair, tmp_path / "target", save)


def test_a_segment_that_is_there_without_its_seal_is_not_sent_again(pair: Path, tmp_path: Path) -> None:
    save, target = Catalog(pair).find(SMALL), Catalog(tmp_path)
    with Catalog(pair).open_save(save) as checkpoint:
        size = carry_part(checkpoint, target, 0, Pace())
        target.store.delete([names.key(save, names.seal(0))])
        assert carry_part(checkpoint, target, 0, Pace()) == 0
        os.truncate(tmp_path / names.key(save, names.segment(0)), size - 1)  # not ours
        target.store.delete([names.key(save, names.seal(0))])
        assert carry_part(checkpoint, target, 0, Pace()) == size
    assert promote(Catalog(pair), target, save) == []
    assert_carried(pair, tmp_path, save)


def test_a_promoter_needs_no_torch(pair: Path, tmp_path: Path) -> None:
    run_fresh(PROMOTE + "assert not {'torch', 'numpy'} & set(sys.modules)", pair, tmp_path, SMALL, 0)


# --- to an object store ------------------------------------------------------------------------


class CutOff(ObjectStore):
    """``fails_at``: the part that cannot be put, counted from 0."""

    def __init__(self, backend: objects.MemoryStore, fails_at: int = 1000) -> None:
        super().__init__(backend, "memory://bucket")
        self.puts: list[int] = []
        self._fails_at = fails_at

    def put_part(self, key: str, nonce: str, offset: int, data: memoryview) -> None:
        if len(self.puts) >= self._fails_at:
            raise StorageError("an injected fault")
        self.puts.append(offset)
        super().put_part(key, nonce, offset, data)


def whole_there(backend: objects.MemoryStore, pair: Path) -> None:
    there: Any = ObjectStore(backend, "memory://bucket")
    for rank in RANKS:
        assert_same(load(there, LARGE, rank=rank), load(pair, LARGE, rank=rank))


def test_what_an_interrupted_copy_has_sent_to_an_object_store_is_not_sent_again(pair: Path) -> None:
    """A rank's segment is a header and two chunks: three objects."""
    source, backend = Catalog(pair), objects.MemoryStore()
    save = source.find(LARGE)
    cut = CutOff(backend, fails_at=2)
    with pytest.raises(StorageError, match="injected"):
        promote(source, Catalog(cut), save)
    assert len(cut.puts) == 2
    again = CutOff(backend)
    sent: list[tuple[int, int]] = []
    assert promote(source, Catalog(again), save, on_part=lambda *told: sent.append(told)) == []
    offsets = {4096, 4096 + CHUNK_BYTES}
    assert sorted(again.puts) == sorted([0, *(offsets - set(cut.puts)), 0, *offsets])
    assert sent[1][1] - sent[0][1] in (CHUNK_BYTES, 4 * 5000)  # the chunk that had been sent
    whole_there(backend, pair)


def test_one_that_gives_up_takes_nothing_from_another_that_copies_the_same(pair: Path) -> None:
    source, backend = Catalog(pair), objects.MemoryStore()
    save = source.find(LARGE)
    slow = CutOff(backend)
    writer_of = slow.writer

    def writer(key: str, size: int, *, copy_of: str = "") -> ObjectWriter:
        found = writer_of(key, size, copy_of=copy_of)
        with pytest.raises(StorageError, match="injected"):  # another one comes, and fails, after this one has looked
            promote(source, Catalog(CutOff(backend, fails_at=2)), save)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slow, "writer", writer)
        with source.open_save(save) as checkpoint:
            introduce(source, Catalog(slow), save.epoch, save)
            carry_part(checkpoint, Catalog(slow), 0, Pace())
    assert promote(source, Catalog(CutOff(backend)), save) == []
    whole_there(backend, pair)


def test_what_is_left_by_somebody_else_is_not_used(pair: Path) -> None:
    """Parts of another size, or under names that are no offsets."""
    source, backend = Catalog(pair), objects.MemoryStore()
    save = source.find(LARGE)
    with pytest.raises(StorageError, match="injected"):
        promote(source, Catalog(CutOff(backend, fails_at=2)), save)
    parts = [each["path"] for page in obstore.list(backend) for each in page if ".parts/" in each["path"]]
    for path in parts:
        obstore.put(backend, path, b"short")
    obstore.put(backend, parts[0].rpartition("/")[0] + "/x", b"odd")
    assert promote(source, Catalog(CutOff(backend)), save) == []
    whole_there(backend, pair)
