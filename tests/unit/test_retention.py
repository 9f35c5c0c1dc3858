"""Which checkpoints a policy keeps, and which may go."""

from __future__ import annotations

import math
from typing import Any

import pytest

from stillframe.errors import ConfigError
from stillframe.model import SaveId
from stillframe.retention import (
    Keep,
    KeepAny,
    KeepBest,
    KeepEvery,
    KeepFor,
    KeepLast,
    Known,
    check_policy,
    decode_policy,
    encode_policy,
    garbage,
    judges_by_manifest,
)

NOW_S = 1_000_000.0


def known(*steps: int) -> list[Known]:
    return [Known(SaveId(step)) for step in steps]


def aged(**hours: float) -> list[Known]:
    """``s10=2.5``: step 10 was saved two and a half hours ago."""
    return [Known(SaveId(int(name[1:])), NOW_S - age * 3600) for name, age in hours.items()]


def measured(metric: str, **values: Any) -> list[Known]:
    return [Known(SaveId(int(name[1:])), metadata={metric: value}) for name, value in values.items()]


STEPS = known(10, 20, 25, 30, 45, 50)


def test_keep_last_keeps_the_newest() -> None:
    assert KeepLast(2).keeps(STEPS, NOW_S) == {45, 50}


def test_keep_last_keeps_all_when_there_are_fewer() -> None:
    assert KeepLast(100).keeps(STEPS, NOW_S) == {10, 20, 25, 30, 45, 50}


def test_keep_every_keeps_multiples_and_the_newest() -> None:
    assert KeepEvery(20).keeps(known(0, 10, 20, 30, 40, 50), NOW_S) == {0, 20, 40, 50}


def test_keep_for_keeps_the_young_and_the_newest() -> None:
    assert KeepFor(2).keeps(aged(s10=3, s20=2.001, s30=2, s40=1, s50=0), NOW_S) == {30, 40, 50}
    assert KeepFor(hours=0.5).keeps(aged(s10=9, s20=8, s30=7), NOW_S) == {30}


def test_a_save_from_the_future_counts_as_young() -> None:
    assert KeepFor(1).keeps(aged(s10=-500, s20=2, s30=2), NOW_S) == {10, 30}


def test_a_save_whose_age_cannot_be_told_stays() -> None:
    assert KeepFor(1).keeps(aged(s10=math.nan, s20=2, s30=2), NOW_S) == {10, 30}


def test_keep_best_keeps_the_lowest_or_the_highest_and_the_newest() -> None:
    found = measured("loss", s10=0.5, s20=2, s30=0.25, s40=3.0, s50=1)
    assert KeepBest("loss").keeps(found, NOW_S) == {30, 50}
    assert KeepBest("loss", 2).keeps(found, NOW_S) == {10, 30, 50}
    assert KeepBest("loss", 2, "max").keeps(found, NOW_S) == {20, 40, 50}
    assert KeepBest("accuracy", 3).keeps(found, NOW_S) == {50}


def test_of_equally_good_saves_the_newer_is_the_better() -> None:
    found = measured("loss", s10=1, s20=1.0, s30=1, s40=5)
    for mode in ("min", "max"):
        best = KeepBest("loss", 1, mode).keeps(found[:3] + known(60), NOW_S)
        assert best == {30, 60}, mode
    assert KeepBest("loss", 2).keeps(found, NOW_S) == {20, 30, 40}


@pytest.mark.parametrize("value", [math.nan, None, "0.1", True, [0.1], {}])
def test_what_is_no_number_is_never_among_the_best(value: Any) -> None:
    found = measured("loss", s10=value, s20=7.0, s30=8.0, s40=9.0)
    for mode in ("min", "max"):
        assert 10 not in KeepBest("loss", 4, mode).keeps(found, NOW_S)
    assert KeepBest("loss").keeps(found, NOW_S) == {20, 40}


def test_the_best_may_be_infinite_or_beyond_all_floats() -> None:
    found = measured("score", s10=math.inf, s20=10**400, s30=1.0, s40=-math.inf)
    assert KeepBest("score", 2, "max").keeps(found, NOW_S) == {10, 20, 40}
    assert KeepBest("score", 2).keeps(found, NOW_S) == {30, 40}


def test_combined_keeps_what_either_keeps() -> None:
    assert (KeepLast(2) | KeepEvery(10)).keeps(STEPS, NOW_S) == {10, 20, 30, 45, 50}
    assert (KeepEvery(25) | KeepEvery(20)).keeps(STEPS, NOW_S) == {20, 25, 50}


