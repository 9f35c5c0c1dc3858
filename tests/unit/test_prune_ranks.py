"""Deleting with several ranks and several epochs: rank 0 of the newest decides, each rank removes its own files, and
nothing that may still count goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from stillframe import Catalog
from stillframe.checkpoint import epochs
from stillframe.checkpoint.removal import remove_all, set_aside
from stillframe.errors import BusyError
from stillframe.format import names
from stillframe.format.epochs import Aside, encode_aside
from stillframe.keeper.retention import Pruner, remove_spares
from stillframe.model import SaveId
from stillframe.retention import Keep, KeepLast
from tests.unit.saved import OTHER, RUN, begun, commit, files, rank_files, write

TOMBSTONE = names.aside()


def first(step: int) -> SaveId:
    return SaveId(step, 1)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 1 and 2 of two ranks, in the first epoch."""
    begun(tmp_path)
    for step in (1, 2):
        write(tmp_path, first(step), 0, 1)
        commit(tmp_path, first(step), 2)
    return tmp_path


def pruner(root: Path, rank: int, keep: Keep | None = None, epoch: int = 1, is_alone: bool = False) -> Pruner:
    return Pruner(Catalog(root), keep or KeepLast(1), rank, is_alone, lambda: epoch)


def unshared_pruner(root: Path, rank: int) -> Pruner:
    return Pruner(Catalog(root, rank), KeepLast(1), rank, True, lambda: 1)


# --- several ranks -----------------------------------------------------------------------------


def test_rank_0_takes_the_manifest_and_its_own_files_the_others_theirs(root: Path) -> None:
    decider, member = pruner(root, 0), pruner(root, 1)
    decider.committed(first(1), None)
    for step in (1, 2):
        member.committed(first(step), None)
    assert files(root, first(1)) > rank_files(1)  # its manifest is still there
    decider.committed(first(2), None)
    assert files(root, first(1)) == rank_files(1) | {TOMBSTONE}
    assert not Catalog(root).is_committed(first(1))
    assert member.has_work
    assert decider.has_work
    member.tidy()
    assert files(root, first(1)) == {TOMBSTONE}
    decider.tidy()
    assert not Catalog(root).dir(first(1)).exists()
    assert not decider.has_work
    assert not member.has_work
    assert files(root, first(2)) == rank_files(0) | rank_files(1) | {names.MANIFEST}


