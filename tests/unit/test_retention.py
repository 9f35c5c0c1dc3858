"""Which checkpoints a policy keeps."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillframe import KeepEvery, KeepLast
from stillframe.errors import ConfigError
from stillframe.retention import Keep

STEPS = [10, 20, 25, 30, 45, 50]


def test_keep_last_keeps_the_newest() -> None:
    assert KeepLast(2).keeps(STEPS) == {45, 50}


def test_keep_last_keeps_all_when_there_are_fewer() -> None:
    assert KeepLast(100).keeps(STEPS) == set(STEPS)


def test_keep_every_keeps_multiples_and_the_newest() -> None:
    assert KeepEvery(20).keeps([0, 10, 20, 30, 40, 50]) == {0, 20, 40, 50}


def test_combined_keeps_what_either_keeps() -> None:
    assert (KeepLast(2) | KeepEvery(10)).keeps(STEPS) == {10, 20, 30, 45, 50}


def test_combining_works_in_either_order() -> None:
    assert KeepLast(2) | KeepEvery(10) == KeepEvery(10) | KeepLast(2)


def test_the_order_of_the_steps_does_not_matter() -> None:
    assert KeepLast(2).keeps(reversed(STEPS)) == KeepLast(2).keeps(STEPS)


def test_nothing_is_kept_of_nothing() -> None:
    assert (KeepLast(3) | KeepEvery(2)).keeps([]) == set()


@pytest.mark.parametrize("count", [0, -1, True, 1.0, "3", None])
@pytest.mark.parametrize("policy", [KeepLast, KeepEvery])
def test_a_count_below_one_or_not_whole_is_refused(policy: Any, count: Any) -> None:
    with pytest.raises(ConfigError, match=policy.__name__):
        policy(count)


@pytest.mark.parametrize("make", [KeepLast, KeepEvery])
def test_two_values_for_one_rule_are_refused(make: Any) -> None:
    with pytest.raises(ConfigError, match="two values"):
        make(1) | make(2)


def test_a_policy_combines_only_with_a_policy() -> None:
    policy: Any = KeepLast(1)
    with pytest.raises(TypeError):
        policy | 3


@given(
    st.sets(st.integers(0, 1000)),
    st.none() | st.integers(1, 20),
    st.none() | st.integers(1, 50),
)
def test_the_newest_is_always_kept_and_nothing_is_invented(
    steps: set[int], last: int | None, every: int | None
) -> None:
    kept = Keep(last, every).keeps(steps)
    assert kept <= steps
    assert not steps or max(steps) in kept


@given(st.sets(st.integers(0, 1000)), st.integers(1, 20), st.integers(1, 50))
def test_a_combination_is_the_union_of_its_halves(steps: set[int], last: int, every: int) -> None:
    assert (KeepLast(last) | KeepEvery(every)).keeps(steps) == (
        KeepLast(last).keeps(steps) | KeepEvery(every).keeps(steps)
    )
