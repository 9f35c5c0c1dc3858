"""Run by torchrun for test_s3.py: two ranks save to an object store, and restore from it."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from stillframe import Checkpointer
from tests.ranks import saying

RANK = int(os.environ["RANK"])


def main(root: str) -> None:
    dist.init_process_group("gloo")
    state: dict[str, Any] = {"w": torch.full((5_000_000,), float(RANK)), "rank": RANK}
    with Checkpointer(root) as checkpointer:
        for step in (1, 2):
            checkpointer.fence()
            state["w"].add_(1)
            checkpointer.save(step, state).wait(timeout_s=60)
    found: dict[str, Any] = {"w": torch.zeros(5_000_000), "rank": -1}
    with Checkpointer(root) as checkpointer:
        restored = checkpointer.restore(found).step
    assert found["rank"] == RANK
    assert bool((found["w"] == RANK + 2).all())
    dist.barrier()
    if RANK == 0:
        saying.say(f"done {restored}")
    dist.destroy_process_group()


main(sys.argv[1])