def test_what_a_rank_has_left_behind_rank_0_removes_in_the_end(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decider = pruner(root, 0)
    decider.committed(first(1), None)
    for _ in range(3):
        decider.committed(first(2), None)
        assert files(root, first(1)) == rank_files(1) | {TOMBSTONE}
    monkeypatch.setattr("stillframe.keeper.retention._OVERDUE_S", -1.0)
    decider.committed(first(2), None)
    assert files(root, first(1)) == set()


def test_a_member_removes_nothing_that_its_policy_keeps(root: Path) -> None:
    """Somebody has removed a manifest by hand: that is no reason to remove more."""
    member = pruner(root, 1, KeepLast(2))
    for step in (1, 2):
        (Catalog(root).dir(first(step)) / names.MANIFEST).unlink()
        member.committed(first(step), None)
    assert files(root, first(1)) == files(root, first(2)) == rank_files(0) | rank_files(1)


def test_a_member_removes_nothing_of_a_checkpoint_that_is_quarantined(root: Path) -> None:
    member = pruner(root, 1)
    set_aside(Catalog(root), first(1), "quarantined", 1)
    for step in (1, 2):
        member.committed(first(step), None)
    assert files(root, first(1)) >= rank_files(1)


def test_a_pinned_checkpoint_stays_whole(root: Path) -> None:
    (Catalog(root).dir(first(1)) / names.PIN).touch()
    decider, member = pruner(root, 0), pruner(root, 1)
    for step in (1, 2):
        decider.committed(first(step), None)
        member.committed(first(step), None)
    assert files(root, first(1)) == rank_files(0) | rank_files(1) | {names.MANIFEST, names.PIN}


def test_a_checkpoint_of_an_earlier_epoch_goes_as_a_whole(root: Path) -> None:
    """Its ranks are gone: nobody else will remove their files."""
    epoch = begun(root, OTHER, parent=first(2))
    newest = SaveId(3, epoch)
    write(root, newest, 0, 1)
    commit(root, newest, 2)
    pruner(root, 0, epoch=epoch).committed(newest, None)
    assert files(root, first(1)) == files(root, first(2)) == set()
    assert Catalog(root).steps() == [3]


def test_where_roots_are_not_shared_nothing_goes_that_another_rank_may_lack(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    epochs.begin(catalog, epochs.claim(catalog, RUN, 0), RUN, 0, None, is_shared=False)
    own = unshared_pruner(tmp_path, 1)
    for step in (1, 2, 3):
        write(tmp_path, first(step), 0, 1)
        own.committed(first(step), -1)
    assert Catalog(tmp_path, 1).steps() == [1, 2, 3]
    own.committed(first(3), 2)
    assert Catalog(tmp_path, 1).steps() == [2, 3]
    assert Catalog(tmp_path, 0).steps() == [1, 2, 3]
    assert files(tmp_path, first(1)) == rank_files(0)


def test_spares_of_ranks_that_there_are_no_more_go(tmp_path: Path) -> None:
    for rank in range(4):
        (tmp_path / names.spare(rank)).touch()
        (tmp_path / f"{names.spare(rank)}.0123abcd.partial").touch()
    remove_spares(Catalog(tmp_path), 1, 2)
    assert [rank for rank in range(4) if (tmp_path / f"{names.spare(rank)}.0123abcd.partial").exists()] == [0, 2, 3]
    remove_spares(Catalog(tmp_path), 0, 2)
    assert [rank for rank in range(4) if (tmp_path / names.spare(rank)).exists()] == [0, 1]


# --- what is left over -------------------------------------------------------------------------


def test_what_an_earlier_epoch_did_not_finish_goes_and_its_tombstone_stays_a_day(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torn = first(3)
    write(root, torn, 0, 1)
    (Catalog(root).dir(torn) / f"{names.segment(2)}.0123abcd.partial").touch()
    (Catalog(root).dir(torn) / "notes.txt").touch()
    epoch = begun(root, OTHER, parent=first(2))
    pruner(root, 0, epoch=epoch).prune()
    assert files(root, torn) == {TOMBSTONE, "notes.txt"}
    aside = Catalog(root).aside(torn)
    assert aside is not None
    assert (aside.reason, aside.was_committed, aside.epoch) == ("left over", False, epoch)
    write(root, torn, 1)  # a keeper that was only paused goes on
    pruner(root, 0, epoch=epoch).prune()
    assert files(root, torn) == {TOMBSTONE, "notes.txt"}
    monkeypatch.setattr("stillframe.keeper.retention.TOMBSTONE_S", -1.0)
    pruner(root, 0, epoch=epoch).prune()
    assert files(root, torn) == {"notes.txt"}


def test_what_this_epoch_is_saving_is_left_alone(root: Path) -> None:
    write(root, first(3), 0)
    write(root, SaveId(3, 2), 0)
    pruner(root, 0, epoch=1).prune()
    assert files(root, first(3)) == files(root, SaveId(3, 2)) == rank_files(0)


def test_a_removal_that_was_interrupted_is_gone_on_with(root: Path) -> None:
    catalog = Catalog(root)
    set_aside(catalog, first(1), "pruned", 1)
    (catalog.dir(first(1)) / names.MANIFEST).unlink()
    pruner(root, 0).prune()
    assert files(root, first(1)) == set()
    assert not catalog.dir(first(1)).exists()


def test_what_is_quarantined_stays(root: Path) -> None:
    set_aside(Catalog(root), first(1), "quarantined", 1)
    epoch = begun(root, OTHER, parent=first(2))
    for _ in range(2):
        pruner(root, 0, epoch=epoch).prune()
        assert files(root, first(1)) == rank_files(0) | rank_files(1) | {names.MANIFEST, TOMBSTONE}


def test_a_tombstone_that_cannot_be_read_keeps_its_save(root: Path) -> None:
    (Catalog(root).dir(first(1)) / TOMBSTONE).write_bytes(b"torn")
    with pytest.raises(Exception, match="stays"):
        pruner(root, 0).prune()
    assert files(root, first(1)) >= rank_files(0) | rank_files(1)


# --- branches ----------------------------------------------------------------------------------


def test_what_has_just_been_committed_stays_whatever_its_number(root: Path) -> None:
    write(root, first(0), 0, 1)
    commit(root, first(0), 2)
    pruner(root, 0, is_alone=True).committed(first(0), None)
    assert Catalog(root).steps() == [0, 2]


def test_an_abandoned_branch_goes_once_the_new_one_has_reached_it(tmp_path: Path) -> None:
    begun(tmp_path)
    for step in (1, 2, 5):
        write(tmp_path, first(step), 0)
        commit(tmp_path, first(step))
    epoch = begun(tmp_path, OTHER, parent=first(1))
    keeper = pruner(tmp_path, 0, KeepLast(9), epoch, is_alone=True)
    for step, left in ((2, {first(1), first(5)}), (6, {first(1), SaveId(2, epoch)})):
        save = SaveId(step, epoch)
        write(tmp_path, save, 0)
        commit(tmp_path, save)
        keeper.committed(save, None)
        catalog = Catalog(tmp_path)
        assert {each for each in catalog.look().saves if catalog.is_committed(each)} == {*left, save}


# --- another run takes over --------------------------------------------------------------------


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_run_that_was_superseded_removes_nothing(root: Path, has_begun: bool) -> None:
    """From the claim on: who has claimed an epoch is about to choose what to go on from."""
    late = pruner(root, 0, is_alone=True)
    epochs.claim(Catalog(root), OTHER, 0)
    if has_begun:
        begun(root, OTHER, parent=first(2))
    with pytest.raises(BusyError, match="another run has taken over"):
        late.committed(first(2), None)
    assert files(root, first(1)) == rank_files(0) | rank_files(1) | {names.MANIFEST}
    assert Catalog(root).is_committed(first(1))


def test_a_tombstone_of_somebody_else_is_not_withdrawn(root: Path) -> None:
    """Only who put it may take it back: whoever put this one has begun to remove the files."""
    catalog = Catalog(root)
    later = begun(root, OTHER, parent=first(2))
    told = Aside("removed", was_committed=True, epoch=later, unix_s=0.0)
    (catalog.dir(first(1)) / TOMBSTONE).write_bytes(encode_aside(told))
    with pytest.raises(BusyError):
        set_aside(catalog, first(1), "pruned", 1)
    assert catalog.aside(first(1)) == told


@pytest.mark.parametrize("stop_after", range(6))
def test_a_checkpoint_that_is_half_removed_is_none(root: Path, stop_after: int) -> None:
    class Stopped(Exception):
        pass

    catalog = Catalog(root)
    left = stop_after
    delete = catalog.store.delete

    def deleting(keys: list[str]) -> None:
        nonlocal left
        for key in keys:
            if not left:
                raise Stopped
            left -= 1
            delete([key])

    set_aside(catalog, first(1), "pruned", 1)
    catalog.store.delete = deleting  # type: ignore[method-assign, assignment]
    with pytest.raises(Stopped):  # before the last of six names
        remove_all(catalog, first(1))
    assert not Catalog(root).is_committed(first(1))
    assert Catalog(root).steps() == [2]
    pruner(root, 0).prune()
    assert not catalog.dir(first(1)).exists()
