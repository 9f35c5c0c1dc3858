"""Run for test_mute.py: ``mute_worker.py ROOT CASE``: keepers that can write no more, not even that they cannot.

``member``: that of rank 1, before it saves step 2.  ``leader``: that of rank 0, before it saves step 2, and that of
rank 1 when it has sealed it.  ``start``: as ``leader``, before rank 0 has saved anything.  ``tickets``: as ``leader``,
where ranks save under tickets, and have never met.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import stillframe
from stillframe import spi
from tests.ranks import saying

RANK = int(os.environ["RANK"])
Then = Callable[[], None] | None


def limit(checkpointer: stillframe.Checkpointer, nbytes: int) -> None:
    """How long a file of its keeper may be: a disk that is full, or is not any more."""
    pid = checkpointer._keeper.pid
    assert pid is not None
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))


def outcome(save: Callable[[], stillframe.Save], when_sealed: Then) -> str:
    began = time.monotonic()
    try:
        saved = save()
        if when_sealed is not None:
            saved.wait("sealed", timeout_s=90)
            when_sealed()
        saved.wait(timeout_s=90)
    except stillframe.StillframeError as error:
        return f"{type(error).__name__} after {time.monotonic() - began:.0f} s: {error}"
    return "committed"


def full(checkpointer: stillframe.Checkpointer, case: str, save: Callable[[int, Then], str]) -> None:
    """Both disks are full, rank 1's after it has sealed."""
    mute = 1 if case == "member" else 0
    if mute == RANK:
        limit(checkpointer, 0)
    fill = (lambda: limit(checkpointer, 0)) if RANK == 1 and case != "start" else None
    saying.say(f"[{RANK}] second {save(2, fill)}")
    dist.barrier()
    limit(checkpointer, resource.RLIM_INFINITY)
    saying.say(f"[{RANK}] again {save(2, None)}")


def main(root: str, case: str) -> None:
    dist.init_process_group("gloo")
    if case == "tickets":
        with_tickets(root)
        return
    with stillframe.Checkpointer(root, events=False) as checkpointer:

        def save(step: int, when_sealed: Then) -> str:
            return outcome(lambda: checkpointer.save(step, state(step)), when_sealed)

        checkpointer._keeper.wait_ready()
        if case != "start":
            saying.say(f"[{RANK}] first {save(1, None)}")
        full(checkpointer, case, save)


def with_tickets(root: str) -> None:
    name: list[str | None] = [None]
    if RANK == 0:
        opened = spi.Run(root, rank=0, world_size=2)
        name = [opened.name]
    dist.broadcast_object_list(name)
    with opened if RANK == 0 else spi.Run(root, name[0], rank=1, world_size=2) as run:

        def save(step: int, when_sealed: Then) -> str:
            ticket = [spi.issue(run, step) if RANK == 0 else None]
            dist.broadcast_object_list(ticket)
            assert ticket[0] is not None
            to = ticket[0]
            return outcome(lambda: spi.save(run, state(step), to), when_sealed)

        saying.say(f"[{RANK}] first {save(1, None)}")
        full(run, "leader", save)


def state(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((1000,), float(step + RANK))}


main(*sys.argv[1:])
