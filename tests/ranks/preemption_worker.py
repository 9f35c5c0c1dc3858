"""Run for test_preemption.py: ``preemption_worker.py ROOT MODE``: trains until it is told to end.

Every step is an update of the same bytes on all ranks, with a collective in it, as in training.  Says each step.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import stillframe
from tests.ranks import saying

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
STEPS, ITEMS = 100_000, {"small": 1000, "large": 24_000_000}


def main(root: str, mode: str) -> None:
    if WORLD > 1:
        dist.init_process_group("gloo")
    weights = torch.nn.Parameter(torch.zeros(ITEMS["large" if mode == "busy" else "small"]))
    # Only where updates are counted: it loads torch's compiler, which takes seconds.
    optimizer = torch.optim.SGD([weights], lr=1.0) if mode in ("forward", "update", "tiers-forward") else None
    state: dict[str, Any] = {"weights": weights, "step": -1}
    options: dict[str, Any] = {}
    if mode.startswith("tiers"):
        far = stillframe.Tier(Path(root, "far"), every=10**6, keep=stillframe.KeepEvery(10**6))
        options["tiers"] = [far, stillframe.Tier(Path(root, "timed"), every=timedelta(days=1))]
        options["shared"] = mode != "tiers-local"
        root = str(Path(root, "root" if options["shared"] else f"node{RANK}"))
    with stillframe.Checkpointer(root, arena="32MiB", keep=stillframe.KeepLast(3), **options) as checkpointer:
        start = checkpointer.restore(state).next_step
        with stillframe.on_preemption(checkpointer, state, on_exception=True) as preemption:
            for step in range(start, STEPS):
                weights.grad = torch.full_like(weights, -1.0)
                if WORLD > 1:
                    dist.all_reduce(weights.grad)
                if mode in ("forward", "tiers-forward") and step == start + 5:
                    raise ArithmeticError("on purpose, before the update")
                if optimizer is None:
                    checkpointer.fence()
                    weights.data -= weights.grad
                else:
                    optimizer.step()
                if mode == "update" and step == start + 5:
                    raise ArithmeticError("on purpose, after the update")
                state["step"] = step
                if mode in ("busy", "tiers-saved", "tiers-forward"):
                    checkpointer.save(step, state)
                saying.say(f"[{RANK}] step {step}")
                time.sleep(0.02)
                preemption.check(step)


main(*sys.argv[1:])
