"""All ranks meet at the same step, whoever calls and whenever, and nobody who has passed it is called back."""

from __future__ import annotations

import random
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from stillframe.errors import DeadlineError
from stillframe.ranks import meeting
from stillframe.ranks.group import Group
from stillframe.ranks.meeting import Meeting
from tests.support import until

pytestmark = pytest.mark.timeout(60)


def groups_of(count: int, store: Any = None) -> list[Group]:
    store = store or dist.HashStore()  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=5))
    found = [Group(rank, count, store, 10.0) for rank in range(count)]
    for each in found:
        each._name = "run"  # as if they had met
    return found


def test_alone_the_next_step_is_the_one() -> None:
    alone = Meeting(Group(0, 1, None, 10.0), "test")
    assert not alone.passed(0)
    alone.call("now")
    alone.call("again")
    assert alone.passed(1) == "now"
    assert not alone.passed(2)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("ahead_s", [0.0, 0.05])
def test_all_ranks_meet_at_the_same_steps(seed: int, ahead_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks wait for one another in every second seed, as in a collective; else they run apart, by many steps."""
    monkeypatch.setattr(meeting, "_LOOK_S", 0.02)
    choose, count = random.Random(seed), 3
    meetings = [Meeting(group, "test", ahead_s) for group in groups_of(count)]
    together = threading.Barrier(count) if seed % 2 else None
    met: list[list[tuple[int, str]]] = [[] for _ in range(count)]
    pauses = [[choose.choice([0.0, 0.001, 0.004]) for _ in range(300)] for _ in range(count)]
    callers = {choose.randrange(count): choose.randrange(60), choose.randrange(count): choose.randrange(60, 150)}

    def train(rank: int) -> None:
        for step in range(300):
            time.sleep(pauses[rank][step])
            if together is not None:
                together.wait(20)
            if callers.get(rank) == step:
                meetings[rank].call(f"rank {rank}")
            why = meetings[rank].passed(step)
            if why:
                met[rank].append((step, why))

    threads = [threading.Thread(target=train, args=[rank]) for rank in range(count)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    steps = [[step for step, _ in each] for each in met]
    assert steps[0] == steps[1] == steps[2]
    if together is not None:  # else one may be at its end before another is called
        assert 1 <= len(steps[0]) <= 2
        assert steps[0][0] > min(callers.values())


def test_a_rank_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_ANSWER_S", 0.5)
    first, _ = groups_of(2)
    lonely = Meeting(first, "test")
    lonely.call("now")
    until(lambda: lonely._round.why, "a call")
    with pytest.raises(DeadlineError, match=r"no answer within 0\.5 s from rank 1"):
        lonely.passed(1000)
    began = time.monotonic()
    with pytest.raises(DeadlineError):
        lonely.passed(1001)
    assert time.monotonic() - began < 0.3  # it is known by now


def test_whoever_has_said_how_far_it_goes_on_does_not_wait_until_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_ANSWER_S", 0.5)
    first, _ = groups_of(2)
    lonely = Meeting(first, "test", ahead_s=0.5)
    lonely.call("now")
    lonely.passed(0)
    time.sleep(0.2)
    assert lonely.passed(1000) == ""  # too early to tell how fast it is: the call waits
    until(lambda: lonely._round.said, "a call")
    said = lonely._round.said
    assert said is not None
    assert 1000 < said < 3500
    assert lonely.passed(said) == ""  # rank 1 never answers
    with pytest.raises(DeadlineError):
        lonely.passed(said + 1)


class Gone:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("connection reset")

    def set_timeout(self, timeout: timedelta) -> None:
        pass


def test_a_store_that_is_gone_is_said() -> None:
    first, _ = groups_of(2, Gone())
    lonely = Meeting(first, "test")
    lonely.call("now")
    time.sleep(0.3)
    assert lonely.passed(0) == ""  # it was never called: no other rank can know
