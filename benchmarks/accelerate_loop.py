"""What ``accelerator.save_state`` costs training, Accelerate's own and ours: ``python -m benchmarks.accelerate_loop``.

One process, one model with AdamW, in turns: so many steps without a save, with Accelerate's, with ours, each save behind
one step.  Blocked is the time in ``save_state``, and, of ours, what the next ``optimizer.step`` waits at the fence: its
time less the median of those without a save.  A turn ends when everything is durable: with ours, after ``wait()``;
Accelerate does not call fsync, so what it wrote is synced by us, outside its time.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console

from stillframe.integrations.accelerate import attach

_WIDTH = 2048


class Turn:
    """Steps with a save behind each, and what they took."""

    def __init__(self, model: Any, optimizer: Any, steps: int, save: Callable[[int], object]) -> None:
        self.saves_s: list[float] = []
        self.updates_s: list[float] = []
        began = time.perf_counter()
        for step in range(steps):
            model(torch.randn(64, _WIDTH)).square().mean().backward()
            self.updates_s.append(_timed(optimizer.step))
            optimizer.zero_grad()
            self.saves_s.append(_timed(lambda: save(step)))  # noqa: B023
        self.iteration_s = (time.perf_counter() - began) / steps


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=0.5)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--directory", type=Path, default=None, help="where to write; default: a temporary directory")
    wish = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="accelerate-", dir=wish.directory))
    layers = max(int(wish.gib * 2**30 / 12 / _WIDTH**2), 1)  # a weight and two moments, 4 bytes each
    found: dict[str, list[Turn]] = {"no save": [], "Accelerate": [], "stillframe": []}
    try:
        stock, model, optimizer = _made(layers)
        ours, own_model, own_optimizer = _made(layers)
        checkpointer = attach(ours, place / "_root", keep=_keep())
        ours.save_state(place / "first")
        checkpointer.wait()
        for turn in range(wish.turns):
            found["no save"].append(Turn(model, optimizer, wish.steps, lambda _: None))
            found["Accelerate"].append(
                Turn(model, optimizer, wish.steps, lambda step: stock.save_state(place / f"stock-{step % 2}"))
            )
            os.sync()
            found["stillframe"].append(
                Turn(own_model, own_optimizer, wish.steps, lambda step: ours.save_state(place / f"s-{turn}-{step}"))  # noqa: B023
            )
            checkpointer.wait()
        size = sum(each.stat().st_size for each in (place / "stock-0").iterdir())
        ours.end_training()
    finally:
        shutil.rmtree(place)
    quiet_s = statistics.median(each for turn in found["no save"] for each in turn.updates_s)
    console = Console()
    console.print(f"{size / 2**30:.2f} GiB, {wish.turns} turns of {wish.steps} steps; median (least–most)")
    for name, turns in found.items():
        saves = [each * 1e3 for turn in turns for each in turn.saves_s]
        waits = [max(each - quiet_s, 0) * 1e3 for turn in turns for each in turn.updates_s[1:]]
        iterations = [turn.iteration_s for turn in turns]
        console.print(
            f"{name:>10}: save_state {_spread(saves)} ms, update waits {_spread(waits)} ms, "
            f"iteration {_spread(iterations)} s",
            soft_wrap=True,
        )


def _keep() -> Any:
    from stillframe import KeepLast

    return KeepLast(2)


def _made(layers: int) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(*(torch.nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    model(torch.randn(2, _WIDTH)).sum().backward()
    optimizer.step()  # its state is there from now on
    optimizer.zero_grad()
    return accelerator, model, optimizer


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


if __name__ == "__main__":
    main()
