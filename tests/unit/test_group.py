"""How ranks agree: threads stand in for ranks, around a real store of torch.distributed."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from stillframe.errors import ConfigError, DeadlineError, IntegrityError, MismatchError
from stillframe.ranks import group
from stillframe.ranks.group import Answer, Group, check_same, join_group
from tests.support import until


def life(store: Any, monkeypatch: pytest.MonkeyPatch) -> list[Group]:
    """Three ranks, as three processes that have just started would be."""
    made = []
    for rank in range(3):
        monkeypatch.setattr(group, "_numbers", itertools.count(1))
        made.append(Group(rank, 3, store, deadline_s=5.0))
    return made


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[Group]:
    return life(HashStore(), monkeypatch)


def together(ranks: list[Group], work: Callable[[Group], Any]) -> list[Any]:
    """What each rank got, or the error that it met."""

    def one(each: Group) -> Any:
        try:
            return work(each)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, ranks))


def total(answers: list[Answer]) -> int:
    return sum(int(each.value) for each in answers)


def test_every_rank_gets_the_verdict_of_rank_0(ranks: list[Group]) -> None:
    for _ in range(3):
        assert together(ranks, lambda each: each.decide("adding", lambda: each.rank + 1, total, int)) == [6, 6, 6]


def test_an_error_of_the_judge_is_raised_on_every_rank(ranks: list[Group]) -> None:
    def judge(answers: list[Answer]) -> int:
        check_same("colour", [each.value for each in answers])
        return 0

    found = together(ranks, lambda each: each.decide("painting", lambda: "red" if each.rank else "blue", judge, int))
    for error in found:
        assert isinstance(error, ConfigError)
        assert "rank 0: colour='blue'; ranks 1-2: colour='red'" in str(error)


def test_a_rank_keeps_its_own_error_and_the_others_hear_of_it(ranks: list[Group]) -> None:
    def say(rank: int) -> int:
        if rank == 1:
            raise MismatchError("it does not fit here")
        return rank

    def judge(answers: list[Answer]) -> int:
        assert [type(each.error) for each in answers] == [type(None), MismatchError, type(None)]
        raise MismatchError("on rank 1")

    first, own, third = together(ranks, lambda each: each.decide("fitting", lambda: say(each.rank), judge, int))
    assert str(own) == "it does not fit here"
    assert str(first) == str(third) == "on rank 1"


def test_any_exception_of_a_rank_reaches_the_others(ranks: list[Group]) -> None:
    def say(rank: int) -> int:
        return 1 // rank  # a bug on rank 0

    def judge(answers: list[Answer]) -> int:
        raise IntegrityError(str(answers[0].error))

    found = together(ranks, lambda each: each.decide("dividing", lambda: say(each.rank), judge, int))
    assert isinstance(found[0], ZeroDivisionError)
    assert "ZeroDivisionError" in str(found[1])


def test_a_rank_that_does_not_come_is_named(ranks: list[Group]) -> None:
    for each in ranks:
        each.deadline_s = 0.2
    found = together(ranks[:2], lambda each: each.decide("waiting", lambda: 1, total, int))
    for error in found:
        assert isinstance(error, DeadlineError)
        assert "waiting: rank 2 of 3 did not come within 0.2 s" in str(error)


def test_if_rank_0_does_not_come_the_others_say_so(ranks: list[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "_VERDICT_S", 0.1)
    for each in ranks:
        each.deadline_s = 0.1
    for error in together(ranks[1:], lambda each: each.decide("waiting", lambda: 1, total, int)):
        assert isinstance(error, DeadlineError)
        assert "rank 0 did not answer" in str(error)


def test_what_an_earlier_life_left_in_the_store_is_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    monkeypatch.setattr(group, "_VERDICT_S", 0.1)
    first, second, third = (life(store, monkeypatch) for _ in range(3))
    assert together(first, lambda each: each.decide("adding", lambda: each.rank, total, int)) == [3, 3, 3]
    for each in second:
        each.deadline_s = 0.1
    for error in together(second[1:], lambda each: each.decide("calling", lambda: 1, total, int)):  # and then killed
        assert isinstance(error, DeadlineError)
    for _ in range(2):
        assert together(third, lambda each: each.decide("adding", lambda: each.rank + 10, total, int)) == [33, 33, 33]


def test_the_newest_step_that_all_have_sealed(ranks: list[Group]) -> None:
    assert ranks[0].complete_step() == -1
    for each in ranks:
        each.note_sealed(1)
    for each in ranks[:2]:
        each.note_sealed(2)
    until(lambda: [each.complete_step() for each in ranks] == [1, 1, 1], "step 1 is complete")
    ranks[2].note_sealed(2)
    until(lambda: [each.complete_step() for each in ranks] == [2, 2, 2], "step 2 is complete")


def test_a_store_that_does_not_answer_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck:
        def __getattr__(self, name: str) -> Any:
            return lambda *_: threading.Event().wait(30)

    monkeypatch.setattr(group, "_VERDICT_S", 0.1)
    alone = Group(1, 2, Stuck(), deadline_s=0.1)
    with pytest.raises(DeadlineError, match="does not answer"):
        alone.decide("waiting", lambda: 1, total, int)
    alone.note_sealed(1)
    assert alone.complete_step() == -1


@pytest.mark.parametrize(
    ("rank", "world_size", "what"),
    [
        (1, None, "give both, or neither"),
        (None, 2, "give both, or neither"),
        (2, 2, "below the world size"),
        (-1, 2, "at least 0"),
        (0, 0, "below the world size"),
        (True, 2, "whole number"),
        (0, "2", "whole number"),
        (0, 2, "MASTER_ADDR"),
    ],
)
def test_a_place_that_cannot_be_is_refused(
    rank: Any, world_size: Any, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ConfigError, match=what):
        join_group(rank, world_size, 1.0)


def test_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert (join_group(None, None, 1.0).rank, join_group(None, None, 1.0).world_size) == (0, 1)
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ConfigError, match="not numbers"):
        join_group(None, None, 1.0)
