"""Stored bytes change, shrink or vanish, and every such change is found before a byte of it is believed.

What is promised: ``restore()`` passes over a damaged step, says so, and takes the older one bit for bit; it never
offers the damaged one again, whose number is free; a step asked for by number is an error, never another step.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from stillframe import (
    Catalog,
    Checkpointer,
    ExistsError,
    IntegrityError,
    NotFoundError,
    RestoreReport,
    VersionError,
    load,
    restore,
)
from stillframe.model import CHUNK_BYTES
from tests import layout
from tests.support import assert_same

DATA_START = 4096


def make_state(step: int) -> dict[str, Any]:
    """Two chunks: ``first`` begins in one, ``last`` ends in the other."""
    return {
        "first": torch.arange(step, step + CHUNK_BYTES // 4, dtype=torch.float32),
        "last": torch.full((1000,), step, dtype=torch.float32),
        "rows": [torch.full((3, 5), float(step)), (step, "text")],
        "step": step,
    }


def save_all(root: Path, *steps: int) -> None:
    with Checkpointer(root, arena="64MiB") as checkpointer:
        for step in steps:
            checkpointer.save(step, make_state(step))
            checkpointer.wait()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2, undamaged; linked to, never changed in place."""
    root = tmp_path_factory.mktemp("whole") / "root"
    save_all(root, 1, 2)
    return root


@pytest.fixture
def root(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "root", copy_function=os.link))


# --- steps that were copied without what the run knows of them ----------------------------------


def spoil(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.unlink()  # it is linked to
    path.write_bytes(data)


def test_damaged_manifests_are_damage_where_nothing_else_tells_of_the_run(root: Path) -> None:
    """No fresh start, and no other step in silence."""
    shutil.rmtree(root / "run")
    for step in (1, 2):
        spoil(layout.manifest(root, step))
    assert Catalog(root).steps() == [1, 2]
    with pytest.raises(IntegrityError, match="is damaged"):
        load(root)
    with Checkpointer(root) as checkpointer:
        with (
            pytest.warns(RuntimeWarning, match="damaged"),
            pytest.raises(IntegrityError, match="nothing to resume from"),
        ):
            checkpointer.restore(make_state(0))
        with pytest.raises(ExistsError):
            checkpointer.save(1, make_state(1))


def test_an_epoch_whose_manifests_are_damaged_goes_on_from_the_one_before(root: Path) -> None:
    with Checkpointer(root) as checkpointer:
        checkpointer.restore(make_state(0))
        checkpointer.save(3, make_state(3)).wait()
    shutil.rmtree(root / "run")
    spoil(layout.manifest(root, 3))
    state = make_state(0)
    with pytest.warns(RuntimeWarning, match="step 3 is damaged and was skipped"):
        assert restore(root, state).step == 2
    assert_same(state, make_state(2))


# --- the ways to be damaged --------------------------------------------------------------------


def flip(path: Path, offset: int, mask: int = 0x10) -> None:
    """Change bits of one byte; a negative offset counts from the end."""
    with path.open("r+b") as file:
        file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ mask]))


def cut(path: Path, by_bytes: int) -> None:
    os.truncate(path, path.stat().st_size - by_bytes)


def cut_to_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def grow(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 1)


def blank_a_block(path: Path) -> None:
    """What a lost write leaves: a block of zeros, the size right."""
    with path.open("r+b") as file:
        file.seek(DATA_START + 3 * 4096)
        file.write(bytes(4096))


@dataclass(frozen=True)
class Damage:
    name: str
    file: str
    do: Callable[[Path], None]
    tensor: str = ""
    """A tensor that the error must name: it is known whenever a chunk is at fault."""

    def __str__(self) -> str:
        return self.name

    def apply(self, root: Path, step: int = 2) -> Path:
        path = layout.file(root, step, self.file)
        shutil.copy2(path, root.parent / "own")
        os.replace(root.parent / "own", path)  # no longer a link to the undamaged one
        self.do(path)
        return path


