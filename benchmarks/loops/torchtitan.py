"""torchtitan's Trainer on one rank, with a Llama of about as many parameters; its last save is one like the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from benchmarks.loops.clock import Clock
from benchmarks.loops.wide import Wide
from tests.engines import titan
from torchtitan.components.checkpointer import CheckpointManager

from stillframe.integrations.torchtitan import Manager

OURS = "stillframe"
WAYS = ("torchtitan", "torchtitan, async", OURS)
_DIM, _HIDDEN, _PARAMETERS = 1024, 4096, 15.7e6
"""Of a layer."""


def train(model: Wide, steps: int, way: str | None, place: Path, clock: Clock) -> None:
    layers = max(round(sum(each.numel() for each in model.parameters()) / _PARAMETERS), 1)
    kind: Any = Manager if way == OURS else CheckpointManager
    more = {"async_mode": "async"} if way == "torchtitan, async" else {}
    saved = {"interval": 1, "keep_latest_k": 2, "last_save_model_only": False, **more}
    config = titan.config(str(place), steps, kind.Config(enable=way is not None, **saved))
    config.model_spec = titan.model(_DIM, _HIDDEN, layers)
    config.metrics.log_freq, config.training.local_batch_size = 1000, 64
    titan.seat()
    trainer = config.build()
    manager = trainer.checkpointer
    save, wait = manager.save, manager.maybe_wait_for_staging

    def saving(step: int, **_: Any) -> None:
        with clock.saving():
            save(step, last_step=False)

    def waiting() -> None:
        with clock.waiting():
            wait()

    if way is not None:
        manager.save, manager.maybe_wait_for_staging = saving, waiting
    try:
        trainer.train()
        manager.maybe_wait_for_saving()
    finally:
        trainer.close()
        dist.destroy_process_group()