def test_a_combination_is_flat_and_has_each_policy_once() -> None:
    combined = KeepLast(2) | (KeepEvery(10) | KeepFor(24)) | KeepEvery(10) | KeepFor(24.0)
    assert isinstance(combined, KeepAny)
    assert combined.policies == (KeepLast(2), KeepEvery(10), KeepFor(24))
    assert KeepLast(2) | KeepLast(2) == KeepLast(2)


def test_a_combination_reads_as_it_was_written() -> None:
    combined = KeepLast(2) | KeepBest("loss", mode="max")
    assert repr(combined) == "KeepLast(count=2) | KeepBest(metric='loss', count=1, mode='max')"
    assert eval(repr(combined)) == combined


def test_a_list_of_policies_may_be_given_nested_or_with_one_only() -> None:
    nested: Any = [KeepAny((KeepEvery(5),)), KeepLast(1)]
    assert KeepAny(nested) == KeepLast(1) | KeepEvery(5)
    assert KeepAny((KeepEvery(20),)).keeps(STEPS, NOW_S) == {20, 50}


def test_nothing_is_kept_of_nothing() -> None:
    assert (KeepLast(3) | KeepEvery(2) | KeepFor(1) | KeepBest("loss")).keeps([], NOW_S) == set()


@pytest.mark.parametrize("count", [0, -1, True, 1.0, "3", None])
@pytest.mark.parametrize("policy", [KeepLast, KeepEvery])
def test_a_count_below_one_or_not_whole_is_refused(policy: Any, count: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        policy(count)
    assert str(caught.value) == f"{policy.__name__}({count!r}): give a whole number of at least 1"


@pytest.mark.parametrize("hours", [0, -1.5, True, math.nan, math.inf, 10**400, "24", None])
def test_hours_that_are_no_time_are_refused(hours: Any) -> None:
    with pytest.raises(ConfigError, match=r"KeepFor\(.*\): give a number of hours above 0"):
        KeepFor(hours)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("",), "name of a number"),
        ((3,), "name of a number"),
        (("\ud800",), "name of a number"),
        (("loss", 0), r"KeepBest\('loss', count=0\): give a whole number of at least 1"),
        (("loss", True), "whole number"),
        (("loss", 1, "lowest"), r"mode='lowest'\): give 'min' or 'max'"),
        (("loss", 1, None), "'min' or 'max'"),
    ],
)
def test_a_best_that_makes_no_sense_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KeepBest(*arguments)


class KeepOdd(KeepLast, frozen=True):
    """A policy of the user's own: the keeper, another process, could not know its rule."""


@pytest.mark.parametrize("given", [3, "KeepLast(3)", KeepLast, [KeepLast(3)], False, Keep(), KeepOdd(1)])
def test_what_is_no_policy_is_refused(given: Any) -> None:
    for use in (check_policy, encode_policy, judges_by_manifest, lambda given: KeepAny((given,))):
        with pytest.raises(ConfigError, match=r"give KeepLast\(n\), KeepEvery\(k\), KeepFor.*KeepBest.*or None"):
            use(given)


@pytest.mark.parametrize("given", [(), [], 3, None, "ab", iter([KeepLast(1)])])
def test_any_of_no_policies_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="at least one"):
        KeepAny(given)


def test_a_policy_is_given_back_as_it_is() -> None:
    policy = KeepLast(3) | KeepEvery(4)
    assert check_policy(policy) is policy
    assert check_policy(None) is None


def test_a_policy_combines_only_with_a_policy() -> None:
    policy: Any = KeepLast(1)
    for other in (3, None):
        with pytest.raises(TypeError):
            policy | other
    with pytest.raises(ConfigError):
        policy | KeepOdd(1)


def test_policies_do_not_change() -> None:
    policy: Any = KeepLast(1)
    with pytest.raises(AttributeError):
        policy.count = 0


def test_only_times_and_metadata_need_manifests() -> None:
    for steps_only in (None, KeepLast(1), KeepEvery(2), KeepLast(1) | KeepEvery(2)):
        assert not judges_by_manifest(steps_only)
    for policy in (KeepFor(1), KeepBest("loss"), KeepLast(1) | KeepFor(1), KeepEvery(1) | KeepBest("loss")):
        assert judges_by_manifest(policy)


