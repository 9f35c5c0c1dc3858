"""Tiers behind a root: what is carried, what is kept, what a lost disk costs, and what a tier that fails does not."""

from __future__ import annotations

import contextlib
import math
import random
import shutil
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import stillframe
from stillframe import Catalog, Checkpointer, ConfigError, KeepLast, NotFoundError, StorageError, Tier, spi
from stillframe.checkpoint.promote import introduce
from stillframe.checkpoint.survey import survey
from stillframe.checkpoint.tiers import look_at_tiers
from stillframe.checkpoint.verify import verify
from stillframe.format import names
from stillframe.keeper.carrying import CarryingNote
from stillframe.keeper.prune import remove_leftovers
from stillframe.keeper.retention import Pruner
from stillframe.model import SaveId
from stillframe.observe.finishing import finish
from stillframe.restoring.sources import Sources
from stillframe.save import capture, tier_book
from stillframe.store.posix import PosixStore
from tests import layout
from tests.support import is_alive, keeper_is_gone, kill, start_child, until

NO_SPANS: list[Any] = [0, -1, True, 1.5, "10", None, 10**12, timedelta(0), timedelta(seconds=-1)]
TWO_CHUNKS, SLOW = 5_000_000, "6MB/s"
"""A state, and a limit with which its second chunk follows three seconds after the first: that one goes at once."""
NO_RATES: list[Any] = [0, -5, "-5MB/s", "fast", "", True, 1.5, math.inf, []]


def state(step: int, count: int = 100_000) -> dict[str, Any]:
    return {"weights": torch.full((count,), float(step)), "step": step}


def save(checkpointer: Checkpointer, step: int, count: int = 100_000) -> stillframe.Save:
    found = checkpointer.save(step, state(step, count))
    found.wait()
    return found


def check(root: Path, step: int, count: int = 100_000) -> None:
    """A root, or a tier, holds this step, whole."""
    live = state(-1, count)
    assert stillframe.restore(root, live, step).step == step
    assert live["step"] == step
    assert bool((live["weights"] == float(step)).all())


def check_whole(root: Path) -> list[int]:
    """Every checkpoint there, verified; gives their steps."""
    catalog = Catalog(root)
    found = list(catalog.committed())
    for each in found:
        with catalog.open_save(each) as checkpoint:
            assert verify(checkpoint).is_whole, each
            assert not catalog.lacks(checkpoint.manifest)
    return sorted(each.step for each in found)


def test_what_is_due_is_carried_and_each_tier_keeps_what_its_policy_says(tmp_path: Path) -> None:
    near, far = Tier(tmp_path / "near", every=2, keep=KeepLast(2)), Tier(tmp_path / "far", every=5)
    with Checkpointer(tmp_path / "root", keep=KeepLast(2), tiers=[near, far]) as checkpointer:
        for step in range(1, 11):
            last = save(checkpointer, step)
            checkpointer.wait(tier=near)
            checkpointer.wait(tier=tmp_path / "far")
        assert last.tiers == {str(tmp_path / "near"): "committed", str(tmp_path / "far"): "committed"}
        last.wait(tier=far)
        odd = save(checkpointer, 11)
        assert odd.tiers == {str(tmp_path / "near"): "not carried", str(tmp_path / "far"): "not carried"}
        with pytest.raises(NotFoundError, match=r"step 11 is not carried to .*near"):
            odd.wait(tier=near)
        first, second = checkpointer.stats().tiers
        assert (first.committed_step, second.committed_step) == (10, 10)
        assert first.behind_steps == 1
        assert first.is_idle
        assert first.failures == 0
    assert check_whole(tmp_path / "root") == [10, 11]
    assert check_whole(tmp_path / "near") == [8, 10]
    assert check_whole(tmp_path / "far") == [5, 10]
    check(tmp_path / "near", 10)


def test_a_time_span_counts_from_the_last_one_that_was_carried(tmp_path: Path) -> None:
    tier = Tier(tmp_path / "tier", every=timedelta(hours=1))
    with Checkpointer(tmp_path / "root", tiers=[tier]) as checkpointer:
        for step in (3, 4, 5):
            save(checkpointer, step)
        checkpointer.wait(tier=tier)
    for step in (6, 7):  # also of a run that does not restore, and saves before it has asked the tier
        with Checkpointer(tmp_path / "root", tiers=[tier]) as checkpointer:
            found = save(checkpointer, step)
            checkpointer.wait(tier=tier)
            assert found.tiers == {str(tmp_path / "tier"): "not carried"}
    assert check_whole(tmp_path / "tier") == [3]


