"""A training script as anybody would write it, with a checkpoint at every step.

    python demo/train.py --root DIR --steps N [--no-save | --turns] [--record FILE]

Started again on the same root, it goes on from the newest checkpoint.  Prints one JSON line at its start and
one for every step; :mod:`demo.record` says what is in them.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a script, from anywhere

from demo import options, turns
from demo.gpt import GPT, Sizes
from demo.record import Record, Saved, Started, Step, fingerprint
from demo.text import Text

import stillframe

_ROWS = 8
_SEED = 1234
_MAX_THREADS = 4
"""More do not help a model of this size; and the same number in every run, for the same order of sums."""


class Watch:
    """Laps of one step, without gaps."""

    def __init__(self) -> None:
        self.begun_s = self._last_s = time.monotonic()

    def lap(self) -> float:
        last_s, self._last_s = self._last_s, time.monotonic()
        return self._last_s - last_s


def make_state(steps: int, sizes: Sizes) -> dict[str, Any]:
    """Everything that a run needs to go on exactly as if it had never stopped."""
    torch.manual_seed(_SEED)
    random.seed(_SEED)
    numpy.random.seed(_SEED)
    model = GPT(sizes)
    matrices = [each for each in model.parameters() if each.dim() >= 2]
    vectors = [each for each in model.parameters() if each.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=1e-3, fused=True
    )
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=steps + 1, pct_start=0.2),
        "data": {"position": 0, "rounds": 0},
        "rng": stillframe.RNG(),
    }


def train(root: Path | None, steps: int, in_turns: bool = False) -> Record:
    """Train up to ``steps``, saving to ``root`` if there is one: at every step, or ``in_turns`` with not saving."""
    torch.set_num_threads(min(_MAX_THREADS, len(os.sched_getaffinity(0))))
    sizes = Sizes()
    state = make_state(steps, sizes)
    model, optimizer, scheduler, data = (state[name] for name in ("model", "optimizer", "scheduler", "data"))
    text = Text(_ROWS, sizes.context)
    told: list[Step] = []
    saves: list[stillframe.Save] = []

    with contextlib.ExitStack() as stack:
        checkpointer = None
        start = None
        watch = Watch()
        if root is not None:
            checkpointer = stack.enter_context(stillframe.Checkpointer(root, keep=stillframe.KeepLast(3)))
            start = checkpointer.restore(state).step
        parameters = sum(each.numel() for each in model.parameters())
        started = Started(parameters, torch.get_num_threads(), start, watch.lap())
        tell(started)

        for step in range((start or 0) + 1, steps + 1):
            watch = Watch()
            inputs, targets = text.batch(data)
            loss = model(inputs, targets)
            forward_s = watch.lap()
            optimizer.zero_grad()
            loss.backward()
            backward_s = watch.lap()
            fenced_s = checkpointer.stats().blocked_fence_s if checkpointer else 0.0
            optimizer.step()  # waits by itself until the save before is copied
            scheduler.step()
            fence_s = checkpointer.stats().blocked_fence_s - fenced_s if checkpointer else 0.0
            update_s = watch.lap() - fence_s
            if checkpointer and (not in_turns or turns.is_saving(step)):
                saves.append(checkpointer.save(step, state))
                if in_turns and turns.is_last(step):
                    checkpointer.wait()  # the next turn, without saves, must not pay for it
            save_s = watch.lap()
            told.append(Step(step, loss.item(), watch.begun_s, forward_s, backward_s, fence_s, update_s, save_s))
            tell(told[-1])

    saved = [Saved(save.step, save.progress.total_bytes, save.times) for save in saves]
    return Record(started, told, saved, fingerprint(state))


def tell(line: Started | Step) -> None:
    sys.stdout.write(f"{msgspec.json.encode(line).decode()}\n")  # one write: several ranks share the pipe
    sys.stdout.flush()


def main() -> None:
    parser = options.parser("Train a small GPT with a checkpoint at every step.")
    parser.add_argument("--turns", action="store_true", help="a few steps with saves, a few without, in turns")
    given = parser.parse_args()
    options.write(given, train(None if given.no_save else given.root, given.steps, given.turns))


if __name__ == "__main__":
    main()
