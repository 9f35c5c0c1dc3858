"""``accelerator.save_state``; of Accelerate's own the last two directories are written over in turn."""

from __future__ import annotations

from pathlib import Path

from accelerate import Accelerator
from benchmarks.loops.clock import Clock
from benchmarks.loops.wide import BATCH, Wide, samples
from torch.utils.data import DataLoader

from stillframe import KeepLast
from stillframe.integrations.accelerate import attach

OURS = "stillframe"
WAYS = ("Accelerate", OURS)


def train(model: Wide, steps: int, way: str | None, place: Path, clock: Clock) -> None:
    accelerator = Accelerator(cpu=True)
    if way == OURS:
        attach(accelerator, place / "_stillframe", keep=KeepLast(2))
    trained, optimizer, loader = accelerator.prepare(model, model.optimizer(), DataLoader(samples(steps), BATCH))
    for step, batch in enumerate(loader):
        accelerator.backward(trained(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
        if way is not None:
            with clock.saving():
                accelerator.save_state(place / f"{step if way == OURS else step % 2}")
    accelerator.end_training()
