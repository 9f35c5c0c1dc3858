"""Deleting with several ranks and several epochs: rank 0 of the newest decides, each rank removes its own files, and
nothing that may still count goes."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from stillframe import Catalog
from stillframe.checkpoint import epochs
from stillframe.checkpoint.removal import remove_all, set_aside
from stillframe.errors import BusyError, StorageError
from stillframe.format import names
from stillframe.format.epochs import Aside, encode_aside
from stillframe.keeper.retention import Pruner, remove_spares
from stillframe.model import SaveId
from stillframe.retention import Keep, KeepBest, KeepLast
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


def unshared_pruner(root: Path, rank: int, epoch: int | None = 1) -> Pruner:
    return Pruner(Catalog(root, rank), KeepLast(1), rank, True, lambda: epoch)


# --- several ranks -----------------------------------------------------------------------------


def test_rank_0_takes_the_manifest_and_its_own_files_the_others_theirs(root: Path) -> None:
    decider, member = pruner(root, 0), pruner(root, 1)
    decider.committed(first(1))
    for step in (1, 2):
        member.committed(first(step))
    assert files(root, first(1)) > rank_files(1)  # its manifest is still there
    decider.committed(first(2))
    assert files(root, first(1)) == rank_files(1) | {TOMBSTONE}
    assert not Catalog(root).is_committed(first(1))
    assert member.has_work
    assert decider.has_work
    member.tidy()
    assert files(root, first(1)) == {TOMBSTONE}
    decider.tidy()
    assert not Path(Catalog(root).dir(first(1))).exists()
    assert not decider.has_work
    assert not member.has_work
    assert files(root, first(2)) == rank_files(0) | rank_files(1) | {names.MANIFEST}


def test_what_a_rank_has_left_behind_rank_0_removes_in_the_end(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decider = pruner(root, 0)
    decider.committed(first(1))
    for _ in range(3):
        decider.committed(first(2))
        assert files(root, first(1)) == rank_files(1) | {TOMBSTONE}
    monkeypatch.setattr("stillframe.keeper.retention._OVERDUE_S", -1.0)
    decider.committed(first(2))
    assert files(root, first(1)) == set()


def test_a_member_removes_nothing_that_its_policy_keeps(root: Path) -> None:
    """Somebody has removed a manifest by hand: that is no reason to remove more."""
    member = pruner(root, 1, KeepLast(2))
    for step in (1, 2):
        (Path(Catalog(root).dir(first(step))) / names.MANIFEST).unlink()
        member.committed(first(step))
    assert files(root, first(1)) == files(root, first(2)) == rank_files(0) | rank_files(1)


def test_a_member_removes_nothing_of_a_checkpoint_that_is_quarantined(root: Path) -> None:
    member = pruner(root, 1)
    set_aside(Catalog(root), first(1), "quarantined", 1)
    for step in (1, 2):
        member.committed(first(step))
    assert files(root, first(1)) >= rank_files(1)


def test_a_pinned_checkpoint_stays_whole(root: Path) -> None:
    (Path(Catalog(root).dir(first(1))) / names.PIN).touch()
    decider, member = pruner(root, 0), pruner(root, 1)
    for step in (1, 2):
        decider.committed(first(step))
        member.committed(first(step))
    assert files(root, first(1)) == rank_files(0) | rank_files(1) | {names.MANIFEST, names.PIN}


def test_a_checkpoint_of_an_earlier_epoch_goes_as_a_whole(root: Path) -> None:
    """Its ranks are gone: nobody else will remove their files."""
    epoch = begun(root, OTHER, parent=first(2))
    newest = SaveId(3, epoch)
    write(root, newest, 0, 1)
    commit(root, newest, 2)
    pruner(root, 0, epoch=epoch).committed(newest)
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

    later = epochs.claim(catalog, OTHER, 0)
    epochs.begin(catalog, later, OTHER, 0, first(3), is_shared=False)
    write(tmp_path, SaveId(4, later), 1)
    own = unshared_pruner(tmp_path, 1, later)
    own.prune()  # who knows whether the other ranks have step 3
    own.committed(SaveId(4, later))
    assert Catalog(tmp_path, 1).steps() == [2, 3, 4]
    unshared_pruner(tmp_path, 1, None).prune(None, 4)  # its trainer begins another epoch meanwhile
    assert Catalog(tmp_path, 1).steps() == [2, 3, 4]
    unshared_pruner(tmp_path, 1, None).committed(SaveId(4, later), 4)  # but what is committed was so in its own
    assert Catalog(tmp_path, 1).steps() == [4]


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
    (Path(Catalog(root).dir(torn)) / f"{names.segment(2)}.0123abcd.partial").touch()
    (Path(Catalog(root).dir(torn)) / "notes.txt").touch()
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
    (Path(catalog.dir(first(1))) / names.MANIFEST).unlink()
    pruner(root, 0).prune()
    assert files(root, first(1)) == set()
    assert not Path(catalog.dir(first(1))).exists()


def test_what_is_quarantined_stays(root: Path) -> None:
    set_aside(Catalog(root), first(1), "quarantined", 1)
    epoch = begun(root, OTHER, parent=first(2))
    for _ in range(2):
        pruner(root, 0, epoch=epoch).prune()
        assert files(root, first(1)) == rank_files(0) | rank_files(1) | {names.MANIFEST, TOMBSTONE}


def test_a_tombstone_that_cannot_be_read_keeps_its_save(root: Path) -> None:
    (Path(Catalog(root).dir(first(1))) / TOMBSTONE).write_bytes(b"torn")
    with pytest.raises(Exception, match="stays"):
        pruner(root, 0).prune()
    assert files(root, first(1)) >= rank_files(0) | rank_files(1)


# --- branches ----------------------------------------------------------------------------------


def test_what_has_just_been_committed_stays_whatever_its_number(root: Path) -> None:
    write(root, first(0), 0, 1)
    commit(root, first(0), 2)
    pruner(root, 0, is_alone=True).committed(first(0))
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
        keeper.committed(save)
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
        late.committed(first(2))
    assert files(root, first(1)) == rank_files(0) | rank_files(1) | {names.MANIFEST}
    assert Catalog(root).is_committed(first(1))


def test_a_tombstone_of_somebody_else_is_not_withdrawn(root: Path) -> None:
    """Only who put it may take it back: whoever put this one has begun to remove the files."""
    catalog = Catalog(root)
    later = begun(root, OTHER, parent=first(2))
    told = Aside("removed", was_committed=True, epoch=later, unix_s=0.0)
    (Path(catalog.dir(first(1))) / TOMBSTONE).write_bytes(encode_aside(told))
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
    assert not Path(catalog.dir(first(1))).exists()


# --- a long run --------------------------------------------------------------------------------


def test_what_a_keeper_remembers_does_not_grow_with_the_saves(tmp_path: Path) -> None:
    begun(tmp_path)
    keepers = [
        Pruner(Catalog(tmp_path), keep, rank, False, lambda: 1) for rank in (0, 1) for keep in (None, KeepLast(3))
    ]
    for step in range(5000):
        for each in keepers:
            if each._decides and each._keep is not None:
                each._own.add(first(step))  # a listing for each would be all that takes time
            else:
                each.committed(first(step))
    keepers[1].committed(first(5000))
    assert [len(each._own) for each in keepers] == [0, 0, 0, 3]


def test_a_member_comes_to_every_save_although_the_oldest_are_kept_for_good(tmp_path: Path) -> None:
    """Which ones are the best is not known here: it looks whether rank 0 has set them aside, a few at a time."""
    begun(tmp_path)
    for step in range(20):
        write(tmp_path, first(step), 0, 1)
        commit(tmp_path, first(step), 2)
    member = pruner(tmp_path, 1, KeepBest("loss", 20))
    for step in range(500):
        member.committed(first(step))
    assert len(member._own) <= 20 + 20


def test_tombstones_that_are_gone_are_forgotten(root: Path) -> None:
    decider = pruner(root, 0)
    decider._tombstones = {first(step) for step in range(1, 1000)}
    decider.prune()
    assert decider._tombstones == {first(1), first(2)}


def test_many_saves_are_looked_at_together_and_one_that_cannot_be_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new keeper meets the tombstones of a day: one after the other they would take minutes on an object store."""
    for step in range(20):
        (tmp_path / names.step_dir(first(step))).mkdir(parents=True)
    together = threading.Barrier(4)

    def is_committed(catalog: Catalog, save: SaveId) -> bool:
        if save.step < 16:
            together.wait(20)  # breaks, and fails, if fewer come
        if save.step == 17:
            raise StorageError("it cannot be looked at")
        return False

    problems: list[StorageError] = []
    catalog = Catalog(tmp_path)
    view = catalog.look()
    monkeypatch.setattr(Catalog, "is_committed", is_committed)
    known = Pruner(catalog, KeepLast(1), 0, True, lambda: None)._take_stock(view, problems)
    assert [save.step for save in known] == [step for step in range(20) if step != 17]
    assert [str(each) for each in problems] == ["it cannot be looked at"]
