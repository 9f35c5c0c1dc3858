"""Two ranks that do not share their root, in which both save: ``local_worker.py ROOT``."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import stillframe
from stillframe import spi
from tests.ranks.saying import say


def main() -> None:
    root = sys.argv[1]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with stillframe.Checkpointer(root, shared=False, deadline_s=60) as checkpointer:
        checkpointer.save(1, {"w": torch.full((4,), float(rank)), "rank": rank}, metadata={"loss": 0.5}).wait()
    dist.barrier()
    if rank == 0:
        for mine in range(2):
            loaded = stillframe.load(root, rank=mine)
            say(f"loaded {loaded['rank']} {loaded['w'].tolist()}")
        with spi.BoxReader(root, rank=1) as reader:
            say(f"box reader {reader.step} {reader.outline['rank']}")
        say(f"steps {stillframe.Catalog(root).steps()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
