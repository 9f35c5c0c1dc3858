"""``accelerator.save_state``; of Accelerate's own the last two directories are written over in turn.

On several ranks: with FSDP2, in the form that is the default there, in which every rank writes its part.
"""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from benchmarks.loops.clock import Clock
from benchmarks.loops.wide import BATCH, Wide, samples
from torch.utils.data import DataLoader

from stillframe import KeepLast
from stillframe.integrations.accelerate import attach

OURS = "stillframe"
WAYS = SHARDED = ("Accelerate", OURS)


def train(model: Wide, steps: int, way: str | None, place: Path, clock: Clock) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin() if dist.is_initialized() else None)
    if way == OURS:
        attach(accelerator, place / "_stillframe", keep=KeepLast(2))
    trained, optimizer, loader = accelerator.prepare(model, model.optimizer(), DataLoader(samples(steps), BATCH))
    assert accelerator.is_fsdp2 == dist.is_initialized()
    for step, batch in enumerate(loader):
        accelerator.backward(trained(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
        if way is not None:
            with clock.saving():
                accelerator.save_state(place / f"{step if way == OURS else step % 2}")
    with mock.patch.object(PartialState, "destroy_process_group"):  # the next turn needs the group, too
        accelerator.end_training()


def plugin() -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Linear"]
    )
