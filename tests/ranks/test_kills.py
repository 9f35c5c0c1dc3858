"""What survives when ranks, or their keepers, die, stop or come late: real processes, killed at chosen moments.

The moments are chosen by stopping keepers (SIGSTOP) and by an arena too small for the state: then staging stands
still half-way, or is complete with nothing written yet.  The ranks of ``pair`` live through the whole module: they
are also the new run that comes after one that died.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import stillframe
from stillframe import Catalog, DeadlineError, KeeperError, StillframeError
from tests import layout
from tests.layout import leftovers
from tests.ranks.trainee import Crew, Rank
from tests.support import is_alive, kill, pause, until

pytestmark = pytest.mark.timeout(300)

BALLAST = 12_000_000
"""48 MB: three chunks, one more than fit into the smallest arena."""
SMALL = "32MiB"
PROMPT_S = 10.0
"""For what should take about a second; far below every deadline that would end it, too."""


class Pairs:
    """Two ranks that serve one test after another; others take their place when a test has failed with them."""

    def __init__(self) -> None:
        self._current: Crew | None = None

    def get(self) -> Crew:
        if self._current is None or not self._current.is_idle:
            self.end()
            self._current = Crew(2)
        return self._current

    def end(self) -> None:
        if self._current is not None:
            self._current.__exit__(None, None, None)
            self._current = None


@pytest.fixture(scope="module")
def pairs() -> Iterator[Pairs]:
    made = Pairs()
    yield made
    made.end()


@pytest.fixture
def pair(pairs: Pairs) -> Crew:
    return pairs.get()


def stop(pid: int) -> None:
    pause(pid)


def go_on(pid: int) -> None:
    os.kill(pid, signal.SIGCONT)


def is_gone(pid: int) -> bool:
    return not is_alive(pid)


def check_whole(root: Path, steps: list[int]) -> None:
    """These and no others are checkpoints; each is of one attempt, and every byte of it is right."""
    assert Catalog(root).steps() == steps
    for step in steps:
        with Catalog(root).open(step) as checkpoint:
            layout.assert_of_one_save(checkpoint)
            assert len(checkpoint.manifest.ranks) == checkpoint.world_size
        stillframe.load(root, step)


def resume(crew: Crew, root: Path, kind: str = "fsdp", ballast: int = 0) -> int | None:
    """A new run in the root; tells from which step it goes on, the same on all."""
    crew.begin(root, kind, ballast)
    steps = {step for step, _ in crew.ask("restore")}
    assert len(steps) == 1
    step: int | None = steps.pop()
    return step


def error_of(rank: Rank, step: int, timeout_s: float = PROMPT_S) -> StillframeError:
    """Why a save of this rank fails; fails the test if it does not, or not in time."""
    rank.tell("wait_for", step)
    with pytest.raises(StillframeError) as caught:
        rank.answer(timeout_s)
    return caught.value


# --- ranks that die ----------------------------------------------------------------------------


@pytest.mark.parametrize(("victim", "arena"), [(1, SMALL), (0, "auto")])
def test_a_rank_killed_in_mid_save_leaves_no_checkpoint_and_nobody_waiting(
    pair: Crew, tmp_path: Path, victim: int, arena: str
) -> None:
    """Trainer and keeper, while staging (a small arena) or before anything is written; then a new run."""
    with Crew(2) as crew:
        crew.begin(tmp_path, "fsdp", BALLAST, arena=arena)
        saved = crew.step(1)
        crew.ask("wait")
        dying, living = crew[victim], crew[1 - victim]
        keeper = dying.keeper
        stop(keeper)
        crew.step(2)
        until(lambda: dying.ask("staged_bytes", 2) >= 2 * 16 * 2**20, "two chunks are staged")
        living.ask("wait_for", 2, "sealed")
        kill(dying.pid)
        kill(keeper)
        living.tell("wait")
        with pytest.raises(StillframeError, match=f"step 2 .*rank {victim}"):
            living.answer(PROMPT_S)
        living.ask("close")
    assert Catalog(tmp_path).steps() == [1]
    assert resume(pair, tmp_path, ballast=BALLAST) == 1
    assert pair.ask("digest") == saved
    pair.step(2)
    pair.close()
    check_whole(tmp_path, [1, 2])
    assert leftovers(tmp_path) == []


def test_of_four_ranks_those_that_died_are_named_to_all_and_two_can_go_on(pair: Crew, tmp_path: Path) -> None:
    with Crew(4) as crew:
        crew.begin(tmp_path, "fsdp")
        crew.step(1)
        crew.ask("wait")
        keepers = [rank.keeper for rank in crew]
        for number in (1, 3):
            stop(keepers[number])
        crew.step(2)
        for number in (1, 3):
            kill(crew[number].pid)
            kill(keepers[number])
        for number in (0, 2):
            assert "ranks 1, 3 ended" in str(error_of(crew[number], 2))
            crew[number].ask("close")
    assert resume(pair, tmp_path) == 1
    pair.step(2)
    pair.close()
    check_whole(tmp_path, [1, 2])
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("killed", [[1], [0, 1]])
def test_trainers_killed_after_staging_lose_nothing(pair: Crew, tmp_path: Path, killed: list[int]) -> None:
    """The keepers, stopped until the trainers are dead, commit alone; the new run has every bit."""
    with Crew(2) as crew:
        crew.begin(tmp_path, "fsdp", BALLAST)
        crew.step(1)
        crew.ask("wait")
        keepers = [rank.keeper for rank in crew]
        for keeper in keepers:
            stop(keeper)
        saved = crew.step(2)
        crew.ask("wait_for", 2, "staged")
        for number in killed:
            kill(crew[number].pid)
            until(partial(is_gone, crew[number].pid), "the trainer is dead")
        for keeper in keepers:
            go_on(keeper)
        if 0 not in killed:
            crew[0].ask("close")
        until(lambda: all(is_gone(keeper) for keeper in keepers), "the keepers finish and leave")
        check_whole(tmp_path, [1, 2])
        assert leftovers(tmp_path) == []
    assert resume(pair, tmp_path, ballast=BALLAST) == 2
    assert pair.ask("digest") == saved
    pair.close()


def test_a_keeper_of_a_dead_run_that_comes_late_mixes_nothing(pair: Crew, tmp_path: Path) -> None:
    """Rank 1's goes on when another run, of one rank, has already committed the same step and a later one.

    A run that has a rank 1, too, is refused for as long as the late one holds its lock.
    """
    with Crew(2) as crew:
        crew.begin(tmp_path, "fsdp", 4 * BALLAST)
        crew.step(1)
        crew.ask("wait")
        keepers = [rank.keeper for rank in crew]
        for keeper in keepers:
            stop(keeper)
        crew.step(2)
        crew.ask("wait_for", 2, "staged")
        go_on(keepers[1])
        while not layout.has_begun(tmp_path, 2, rank=1):
            time.sleep(0)
        stop(keepers[1])  # it has begun to write
        crew.kill_trainers()
        kill(keepers[0])

        pair.begin(tmp_path, "fsdp", 4 * BALLAST)
        for rank in pair:
            rank.tell("restore")
        for rank, words in zip(pair, ("on rank 1: .*", ""), strict=True):
            with pytest.raises(
                stillframe.BusyError, match=f"{words}another run: .*its keeper is process {keepers[1]} "
            ):
                rank.answer()
        pair.close()

        state: dict[str, Any] = {"value": 0}
        with stillframe.Checkpointer(tmp_path) as alone:
            for step in (2, 3):
                alone.save(step, state)
            alone.wait()
            go_on(keepers[1])
            until(lambda: is_gone(keepers[1]), "the late keeper leaves")
            check_whole(tmp_path, [1, 2, 3])
            alone.save(4, state)
    check_whole(tmp_path, [1, 2, 3, 4])
    with stillframe.Checkpointer(tmp_path) as alone:
        assert alone.restore(state).step == 4
        alone.save(5, state)
    check_whole(tmp_path, [1, 2, 3, 4, 5])
    assert len(layout.files_of(tmp_path, 2)) == 3  # manifest, segment and seal: what came late is swept
    assert leftovers(tmp_path) == []


def test_a_run_that_waited_for_a_late_keeper_has_its_files_swept(pair: Crew, tmp_path: Path) -> None:
    """Rank 0's died, so what rank 1's still seals is of no use."""
    with Crew(2) as crew:
        crew.begin(tmp_path, "fsdp")
        crew.step(1)
        crew.ask("wait")
        keepers = [rank.keeper for rank in crew]
        for keeper in keepers:
            stop(keeper)
        crew.step(2)
        crew.ask("wait_for", 2, "staged")
        crew.kill_trainers()
        kill(keepers[0])
        pair.begin(tmp_path, "fsdp")
        for rank in pair:
            rank.tell("restore")
        holder = layout.lock(tmp_path)
        until(lambda: f'"pid":{pair[0].keepers[-1]},' in holder.read_text(), "rank 0 has its lock, rank 1 waits for it")
        go_on(keepers[1])
        assert [rank.answer()[0] for rank in pair] == [1, 1]
    for step in (3, 4):
        pair.step(step)
        pair.ask("wait")
    pair.close()
    assert leftovers(tmp_path) == []
    check_whole(tmp_path, [1, 3, 4])


# --- keepers that die --------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [1, 0])
@pytest.mark.parametrize("is_replaced_at_once", [False, True])
def test_a_killed_keeper_fails_its_step_on_all_ranks_and_the_next_save_commits(
    pair: Crew, tmp_path: Path, victim: int, is_replaced_at_once: bool
) -> None:
    """Also when its trainer has started another before any rank has missed the one that was killed."""
    pair.begin(tmp_path, "ddp")
    pair.step(1)
    pair.ask("wait")
    hurt, other = pair[victim], pair[1 - victim]
    keeper = hurt.keeper
    stop(keeper)
    pair.step(2)
    other.ask("wait_for", 2, "sealed")
    kill(keeper)
    error = error_of(hurt, 2)
    assert isinstance(error, KeeperError)
    assert "SIGKILL" in str(error)
    if is_replaced_at_once:
        pair.step(3)
    error = error_of(other, 2)
    assert isinstance(error, KeeperError)
    assert f"rank {victim} " in str(error)
    if not is_replaced_at_once:
        pair.step(3)
    pair.ask("wait_for", 3)
    pair.close()
    check_whole(tmp_path, [1, 3])
    assert resume(pair, tmp_path, "ddp") == 3
    pair.step(4)
    pair.close()
    check_whole(tmp_path, [1, 3, 4])
    assert leftovers(tmp_path) == []


# --- ranks that are late -----------------------------------------------------------------------


def test_a_stopped_keeper_delays_commits_and_nothing_else(pair: Crew, tmp_path: Path) -> None:
    """Training, with its collectives, and the saves of the other rank go on."""
    pair.begin(tmp_path, "fsdp", arena="128MiB")
    pair.step(1)
    pair.ask("wait")
    keeper = pair[1].keeper
    stop(keeper)
    for step in (2, 3, 4):
        pair.step(step)
        pair[0].ask("wait_for", step, "sealed")
    pair.ask("advance")
    assert Catalog(tmp_path).steps() == [1]
    go_on(keeper)
    pair.close()
    check_whole(tmp_path, [1, 2, 3, 4])


def test_a_stopped_trainer_delays_commits_and_nothing_else(pair: Crew, tmp_path: Path) -> None:
    """In a loop without collectives: save() and fence() of the other rank do not wait for it."""
    pair.begin(tmp_path, "alone")
    pair.step(1)
    pair.ask("wait")
    stop(pair[1].pid)
    for step in (2, 3, 4):
        pair[0].ask("advance")
        pair[0].ask("save", step)
        pair[0].ask("wait_for", step, "sealed")
    assert Catalog(tmp_path).steps() == [1]
    go_on(pair[1].pid)
    for step in (2, 3, 4):
        pair[1].ask("advance")
        pair[1].ask("save", step)
    pair.close()
    check_whole(tmp_path, [1, 2, 3, 4])


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_rank_that_stays_away_past_the_deadline_fails_the_step_on_all(
    pair: Crew, tmp_path: Path, has_begun: bool
) -> None:
    """The late one hears of it when it continues, whether it had begun to write by then or not."""
    pair.begin(tmp_path, "fsdp", 4 * BALLAST if has_begun else 0, deadline_s=3)
    pair.step(1)
    pair.ask("wait")
    keeper = pair[1].keeper
    stop(keeper)
    pair.step(2)
    if has_begun:
        pair.ask("wait_for", 2, "staged")
        go_on(keeper)
        while not layout.has_begun(tmp_path, 2, rank=1):
            time.sleep(0)
        stop(keeper)
    error = error_of(pair[0], 2)
    assert isinstance(error, DeadlineError)
    assert "rank 1 of 2 did not seal it within 3 s" in str(error)
    go_on(keeper)
    late = error_of(pair[1], 2, 30.0)
    assert isinstance(late, DeadlineError)
    assert str(late) == str(error)
    assert layout.bulk_of(tmp_path, 2) == []
    pair.step(3)
    pair.close()
    check_whole(tmp_path, [1, 3])


# --- damage ------------------------------------------------------------------------------------


def test_damage_that_one_rank_finds_makes_all_step_back_together(pair: Crew, tmp_path: Path) -> None:
    pair.begin(tmp_path, "fsdp", BALLAST)
    saved = pair.step(1)
    pair.step(2)
    pair.close()
    segment = layout.segment(tmp_path, 2, rank=1)
    with segment.open("r+b") as file:
        file.seek(-BALLAST, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    pair.begin(tmp_path, "fsdp", BALLAST)
    for _ in range(2):  # each time: nothing is written because something was read
        for step, told in pair.ask("restore"):
            assert step == 1
            assert len(told) == 1
            assert "step 2 is damaged and was skipped" in told[0]
            assert "on rank 1: " in told[0]
        assert pair.ask("digest") == saved
    pair.step(2)
    pair.close()
    check_whole(tmp_path, [1, 2])
