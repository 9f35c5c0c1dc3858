"""Parts that come slowly to a tier: whoever gets on is waited for, and nobody sends again what another is sending."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch._C._distributed_c10d import HashStore

from stillframe import Catalog
from stillframe.checkpoint.epochs import begin, claim_number
from stillframe.checkpoint.notes import read_target
from stillframe.checkpoint.promote import Pace, carry_part, introduce, promote, sweep
from stillframe.errors import NotFoundError
from stillframe.format import names
from stillframe.format.epochs import Target, encode_target
from stillframe.keeper import follower, leader, mover, progress
from stillframe.keeper.follower import Follower
from stillframe.keeper.leader import Leader
from stillframe.link.messages import TierFailed
from stillframe.model import SaveId
from stillframe.ranks import joining
from stillframe.tiers import Tier, check_tiers
from tests import layout
from tests.integration.test_promote import LARGE, SMALL, save_pair, unshared

RUN = "0123abcd"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of two ranks; not to be changed."""
    root = tmp_path_factory.mktemp("slow") / "pair"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joining, "_store", lambda *_: HashStore())  # they never talk
        save_pair(root)
    return root


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        fake = SimpleNamespace(monotonic=lambda: self.now_s, time=lambda: self.now_s, sleep=self.pass_by)
        for module in (follower, leader, mover, progress):
            monkeypatch.setattr(module, "time", fake)

    def pass_by(self, seconds: float) -> None:
        self.now_s += seconds


class Rank0(Leader):
    """Its turns are taken by hand."""

    def start(self) -> None:
        pass


class Rank1(Follower):
    def start(self) -> None:
        pass


class Told(list[object]):
    @property
    def errors(self) -> list[str]:
        return [each.message for each in self if isinstance(each, TierFailed)]


def lead(root: Path, tier: Path, told: Told, limit: str | None = None) -> Rank0:
    (config,) = check_tiers([Tier(tier, limit=limit)], str(root))
    given = 0, config, Catalog(root), Catalog(tier), 0, 2, RUN, lambda: 1, told.append, told.append, told.append
    return Rank0(*given, is_whole=lambda _save: True)


def follow(root: Path, tier: Path, run: str = RUN) -> Rank1:
    (config,) = check_tiers([Tier(tier)], str(root))
    told = Told()
    return Rank1(0, config, Catalog(root), Catalog(tier), 1, 2, run, lambda: 1, told.append, told.append, told.append)


def say(tier: Path, target: SaveId, stalled: tuple[int, ...], run: str = RUN) -> None:
    Catalog(tier).store.put(names.TARGET, encode_target(Target(run, target, stalled=stalled)))


def parts_in(tier: Path, save: SaveId) -> list[str]:
    return sorted(name for name in Catalog(tier).store.list(names.step_dir(save)) if name.startswith("seal-"))


