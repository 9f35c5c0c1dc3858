"""Saves that storage does not keep up with: what waits is bounded, and so is the wait."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import stillframe
from stillframe import BusyError, Catalog, Checkpointer, spi
from stillframe.link.arena import Arena
from stillframe.save import budget
from stillframe.save.budget import MAX_WAITING, Budget
from stillframe.save.saves import Save, Saves
from stillframe.save.stager import Stager
from stillframe.units import MIB
from tests.support import kill, until

ARENA = 32 * MIB


class Average:
    """Neither a module nor an optimizer: ``save`` captures all of it, 16 MiB."""

    def __init__(self) -> None:
        self.weights = torch.zeros(4 * MIB)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


@pytest.fixture
def checkpointer(tmp_path: Path) -> Iterator[Checkpointer]:
    """Its keeper is stopped; it is continued or killed in the end."""
    made = Checkpointer(tmp_path, arena=ARENA, on_error="warn")
    made.save(0, {"average": Average()}).wait()
    os.kill(spi.keeper_pid(made) or 0, signal.SIGSTOP)
    yield made
    if (keeper := spi.keeper_pid(made)) is not None:
        os.kill(keeper, signal.SIGCONT)
    made.close()


class Trainer(threading.Thread):
    """Saves the steps from 1 on, each with its number as content."""

    def __init__(self, checkpointer: Checkpointer, steps: int) -> None:
        super().__init__(daemon=True)
        self.checkpointer = checkpointer
        self.steps = steps
        self.start()

    def run(self) -> None:
        average = Average()
        for step in range(1, self.steps + 1):
            average.weights.fill_(step)
            self.checkpointer.save(step, {"average": average})


def until_waiting(checkpointer: Checkpointer, saves: int = 1) -> None:
    """The stager waits for the stopped keeper, and so many calls of ``save`` for the stager."""
    arena, room = checkpointer._stager.arena, checkpointer._saver._budget
    assert arena is not None
    until(lambda: arena.is_awaited and not room._has_room() and len(checkpointer._saves._bells) == saves, "the wait")


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def waiting_bytes(checkpointer: Checkpointer) -> int:
    return sum(each.progress.total_bytes for each in checkpointer._saves.in_flight if each.phase == "captured")


def test_what_waits_for_a_stopped_keeper_is_bounded_and_nothing_is_lost(
    checkpointer: Checkpointer, tmp_path: Path
) -> None:
    before = resident()
    trainer = Trainer(checkpointer, 12)
    until_waiting(checkpointer)
    assert waiting_bytes(checkpointer) <= ARENA + 16 * MIB
    assert resident() - before < 2 * ARENA + 48 * MIB
    os.kill(spi.keeper_pid(checkpointer) or 0, signal.SIGCONT)
    trainer.join(60)
    checkpointer.wait()
    assert Catalog(tmp_path).steps() == list(range(13))
    for step in (1, 5, 12):
        weights = stillframe.load(tmp_path, step)["average"]["weights"]
        assert torch.equal(weights, torch.full_like(weights, step))


def test_the_wait_ends_when_the_keeper_dies(checkpointer: Checkpointer, tmp_path: Path) -> None:
    trainer = Trainer(checkpointer, 8)
    until_waiting(checkpointer)
    kill(spi.keeper_pid(checkpointer) or 0)
    trainer.join(60)
    assert not trainer.is_alive()
    checkpointer.wait()
    assert checkpointer.stats().failed >= 3  # those that the keeper died with
    assert Catalog(tmp_path).steps()[-1] == 8


def test_a_signal_handler_that_saves_while_a_save_waits_waits_too(checkpointer: Checkpointer, tmp_path: Path) -> None:
    average = Average()
    steps = itertools.count(1)

    def handle(number: int, frame: Any) -> None:
        checkpointer.save(next(steps), {"average": average})

    def interrupt() -> None:
        until_waiting(checkpointer)
        os.kill(os.getpid(), signal.SIGUSR1)
        until_waiting(checkpointer, 2)
        os.kill(spi.keeper_pid(checkpointer) or 0, signal.SIGCONT)

    before = signal.signal(signal.SIGUSR1, handle)
    helper = threading.Thread(target=interrupt, daemon=True)
    helper.start()
    try:
        for _ in range(7):
            checkpointer.save(next(steps), {"average": average})
    finally:
        signal.signal(signal.SIGUSR1, before)
    helper.join(60)
    checkpointer.wait()
    assert Catalog(tmp_path).steps() == list(range(9))


def test_a_wait_in_which_nothing_moves_ends_with_an_error_that_names_the_saves(
    checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(budget, "_TURN_S", 0.1)
    monkeypatch.setattr(budget, "_STALL_TURNS", 3)
    for step in range(1, 5):  # two fill the arena, two wait
        checkpointer.save(step, {"average": Average()})
        until(lambda: waiting_bytes(checkpointer) <= max(step - 2, 0) * 16 * MIB, "staging")  # noqa: B023
    with pytest.raises(BusyError, match="the steps 3, 4 are not staged"):
        checkpointer.save(5, {"average": Average()})
    assert "Is the storage slow?" in caplog.text
    os.kill(spi.keeper_pid(checkpointer) or 0, signal.SIGCONT)
    checkpointer.save(20, {"average": Average()}).wait()


def test_a_signal_handler_does_not_wait_for_the_save_that_it_interrupts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One save may wait.  The first is interrupted when it exists, and before the stager has it."""
    monkeypatch.setattr(budget, "MAX_WAITING", 1)
    submit = Stager.submit
    state = {"weights": torch.zeros(1000)}
    with Checkpointer(tmp_path) as checkpointer:

        def interrupted(self: Stager, *arguments: Any) -> None:
            monkeypatch.setattr(Stager, "submit", submit)
            checkpointer.save(2, state)
            submit(self, *arguments)

        monkeypatch.setattr(Stager, "submit", interrupted)
        checkpointer.save(1, state)
        checkpointer.wait()
    assert Catalog(tmp_path).steps() == [1, 2]


