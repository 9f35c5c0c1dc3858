"""Run for test_batches.py: ``batches_worker.py ROOT STEPS``: takes so many batches, says which samples they held."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

import stillframe
from tests.ranks import saying

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def main(root: str, steps: str) -> None:
    dist.init_process_group("gloo")
    data: Any = range(24)
    batches = stillframe.Batches(DataLoader(data, 2, sampler=DistributedSampler[int](data)))
    with stillframe.Checkpointer(root) as checkpointer:
        step = checkpointer.restore({"batches": batches}).next_step
        for batch in batches:
            saying.say(f"[{RANK}] samples {batch.tolist()}")
            checkpointer.save(step, {"batches": batches}).wait()
            step += 1
            if step == int(steps):
                break


main(*sys.argv[1:])
