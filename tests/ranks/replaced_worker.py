"""Run by torchrun for test_identity.py: rank 0's keeper is killed as soon as it has published a manifest."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from stillframe import Catalog, Checkpointer, StillframeError, spi
from stillframe.model import SaveId
from tests.ranks.saying import say

RANK = int(os.environ["RANK"])


def main(root: str) -> None:
    dist.init_process_group("gloo")
    state = {"x": torch.arange(100_000.0) + RANK}
    with Checkpointer(root, deadline_s=20, on_error="warn") as checkpointer:
        checkpointer.save(1, state).wait()
        dist.barrier()
        for step in (2, 3, 4):
            keeper = spi.keeper_pid(checkpointer)
            save = checkpointer.save(step, state)
            if RANK == 0 and keeper is not None:
                manifest = Path(root) / f"step-{step:012d}-e0001-1" / "manifest.json"
                end = time.monotonic() + 10
                while not manifest.exists() and time.monotonic() < end:
                    pass
                os.kill(keeper, signal.SIGKILL)
            try:
                save.wait()
            except StillframeError as error:
                say(f"[{RANK}] {step} {type(error).__name__}")
            dist.barrier()
            time.sleep(1.0)  # a member that was told "failed" would have removed its files by now
    catalog = Catalog(root)
    for step in (2, 3, 4):
        found = SaveId(step)
        if RANK == 0 and catalog.is_committed(found):
            say(f"published {step}: {catalog.lacks(catalog.manifest(found)) or 'whole'}")
    dist.destroy_process_group()


main(sys.argv[1])
