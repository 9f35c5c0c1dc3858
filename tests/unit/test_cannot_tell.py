"""What cannot be read is neither there nor absent: nothing is deleted because of it, and it holds nobody up."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from stillframe import Catalog
from stillframe.checkpoint import labels
from stillframe.checkpoint.lock import Life, Note, RootLock, life_of, owner_of
from stillframe.errors import IntegrityError, NotFoundError, StorageError, to_record
from stillframe.format import limits, names
from stillframe.keeper.retention import Pruner
from stillframe.model import Label, SaveId
from stillframe.retention import KeepFor, KeepLast
from stillframe.save.steps import TakenSteps
from stillframe.store.calls import Calls
from stillframe.store.posix import PosixStore
from tests import layout
from tests.unit.saved import OTHER, RUN, begun, commit, rank_files, sealed, write


class Refusing(Calls):
    """Opening, or looking at, a file or directory of such a name fails."""

    def __init__(self, code: int, is_refused: Callable[[str], bool]) -> None:
        self._code = code
        self._is_refused = is_refused

    def open(self, name: str, flags: int, dir_fd: int | None = None) -> int:
        self._check(name)
        return super().open(name, flags, dir_fd)

    def stat(self, name: str, dir_fd: int) -> os.stat_result:
        self._check(name)
        return super().stat(name, dir_fd)

    def _check(self, name: str) -> None:
        if self._is_refused(name):
            raise OSError(self._code, os.strerror(self._code), name)


def refusing(root: Path, code: int, *refused: str) -> Catalog:
    return Catalog(PosixStore(root, calls=Refusing(code, lambda name: name in refused)))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    begun(tmp_path)
    for step in (1, 2, 3):
        write(tmp_path, SaveId(step), 0)
        commit(tmp_path, SaveId(step))
    return tmp_path


@pytest.fixture
def catalog(root: Path) -> Catalog:
    """Step 2 cannot be read."""
    return refusing(root, errno.EACCES, layout.step_dir(root, 2).name)


# --- one step of several -----------------------------------------------------------------------


def test_the_newest_is_found_whatever_older_ones_there_are(catalog: Catalog) -> None:
    assert catalog.latest() == 3
    with pytest.raises(StorageError):
        catalog.newest({SaveId(3)})


def test_the_newest_that_cannot_be_looked_at_is_an_error_not_an_older_one(root: Path) -> None:
    catalog = refusing(root, errno.EACCES, layout.step_dir(root, 3).name)
    with pytest.raises(StorageError, match="Permission denied"):
        catalog.newest()
    with pytest.raises(StorageError, match="Permission denied"):
        TakenSteps(catalog).issue(None)


def test_another_step_can_be_saved(catalog: Catalog) -> None:
    taken = TakenSteps(catalog)
    assert taken.begin(4) == 1


def test_a_step_that_is_not_there_is_not_found(catalog: Catalog) -> None:
    with pytest.raises(NotFoundError):
        catalog.open(7)


def pruner(catalog: Catalog, epoch: int = 1, keep: KeepLast | KeepFor | None = None) -> Pruner:
    return Pruner(catalog, keep or KeepLast(1), 0, True, lambda: epoch)


def test_retention_passes_it_over_and_says_so(root: Path, catalog: Catalog) -> None:
    with pytest.raises(StorageError, match="Permission denied"):
        pruner(catalog).committed(SaveId(3))
    assert Catalog(root).steps() == [2, 3]


def test_leftovers_beside_it_are_removed(root: Path, catalog: Catalog) -> None:
    write(root, SaveId(4), 0)
    epoch = begun(root, OTHER, parent=SaveId(3))
    with pytest.raises(StorageError, match="Permission denied"):
        pruner(catalog, epoch).prune()
    assert not layout.has_step(root, 4)
    assert Catalog(root).is_committed(SaveId(2))


@pytest.mark.parametrize("refused", [names.MANIFEST, names.aside(), names.PIN])
@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_nothing_is_removed_where_nobody_can_tell_what_it_is(root: Path, refused: str, code: int) -> None:
    epoch = begun(root, OTHER, parent=SaveId(3))
    (layout.step_dir(root, 1) / names.PIN).touch()
    keeper = pruner(refusing(root, code, refused), epoch)
    for _ in range(2):
        try:
            keeper.prune(SaveId(3))
        except StorageError:
            assert refused != names.PIN, "a pin that cannot be read is a pin"
    assert Catalog(root).steps() == [1, 2, 3]
    for step in (1, 2, 3):
        assert rank_files(0) <= {path.name for path in layout.step_dir(root, step).iterdir()}


# --- a manifest --------------------------------------------------------------------------------


def test_a_commit_that_cannot_compare_the_manifest_that_is_there_is_in_doubt(tmp_path: Path) -> None:
    store = PosixStore(tmp_path, calls=Refusing(errno.EACCES, lambda name: name == layout.MANIFEST))
    save = sealed(store, 0, 1)
    there = Path(Catalog(tmp_path).dir(save.identify())) / layout.MANIFEST
    there.write_bytes(b"whose?")
    with pytest.raises(StorageError, match="Permission denied"):
        save.commit([save.sealed])
    assert save.is_promised
    assert there.read_bytes() == b"whose?"


def test_a_manifest_that_is_too_large_is_damage_and_stays(root: Path) -> None:
    os.truncate(layout.manifest(root, 3), limits.MAX_MANIFEST_BYTES + 1)
    with pytest.raises(IntegrityError, match="more than the"):
        Catalog(root).manifest(SaveId(3))
    assert layout.manifest(root, 3).stat().st_size == limits.MAX_MANIFEST_BYTES + 1


# --- an epoch ----------------------------------------------------------------------------------


def test_an_epoch_whose_parent_cannot_be_read_is_no_reason_to_guess(root: Path) -> None:
    catalog = refusing(root, errno.EIO, Path(names.parent(1)).name)
    with pytest.raises(StorageError):
        catalog.look()
    with pytest.raises(StorageError):
        catalog.newest()


def test_where_the_files_of_the_epochs_are_lost_the_manifests_are_asked(root: Path) -> None:
    (root / names.parent(1)).unlink()
    assert Catalog(root).steps() == [1, 2, 3]


# --- a label -----------------------------------------------------------------------------------


@pytest.mark.parametrize("unreadable", [layout.LABEL, layout.MANIFEST])
def test_a_label_of_which_nobody_can_tell_stays_for_the_next_run(root: Path, unreadable: str) -> None:
    labels.write(Catalog(root), SaveId(3), Label("tag", ("file",), b"x"), 0, 1, decides=True)
    with contextlib.suppress(StorageError):  # said, and tried again
        labels.finish(refusing(root, errno.ESTALE, unreadable), 2)
    assert layout.unfinished_label(root, 3).is_dir()
    labels.finish(Catalog(root), 2)
    assert (root / "tag" / "file").read_bytes().startswith(b"x")


# --- text --------------------------------------------------------------------------------------


@pytest.mark.parametrize("character", ["x", "\x01", "\N{GRINNING FACE}"])
def test_a_note_with_a_long_failure_in_any_script_can_be_read(tmp_path: Path, character: str) -> None:
    """A note that cannot be read would let others take a living keeper for a dead one."""
    lock = RootLock(PosixStore(tmp_path), 1, RUN, lambda: Note("finishing", character * 5000))
    lock.acquire()
    assert life_of(PosixStore(tmp_path), 1, RUN) is Life.ALIVE
    owner = owner_of(PosixStore(tmp_path), 1)
    assert owner is not None
    assert len(owner.failure) > 300
    lock.release()


def test_an_error_about_a_path_that_is_no_text_can_be_told() -> None:
    path = os.fsdecode(b"/root-\xff")
    kind, message = to_record(StorageError(f"writing {path}"))
    assert msgspec.json.decode(msgspec.json.encode((kind, message))) == ["StorageError", "writing /root-\\udcff"]