def test_a_clock_that_was_ahead_does_not_keep_a_tier_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node whose clock was a month ahead has saved what is in the tier; the run goes on on another one."""
    tier = Tier(tmp_path / "tier", every=timedelta(hours=1))
    ahead = SimpleNamespace(time=lambda: time.time() + 30 * 86400, monotonic=time.monotonic)
    with monkeypatch.context() as patched, Checkpointer(tmp_path / "root", tiers=[tier]) as checkpointer:
        patched.setattr(capture, "time", ahead)
        save(checkpointer, 1).wait(tier=tier)
    with Checkpointer(tmp_path / "root", tiers=[tier]) as checkpointer:
        assert checkpointer.restore(state(-1)).step == 1
        save(checkpointer, 2).wait(tier=tier)
        assert save(checkpointer, 3).tiers == {str(tmp_path / "tier"): "not carried"}
    assert check_whole(tmp_path / "tier") == [1, 2]


def test_a_root_that_is_lost_is_restored_from_the_nearest_tier_and_goes_on(tmp_path: Path) -> None:
    tiers = [Tier(tmp_path / "near", every=2, keep=KeepLast(3)), Tier(tmp_path / "far", every=5)]
    with Checkpointer(tmp_path / "root", keep=KeepLast(2), tiers=tiers) as checkpointer:
        for step in range(1, 7):
            save(checkpointer, step)
            checkpointer.wait(tier=tiers[0])
        checkpointer.wait(tier=tiers[1])
    shutil.rmtree(tmp_path / "root")
    live = state(-1)
    with Checkpointer(tmp_path / "root", keep=KeepLast(2), tiers=tiers) as checkpointer:
        report = checkpointer.restore(live)
        assert (report.step, report.source) == (6, str(tmp_path / "near"))
        assert live["step"] == 6
        for step in range(7, 11):
            save(checkpointer, step)
            checkpointer.wait(tier=tiers[0])
    assert Catalog(tmp_path / "root").epochs() == [2]  # 1 is in the tiers
    assert check_whole(tmp_path / "near") == [6, 8, 10]
    assert check_whole(tmp_path / "far") == [5, 10]
    shutil.rmtree(tmp_path / "root")
    shutil.rmtree(tmp_path / "near")
    report = stillframe.restore(tmp_path / "root", live, tiers=tiers)
    assert (report.step, report.source) == (10, str(tmp_path / "far"))
    check(tmp_path / "far", 5)


def test_a_run_that_reads_by_itself_goes_on_from_what_the_tier_has(tmp_path: Path) -> None:
    root, tier = tmp_path / "disk", Tier(tmp_path / "tier")
    for step, before in ((3, None), (4, 3)):
        with Checkpointer(root, tiers=[tier]) as checkpointer:
            assert spi.go_on(checkpointer) == before
            spi.settle_tier(checkpointer, tier)
            spi.save(checkpointer, state(step), spi.issue(checkpointer, least=3)).wait()
        shutil.rmtree(root)
    check(tmp_path / "tier", 4)
    catalog = Catalog(tmp_path / "tier")
    assert spi.is_tier(catalog)
    assert catalog.steps() == [3, 4]  # on one branch: the second goes on from the first
    catalog.delete(3)
    assert spi.is_tier(catalog)
    with Checkpointer(tmp_path / "tier") as checkpointer:
        save(checkpointer, 5)
    assert not spi.is_tier(catalog)


@pytest.mark.parametrize("what", ["chunk", "segment", "seal"])
def test_what_is_damaged_in_the_root_is_read_from_a_tier_and_reported(tmp_path: Path, what: str) -> None:
    tier = Tier(tmp_path / "tier")
    with Checkpointer(tmp_path / "root", tiers=[tier]) as checkpointer:
        save(checkpointer, 1)
        checkpointer.wait(tier=tier)
    segment = layout.segment(tmp_path / "root", 1)
    if what == "chunk":
        data = bytearray(segment.read_bytes())
        data[-1000] ^= 1
        segment.write_bytes(data)
    elif what == "segment":
        segment.unlink()
    else:
        layout.seal(tmp_path / "root", 1).unlink()
    live = state(-1)
    with Checkpointer(tmp_path / "root", tiers=[tier]) as checkpointer:
        report = checkpointer.restore(live)
    assert (report.step, report.source, report.skipped) == (1, str(tmp_path / "tier"), ())
    assert len(report.replaced) == 1
    assert str(tmp_path / "root") in report.replaced[0]
    assert bool((live["weights"] == 1.0).all())


def test_a_tier_that_is_down_costs_nothing_but_age_and_catches_up_by_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = Tier(tmp_path / "tier", every=2)
    (tmp_path / "tier").write_text("in its place")
    with Checkpointer(tmp_path / "root", keep=KeepLast(1), tiers=[tier]) as checkpointer:
        for step in range(1, 6):
            save(checkpointer, step)
        until(lambda: checkpointer.stats().tiers[0].failures > 0, "an attempt that fails")
        stats = checkpointer.stats().tiers[0]
        assert "tier" in stats.trouble
        assert stats.behind_steps == 5
        assert checkpointer.stats().failed == 0
        with pytest.raises(stillframe.DeadlineError, match="is behind"):
            checkpointer.wait(tier=tier, timeout_s=0.1)
        assert 4 in Catalog(tmp_path / "root").steps()  # what waits is kept
        (tmp_path / "tier").unlink()
        checkpointer.wait(tier=tier)
        assert not checkpointer.stats().tiers[0].trouble
    assert check_whole(tmp_path / "tier")[-1] == 4
    assert sum("nothing can be carried" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("on_error", ["raise", "warn", "function", "function that raises"])
def test_the_job_is_told_of_a_tier_once_for_each_trouble_and_nothing_is_raised(
    tmp_path: Path, on_error: Any, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[stillframe.StillframeError] = []

    def tell(error: stillframe.StillframeError) -> None:
        told.append(error)
        if on_error != "function":
            raise RuntimeError("a bug of the job")

    tier = Tier(tmp_path / "tier")
    given = tell if on_error.startswith("function") else on_error
    troubles = 2 if on_error == "function" else 1
    with Checkpointer(tmp_path / "root", tiers=[tier], on_error=given) as checkpointer:
        for step in range(1, troubles + 1):
            (tmp_path / "tier").write_text("in its place")
            save(checkpointer, 2 * step - 1)
            until(lambda: checkpointer.stats().tiers[0].failures > 1, "it is tried again")
            save(checkpointer, 2 * step)
            (tmp_path / "tier").unlink()
            checkpointer.wait(tier=tier)
            shutil.move(tmp_path / "tier", tmp_path / f"was-{step}")
        assert checkpointer.stats().failed == 0
    warnings = [record.message for record in caplog.records if "nothing can be carried" in record.message]
    assert len(warnings) == (0 if on_error == "function" else 1)
    assert all(message.startswith("on_error raised") == (on_error == "function that raises") for message in warnings)
    assert [type(error) for error in told] == ([StorageError] * troubles if given is tell else [])
    assert all(f"nothing can be carried to {tmp_path / 'tier'}" in str(error) for error in told)


def test_close_does_not_wait_long_for_a_tier_that_fails_and_the_next_run_carries_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tier_book, "_CLOSE_S", 0.5)
    tier = Tier(tmp_path / "tier")
    (tmp_path / "tier").write_text("in its place")
    began = time.monotonic()
    with Checkpointer(tmp_path / "root", tiers=[tier]) as checkpointer:
        save(checkpointer, 1)
    assert time.monotonic() - began < 45
    assert any("is left behind by close()" in record.message for record in caplog.records)
    (tmp_path / "tier").unlink()
    with Checkpointer(tmp_path / "root", tiers=[tier]) as checkpointer:
        checkpointer.restore(state(-1))
        save(checkpointer, 2)
        checkpointer.wait(tier=tier)
    assert check_whole(tmp_path / "tier")[-1] == 2


def test_a_tier_of_another_run_is_left_alone_and_saves_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(tmp_path / "tier") as other:
        save(other, 1)
    before = sorted(tmp_path.joinpath("tier").rglob("*"))
    tier = Tier(tmp_path / "tier")
    with Checkpointer(tmp_path / "root", tiers=[tier]) as checkpointer:
        save(checkpointer, 1)
        with pytest.raises(StorageError, match=r"nothing is carried to .*tier any more: .*another run"):
            checkpointer.wait(tier=tier)
        last = save(checkpointer, 2)
        assert last.tiers == {str(tmp_path / "tier"): "not carried"}
        assert checkpointer.stats().tiers[0].is_over
    assert sorted(tmp_path.joinpath("tier").rglob("*")) == before
    assert check_whole(tmp_path / "root") == [1, 2]


def test_a_slow_tier_carries_one_to_its_end_then_the_newest(tmp_path: Path) -> None:
    count = 5_000_000
    tier = Tier(tmp_path / "tier", limit="5MB/s")
    with Checkpointer(tmp_path / "root", keep=KeepLast(1), tiers=[tier]) as checkpointer:
        first = save(checkpointer, 1, count)
        until(lambda: first.tiers[str(tmp_path / "tier")] == "carrying", "it is carried")
        saves = [save(checkpointer, step, count) for step in (2, 3, 4)]
        assert first.tiers[str(tmp_path / "tier")] == "carrying"
        assert {1, 4} <= set(Catalog(tmp_path / "root").steps())  # the target stays, whatever the policy says
        first.wait(tier=tier)
        saves[-1].wait(tier=tier)
        with pytest.raises(NotFoundError, match="step 2 is not carried"):
            saves[0].wait(tier=tier)
    assert check_whole(tmp_path / "tier") == [1, 4]
    until(lambda: keeper_is_gone(tmp_path / "root"), "the keeper's end")
    check(tmp_path / "tier", 4, count)


@pytest.mark.parametrize(
    ("tiers", "match"),
    [
        ("/x", "give a list of Tier"),
        (["/x"], "give Tier"),
        ([Tier("/x"), Tier("/x/")], "lies in the other"),
        ([Tier(f"/{number}") for number in range(9)], "more than"),
    ],
)
def test_tiers_that_cannot_be_are_refused(tmp_path: Path, tiers: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Checkpointer(tmp_path, tiers=tiers)


@pytest.mark.parametrize(
    ("root", "more", "match"),
    [
        ("", {}, r"root=''"),
        (" ", {}, r"root=' '"),
        (None, {}, r"root=None"),
        (7, {}, r"root=7"),
        (b"/x", {}, r"root=b'/x'"),
        ("a\0b", {}, r"root='a"),
        ("ftp://x", {}, "cannot write to"),
        ("/x/{node}", {}, "every rank must see the same tier"),
        *(("/x", {"every": each}, "every=") for each in NO_SPANS),
        *(("/x", {"limit": each}, "limit=") for each in NO_RATES),
        ("/x", {"keep": "all"}, "keep="),
        ("/x", {"storage_options": 3}, "storage_options="),
        ("/x", {"storage_options": {"key": object()}}, "storage_options"),
    ],
)
def test_a_tier_that_cannot_be_is_refused_where_it_is_written(root: Any, more: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        Tier(root, **more)
    assert "Tier" in str(caught.value) or root == "ftp://x"


def test_a_refused_tier_does_not_tell_keys() -> None:
    with pytest.raises(ConfigError) as caught:
        Tier("s3://AKIA:secret@bucket/{node}", every=0)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("root", ["", None, 7])
def test_a_root_that_names_no_place_is_refused(root: Any) -> None:
    with pytest.raises(ConfigError, match="root="):
        Checkpointer(root)
    with pytest.raises(ConfigError, match="root="):
        stillframe.restore(root, {})


def test_storage_options_that_are_no_dict_are_refused(tmp_path: Path) -> None:
    wrong: Any = "key=1"
    with pytest.raises(ConfigError, match="storage_options="):
        Checkpointer(tmp_path, storage_options=wrong)


def test_a_tier_inside_the_root_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lies in the other"):
        Checkpointer(tmp_path, tiers=[Tier(tmp_path / "tier")])


def test_a_checkpointer_without_tiers_says_so(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        last = save(checkpointer, 1)
        assert last.tiers == {}
        with pytest.raises(ConfigError, match="the tiers are none"):
            last.wait(tier="/nowhere")
        with pytest.raises(ConfigError, match="the tiers are none"):
            checkpointer.wait(tier="/nowhere")


RUN = """
import os, sys, time, torch, stillframe
from stillframe import Checkpointer, KeepLast, Tier, spi
root, tier, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
state = {"weights": torch.zeros(count), "step": 0}
tiers = [Tier(tier, every=2, keep=KeepLast(2))]
with Checkpointer(root, keep=KeepLast(2), tiers=tiers, on_error="warn") as checkpointer:
    begin = checkpointer.restore(state).step or 0
    print("keeper", spi.keeper_pid(checkpointer), begin, flush=True)
    for step in range(begin + 1, begin + 1000):
        checkpointer.fence()
        state["weights"].fill_(step)
        state["step"] = step
        save = checkpointer.save(step, state)
        save.wait()
        print("committed", step, flush=True)
        if save.tiers[tier] == "committed" or checkpointer.stats().tiers[0].committed_step:
            print("carried", checkpointer.stats().tiers[0].committed_step, flush=True)