def test_a_slow_part_is_waited_for_and_one_of_which_no_sign_comes_is_given_up(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, told, tier = Clock(monkeypatch), Told(), tmp_path / "tier"
    rank0 = lead(unshared(pair, tmp_path / "node0", 0), tier, told)
    target = Catalog(pair).find(LARGE)
    assert rank0.attempt()
    rank0.committed(SaveId(LARGE + 1), None)  # something newer waits all the time
    sign = names.key(target, names.progress(1))
    for carried in range(1, 20):  # 19 minutes
        Catalog(tier).store.put(sign, str(carried).encode())
        clock.pass_by(60)
        assert rank0.attempt()
        found = read_target(Catalog(tier))
        assert found is not None
        assert (found.save, found.stalled) == (target, ())
    assert told.errors == []
    clock.pass_by(40)  # the last sign is as it was
    rank0.attempt()
    rank0.attempt()
    found = read_target(Catalog(tier))
    assert found is not None
    assert (found.save, found.stalled) == (target, (1,))
    clock.pass_by(120)
    rank0.attempt()
    (error,) = told.errors
    assert "the part of rank 1 has not come" in error
    assert not Catalog(tier).is_committed(target)


def test_a_low_limit_is_no_reason_to_give_up(pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, told, tier = Clock(monkeypatch), Told(), tmp_path / "tier"
    monkeypatch.setattr(Pace, "take", lambda *_: None)
    rank0 = lead(unshared(pair, tmp_path / "node0", 0), tier, told, limit="50KB/s")  # six minutes for a chunk
    assert rank0.attempt()
    rank0.committed(SaveId(LARGE + 1), None)
    for _ in range(2):
        clock.pass_by(400)
        assert rank0.attempt()
    assert told.errors == []
    assert read_target(Catalog(tier)) == Target(RUN, Catalog(pair).find(LARGE), None, Catalog(pair).find(LARGE))


def test_what_another_carries_is_left_to_it_until_rank_0_says_otherwise(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both parts are seen by both ranks; what is carried takes minutes."""
    clock, tier = Clock(monkeypatch), tmp_path / "tier"
    target = Catalog(pair).find(SMALL)
    introduce(Catalog(pair), Catalog(tier), 1)
    say(tier, target, ())
    rank1 = follow(pair, tier)
    for _ in range(3):
        assert rank1.attempt()
        clock.pass_by(100)
    assert parts_in(tier, target) == [names.seal(1)]
    say(tier, target, (0,))
    assert rank1.attempt()
    assert parts_in(tier, target) == [names.seal(0), names.seal(1)]


def test_rank_0_carries_itself_what_nobody_gets_on_with(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, told, tier = Clock(monkeypatch), Told(), tmp_path / "tier"
    rank0 = lead(pair, tier, told)
    target = Catalog(pair).find(LARGE)
    assert rank0.attempt()
    assert parts_in(tier, target) == [names.seal(0)]
    clock.pass_by(40)
    rank0.attempt()
    rank0.attempt()
    assert Catalog(tier).is_committed(target)
    assert told.errors == []


def test_whoever_carries_for_long_gives_signs_and_takes_them_back(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, target = tmp_path / "tier", Catalog(pair).find(LARGE)
    introduce(Catalog(pair), Catalog(tier), 1)
    say(tier, target, ())
    monkeypatch.setattr(progress, "SIGN_S", 0.0)
    seen: list[bytes] = []
    end = progress.Sign.end

    def look(sign: progress.Sign) -> None:
        seen.append((tier / names.key(target, names.progress(1))).read_bytes())
        end(sign)

    monkeypatch.setattr(progress.Sign, "end", look)
    assert follow(pair, tier).attempt()
    assert len(seen) == 1
    # Several threads carry: the sign that is put last need not be the newest.
    assert 0 < int(seen[0]) <= Catalog(pair).manifest(target).ranks[1].segment_bytes
    assert not (tier / names.key(target, names.progress(1))).exists()


def test_signs_that_are_left_go_when_all_parts_are_there(pair: Path, tmp_path: Path) -> None:
    target, tier = Catalog(pair).find(SMALL), Catalog(tmp_path / "tier")
    introduce(Catalog(pair), tier, 1)
    with Catalog(pair).open_save(target) as checkpoint:
        carry_part(checkpoint, tier, 0, Pace())
    for name in (names.progress(1), names.failure(1)):
        tier.store.put(names.key(target, name), b"1")
    assert promote(Catalog(pair), tier, target) == []
    assert sorted(tier.store.list(names.step_dir(target))) == sorted(Catalog(pair).store.list(names.step_dir(target)))
    sweep(tier, target)


def test_runs_that_were_killed_between_the_save_and_this_one_have_not_taken_over(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save is of the first run; the second was killed when it had begun in the tier; the third one carries on."""
    Clock(monkeypatch)
    place, target = tmp_path / "tier", Catalog(pair).find(SMALL)
    tier = Catalog(place)
    introduce(Catalog(pair), tier, 1)
    claim_number(tier, "second", 0, 2)
    say(place, target, (), "third")
    rank1 = follow(pair, place, "third")
    assert rank1.attempt()
    promote(Catalog(pair), tier, target)
    assert rank1.attempt()  # the claim of its own run is not seen yet
    assert (rank1.kept, rank1._committed, rank1._is_over) == ({target}, None, False)
    claim_number(tier, "third", 0, 3)
    assert not rank1.attempt()
    assert (rank1.kept, rank1._committed, rank1._is_over) == (set(), target, False)
    claim_number(tier, "fourth", 0, 4)
    later = Catalog(pair).find(LARGE)
    promote(Catalog(pair), tier, later)
    say(place, later, (), "third")
    assert not rank1.attempt()
    assert (rank1._committed, rank1._is_over) == (target, True)


def test_a_part_that_is_whole_in_the_tier_alone_is_not_removed_before_a_later_step_is_there(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0's part is damaged in its root; rank 1's is in its own root, and its keeper is paused."""
    clock, told, place = Clock(monkeypatch), Told(), tmp_path / "tier"
    target, tier = Catalog(pair).find(LARGE), Catalog(place)
    node0 = unshared(pair, tmp_path / "node0", 0)
    introduce(Catalog(pair), tier, 1)
    with Catalog(pair).open_save(target) as checkpoint:
        carry_part(checkpoint, tier, 0, Pace())
    os.truncate(layout.segment(node0, LARGE), 4096)
    rank0 = lead(node0, place, told)
    for _ in range(6):
        assert rank0.attempt()
        clock.pass_by(40)
    assert told.errors == []
    found = read_target(tier)
    assert found is not None
    assert (found.save, found.stalled) == (target, (1,))
    rank0.committed(SaveId(LARGE + 1), None)  # something newer waits
    clock.pass_by(120)
    rank0.attempt()
    (error,) = told.errors
    assert "the part of rank 1 has not come" in error
    assert parts_in(place, target) == [names.seal(0)]
    rank0._done(SaveId(LARGE + 1))
    rank0._tidy(SaveId(LARGE + 1))
    assert parts_in(place, target) == []


def test_one_of_several_that_were_given_up_is_kept(pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    rank0 = lead(unshared(pair, tmp_path / "node0", 0), tmp_path / "tier", Told())
    tier = Catalog(tmp_path / "tier")
    introduce(Catalog(pair), tier, 1)
    saves = [Catalog(pair).find(step) for step in (LARGE, SMALL)]
    for save in saves:
        with Catalog(pair).open_save(save) as checkpoint:
            carry_part(checkpoint, tier, 0, Pace())
        rank0._give_up(save, NotFoundError("it is lost"))
    assert [parts_in(tmp_path / "tier", save) for save in saves] == [[names.seal(0)], []]


@pytest.mark.parametrize("is_begun", [False, True])
def test_what_rank_0_has_in_the_tier_alone_is_carried_to_its_end(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_begun: bool
) -> None:
    """Its node is new: the run has restored its part from the tier, and may have begun to save."""
    clock, told, place = Clock(monkeypatch), Told(), tmp_path / "tier"
    target, tier, node0 = Catalog(pair).find(LARGE), Catalog(place), Catalog(tmp_path / "node0")
    introduce(Catalog(pair), tier, 1)
    with Catalog(pair).open_save(target) as checkpoint:
        carry_part(checkpoint, tier, 0, Pace())
    claim_number(node0, RUN, 1, 2)
    if is_begun:
        begin(node0, 2, RUN, 1, target, False, [tier])
    (config,) = check_tiers([Tier(place)], node0.root)
    given = 0, config, node0, tier, 0, 2, RUN, lambda: 2, told.append, told.append, told.append
    rank0 = Rank0(*given, is_whole=lambda _save: True, agreed=lambda: None if is_begun else target)
    for _ in range(3):  # also when the other one does not get on
        assert rank0.attempt()
        clock.pass_by(40)
    assert rank0.kept == {target}
    assert follow(unshared(pair, tmp_path / "node1", 1), place).attempt()
    assert not rank0.attempt()
    assert tier.is_committed(target)
    assert told.errors == []


def test_the_newest_epoch_that_has_begun_is_told_even_if_the_present_one_has_not(tmp_path: Path) -> None:
    root = Catalog(tmp_path / "root")
    for epoch in (1, 2, 3):
        claim_number(root, RUN, epoch, epoch)
        if epoch < 3:
            begin(root, epoch, RUN, epoch, None, True)
    (config,) = check_tiers([Tier(tmp_path / "tier")], root.root)
    told = Told()
    given = 0, config, root, Catalog(tmp_path / "tier"), 0, 1, RUN, lambda: 3, told.append, told.append, told.append
    Rank0(*given, is_whole=lambda _save: True).attempt()
    assert (told.errors, Catalog(tmp_path / "tier").epochs()) == ([], [2])
    assert Catalog(tmp_path / "tier").parent(2) is not None
