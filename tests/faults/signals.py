"""A loop that saves, fences, waits, restores and closes, interrupted by a real signal in every round.

``python -m tests.faults.signals ROUNDS SEED ROOT``.  The handler raises, as that of Ctrl-C does; in every third round
it first saves, as one that is told of an approaching end would.  Every step's weights hold its number: so a checkpoint
of another step, or of two, would show.  Prints how many rounds were interrupted.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import random
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import stillframe
from stillframe import Checkpointer, StillframeError

ITEMS = 3_000_000
ROUND_S = 60
WAIT_S = 30.0
AGAIN_S = 5.0
"""In the middle of a ``__del__`` or of a weak reference's callback the interpreter swallows whatever is raised."""
CHECKED_EVERY = 20


class Loop:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.state: dict[str, Any] = {"weights": torch.zeros(ITEMS), "step": 0}
        self.step = 0
        self.is_handler_saving = False
        self.is_armed = False
        self.where = ""
        self._open()

    def _open(self) -> None:
        self.checkpointer = Checkpointer(self.root, arena="48MiB", keep=stillframe.KeepLast(3))

    def interrupt(self, _number: int, frame: FrameType | None) -> None:
        if not self.is_armed:
            return
        if self.where:
            sys.stderr.write(f"swallowed at:\n{self.where}")
        self.where = "".join(traceback.format_stack(frame, 6))
        if self.is_handler_saving:
            with contextlib.suppress(StillframeError):
                step = int(self.state["weights"][0])  # it may come in the middle of an update
                self.checkpointer.save(step, {**self.state, "step": step})
        raise KeyboardInterrupt

    def work(self, closes: bool) -> None:
        """Something is always under way in it; ends only by a signal, or by closing."""
        for _ in range(3):
            self.update()
            self.checkpointer.save(self.step, self.state)
        self.checkpointer.wait(timeout_s=WAIT_S)
        self.checkpointer.restore(self.state)
        self.update()
        self.checkpointer.save(self.step, self.state)
        if closes:
            self.checkpointer.close(WAIT_S)
        while True:
            self.checkpointer.fence()
            self.checkpointer.wait(timeout_s=WAIT_S)

    def update(self) -> None:
        self.checkpointer.fence()
        self.step += 1
        self.state["weights"].fill_(self.step)
        self.state["step"] = self.step

    def go_on(self, is_closed: bool) -> None:
        """Whatever was interrupted, the next save is committed, and is what it should be."""
        if is_closed:
            with told():
                self.checkpointer.close(WAIT_S)
            self._open()
            self.checkpointer.restore(self.state)
        with told():
            self.checkpointer.fence()
        self.update()
        with told():
            self.checkpointer.save(self.step, self.state)
        self.update()
        try:
            save = self.checkpointer.save(self.step, self.state)
        except StillframeError:  # of an earlier save: this one goes on, and so does the next
            self.update()
            save = self.checkpointer.save(self.step, self.state)
        save.wait(timeout_s=WAIT_S)
        with told():
            self.checkpointer.wait(timeout_s=WAIT_S)

    def check(self) -> None:
        for step in stillframe.Catalog(self.root).steps():
            with contextlib.suppress(stillframe.NotFoundError):  # retention has just come by
                found = stillframe.load(self.root, step)
                assert found["step"] == step, f"step {step} holds {found['step']}"
                assert bool((found["weights"] == step).all()), f"step {step} is torn"


@contextlib.contextmanager
def told() -> Iterator[None]:
    """An error of a save is what it should be; one that says that something hangs is not."""
    try:
        yield
    except stillframe.DeadlineError:
        raise
    except StillframeError:
        pass


def main(rounds: int, seed: int, root: Path) -> None:
    logging.getLogger("stillframe").setLevel(logging.CRITICAL)
    chance = random.Random(seed)
    loop = Loop(root)
    interrupted = 0
    signal.signal(signal.SIGALRM, loop.interrupt)
    for number in range(rounds):
        faulthandler.dump_traceback_later(ROUND_S, exit=True)
        loop.is_handler_saving = number % 3 == 0
        closes = number % 5 == 0
        loop.where, loop.is_armed = "", True
        first_s = chance.uniform(0.0001, 0.4) if closes else chance.expovariate(20)
        signal.setitimer(signal.ITIMER_REAL, first_s, AGAIN_S)
        try:
            loop.work(closes)
        except KeyboardInterrupt:
            loop.is_armed = False
            interrupted += 1
        except stillframe.ConfigError:  # it was closed before the signal came
            loop.is_armed = False
            assert closes
        loop.go_on(closes)
        if number % CHECKED_EVERY == 0:
            loop.check()
    loop.checkpointer.close(WAIT_S)
    loop.check()
    sys.stdout.write(f"{interrupted} of {rounds} rounds\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
