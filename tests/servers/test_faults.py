"""What servers and networks do to a run, as its root and as a tier: on a real server, through a proxy that meddles.

What is promised: training goes on, nothing that was committed is lost, no manifest names what is not there, the error
says what to do, and when the fault is gone the next save works, a tier catches up, and nothing is left over.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

import stillframe
from stillframe import BusyError, Catalog, Checkpointer, StorageError, Tier
from tests.servers.ceph import SECRET, Ceph
from tests.servers.proxy import Fault, Proxy
from tests.servers.shared import PLACE, check_passing_faults, check_whole, keys, left_over, new_url
from tests.support import until

pytestmark = pytest.mark.timeout(240)
HASTY = {"timeout": "2s", "retry_timeout": 2}
"""So that a server that does not answer is given up soon."""
READ_ONLY, FULL, REMOVED = "sf-read-only", "sf-full", "sf-removed"
"""Buckets."""


@pytest.fixture(scope="module")
def server(ceph: Ceph) -> Ceph:
    for name in (READ_ONLY, FULL, REMOVED):
        ceph.make_place(name)
    return ceph


@pytest.fixture
def proxy(server: Ceph) -> Iterator[Proxy]:
    found = Proxy(server.options)
    yield found
    found.stop()


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((500_000,), float(step)), "step": step}


def restored(url: str, options: dict[str, Any]) -> int | None:
    live = state(-1)
    step = stillframe.restore(url, live, storage_options=options).step
    assert live["step"] == step
    assert bool((live["w"] == float(live["step"])).all())
    return step


# --- as the only root ----------------------------------------------------------------------------

FAULTS: dict[str, tuple[Fault, str]] = {
    "503": (Fault(status=503, code="SlowDown"), r"503 Service Unavailable.*asked \d+ times.*overloaded, or down"),
    "hangs": (Fault(hangs=True), r"does not answer \(it took too long\).*does it run"),
    "cut in mid-part": (
        Fault(methods="PUT", only=".parts/", cut_request=1_000_000),
        r"does not answer \(Connection reset by peer\)",
    ),
    "cut in the answer": (Fault(cut_answer=0), r"does not answer \(Connection reset by peer\)"),
    "expired": (
        Fault(status=403, code="ExpiredToken"),
        r"403 Forbidden \(ExpiredToken\); the credentials have expired",
    ),
    "clocks apart": (Fault(shift_s=3600.0), r"RequestTimeTooSkewed\); the clocks of this machine and of the server"),
}
DENIED = r"AccessDenied\); look at the credentials.* allowed to read, write, list and delete"
REVOKED = r"403 Forbidden \(UserSuspended\); look at the credentials"
NO_ROOM = r"QuotaExceeded\); there is no room, or a quota is reached: make room there"


class Run:
    """One run for all faults: what one leaves behind, the next one meets."""

    def __init__(self, server: Ceph) -> None:
        self.server, self.proxy, self.url = server, Proxy(server.options), new_url("s3")
        options = {**self.proxy.options, **HASTY}
        self.checkpointer = Checkpointer(self.url, storage_options=options, on_error="warn")
        self.committed: list[int] = []
        self.step = 0

    def save(self) -> stillframe.Save:
        self.step += 1
        began = time.monotonic()
        self.checkpointer.fence()
        saved = self.checkpointer.save(self.step, state(self.step))
        assert time.monotonic() - began < 0.5, "training does not wait for a server"
        return saved

    def commit(self) -> None:
        self.save().wait(timeout_s=30)
        self.committed.append(self.step)

    def fault(self, name: str) -> tuple[AbstractContextManager[object], str]:
        if name == "read-only":
            return self.server.read_only(PLACE), DENIED
        if name == "full":
            return self.server.full(PLACE), NO_ROOM
        if name == "killed":
            return self.server.down(), "does not answer"
        if name == "revoked":
            return self.server.suspended(), REVOKED
        fault, about = FAULTS[name]
        return self.proxy.doing(fault), about


@pytest.fixture(scope="module")
def run(server: Ceph) -> Iterator[Run]:
    found = Run(server)
    try:
        found.commit()
        yield found
    finally:
        found.checkpointer.close(timeout_s=20)
        found.proxy.stop()


@pytest.mark.parametrize("name", [*FAULTS, "read-only", "full", "killed", "revoked"])
def test_as_the_root_it_fails_a_save_that_says_why_and_the_next_works(
    run: Run, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    fault, about = run.fault(name)
    with fault, pytest.raises(StorageError, match=about) as caught:
        run.save().wait(timeout_s=10)
    assert SECRET not in str(caught.value)
    run.commit()
    assert check_whole(run.server, run.url, run.step - 1) == run.committed
    assert len([each for each in caplog.records if each.levelno >= logging.WARNING]) == 1, caplog.text


def test_as_the_root_nothing_is_left_over_in_the_end(run: Run) -> None:
    run.checkpointer.close(timeout_s=20)
    with Checkpointer(run.url, storage_options=run.server.options) as checkpointer:
        live = state(-1)
        assert checkpointer.restore(live).step == run.committed[-1]
        checkpointer.save(1000, state(1000)).wait(timeout_s=30)
        until(lambda: not left_over(run.server, run.url), "the sweep")
    assert check_whole(run.server, run.url) == [*run.committed, 1000]


def test_as_the_root_what_passes_costs_time_alone(server: Ceph, proxy: Proxy) -> None:
    check_passing_faults(server, new_url("s3"), proxy, "SlowDown")


def test_as_the_root_a_commit_that_nobody_can_tell_of_stands(server: Ceph, proxy: Proxy) -> None:
    url, options = new_url("s3"), {**proxy.options, **HASTY, "retry_timeout": 1}
    with Checkpointer(url, storage_options=options, on_error="warn") as checkpointer:
        checkpointer.save(1, state(1)).wait(timeout_s=30)
        with (
            proxy.doing(Fault(only="manifest.json", cut_answer=0)),  # it is done, and no answer comes
            pytest.raises(StorageError, match="cannot determine whether step 2 was committed"),
        ):
            checkpointer.save(2, state(2)).wait(timeout_s=30)
        assert check_whole(server, url) == [1, 2]
        checkpointer.save(3, state(3)).wait(timeout_s=30)
    assert check_whole(server, url) == [1, 2, 3]
    assert not left_over(server, url)


def test_as_the_root_a_server_that_ignores_conditions_gets_no_checkpoint(server: Ceph, proxy: Proxy) -> None:
    url, options = new_url("s3"), {**proxy.options, **HASTY}
    with Checkpointer(url, storage_options=options, on_error="warn") as checkpointer:
        with (
            proxy.doing(Fault(conditional=True, drops_condition=True)),
            pytest.raises(StorageError, match=r"ignores the condition.*use a server that honours it"),
        ):
            checkpointer.save(1, state(1)).wait(timeout_s=30)
        assert keys(server, url) == []
        checkpointer.save(2, state(2)).wait(timeout_s=30)
    assert check_whole(server, url) == [2]
    assert not left_over(server, url)


def test_as_the_root_of_two_runs_the_second_goes_on_and_the_first_is_told(server: Ceph) -> None:
    url, options = new_url("s3"), server.options
    with (
        Checkpointer(url, storage_options=options, on_error="warn") as first,
        Checkpointer(url, storage_options=options) as second,
    ):
        first.save(1, state(1)).wait(timeout_s=30)
        live = state(-1)
        assert second.restore(live).step == 1
        second.save(2, state(2)).wait(timeout_s=30)
        for step in (2, 3):  # the same one, and the next
            with pytest.raises(BusyError, match="another run"):
                first.save(step, {**state(step), "w": torch.zeros(500_000)}).wait(timeout_s=30)
        second.save(3, state(3)).wait(timeout_s=30)
    assert check_whole(server, url) == [1, 2, 3]
    assert restored(url, options) == 3


def test_as_the_root_a_bucket_that_is_removed_fails_saves_until_it_is_there_again(server: Ceph) -> None:
    url, options = new_url("s3", REMOVED), server.options
    with Checkpointer(url, storage_options=options, on_error="warn") as checkpointer:
        checkpointer.save(1, state(1)).wait(timeout_s=30)
        with server.without(REMOVED), pytest.raises(StorageError, match="there is no such bucket: make it first"):
            checkpointer.save(2, state(2)).wait(timeout_s=30)
        for step in (3, 4):
            checkpointer.save(step, state(step)).wait(timeout_s=30)
    assert check_whole(server, url) == [3, 4]
    live = state(-1)
    with Checkpointer(url, storage_options=options) as checkpointer:
        assert checkpointer.restore(live).step == 4
        checkpointer.save(5, state(5)).wait(timeout_s=30)
    assert restored(url, options) == 5
    assert not left_over(server, url)


# --- as a tier -----------------------------------------------------------------------------------


def test_as_tiers_they_cost_no_save_are_told_of_once_and_catch_up(server: Ceph, tmp_path: Path) -> None:
    """A tier for each fault, all at once."""
    faulty = {name: fault for name, fault in FAULTS.items() if name != "cut in the answer"}  # eight are allowed
    names = [*faulty, "condition ignored", "read-only", "full"]
    proxies = {name: Proxy(server.options) for name in names}
    buckets = {"read-only": READ_ONLY, "full": FULL}
    urls = {name: new_url("s3", buckets.get(name, PLACE)) for name in names}
    tiers = [Tier(urls[name], storage_options={**proxies[name].options, **HASTY}) for name in names]
    abouts = {name: about for name, (_, about) in faulty.items()}
    abouts |= {"condition ignored": "ignores the condition of a write", "read-only": DENIED, "full": NO_ROOM}
    told: list[stillframe.StillframeError] = []
    ignoring = proxies["condition ignored"].doing(Fault(conditional=True, drops_condition=True))
    with contextlib.ExitStack() as ending:
        for proxy in proxies.values():
            ending.callback(proxy.stop)
        checkpointer = ending.enter_context(Checkpointer(tmp_path / "root", tiers=tiers, on_error=told.append))
        with contextlib.ExitStack() as faults:
            faults.enter_context(ignoring)  # from the first write on: later it is not tried again
            checkpointer.save(1, state(1)).wait()
            for name in names:
                if name != "condition ignored":
                    checkpointer.wait(tier=urls[name], timeout_s=60)
            for name, (fault, _) in faulty.items():
                faults.enter_context(proxies[name].doing(fault))
            faults.enter_context(server.read_only(READ_ONLY))
            faults.enter_context(server.full(FULL))
            for step in (2, 3, 4):
                checkpointer.fence()
                checkpointer.save(step, state(step)).wait(timeout_s=20)
            until(lambda: all(each.failures for each in checkpointer.stats().tiers), "all have failed", 60)
            assert any(each.failures > 1 for each in checkpointer.stats().tiers), (
                "those that fail at once are tried again"
            )
            stats = dict(zip(names, checkpointer.stats().tiers, strict=True))
            for name in names:
                is_new = name == "condition ignored"
                assert stats[name].committed_step == (None if is_new else 1), name
                assert stats[name].behind_steps == (4 if is_new else 3)
                there = Catalog(urls[name], storage_options=server.options).steps()
                assert there == ([] if is_new else [1]), name
        assert checkpointer.stats().failed == 0
        for tier in tiers:
            checkpointer.wait(tier=tier, timeout_s=60)
    for name in names:
        (error,) = [each for each in told if urls[name] in str(each)]
        assert re.search(abouts[name], str(error)), (name, error)
        assert SECRET not in str(error)
        assert check_whole(server, urls[name])[-1] == 4, name
        assert not left_over(server, urls[name]), name
    assert Catalog(tmp_path / "root").steps() == [1, 2, 3, 4]


def test_as_a_tier_of_two_runs_one_carries_and_the_other_is_told(server: Ceph, tmp_path: Path) -> None:
    """Both begin at the same moment."""
    tier = Tier(new_url("s3"), storage_options=server.options)
    with (
        Checkpointer(tmp_path / "one", tiers=[tier]) as one,
        Checkpointer(tmp_path / "two", tiers=[tier]) as two,
    ):
        for step in (1, 2, 3):
            saves = [each.save(step, {**state(step), "run": run}) for run, each in enumerate((one, two))]
            for save in saves:
                save.wait(timeout_s=30)
        until(lambda: one.stats().tiers[0].is_over or two.stats().tiers[0].is_over, "one of them is told")
        loser, winner = (one, two) if one.stats().tiers[0].is_over else (two, one)
        winner.wait(tier=tier, timeout_s=60)
        with pytest.raises(StorageError, match=r"nothing is carried to .* any more: .*another run"):
            loser.wait(tier=tier, timeout_s=60)
        assert not winner.stats().tiers[0].is_over
    assert check_whole(server, str(tier.root))[-1] == 3
    for step in check_whole(server, str(tier.root)):
        found = stillframe.load(str(tier.root), step, storage_options=server.options)
        assert found["run"] == (0 if winner is one else 1)
    assert Catalog(tmp_path / "one").steps() == Catalog(tmp_path / "two").steps() == [1, 2, 3]


@pytest.mark.parametrize("what", ["emptied", "removed"])
def test_as_a_tier_what_is_taken_away_is_filled_again(server: Ceph, tmp_path: Path, what: str) -> None:
    tier = Tier(new_url("s3", REMOVED), storage_options={**server.options, **HASTY})
    url = str(tier.root)
    with Checkpointer(tmp_path / "root", tiers=[tier], on_error="warn") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(step)).wait(tier=tier, timeout_s=60)
        if what == "emptied":
            server.empty(REMOVED)
        else:
            with server.without(REMOVED):
                checkpointer.save(3, state(3)).wait(timeout_s=30)
                until(lambda: "no such bucket" in checkpointer.stats().tiers[0].trouble, "it is told")
        for step in (4, 5):
            checkpointer.save(step, state(step)).wait(tier=tier, timeout_s=60)
        assert checkpointer.stats().failed == 0
    assert check_whole(server, url)[-2:] == [4, 5]
    assert Catalog(url, storage_options=server.options).parent(1) is not None, "it is known whose it is"
    assert not left_over(server, url)
    with Checkpointer(tmp_path / "elsewhere", tiers=[tier]) as checkpointer:  # the root is lost
        live = state(-1)
        assert checkpointer.restore(live).step == 5
        checkpointer.save(6, state(6)).wait(tier=tier, timeout_s=60)
    assert restored(url, server.options) == 6
