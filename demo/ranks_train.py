"""Training sharded over ranks with FSDP2, as anybody would write it, with a checkpoint at every step.

    torchrun --nproc-per-node N demo/ranks_train.py --root DIR --steps N [--no-save] [--record FILE]

Each rank holds a shard of every tensor, reads rows of its own, and draws its own dropout.  Started again on the
same root, also by torchrun itself, all go on from the newest checkpoint.  Every rank prints a JSON line at its
start, and rank 0 one for every step; :mod:`demo.record` says what is in them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TypeAlias

import numpy
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a script, from anywhere

from demo import options
from demo.gpt import GPT, Sizes
from demo.record import Record, Saved, Started, Step, fingerprint
from demo.text import Text
from demo.train import Watch, tell

import stillframe
from stillframe import spi

SIZES = Sizes(context=64, width=128, heads=4, layers=3)
ROWS = 8
_SEED = 1234
_UNSEEN_SEED = 8
Make: TypeAlias = "Callable[[argparse.Namespace], stillframe.Checkpointer]"


def make_state(steps: int, rank: int = 0, mesh: DeviceMesh | None = None) -> stillframe.TrainState:
    """All that a run needs to go on exactly: sharded over the mesh, or plain without one."""
    _seed(_SEED)
    model = GPT(SIZES)
    if mesh is not None:
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=6e-3, total_steps=steps + 1, pct_start=0.2)
    _seed(_SEED + 1 + rank)
    data = {"position": 0, "rounds": 0}
    return stillframe.TrainState(model, optimizer, scheduler=scheduler, data=data, rng=stillframe.RNG())


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def unseen_loss(model: torch.nn.Module) -> float:
    """On text that nobody trains on; the same on every rank."""
    inputs, targets = Text(ROWS, SIZES.context, 10_000, _UNSEEN_SEED).batch({"position": 0, "rounds": 0})
    model.eval()
    with torch.no_grad():
        loss: torch.Tensor = model(inputs, targets)
    return loss.item()


def rank_fingerprint(rank: int, state: stillframe.TrainState) -> dict[str, str]:
    """Of the whole state as a rank has it: shards put together, and what is its own.  All ranks call it together."""
    parts = {"model": state.model_state(), "optimizer": state.optimizer_state(), **state.more}
    return fingerprint({f"rank {rank}": parts})


def of_all_ranks(own: dict[str, str]) -> dict[str, str]:
    """The fingerprints of all ranks together, on every rank."""
    found: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return {path: leaf for each in found for path, leaf in each.items()}


def train(make: Callable[[], stillframe.Checkpointer] | None, steps: int) -> Record:
    """Train up to ``steps``, saving with what ``make`` makes.  Tells the same record on every rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    state = make_state(steps, rank, init_device_mesh("cpu", (world_size,)))
    model, optimizer = state.model, state.optimizer
    scheduler, data = state.more["scheduler"], state.more["data"]
    assert optimizer is not None
    text = Text(ROWS * world_size, SIZES.context)
    told: list[Step] = []
    saves: list[stillframe.Save] = []

    with contextlib.ExitStack() as stack:
        checkpointer = None
        report = stillframe.RestoreReport(None)
        watch = Watch()
        if make is not None:
            checkpointer = stack.enter_context(make())
            report = checkpointer.restore(state)
        start = report.step
        parameters = sum(each.numel() for each in model.parameters())
        keeper = spi.keeper_pid(checkpointer) if checkpointer else None
        started = Started(
            parameters, torch.get_num_threads(), start, watch.lap(), rank, os.getpid(), keeper or 0,
            report.source, report.bytes,
        )  # fmt: skip
        tell(started)

        for step in range((start or 0) + 1, steps + 1):
            watch = Watch()
            inputs, targets = text.batch(data)
            loss = model(inputs[rank::world_size], targets[rank::world_size])
            forward_s = watch.lap()
            optimizer.zero_grad()
            loss.backward()
            dist.all_reduce(loss.detach())  # in place: now the sum over the ranks
            backward_s = watch.lap()
            fenced_s = checkpointer.stats().blocked_fence_s if checkpointer else 0.0
            optimizer.step()  # waits by itself until the save before is copied
            scheduler.step()
            fence_s = checkpointer.stats().blocked_fence_s - fenced_s if checkpointer else 0.0
            update_s = watch.lap() - fence_s
            if checkpointer:
                saves.append(checkpointer.save(step, state))
            save_s = watch.lap()
            mean = loss.item() / world_size
            told.append(Step(step, mean, watch.begun_s, forward_s, backward_s, fence_s, update_s, save_s))
            if rank == 0:
                tell(told[-1])

    saved = [Saved(save.step, save.progress.total_bytes, save.times) for save in saves]
    return Record(started, told, saved, of_all_ranks(rank_fingerprint(rank, state)), unseen_loss(model))


def run_rank(parser: argparse.ArgumentParser, make: Make, timeout: timedelta | None = None) -> None:
    """What every training script on ranks does: with ``make``, a checkpointer for the options that were given."""
    given = parser.parse_args()
    torch.set_num_threads(1)  # the ranks share the cores; and the same number everywhere, for the same order of sums
    dist.init_process_group("gloo", timeout=timeout)
    record = train(None if given.no_save else lambda: make(given), given.steps)
    if dist.get_rank() == 0:
        options.write(given, record)
    dist.destroy_process_group()


def main() -> None:
    parser = options.parser("Train a small GPT on several ranks with a checkpoint at every step.")
    run_rank(parser, lambda given: stillframe.Checkpointer(given.root, keep=stillframe.KeepLast(3)))


if __name__ == "__main__":
    main()