"""


@pytest.mark.timeout(240)
def test_kills_at_any_moment_of_a_promotion_lose_nothing_that_was_reported(tmp_path: Path) -> None:
    """Trainer, keeper or both, again and again; in the end one run carries on to its end."""
    root, tier, count = tmp_path / "root", tmp_path / "tier", 2_000_000
    rng = random.Random(0)
    committed = carried = 0
    for _ in range(6):
        child = start_child(RUN, root, tier, count)
        assert child.stdout is not None
        keeper = int(child.stdout.readline().split()[1])
        time.sleep(rng.uniform(0.2, 1.0))
        victims = rng.choice([(child.pid,), (keeper,), (keeper, child.pid)])
        for pid in victims:
            if is_alive(pid):
                kill(pid)
        if child.pid not in victims:
            time.sleep(0.5)
            child.kill()
        out, _ = child.communicate(timeout=60)
        lines = [line.split() for line in out.splitlines()]
        committed = max([committed, *(int(words[1]) for words in lines if words[0] == "committed")])
        carried = max([carried, *(int(words[1]) for words in lines if words[0] == "carried")])
        steps = check_whole_beside_a_keeper(tier)
        assert not carried or max(steps) >= carried, (steps, carried)
    until(lambda: keeper_is_gone(root), "the end of the last keeper")
    live = state(0, count)
    with Checkpointer(root, keep=KeepLast(2), tiers=[Tier(tier, every=2, keep=KeepLast(2))]) as checkpointer:
        found = checkpointer.restore(live).step
        assert found is not None
        assert found >= committed
        assert bool((live["weights"] == float(found)).all())
        for step in (found + 1, found + 2):
            save(checkpointer, step, count)
        checkpointer.wait(tier=tier)
    assert max(check_whole(tier)) >= found + 1
    # A killed keeper's tombstone, with what is beside it, is left alone for a day: it might only be paused.
    tombstones = {each.parent.name for each in tier.glob("step-*/aside.json")}
    assert not [each for each in layout.leftovers(tier) if each.split("/")[0] not in tombstones]
    shutil.rmtree(root)
    assert (stillframe.restore(root, live, tiers=[Tier(tier)]).step or 0) >= found + 1


def check_whole_beside_a_keeper(tier: Path) -> list[int]:
    """As :func:`check_whole`, while an orphaned keeper may still carry and remove."""
    for _ in range(10):
        try:
            return check_whole(tier)
        except (stillframe.NotFoundError, stillframe.IntegrityError):
            time.sleep(0.3)
    return check_whole(tier)


def test_removing_steps_in_a_tier_by_hand_stops_nothing_and_leaves_nothing_behind(tmp_path: Path) -> None:
    tier = Tier(tmp_path / "tier", every=2)
    with Checkpointer(tmp_path / "root", tiers=[tier]) as checkpointer:
        for step in range(1, 5):
            save(checkpointer, step)
            checkpointer.wait(tier=tier)
        Catalog(tmp_path / "tier").delete(2)  # beside a living run
        for step in range(5, 8):
            save(checkpointer, step)
        checkpointer.wait(tier=tier)
        assert Catalog(tmp_path / "tier").steps() == [4, 6]
    Catalog(tmp_path / "tier").delete(4)  # when none lives
    live = state(-1)
    with Checkpointer(tmp_path / "root", tiers=[tier]) as checkpointer:
        assert checkpointer.restore(live).step == 7  # what was removed there is no word about what is here
        save(checkpointer, 8)
        checkpointer.wait(tier=tier)
    assert check_whole(tmp_path / "tier") == [6, 8]
    assert check_whole(tmp_path / "root") == list(range(1, 9))


def test_removing_in_a_tier_by_hand_leaves_the_branch_as_it_is(tmp_path: Path) -> None:
    """Also where the run has saved nothing there since its last start, and where it has gone back."""
    root, tier = tmp_path / "root", Tier(tmp_path / "tier", every=10)
    with Checkpointer(root, tiers=[tier]) as checkpointer:
        save(checkpointer, 10)
    with Checkpointer(root, tiers=[tier]) as checkpointer:
        assert checkpointer.restore(state(-1)).step == 10
        save(checkpointer, 11)  # the tier learns of the epoch, and gets nothing
        checkpointer.wait(tier=tier)
    for _ in range(2):
        remove_leftovers(Catalog(tmp_path / "tier"))
    with Checkpointer(root, tiers=[tier]) as checkpointer:
        assert checkpointer.restore(state(-1)).step == 11
        save(checkpointer, 12)
        checkpointer.rewind(11)
        checkpointer.wait(tier=tier)
    remove_leftovers(Catalog(tmp_path / "tier"))
    remove_leftovers(Catalog(root))
    assert Catalog(root).steps() == [10, 11], "a rewind stays one"
    with Checkpointer(root, tiers=[tier]) as checkpointer:
        assert checkpointer.restore(state(-1)).step == 11
        save(checkpointer, 20)
    assert check_whole(tmp_path / "tier") == [10, 20]


def in_tier(tier: Path) -> list[tuple[int, int]]:
    """(step, epoch) of what is whole there."""
    return [(each.step, each.epoch) for each in Catalog(tier).committed()]


def test_the_runs_own_restore_is_not_taken_for_another_run(tmp_path: Path) -> None:
    tier = Tier(tmp_path / "tier")
    with Checkpointer(tmp_path / "root", tiers=[tier]) as checkpointer:
        for step in range(1, 6):
            save(checkpointer, step)
            checkpointer.restore(state(-1))
        checkpointer.wait(tier=tier)
        assert not checkpointer.stats().tiers[0].is_over
    assert check_whole(tmp_path / "tier")[-1] == 5


def test_after_going_back_a_step_that_comes_again_is_another_one(tmp_path: Path) -> None:
    tier = Tier(tmp_path / "tier", limit="4MB/s")
    with Checkpointer(tmp_path / "root", tiers=[tier]) as checkpointer:
        for step in (1, 2, 3):
            save(checkpointer, step).wait(tier=tier)
        checkpointer.rewind(1)
        live = state(-1)
        assert checkpointer.restore(live).step == 1
        for step in (2, 3):
            again = checkpointer.save(step, {**state(step), "weights": torch.full((100_000,), step + 100.0)})
            again.wait(tier=tier)
            assert in_tier(tmp_path / "tier")[0] == (step, again.epoch)
    shutil.rmtree(tmp_path / "root")
    assert stillframe.restore(tmp_path / "root", live, tiers=[tier]).step == 3
    assert bool((live["weights"] == 103.0).all())


def test_what_was_asked_for_before_going_back_is_not_carried_again(tmp_path: Path) -> None:
    """An exception has had step 2 carried.  Caught, training goes back, and comes by that number once more."""
    tier = Tier(tmp_path / "tier", every=1000)
    with Checkpointer(tmp_path / "root", tiers=[tier]) as checkpointer:
        save(checkpointer, 1)
        checkpointer._keeper.carry(2)
        save(checkpointer, 2).wait(tier=tier)
        checkpointer.restore(state(-1), step=1)
        again = save(checkpointer, 2)
        checkpointer.wait(tier=tier)
        assert again.tiers == {str(tmp_path / "tier"): "not carried"}
        checkpointer._keeper.carry(2)  # it is asked for in its turn
        again.wait(tier=tier)
    assert [each.epoch for each in Catalog(tmp_path / "tier").look().saves if each.step == 2] == [1, 2]


def test_what_was_gone_back_from_is_not_carried_instead_of_the_step_that_is_asked_for(tmp_path: Path) -> None:
    tier = Tier(tmp_path / "tier", every=1000)
    with Checkpointer(tmp_path / "root", tiers=[tier]) as checkpointer:
        save(checkpointer, 1)
        save(checkpointer, 2)
        checkpointer.restore(state(-1), step=1)
        checkpointer._keeper.carry(2)
        until(lambda: checkpointer._keeper.tiers._news[0].asked == 2, "the keeper has heard")  # type: ignore[union-attr]
        assert checkpointer.stats().tiers[0].waiting_step is None
        save(checkpointer, 2).wait(tier=tier)
    assert [(each.step, each.epoch) for each in Catalog(tmp_path / "tier").look().saves] == [(2, 2)]


def test_what_is_restored_and_asked_for_is_carried(tmp_path: Path) -> None:
    """The signal comes at once: the step is there, and of the start before."""
    tier = Tier(tmp_path / "tier", every=1000)
    with Checkpointer(tmp_path / "root") as checkpointer:
        save(checkpointer, 2)
    with Checkpointer(tmp_path / "root", tiers=[tier]) as checkpointer:
        checkpointer.restore(state(-1))
        checkpointer.wait(tier=tier)
        checkpointer._keeper.carry(2)
        until(lambda: checkpointer.stats().tiers[0].committed_step == 2, "it is carried")
    check(tmp_path / "tier", 2)


def test_a_branch_of_which_nothing_is_left_is_no_fresh_start(tmp_path: Path) -> None:
    """The run went back, and the tier was told, but has nothing of it; then the root was lost."""
    tier = Tier(tmp_path / "tier", every=10)
    with Checkpointer(tmp_path / "root", tiers=[tier]) as checkpointer:
        for step in (5, 10):
            save(checkpointer, step)
        checkpointer.wait(tier=tier)
        checkpointer.rewind(5)
        save(checkpointer, 6)
    introduce(Catalog(tmp_path / "root"), Catalog(tmp_path / "tier"), max(Catalog(tmp_path / "root").epochs()))
    shutil.rmtree(tmp_path / "root")
    live = state(-1)
    with pytest.raises(stillframe.IntegrityError, match=r"holds step 10 of start 1, off the branch"):
        stillframe.restore(tmp_path / "root", live, tiers=[tier])
    assert stillframe.restore(tmp_path / "root", live, 10, tiers=[tier]).step == 10
    assert live["step"] == 10


def test_a_first_promotion_that_was_interrupted_makes_the_tier_nobodys(tmp_path: Path) -> None:
    tier = Tier(tmp_path / "tier")
    with Checkpointer(tmp_path / "root", tiers=[tier]) as checkpointer:
        save(checkpointer, 1).wait(tier=tier)
    layout.manifest(tmp_path / "tier", 1).unlink()
    shutil.rmtree(tmp_path / "root")
    with Checkpointer(tmp_path / "root", tiers=[tier]) as checkpointer:
        assert checkpointer.restore(state(-1)).step is None
        save(checkpointer, 2).wait(tier=tier)
    assert check_whole(tmp_path / "tier") == [2]


def test_a_link_that_leads_to_the_root_is_no_tier(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "root")
    with pytest.raises(ConfigError, match="lies in the other"):
        Checkpointer(tmp_path / "root", tiers=[Tier(tmp_path / "link")])


def test_who_waits_for_a_tier_gets_another_keeper_when_that_dies(tmp_path: Path) -> None:
    count = 5_000_000
    tier = Tier(tmp_path / "tier", limit="10MB/s")
    with Checkpointer(tmp_path / "root", tiers=[tier], on_error="warn") as checkpointer:
        first = save(checkpointer, 1, count)
        until(lambda: first.tiers[str(tmp_path / "tier")] == "carrying", "it is carried")
        kill(spi.keeper_pid(checkpointer) or 0)
        first.wait(tier=tier, timeout_s=60)
    assert check_whole(tmp_path / "tier") == [1]


def test_the_root_is_free_while_a_tier_is_still_carried_to(tmp_path: Path) -> None:
    count = 10_000_000
    tier = Tier(tmp_path / "tier", limit="5MB/s")
    checkpointer = Checkpointer(tmp_path / "root", tiers=[tier])
    save(checkpointer, 1, count)
    checkpointer.close(timeout_s=0.5)
    began = time.monotonic()
    with Checkpointer(tmp_path / "root") as other:
        assert other.restore(state(-1, count)).step == 1
    assert time.monotonic() - began < 4, "it takes 8 s to carry"
    until(lambda: check_whole_beside_a_keeper(tmp_path / "tier") == [1], "the first keeper carries on")


def test_what_the_next_run_carries_stays_noted_when_the_keeper_before_ends(tmp_path: Path) -> None:
    count = 10_000_000
    root, tier = tmp_path / "root", Tier(tmp_path / "tier", limit="5MB/s")
    checkpointer = Checkpointer(root, tiers=[tier])
    save(checkpointer, 1, count)
    keeper = spi.keeper_pid(checkpointer) or 0
    checkpointer.close(timeout_s=0.5)
    with Checkpointer(root, tiers=[tier], on_error="warn") as other:
        assert other.restore(state(-1, count)).step == 1
        save(other, 2, count)
        until(lambda: not is_alive(keeper), "the keeper before has carried step 1, or is told that it is taken over")
        noted = CarryingNote(PosixStore(root), 0).inherited()[str(tmp_path / "tier")]
        assert 2 in [each.step for each in noted if each is not None]
        other.close(timeout_s=0)


def test_nobody_of_before_removes_what_a_run_has_resumed_from_in_a_tier(tmp_path: Path) -> None:
    tier = Tier(tmp_path / "tier")
    with Checkpointer(tmp_path / "root", tiers=[tier]) as checkpointer:
        for step in (1, 2, 3):
            save(checkpointer, step).wait(tier=tier)
    shutil.rmtree(tmp_path / "root")
    there = Catalog(tmp_path / "tier")
    with Checkpointer(tmp_path / "root", tiers=[tier]) as checkpointer:
        assert checkpointer.restore(state(-1), step=2).step == 2
        assert there.epochs() == [1, 2], "claimed before anything was saved"
        with pytest.raises(stillframe.BusyError, match="another run"):
            Pruner(there, KeepLast(1), 0, True, lambda: 1, set).prune()  # a keeper of epoch 1 that was paused
        assert there.steps() == [1, 2, 3]


def test_a_tier_that_is_emptied_under_a_run_can_be_resumed_from_again(tmp_path: Path) -> None:
    tier = Tier(tmp_path / "tier")
    with Checkpointer(tmp_path / "root", tiers=[tier], on_error="warn") as checkpointer:
        save(checkpointer, 1).wait(tier=tier)
        shutil.rmtree(tmp_path / "tier")
        save(checkpointer, 2).wait(tier=tier)
    assert Catalog(tmp_path / "tier").parent(1) is not None
    shutil.rmtree(tmp_path / "root")
    with Checkpointer(tmp_path / "root", tiers=[tier]) as checkpointer:
        assert checkpointer.restore(state(-1)).step == 2
        save(checkpointer, 3).wait(tier=tier)
    assert check_whole(tmp_path / "tier") == [2, 3]


@pytest.mark.parametrize("left", [0, 1])
def test_a_number_that_no_run_can_have_reached_costs_the_tier_and_no_save(tmp_path: Path, left: int) -> None:
    (tmp_path / "tier" / "run" / f"e{names.MAX_EPOCH - left}").mkdir(parents=True)
    tier = Tier(tmp_path / "tier")
    for step in (1, 2):  # also not of a later run
        with Checkpointer(tmp_path / "root", tiers=[tier]) as checkpointer:
            save(checkpointer, step)
            with pytest.raises(StorageError, match="nothing is carried"):
                checkpointer.wait(tier=tier)
        check(tmp_path / "root", step)


def test_what_was_gone_back_from_does_not_count_in_a_tier_either(tmp_path: Path) -> None:
    tier = Tier(tmp_path / "tier", every=1)
    with Checkpointer(tmp_path / "root", keep=KeepLast(1), tiers=[tier]) as checkpointer:
        for step in (1, 2, 3, 4):
            save(checkpointer, step).wait(tier=tier)
        checkpointer.rewind(2)  # the root has step 4 alone
        live = state(-1)
        report = checkpointer.restore(live)
        assert (report.step, report.source, live["step"]) == (2, str(tmp_path / "tier"), 2)
        with pytest.raises(NotFoundError, match="step 7"):
            checkpointer.rewind(7)
    shutil.rmtree(tmp_path / "root")  # close() has told the tier, though nothing was left to carry
    assert stillframe.restore(tmp_path / "root", state(-1), tiers=[tier]).step == 2


def test_a_tier_that_is_down_keeps_nobody_from_going_back_to_what_another_has(tmp_path: Path) -> None:
    near, far = Tier(tmp_path / "near"), Tier(tmp_path / "far")
    with Checkpointer(tmp_path / "root", keep=KeepLast(1), tiers=[near, far], on_error="warn") as checkpointer:
        for step in (1, 2, 3):
            save(checkpointer, step)
            checkpointer.wait(tier=near)
            checkpointer.wait(tier=far)
        _away(tmp_path / "near")
        checkpointer.rewind(1)
        assert checkpointer.restore(state(-1)).step == 1
        with pytest.raises(StorageError, match=r"step 7 was not found, but .*near cannot be read"):
            checkpointer.rewind(7)


def _away(tier: Path) -> Path:
    """Nobody reaches the tier: something else lies where it was."""
    moved = tier.with_name("moved")
    tier.rename(moved)
    tier.write_text("no directory")
    return moved


@pytest.fixture
def behind(tmp_path: Path) -> Tier:
    """A tier with steps 2 and 4, behind a root with steps 1, 2 and 4."""
    tier = Tier(tmp_path / "tier", every=2)
    with Checkpointer(tmp_path / "root", tiers=[tier]) as checkpointer:
        for step in (1, 2, 4):
            save(checkpointer, step)
            checkpointer.wait(tier=tier)
    return tier


def when_chosen(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], object]) -> None:
    """Between the choice of a step and its reading; once."""
    choose, pending = Sources.choose, [happens]

    def choose_then(self: Sources, save: SaveId, run: str) -> None:
        choose(self, save, run)
        while pending:
            pending.pop()()

    monkeypatch.setattr(Sources, "choose", choose_then)


def unmount(tier: Path) -> None:
    tier.rename(tier.with_name("moved"))
    tier.mkdir()


@pytest.mark.parametrize(
    ("fails", "match"),
    [(_away, r"step 4 .* was chosen, but .*tier cannot be read"), (unmount, "step 4 .* was there, and is gone")],
)
def test_a_tier_that_fails_when_a_step_of_it_was_chosen_is_no_fresh_start(
    tmp_path: Path, behind: Tier, fails: Callable[[Path], object], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(tmp_path / "root")
    when_chosen(monkeypatch, lambda: fails(tmp_path / "tier"))
    with Checkpointer(tmp_path / "root", tiers=[behind], on_error="warn") as checkpointer:
        with pytest.raises(StorageError, match=match):
            checkpointer.restore(state(-1))
        (tmp_path / "tier").rmdir() if (tmp_path / "tier").is_dir() else (tmp_path / "tier").unlink()
        (tmp_path / "moved").rename(tmp_path / "tier")
        assert checkpointer.restore(state(-1)).step == 4


def test_a_tier_that_fails_makes_no_step_damaged_and_an_older_one_is_told(
    tmp_path: Path, behind: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, tier = tmp_path / "root", tmp_path / "tier"
    segment = layout.segment(root, 4)
    segment.write_bytes(segment.read_bytes()[:-1] + b"x")
    with monkeypatch.context() as patched:
        when_chosen(patched, lambda: _away(tier))
        with pytest.raises(StorageError, match=r"step 4 .* was chosen, but .*tier cannot be read"):
            stillframe.restore(root, state(-1), tiers=[behind])
    with pytest.warns(RuntimeWarning, match="step 4 is damaged"):  # it was down before: as if it was not there
        assert stillframe.restore(root, state(-1), tiers=[behind]).step == 2
    tier.unlink()
    (tmp_path / "moved").rename(tier)
    for step in (2, 4):
        shutil.rmtree(layout.step_dir(root, step))
    when_chosen(monkeypatch, lambda: unmount(tier))
    with pytest.warns(RuntimeWarning, match="step 1 is restored, though there was a newer one .*step 4: it was there"):
        report = stillframe.restore(root, state(-1), tiers=[behind])
    assert (report.step, [each.step for each in report.skipped]) == (1, [4])


def test_a_step_that_is_asked_for_is_not_called_missing_while_a_tier_is_down(tmp_path: Path, behind: Tier) -> None:
    shutil.rmtree(tmp_path / "root")
    _away(tmp_path / "tier")
    with pytest.raises(StorageError, match=r"step 4 was not found, but .*tier cannot be read"):
        stillframe.restore(tmp_path / "root", state(-1), 4, tiers=[behind])


def test_going_back_goes_by_the_branch_of_the_tiers_as_well(tmp_path: Path) -> None:
    """The root has lost its step 2 of the branch, and has one that training went back from."""
    tier = Tier(tmp_path / "tier")
    with Checkpointer(tmp_path / "root", tiers=[tier]) as checkpointer:
        for step in (1, 2, 3):
            save(checkpointer, step).wait(tier=tier)
        checkpointer.rewind(1)
        for step in (2, 3):
            checkpointer.save(step, {**state(step), "step": -step}).wait(tier=tier)
        shutil.rmtree(tmp_path / "root" / names.step_dir(SaveId(2, 2)))
        checkpointer.rewind(2)
        live = state(-1)
        assert checkpointer.restore(live).source == str(tmp_path / "tier")
        assert live["step"] == -2


def test_what_the_root_has_lost_is_carried_on_from_another_tier(tmp_path: Path) -> None:
    near, far = Tier(tmp_path / "near"), Tier(tmp_path / "far")
    (tmp_path / "far").write_text("in its place")
    with Checkpointer(tmp_path / "root", tiers=[near, far], on_error="warn") as checkpointer:
        kept = save(checkpointer, 1)
        kept.wait(tier=near)
        shutil.rmtree(layout.segment(tmp_path / "root", 1).parent)
        (tmp_path / "far").unlink()
        kept.wait(tier=far, timeout_s=60)
    check(tmp_path / "far", 1)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_what_another_run_has_put_into_a_tier_is_never_restored_for_this_one(
    tmp_path: Path, is_damaged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Its steps may be newer, or called the same as one that is damaged here."""
    tier = Tier(tmp_path / "tier")
    with Checkpointer(tmp_path / "other", tiers=[tier]) as checkpointer:
        for step in (1, 2, 9):
            checkpointer.save(step, {"weights": torch.full((100_000,), -1.0), "step": step}).wait(tier=tier)
    with Checkpointer(tmp_path / "root") as checkpointer:
        save(checkpointer, 1)
        save(checkpointer, 2)
    if is_damaged:
        segment = layout.segment(tmp_path / "root", 2)
        segment.write_bytes(segment.read_bytes()[:-1] + b"x")
    live = state(-1)
    wanted = 1 if is_damaged else 2
    told = pytest.warns(RuntimeWarning, match="damaged") if is_damaged else contextlib.nullcontext()
    with Checkpointer(tmp_path / "root", tiers=[tier]) as checkpointer:
        with pytest.raises(NotFoundError, match="step 9"):
            checkpointer.rewind(9)
        with told:
            report = checkpointer.restore(live)
    assert (report.step, report.source) == (wanted, str(tmp_path / "root"))
    assert bool((live["weights"] == float(wanted)).all())
    assert "holds checkpoints of another run" in caplog.text
    (view,) = look_at_tiers(survey(tmp_path / "root"))
    assert "another run" in view.trouble
    (finding,) = finish(tmp_path / "root")
    assert "could not be read" in finding.what


