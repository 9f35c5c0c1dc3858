"""A rank of FSDP2 on the queued device: trains twice, and says whether each save of the second is what the first was.

torchrun --nproc-per-node 2 fsdp_worker.py ROOT
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stillframe import Checkpointer
from tests.device import collectives, queued
from tests.device.models import Transformer
from tests.device.streams import side_streams, training_on
from tests.ranks.leaving import leave
from tests.ranks.saying import say
from tests.support import bytes_of

STEPS = 3
LATE_S = 0.02


def make(device: str) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(17)
    mesh = init_device_mesh("queued", (dist.get_world_size(),))
    model = Transformer(64, (device,), 0.0)
    for module in (model.first, model.second, model):
        fully_shard(module, mesh=mesh)
    collectives.use(model)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)}


def train(state: dict[str, Any], device: str, number: int) -> None:
    tokens = torch.randint(0, 97, (4, 16), generator=torch.Generator().manual_seed(number))
    found = state["model"](tokens.to(device, non_blocking=True))
    wanted = tokens.to(device, non_blocking=True).flatten()
    torch.nn.functional.cross_entropy(found.flatten(0, 1), wanted).backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def shards(state: dict[str, Any]) -> list[bytes]:
    """This rank's bytes of all of it."""
    tensors = [*state["model"].state_dict().values()]
    for each in state["optimizer"].state_dict()["state"].values():
        tensors += each.values()
    return [bytes_of(each.to_local() if hasattr(each, "to_local") else each) for each in tensors]


def main(root: Path, rank: int) -> None:
    device = f"queued:{rank}"
    state, truth = make(device), []
    for number in range(STEPS):
        truth.append(shards(state))
        train(state, device, number)
    end, state = shards(state), make(device)
    with Checkpointer(root) as checkpointer:
        for number in range(STEPS):
            gates = [queued.Gate(each) for each in side_streams(checkpointer)] if number else []
            checkpointer.save(number, state)
            train(state, device, number)
            time.sleep(LATE_S)
            for gate in gates:
                gate.open()
        assert shards(state) == end, "saving changed the training"
        checkpointer.wait()
        fresh = make(device)
        train(fresh, device, 99)  # its optimizer has a state to restore into
        for number in reversed(range(1, STEPS)):
            checkpointer.restore(fresh, step=number)
            wrong = [index for index, (a, b) in enumerate(zip(shards(fresh), truth[number], strict=True)) if a != b]
            assert not wrong, f"step {number}: shards {wrong} of {len(truth[number])} differ"
        checkpointer.restore(fresh, step=1)
        for number in range(1, STEPS):
            train(fresh, device, number)
        assert shards(fresh) == end, "what was restored does not train as it did"
    torch.accelerator.synchronize()
    reports = queued.take_reports()
    assert not reports, reports
    say(f"rank {rank}: {STEPS} saves, {len(end)} tensors, all as they were")


if __name__ == "__main__":
    warnings.simplefilter("error")
    queued.load()
    this_rank = int(os.environ["RANK"])
    torch.accelerator.set_device_index(this_rank)
    dist.init_process_group("cpu:gloo")
    with training_on("own") as streams:
        torch.accelerator.set_stream(streams[this_rank])
        main(Path(sys.argv[1]), this_rank)
    leave()