DAMAGES = [
    Damage("segment-flipped-in-length-of-header", "segment", lambda path: flip(path, 0)),
    Damage("segment-flipped-in-header", "segment", lambda path: flip(path, 100)),
    Damage("segment-flipped-in-padding-of-header", "segment", lambda path: flip(path, DATA_START - 1)),
    Damage("segment-flipped-in-first-byte", "segment", lambda path: flip(path, DATA_START), "first"),
    Damage("segment-flipped-in-first-chunk", "segment", lambda path: flip(path, DATA_START + 5_000_001), "first"),
    Damage("segment-flipped-in-last-chunk", "segment", lambda path: flip(path, DATA_START + CHUNK_BYTES + 100), "last"),
    Damage("segment-flipped-in-last-byte", "segment", lambda path: flip(path, -1), "last"),
    Damage("segment-with-a-blank-block", "segment", blank_a_block, "first"),
    Damage("segment-cut-by-a-byte", "segment", lambda path: cut(path, 1)),
    Damage("segment-cut-to-half", "segment", cut_to_half),
    Damage("segment-empty", "segment", empty),
    Damage("segment-grown", "segment", grow),
    Damage("segment-missing", "segment", os.unlink),
    Damage("seal-flipped-at-its-start", "seal", lambda path: flip(path, 15)),
    Damage("seal-flipped-in-its-body", "seal", lambda path: flip(path, 200)),
    Damage("seal-flipped-at-its-end", "seal", lambda path: flip(path, -5)),
    Damage("seal-cut-to-half", "seal", cut_to_half),
    Damage("seal-empty", "seal", empty),
    Damage("seal-missing", "seal", os.unlink),
    Damage("manifest-flipped-at-its-start", "manifest", lambda path: flip(path, 5)),
    Damage("manifest-flipped-in-its-body", "manifest", lambda path: flip(path, 200)),
    Damage("manifest-cut-to-half", "manifest", cut_to_half),
    Damage("manifest-empty", "manifest", empty),
]
every_damage = pytest.mark.parametrize("damage", DAMAGES, ids=str)


def restore_quietly(checkpointer: Checkpointer, state: Any) -> RestoreReport:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return checkpointer.restore(state)


# --- each of them ------------------------------------------------------------------------------


@every_damage
def test_restore_passes_over_a_damaged_step_and_takes_the_older_one_exactly(root: Path, damage: Damage) -> None:
    path = damage.apply(root)
    state = make_state(99)
    with Checkpointer(root) as checkpointer, pytest.warns(RuntimeWarning, match="step 2 is damaged") as caught:
        report = checkpointer.restore(state)
    assert_same(state, make_state(1))
    said = str(caught[0].message)
    assert path.name in said
    assert not damage.tensor or f"'{damage.tensor}'" in said
    assert report.step == 1
    assert [skipped.step for skipped in report.skipped] == [2]
    assert path.name in report.skipped[0].reason


@every_damage
def test_a_damaged_step_is_passed_over_each_time_and_left_as_it_is(root: Path, damage: Damage) -> None:
    damage.apply(root)
    before = {path: path.read_bytes() for path in layout.step_dir(root, 2).iterdir()}
    for _ in range(2):
        with Checkpointer(root) as checkpointer:
            report = restore_quietly(checkpointer, make_state(99))
            assert [skipped.step for skipped in report.skipped] == [2]
    assert {path: path.read_bytes() for path in layout.step_dir(root, 2).iterdir()} == before


@every_damage
def test_the_number_of_a_damaged_step_is_free_and_what_is_saved_under_it_counts(root: Path, damage: Damage) -> None:
    damage.apply(root)
    anew = {**make_state(2), "step": -2}
    with Checkpointer(root) as checkpointer:
        restore_quietly(checkpointer, make_state(99))
        checkpointer.save(2, anew)
        checkpointer.wait()
    assert Catalog(root).steps() == [1, 2]
    state = make_state(99)
    with Checkpointer(root) as checkpointer:
        report = checkpointer.restore(state)
    assert (report.step, report.skipped) == (2, ())
    assert_same(state, anew)


@every_damage
def test_a_damaged_step_asked_for_by_number_is_an_error_not_another_step(root: Path, damage: Damage) -> None:
    path = damage.apply(root)
    with Checkpointer(root) as checkpointer, pytest.raises(IntegrityError, match=re.escape(path.name)):
        checkpointer.restore(make_state(99), step=2)


@every_damage
def test_load_refuses_a_damaged_step(root: Path, damage: Damage) -> None:
    path = damage.apply(root)
    with pytest.raises(IntegrityError, match=re.escape(path.name)):
        load(root, 2)
    with pytest.raises(IntegrityError, match=re.escape(path.name)):
        load(root)


# --- several, all, none ------------------------------------------------------------------------


def test_restore_passes_over_as_many_damaged_steps_as_there_are(root: Path) -> None:
    save_all(root, 3, 4)
    DAMAGES[3].apply(root, 4)
    DAMAGES[-1].apply(root, 3)
    layout.seal(root, 2).unlink()
    state = make_state(99)
    with Checkpointer(root) as checkpointer, pytest.warns(RuntimeWarning, match="damaged") as caught:
        report = checkpointer.restore(state)
    assert (report.step, [skipped.step for skipped in report.skipped]) == (1, [4, 3, 2])
    assert [str(warning.message).split()[1] for warning in caught] == ["4", "3", "2"]
    assert_same(state, make_state(1))


