"""A tier's thread in the keeper: whatever it meets is trouble with that tier, and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from stillframe import Catalog, Checkpointer, NotFoundError
from stillframe.checkpoint.promote import introduce
from stillframe.format import names
from stillframe.format.epochs import Target, encode_target
from stillframe.keeper.carrying import CarryingNote
from stillframe.keeper.follower import Follower
from stillframe.link.messages import TierFailed, TierNews
from stillframe.model import SaveId
from stillframe.store.posix import PosixStore
from stillframe.tiers import Tier, check_tiers
from tests import layout
from tests.support import until


class Broken(Follower):
    def _turn(self, epoch: int) -> bool:
        raise RuntimeError("a bug")


def test_a_bug_in_carrying_is_told_as_trouble_and_ends_no_keeper(tmp_path: Path) -> None:
    told: list[TierNews | TierFailed] = []
    said: list[str] = []

    def news() -> TierNews:
        return [each for each in told if isinstance(each, TierNews)][-1]

    (config,) = check_tiers([Tier(tmp_path / "tier")], str(tmp_path / "root"))
    root, tier = Catalog(tmp_path / "root"), Catalog(tmp_path / "tier")
    mover = Broken(0, config, root, tier, 1, 2, "run", lambda: 1, told.append, said.append, lambda _event: None)
    mover.start()
    until(lambda: told and news().failures > 1, "it is told, and tried again")
    assert news().trouble == "unexpected RuntimeError: a bug"
    assert not news().is_over
    (complaint,) = [each for each in told if isinstance(each, TierFailed)]
    assert complaint.kind == "StorageError"
    assert complaint.message.endswith("(it is tried again): unexpected RuntimeError: a bug")
    assert not said
    mover.finish()


def test_a_keeper_that_has_let_go_of_the_root_notes_nothing_over_another(tmp_path: Path) -> None:
    """What is noted keeps the next keeper from pruning what it has not carried yet."""
    store = PosixStore(tmp_path)
    first, second = CarryingNote(store, 0), CarryingNote(store, 0)
    first.put(lambda: {"tier": (SaveId(5), None)})
    assert second.inherited() == {"tier": (SaveId(5), None)}
    second.put(lambda: {"tier": (SaveId(5), SaveId(6))})
    first.put(dict, lambda: False)  # it has carried step 5
    assert CarryingNote(store, 0).inherited() == {"tier": (SaveId(5), SaveId(6))}
    first.put(dict, lambda: True)
    assert CarryingNote(store, 0).inherited() == {}


def test_what_the_root_has_lost_is_never_taken_from_another_run(tmp_path: Path) -> None:
    """Both have saved a step 1 in an epoch 1."""
    for run in ("root", "other"):
        with Checkpointer(tmp_path / run) as checkpointer:
            checkpointer.save(1, {"run": run}).wait()
    root, tier, other = (Catalog(tmp_path / name) for name in ("root", "tier", "other"))
    introduce(root, tier, 1)
    shutil.rmtree(layout.segment(tmp_path / "root", 1).parent)
    (config,) = check_tiers([Tier(tmp_path / "tier")], str(tmp_path / "root"))

    def ignore(_told: object) -> None:
        pass

    mover = Follower(0, config, root, tier, 0, 1, "run", lambda: 1, ignore, ignore, ignore, [other])
    with pytest.raises(NotFoundError, match="root"):
        mover._carry(SaveId(1))
    assert list(tier.look().saves) == []


def test_a_follower_does_not_take_for_skipped_what_rank_0_was_not_asked_for_yet(tmp_path: Path) -> None:
    """Both ranks are asked for a step that is not due; rank 0's keeper had said before that it is through with it."""
    (config,) = check_tiers([Tier(tmp_path / "tier", every=1000)], str(tmp_path / "root"))
    root, tier = Catalog(tmp_path / "root"), Catalog(tmp_path / "tier")

    def ignore(_told: object) -> None:
        pass

    mover = Follower(0, config, root, tier, 1, 2, "run", lambda: 1, ignore, ignore, ignore)
    tier.store.put(names.TARGET, encode_target(Target("run", None, None, SaveId(28))), durable=False)
    mover._considered = SaveId(28)
    mover.ask_for(28)
    assert mover.attempt()
    assert mover.kept == {SaveId(28)}
    mover.ask_for(29)  # an ordinary one is skipped, if rank 0's keeper says so
    assert not mover.attempt()
    assert mover.kept == set()
