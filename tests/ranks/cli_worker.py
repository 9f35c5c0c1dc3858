"""Two FSDP2 ranks that leave checkpoints for the tests of the command line: ``cli_worker.py ROOT [split|stuck]``.

``split``: they do not share the root.  ``stuck``: rank 1 never saves what rank 0 does.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from stillframe import Checkpointer, TrainState
from tests.ranks.leaving import leave
from tests.ranks.saying import say


def main() -> None:
    root, is_split, is_stuck = sys.argv[1], "split" in sys.argv, "stuck" in sys.argv
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(24, 32), torch.nn.Linear(32, 24, bias=False))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters())
    state = TrainState(model, optimizer, mine={"rank": dist.get_rank(), "noise": torch.full((3,), dist.get_rank())})
    with Checkpointer(root, deadline_s=60, shared=not is_split) as checkpointer:
        if is_stuck:
            if dist.get_rank() == 0:
                checkpointer.save(5, {"w": torch.ones(1000)}).wait("sealed")
                say("sealed")
            time.sleep(100)
        for step in (1, 2):
            model(torch.ones(4, 24)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.save(step, state)
    leave()


if __name__ == "__main__":
    main()
