"""Trains on the queued device, on a stream of its own, and saves every step; killed and started again it goes on.

    python -m tests.device.trainee ROOT STEPS

At the end it says whether the state is, bit for bit, that of a training that nobody killed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import stillframe
from stillframe import Checkpointer
from tests.device import queued
from tests.device.models import Recipe, Training, on_cpu, train
from tests.device.streams import training_on
from tests.ranks.saying import say
from tests.support import assert_same

RECIPE = Recipe("fused", devices=("queued:0", "queued:1"), dropout=0.2)
RATE = 20e6
"""Bytes a second: a save takes some 0.1 s, and so does a step."""


def main(root: Path, steps: int) -> None:
    queued.set_rate(RATE)
    with Checkpointer(root, on_error="warn") as checkpointer:
        training = Training(RECIPE)
        state = {**training.state, "rng": stillframe.RNG()}
        done = checkpointer.restore(state).step or 0
        say(f"from {done}")
        for step in range(done + 1, steps + 1):
            training.step()
            checkpointer.save(step, state)
            say(f"saved {step}")
    end = on_cpu(training.state)
    torch.accelerator.synchronize()
    assert not queued.take_reports()
    assert_same(end, train(RECIPE, steps))
    assert_same(on_cpu(stillframe.load(root, steps)["model"]), end["model"])
    say("the same")


if __name__ == "__main__":
    queued.load()
    with training_on("own"):
        main(Path(sys.argv[1]), int(sys.argv[2]))