def test_damage_in_an_older_step_does_not_concern_the_newest(root: Path) -> None:
    DAMAGES[3].apply(root, 1)
    state = make_state(99)
    with Checkpointer(root) as checkpointer:
        assert checkpointer.restore(state).step == 2
    assert_same(state, make_state(2))


@pytest.mark.parametrize("damage", [DAMAGES[3], DAMAGES[9], DAMAGES[12], DAMAGES[18], DAMAGES[22]], ids=str)
def test_when_every_checkpoint_is_damaged_restore_is_an_error_not_a_fresh_start(root: Path, damage: Damage) -> None:
    damage.apply(root, 1)
    damage.apply(root, 2)
    everything = re.escape(str(root)) + r".*\(steps \[1, 2\]\)"
    with Checkpointer(root) as checkpointer, pytest.raises(IntegrityError, match=everything):
        restore_quietly(checkpointer, make_state(99))


def test_a_run_started_again_is_told_again_that_every_checkpoint_is_damaged(root: Path) -> None:
    """A cluster restarts what fails: the second try must not train from scratch as if nothing had been there."""
    DAMAGES[3].apply(root, 1)
    DAMAGES[3].apply(root, 2)
    for _ in range(2):
        with Checkpointer(root) as checkpointer, pytest.raises(IntegrityError):
            restore_quietly(checkpointer, make_state(99))


def test_without_a_manifest_there_is_no_checkpoint(root: Path) -> None:
    layout.uncommit(root, 2)
    assert Catalog(root).steps() == [1]
    with pytest.raises(NotFoundError, match="step 2 is not a checkpoint"):
        load(root, 2)
    state = make_state(99)
    with Checkpointer(root) as checkpointer:
        assert checkpointer.restore(state).step == 1
        with pytest.raises(NotFoundError, match="step 2 is not a checkpoint"):
            checkpointer.restore(state, step=2)
    assert_same(state, make_state(1))


def test_what_has_no_manifest_is_swept_by_the_next_run(root: Path) -> None:
    layout.uncommit(root, 2)
    save_all(root, 3)
    assert layout.steps_there(root) == [1, 3]


def test_the_files_of_a_damaged_step_stay_for_a_person_to_look_at(root: Path) -> None:
    path = DAMAGES[3].apply(root)
    damaged = path.read_bytes()
    with Checkpointer(root) as checkpointer:
        restore_quietly(checkpointer, make_state(99))
    save_all(root, 3)
    assert path.read_bytes() == damaged


# --- every bit ---------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """One checkpoint whose seal and manifest are small enough to try every bit of them."""
    with Checkpointer(tmp_path / "small") as checkpointer:
        checkpointer.save(1, {"a": torch.arange(5), "b": [1, (2.5, None)]})
        checkpointer.wait()
    return tmp_path / "small"


def outcome(root: Path) -> str:
    """What opening step 1 comes to; only an honest refusal is ``refused``."""
    try:
        Catalog(root).open(1).close()
    except (IntegrityError, VersionError):
        return "refused"
    except Exception as error:
        return repr(error)
    return "accepted"


@pytest.mark.parametrize("file", ["seal", "manifest"])
def test_every_flipped_bit_is_refused(small: Path, file: str) -> None:
    path = layout.file(small, 1, file)
    data = path.read_bytes()
    wrong = {}
    with path.open("r+b", buffering=0) as writing:
        for position, byte in enumerate(data):
            for bit in range(8):
                os.pwrite(writing.fileno(), bytes([byte ^ 1 << bit]), position)
                if (said := outcome(small)) != "refused":
                    wrong[position, bit] = said
            os.pwrite(writing.fileno(), bytes([byte]), position)
    assert outcome(small) == "accepted"
    assert wrong == {}


@pytest.mark.parametrize("file", ["seal", "manifest"])
def test_bytes_replaced_at_random_are_refused(small: Path, file: str) -> None:
    path = layout.file(small, 1, file)
    data = path.read_bytes()
    chance = random.Random(20)
    wrong = {}
    for number in range(500):
        position, length = chance.randrange(len(data) - 1), chance.randint(1, 40)
        noise = chance.randbytes(length)[: len(data) - 1 - position]
        if noise == data[position : position + len(noise)]:
            continue
        path.write_bytes(data[:position] + noise + data[position + len(noise) :])
        if (said := outcome(small)) != "refused":
            wrong[number, position, noise] = said
    assert wrong == {}


@pytest.mark.parametrize("file", ["seal", "manifest"])
def test_every_cut_is_refused(small: Path, file: str) -> None:
    path = layout.file(small, 1, file)
    wrong = {}
    for size in reversed(range(path.stat().st_size - 1)):  # the last byte is a line feed, and says nothing
        os.truncate(path, size)
        if (said := outcome(small)) != "refused":
            wrong[size] = said
    assert wrong == {}