def test_a_restore_from_a_tier_and_steps_left_behind_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = Tier(tmp_path / "tier")
    with Checkpointer(tmp_path / "root", tiers=[tier]) as checkpointer:
        for step in (1, 2):
            save(checkpointer, step).wait(tier=tier)
        with Checkpointer(tmp_path / "other", tiers=[tier]) as other:  # takes over
            assert other.restore(state(-1)).step == 2
            assert f"step 2 is restored from {tmp_path / 'tier'}" in caplog.text
            save(other, 3).wait(tier=tier)
        save(checkpointer, 3)
        save(checkpointer, 4)
    with Checkpointer(tmp_path / "root", tiers=[tier]) as checkpointer:
        assert checkpointer.restore(state(-1)).source == str(tmp_path / "tier")
    assert f"steps 3-4 of {tmp_path / 'root'} do not count" in caplog.text


@pytest.mark.parametrize("how", ["restore", "save"])
def test_who_waits_right_after_a_restart_waits_for_what_was_left_to_be_carried(tmp_path: Path, how: str) -> None:
    tier, count = Tier(tmp_path / "tier", every=2, limit="1MB/s"), 1_000_000
    with Checkpointer(tmp_path / "root", tiers=[tier], on_error="warn") as checkpointer:
        save(checkpointer, 2, count)
        until(lambda: checkpointer.stats().tiers[0].committed_step == 2, "the first, which nothing slows, is there")
        save(checkpointer, 4, count)
        until(lambda: checkpointer.stats().tiers[0].target_step == 4, "it is being carried")
        kill(spi.keeper_pid(checkpointer) or 0)
        checkpointer.close(timeout_s=0)
    assert check_whole(tmp_path / "tier") == [2]
    with Checkpointer(tmp_path / "root", tiers=[tier]) as checkpointer:
        checkpointer.wait(tier=tier, timeout_s=0.5)  # nothing has begun: there is nothing to wait for
        if how == "restore":
            assert checkpointer.restore(state(-1, count)).step == 4
        else:
            save(checkpointer, 5)  # it is not due
        checkpointer.wait(tier=tier, timeout_s=60)
        assert check_whole(tmp_path / "tier") == [2, 4]


