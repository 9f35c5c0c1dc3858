"""Retention for any policy and any history: what may go is decided alike by everybody, and never costs the newest."""

from __future__ import annotations

import math
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stillframe.model import SaveId
from stillframe.retention import (
    Keep,
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
METRICS = ["loss", "bleu"]

examples = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A busy machine is no failure."""

single: st.SearchStrategy[Keep] = st.one_of(
    st.builds(KeepLast, st.integers(1, 8)),
    st.builds(KeepEvery, st.integers(1, 20)),
    st.builds(KeepFor, st.floats(0, 50, exclude_min=True) | st.integers(1, 50)),
    st.builds(KeepBest, st.sampled_from(METRICS), st.integers(1, 4), st.sampled_from(["min", "max"])),
)
policies = st.lists(single, min_size=1, max_size=4).map(lambda parts: reduce(or_, parts))
names = st.text('aZ0./ "\\\n\x00\x7fé\u2028\U0001f600', min_size=1)
any_policy = policies | st.builds(KeepBest, names, st.integers(1))

numbers = st.integers(-3, 3) | st.floats(-3, 3) | st.sampled_from([math.nan, math.inf, -math.inf])
metadata = st.dictionaries(st.sampled_from(METRICS), numbers | st.sampled_from([None, "0", True, False]))
steps = st.integers(0, 60)
saves = st.builds(SaveId, steps, st.integers(1, 4), st.integers(1, 3))
times = st.floats(NOW_S - 60 * 3600, NOW_S + 3600)
branches = st.lists(st.builds(Known, saves, times, metadata), max_size=12, unique_by=lambda known: known.save.step)


class History(NamedTuple):
    branch: list[Known]
    off_branch: list[SaveId]
    pins: set[SaveId]

    def going(self, keep: Keep | None) -> dict[SaveId, str]:
        return garbage(self.branch, self.off_branch, keep, self.pins, NOW_S)


@st.composite
def histories(draw: st.DrawFn) -> History:
    branch = draw(branches)
    taken = {known.save for known in branch}
    off_branch = draw(st.lists(saves.filter(lambda save: save not in taken), max_size=8, unique=True))
    every = sorted(taken) + off_branch
    pins = draw(st.sets(st.sampled_from(every) | saves if every else saves, max_size=4))
    return History(branch, off_branch, pins)


def picked(policy: Keep, known: Known, branch: list[Known]) -> bool:
    """Whether a single policy asks for a save, said another way: by counting those that are better."""
    if isinstance(policy, KeepLast):
        return sum(other.save.step > known.save.step for other in branch) < policy.count
    if isinstance(policy, KeepEvery):
        return known.save.step in range(0, 61, policy.steps)
    if isinstance(policy, KeepFor):
        return known.saved_unix_s >= NOW_S or (NOW_S - known.saved_unix_s) <= policy.hours * 3600
    assert isinstance(policy, KeepBest)

    def value(of: Known) -> Any:
        found: Any = of.metadata.get(policy.metric)
        return found if type(found) in (int, float) and not math.isnan(found) else None

    def beats(other: Known) -> bool:
        if value(other) == value(known):
            return other.save.step > known.save.step
        return bool(value(other) < value(known) if policy.mode == "min" else value(other) > value(known))

    if value(known) is None:
        return False
    return sum(value(other) is not None and beats(other) for other in branch) < policy.count


@examples
@given(st.lists(single, min_size=1, max_size=4), branches)
def test_a_policy_keeps_exactly_what_it_says_and_the_newest(parts: list[Keep], branch: list[Known]) -> None:
    newest = max((known.save.step for known in branch), default=None)
    wanted = {
        known.save.step
        for known in branch
        if known.save.step == newest or any(picked(part, known, branch) for part in parts)
    }
    assert reduce(or_, parts).keeps(branch, NOW_S) == wanted


@examples
@given(policies, policies, policies)
def test_or_is_associative_commutative_and_idempotent(a: Keep, b: Keep, c: Keep) -> None:
    assert (a | b) | c == a | (b | c)
    assert a | b == b | a
    assert a | a == a
    assert (a | b) | b == a | b
    assert repr(a | b) == repr(b | a)
    assert hash(a | b) == hash(b | a)


@examples
@given(policies, policies, branches)
def test_a_combination_keeps_the_union(a: Keep, b: Keep, branch: list[Known]) -> None:
    assert (a | b).keeps(branch, NOW_S) == a.keeps(branch, NOW_S) | b.keeps(branch, NOW_S)


@examples
@given(policies, policies)
def test_a_combination_needs_manifests_if_a_part_does(a: Keep, b: Keep) -> None:
    assert judges_by_manifest(a | b) == (judges_by_manifest(a) or judges_by_manifest(b))


@examples
@given(policies, branches)
def test_without_time_and_metadata_the_steps_suffice(keep: Keep, branch: list[Known]) -> None:
    bare = [Known(known.save) for known in branch]
    assert judges_by_manifest(keep) or keep.keeps(bare, NOW_S) == keep.keeps(branch, NOW_S)


@examples
@given(st.none() | any_policy)
def test_a_policy_survives_the_way_to_another_process(keep: Keep | None) -> None:
    received = decode_policy(encode_policy(keep))
    assert received == keep
    assert type(received) is type(keep)
    assert check_policy(received) == keep
    assert encode_policy(received) == encode_policy(keep)


@examples
@given(histories(), policies)
def test_exactly_the_garbage_goes(history: History, keep: Keep) -> None:
    branch, off_branch, pins = history
    kept = keep.keeps(branch, NOW_S)
    wanted = set()
    if branch:
        reached = max(known.save.step for known in branch)
        wanted = {known.save for known in branch if known.save.step not in kept}
        wanted |= {save for save in off_branch if save.step <= reached}
    assert set(history.going(keep)) == wanted - pins


@examples
@given(histories(), policies)
def test_the_newest_and_the_pinned_never_go(history: History, keep: Keep) -> None:
    going = set(history.going(keep))
    assert not going & history.pins
    if history.branch:
        assert max(known.save for known in history.branch) not in going


@examples
@given(histories(), policies)
def test_off_branch_saves_never_go_before_the_branch_has_passed_them(history: History, keep: Keep) -> None:
    reached = max((known.save.step for known in history.branch), default=-1)
    assert all(save.step <= reached for save in history.going(keep))


@examples
@given(histories(), policies, policies)
def test_more_policies_and_more_pins_keep_more(history: History, a: Keep, b: Keep) -> None:
    going = set(history.going(a))
    assert set(history.going(a | b)) <= going
    assert set(history._replace(pins=history.pins | set(list(going)[:1])).going(a)) <= going
    assert set(history.going(a | b)) == going & set(history.going(b))


@examples
@given(histories(), policies, st.randoms(use_true_random=False))
def test_the_order_of_what_is_found_does_not_matter(history: History, keep: Keep, random: Any) -> None:
    branch, off_branch = history.branch.copy(), history.off_branch.copy()
    random.shuffle(branch)
    random.shuffle(off_branch)
    shuffled = History(branch, off_branch, history.pins)
    assert list(shuffled.going(keep).items()) == list(history.going(keep).items())
    assert keep.keeps(branch, NOW_S) == keep.keeps(history.branch, NOW_S)


@examples
@given(histories(), policies)
def test_removing_the_garbage_leaves_no_more(history: History, keep: Keep) -> None:
    """A removal that was interrupted and is done again, or done by the next run, takes nothing else."""
    going = history.going(keep)
    branch = [known for known in history.branch if known.save not in going]
    off_branch = [save for save in history.off_branch if save not in going]
    assert not History(branch, off_branch, history.pins).going(keep)


@examples
@given(histories(), policies)
def test_each_has_a_reason_and_nothing_is_invented(history: History, keep: Keep) -> None:
    found = {known.save for known in history.branch} | set(history.off_branch)
    assert set(history.going(keep)) <= found
    assert all(history.going(keep).values())
    assert history.going(None) == {}
    assert history._replace(branch=[]).going(keep) == {}