def test_audited_saves_need_no_update_to_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also behind a hold: that is released only when the save has been requested."""
    monkeypatch.setattr(budget, "MAX_WAITING", 1)
    state = {"weights": torch.zeros(1000)}
    with Checkpointer(tmp_path, audit=True) as checkpointer:
        release = spi.UpdateGate(checkpointer.fence).hold("")
        for step in range(4):
            checkpointer.save(step, state)
        release()
        checkpointer.wait()
    assert Catalog(tmp_path).steps() == [0, 1, 2, 3]


def begin(saves: Saves, step: int, attempt: int, total_bytes: int, requested_s: float) -> Save:
    save = saves.make(step, attempt, total_bytes, requested_s)
    saves.add(save)
    return save


def test_what_counts_is_what_is_neither_staged_nor_failed() -> None:
    saves = Saves("warn")
    arena = Arena(ARENA)
    room = Budget(saves, lambda: arena)
    made = [begin(saves, step, 1, 100 * MIB, 0.0) for step in range(MAX_WAITING)]
    for save in made:
        assert room._has_room()
        room.add(save, 0)
    assert not room._has_room()
    saves.staged(made[0], 1.0)
    assert room._has_room()
    room.add(begin(saves, 20, 1, 100 * MIB, 0.0), 90 * MIB)  # one larger than all: it is let through
    for each in saves.in_flight:
        saves.fail(each.number, stillframe.KeeperError("dead"))
    assert room._has_room()
    assert room._waiting == {}
    big = begin(saves, 21, 1, 100 * MIB, 0.0)
    room.add(big, 90 * MIB)
    assert not room._has_room()
    saves.fail(big.number, stillframe.KeeperError("dead"))
    assert room._has_room()
    arena.close()


def test_before_there_is_an_arena_the_waiting_save_is_the_measure() -> None:
    saves = Saves("warn")
    room = Budget(saves, lambda: None)
    assert room._has_room()
    room.add(begin(saves, 1, 1, 100, 0.0), 60)
    assert room._has_room()
    room.add(begin(saves, 2, 1, 100, 0.0), 60)
    assert not room._has_room()