def test_what_is_being_carried_stays_in_the_root_when_the_keeper_is_killed(tmp_path: Path) -> None:
    """Also while the next keeper saves, prunes, and does not reach the tier; and it is no more than two steps."""
    tier, count = Tier(tmp_path / "tier", every=2, limit=SLOW), TWO_CHUNKS
    root = tmp_path / "root"
    with Checkpointer(root, keep=KeepLast(1), tiers=[tier], on_error="warn") as checkpointer:
        checkpointer.restore(state(0, count))
        for step in (1, 2):
            save(checkpointer, step, count)
        until(lambda: checkpointer.stats().tiers[0].target_step == 2, "it is being carried")
        keeper = spi.keeper_pid(checkpointer)
        assert keeper is not None
        kill(keeper)
        until(lambda: not is_alive(keeper), "its end")
        moved = _away(tmp_path / "tier")
        for step in (3, 5):
            save(checkpointer, step, count)
        until(lambda: checkpointer.stats().tiers[0].trouble, "the tier cannot be reached")
        for step in (6, 7):
            save(checkpointer, step, count)
        until(lambda: Catalog(root).steps() == [2, 6, 7], "what is carried, comes next, and is kept")
        assert checkpointer.stats().tiers[0].waiting_step == 6
        (tmp_path / "tier").unlink()
        moved.rename(tmp_path / "tier")
        save(checkpointer, 8, count)  # so it is tried again at once
        checkpointer.wait(tier=tier)
        assert check_whole(tmp_path / "tier") == [2, 8]
        save(checkpointer, 9, count)
        until(lambda: Catalog(root).steps() == [9], "nothing more is kept for it")