def test_a_policy_as_text_is_plain_json() -> None:
    assert encode_policy(None) == "null"
    assert encode_policy(KeepLast(3)) == '{"keep":"last","count":3}'
    assert encode_policy(KeepEvery(5) | KeepFor(2)) == (
        '{"keep":"any","policies":[{"keep":"every","steps":5},{"keep":"for","hours":2.0}]}'
    )


@pytest.mark.parametrize(
    "text",
    [
        "", "3", "[]", "\ud800", "{}", '{"keep":"last"}', '{"keep":"last","count":0}', '{"keep":"last","count":"3"}',
        '{"keep":"last","count":3,"more":1}', '{"keep":"some","count":3}', '{"keep":"any","policies":[]}',
        '{"keep":"for","hours":-1}', '{"keep":"best","metric":"loss","mode":"mean"}', '{"keep":"last","count":3} 4',
        "[" * 100_000,
    ],
)  # fmt: skip
def test_text_that_is_no_policy_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a retention policy"):
        decode_policy(text)


def branch(*saves: tuple[int, int, int]) -> list[Known]:
    return [Known(SaveId(*save)) for save in saves]


def test_with_no_policy_nothing_goes() -> None:
    assert garbage(STEPS, [SaveId(1)], None, [], NOW_S) == {}


def test_of_an_empty_branch_nothing_goes() -> None:
    assert garbage([], [SaveId(1), SaveId(2)], KeepLast(1), [], NOW_S) == {}


def test_what_the_policy_does_not_keep_goes_with_the_reason() -> None:
    going = garbage(STEPS, [], KeepLast(3), [], NOW_S)
    assert going == dict.fromkeys([SaveId(10), SaveId(20), SaveId(25)], "older than the 3 newest")
    assert list(going) == sorted(going)


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (KeepLast(1), "older than the newest"),
        (KeepEvery(7), "not a multiple of 7"),
        (KeepFor(1), "saved more than 1 hour ago"),
        (KeepFor(2.5), "saved more than 2.5 hours ago"),
        (KeepBest("loss"), "not the one with the lowest 'loss'"),
        (KeepBest("bleu", 4, "max"), "not among the 4 with the highest 'bleu'"),
        (KeepEvery(7) | KeepLast(2), "older than the 2 newest and not a multiple of 7"),
    ],
)
def test_the_reason_says_what_the_policy_asked_for(policy: Keep, reason: str) -> None:
    assert garbage(STEPS, [], policy, [], NOW_S)[SaveId(10)] == reason


def test_a_pinned_save_stays() -> None:
    pins = [SaveId(10), SaveId(20, 2), SaveId(30, 1, 2), SaveId(40, 5)]
    going = garbage(known(10, 20, 50), [SaveId(30, 1, 2), SaveId(30, 1, 3)], KeepLast(1), pins, NOW_S)
    assert set(going) == {SaveId(20), SaveId(30, 1, 3)}  # a pin is of one save, not of all saves of its step


def test_only_steps_count_on_the_branch_not_when_they_were_saved() -> None:
    """On a branch later saves have greater steps; whoever has just committed a lower one pins it."""
    saves = branch((10, 1, 1), (20, 2, 1), (30, 1, 1), (40, 1, 1))
    assert set(garbage(saves, [], KeepLast(1), [], NOW_S)) == {SaveId(10), SaveId(20, 2), SaveId(30)}
    assert set(garbage(saves, [], KeepLast(1), [SaveId(20, 2)], NOW_S)) == {SaveId(10), SaveId(30)}


def test_off_branch_saves_go_once_the_branch_has_reached_their_step() -> None:
    off_branch = [SaveId(60), SaveId(70), SaveId(80)]
    at_60 = garbage(branch((50, 1, 1), (60, 2, 1)), off_branch, KeepLast(9), [], NOW_S)
    assert at_60 == {SaveId(60): "left behind: the branch has another save of this step"}
    at_75 = garbage(branch((50, 1, 1), (75, 2, 1)), off_branch, KeepLast(9), [], NOW_S)
    assert at_75 == dict.fromkeys(
        [SaveId(60), SaveId(70)], "left behind: training went on from an earlier step and has reached step 75"
    )


def test_a_save_given_as_on_and_off_the_branch_counts_as_on_it() -> None:
    both = [each.save for each in STEPS]
    assert garbage(STEPS, both, KeepLast(2), [], NOW_S) == garbage(STEPS, [], KeepLast(2), [], NOW_S)
