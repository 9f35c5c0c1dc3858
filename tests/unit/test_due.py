"""Which steps are due: by their number, by rank 0's clock, or by both."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import stillframe
from stillframe.ranks import meeting
from stillframe.ranks.group import Group
from stillframe.save import due
from stillframe.save.due import Due
from tests.unit.test_meeting import groups_of


class Clock:
    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(due, "time", made)
    return made


def test_multiples_of_steps_are_due(tmp_path: Path) -> None:
    with stillframe.Checkpointer(tmp_path, every=stillframe.Every(steps=3)) as checkpointer:
        assert [step for step in range(10) if checkpointer.due(step)] == [0, 3, 6, 9]


def test_the_last_step_of_a_loop_is_due(tmp_path: Path) -> None:
    with stillframe.Checkpointer(tmp_path, every=stillframe.Every(steps=4, minutes=60)) as checkpointer:
        assert [step for step in range(7) if checkpointer.due(step, last=step == 6)] == [0, 4, 6]


def test_minutes_count_from_the_last_that_was_due(clock: Clock) -> None:
    alone = Due(stillframe.Every(minutes=10), Group(0, 1, None, 10.0))
    found = []
    for step in range(30):
        clock.now_s += 240
        if alone.at(step, False):
            found.append(step)
    assert found == [2, 5, 8, 11, 14, 17, 20, 23, 26, 29]


def test_steps_and_minutes_together(clock: Clock) -> None:
    alone = Due(stillframe.Every(steps=5, minutes=10), Group(0, 1, None, 10.0))
    found = []
    for step in range(12):
        clock.now_s += 240
        if alone.at(step, False):
            found.append(step)
    assert found == [0, 3, 5, 8, 10]


def test_all_ranks_are_told_the_same_steps_by_rank_0_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_LOOK_S", 0.01)
    each = [Due(stillframe.Every(minutes=0.001), group) for group in groups_of(2)]
    together = threading.Barrier(2)
    found: list[list[int]] = [[], []]

    def train(rank: int) -> None:
        for step in range(400):
            together.wait(20)
            if each[rank].at(step, False):
                found[rank].append(step)
            threading.Event().wait(0.002)

    threads = [threading.Thread(target=train, args=[rank]) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1]
    assert len(found[0]) >= 2


def test_when_is_asked_for_it_must_have_been_said(tmp_path: Path) -> None:
    with stillframe.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, {"w": torch.zeros(1)})
        with pytest.raises(stillframe.ConfigError, match="every="):
            checkpointer.due(1)


@pytest.mark.parametrize(
    "arguments",
    [{}, {"steps": 0}, {"steps": True}, {"steps": 1.5}, {"minutes": 0}, {"minutes": float("inf")}, {"minutes": "1"}],
)
def test_nonsense_is_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(stillframe.ConfigError, match="Every"):
        stillframe.Every(**arguments)  # type: ignore[arg-type]


def test_another_thing_than_every_is_refused(tmp_path: Path) -> None:
    with pytest.raises(stillframe.ConfigError, match=r"Every\(steps="):
        stillframe.Checkpointer(tmp_path, every=100)  # type: ignore[arg-type]