def test_what_was_being_carried_is_forgotten_when_the_run_goes_back_behind_it(tmp_path: Path) -> None:
    tier, count = Tier(tmp_path / "tier", every=2, limit=SLOW), TWO_CHUNKS
    root = tmp_path / "root"
    with Checkpointer(root, tiers=[tier], on_error="warn") as checkpointer:
        checkpointer.restore(state(0, count))
        for step in (1, 2):
            save(checkpointer, step, count)
        until(lambda: checkpointer.stats().tiers[0].target_step == 2, "it is being carried")
        keeper = spi.keeper_pid(checkpointer)
        assert keeper is not None
        kill(keeper)
        until(lambda: not is_alive(keeper), "its end")
        checkpointer.rewind(1)
        checkpointer.restore(state(0, count))
        save(checkpointer, 3, count)
        checkpointer.wait(tier=tier)
    assert check_whole(tmp_path / "tier") == [3]


def test_advice_on_a_damaged_step_names_the_tier_that_has_it(tmp_path: Path) -> None:
    tier = Tier(tmp_path / "tier")
    with Checkpointer(tmp_path / "root", tiers=[tier]) as checkpointer:
        for step in (1, 2):
            save(checkpointer, step).wait(tier=tier)
    shutil.rmtree(tmp_path / "root")
    segment = layout.segment(tmp_path / "tier", 2)
    segment.write_bytes(segment.read_bytes()[:-1] + b"\xff")
    with pytest.warns(RuntimeWarning, match=rf"stillframe verify {tmp_path / 'tier'} 2.*doctor {tmp_path / 'tier'} "):
        assert stillframe.restore(tmp_path / "root", state(-1), tiers=[tier]).step == 1
    segment = layout.segment(tmp_path / "tier", 1)
    segment.write_bytes(segment.read_bytes()[:-1] + b"\xff")
    with pytest.warns(RuntimeWarning), pytest.raises(stillframe.IntegrityError, match=f"every.*{tmp_path / 'tier'} is"):
        stillframe.restore(tmp_path / "root", state(-1), tiers=[tier])
