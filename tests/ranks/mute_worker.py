"""Run for test_mute.py: ``mute_worker.py ROOT``: the keeper of rank 1 can write no more, not even that it cannot."""

from __future__ import annotations

import os
import resource
import sys
import time

import torch
import torch.distributed as dist

import stillframe
from tests.ranks import saying

RANK = int(os.environ["RANK"])


def save(checkpointer: stillframe.Checkpointer, step: int) -> str:
    """What becomes of it."""
    began = time.monotonic()
    try:
        checkpointer.save(step, {"w": torch.full((1000,), float(step + RANK))}).wait(timeout_s=90)
    except stillframe.StillframeError as error:
        return f"{type(error).__name__} after {time.monotonic() - began:.0f} s: {error}"
    return "committed"


def main(root: str) -> None:
    dist.init_process_group("gloo")
    with stillframe.Checkpointer(root, events=False) as checkpointer:
        saying.say(f"[{RANK}] first {save(checkpointer, 1)}")
        pid = checkpointer._keeper.pid
        assert pid is not None
        if RANK == 1:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        saying.say(f"[{RANK}] second {save(checkpointer, 2)}")
        dist.barrier()
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        saying.say(f"[{RANK}] again {save(checkpointer, 2)}")


main(*sys.argv[1:])
