"""What cannot be looked at is neither there nor absent: nothing is deleted because of it, and it holds nobody up."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from stillframe import Catalog
from stillframe.checkpoint.lock import Life, RootLock, life_of
from stillframe.errors import NotFoundError, StorageError, to_record
from stillframe.format import limits
from stillframe.format.records import SealDraft
from stillframe.keeper import labels
from stillframe.keeper.retention import Pruner, sweep
from stillframe.keeper.segment import SegmentWriter
from stillframe.link.messages import Begin
from stillframe.model import Label
from stillframe.retention import KeepLast
from stillframe.save.saves import Saves
from stillframe.save.steps import TakenSteps
from stillframe.store.calls import Calls
from stillframe.store.posix import PosixStore
from tests import layout
from tests.unit.test_prune_ranks import ATTEMPT, OTHER, commit, write


class Refusing(Calls):
    """Opening a file or directory of such a name fails."""

    def __init__(self, code: int, is_refused: Callable[[str], bool]) -> None:
        self._code = code
        self._is_refused = is_refused

    def open(self, name: str, flags: int, dir_fd: int | None = None) -> int:
        if self._is_refused(name):
            raise OSError(self._code, os.strerror(self._code), name)
        return super().open(name, flags, dir_fd)


def refusing(root: Path, code: int, *refused: str) -> Catalog:
    return Catalog(PosixStore(root, calls=Refusing(code, lambda name: name in refused)))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (1, 2, 3):
        write(tmp_path, step, 0)
        commit(tmp_path, step)
    return tmp_path


@pytest.fixture
def catalog(root: Path) -> Catalog:
    """Step 2 cannot be looked at."""
    return refusing(root, errno.EACCES, layout.step_dir(root, 2).name)


# --- one step of several -----------------------------------------------------------------------


def test_the_newest_is_found_whatever_older_ones_there_are(catalog: Catalog) -> None:
    assert catalog.latest() == 3
    with pytest.raises(StorageError):
        catalog.latest({3})


def test_another_step_can_be_saved(catalog: Catalog) -> None:
    taken = TakenSteps(catalog, Saves("raise"), has_other_ranks=False)
    taken.check_free(4)
    with pytest.raises(StorageError):
        taken.check_free(2)


def test_a_step_that_is_not_there_is_not_found(catalog: Catalog) -> None:
    with pytest.raises(NotFoundError):
        catalog.open(7)


def test_retention_passes_it_over_and_says_so(root: Path, catalog: Catalog) -> None:
    pruner = Pruner(catalog, KeepLast(1), 0, ATTEMPT, is_alone=True)
    with pytest.raises(StorageError, match="Permission denied"):
        pruner.committed(3, None)
    assert Catalog(root).steps() == [2, 3]


def test_a_sweep_passes_it_over_and_says_so(root: Path, catalog: Catalog) -> None:
    write(root, 4, 0, attempt=OTHER)
    with pytest.raises(StorageError, match="Permission denied"):
        sweep(catalog, ATTEMPT, "all")
    assert not layout.has_step(root, 4)


# --- a manifest --------------------------------------------------------------------------------


def test_a_commit_that_fails_takes_back_no_manifest_but_its_own(root: Path) -> None:
    """Another run has committed the step, and its manifest cannot be compared with ours."""
    catalog = refusing(root, errno.EACCES, layout.MANIFEST)
    begin = Begin(1, 3, 0.0, 0, 0, 0, "", ())
    draft = SealDraft(3, 0, 1, OTHER, msgspec.Raw(b"[]"), msgspec.Raw(b"[]"), msgspec.Raw(b"[]"))
    writer = SegmentWriter(begin, b"", draft, catalog, threading.Lock())
    with pytest.raises(StorageError, match="Permission denied"):
        writer.commit([])
    assert Catalog(root).steps() == [1, 2, 3]


def test_a_manifest_whose_bytes_the_device_does_not_give_can_be_set_aside(root: Path) -> None:
    before = layout.manifest(root, 3).read_bytes()
    catalog = refusing(root, errno.EIO, layout.MANIFEST)
    assert catalog.mark_damaged(3)
    assert Catalog(root).steps() == [1, 2]
    assert layout.aside(root, 3).read_bytes() == before


def test_a_manifest_that_is_too_large_is_kept_for_a_person_to_look_at(root: Path) -> None:
    os.truncate(layout.manifest(root, 3), limits.MAX_MANIFEST_BYTES + 1)
    assert Catalog(root).mark_damaged(3)
    assert layout.aside(root, 3).stat().st_size == limits.MAX_MANIFEST_BYTES + 1


# --- a label -----------------------------------------------------------------------------------


@pytest.mark.parametrize("unreadable", [layout.LABEL, layout.MANIFEST])
def test_a_label_of_which_nobody_can_tell_stays_for_the_next_run(root: Path, unreadable: str) -> None:
    labels.write(Catalog(root), 3, ATTEMPT, Label("tag", ("file",), b"x"), decides=True)
    labels.finish(refusing(root, errno.ESTALE, unreadable), OTHER)
    assert layout.unfinished_label(root, 3, ATTEMPT).is_dir()
    labels.finish(Catalog(root), OTHER)
    assert (root / "tag" / "file").read_bytes() == b"x"


# --- text --------------------------------------------------------------------------------------


def test_a_long_failure_in_any_script_is_read_back_whole(tmp_path: Path) -> None:
    """A note that cannot be read would let a sweep take a living keeper for a dead one."""
    lock = RootLock(PosixStore(tmp_path), 1, ATTEMPT)
    lock.acquire()
    lock.note("finishing", "\x01" * 2000)
    assert life_of(PosixStore(tmp_path), 1, ATTEMPT) is Life.ALIVE
    lock.release()


def test_an_error_about_a_path_that_is_no_text_can_be_told() -> None:
    path = os.fsdecode(b"/root-\xff")
    kind, message = to_record(StorageError(f"writing {path}"))
    assert msgspec.json.decode(msgspec.json.encode((kind, message))) == ["StorageError", "writing /root-\\udcff"]
