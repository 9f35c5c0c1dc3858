"""``trainer.save_checkpoint``, with Lightning's own plugin, with its ``AsyncCheckpointIO``, and with ours.

The last two checkpoints are written over in turn.  On several ranks: with ``ModelParallelStrategy``, which knows no
asynchronous plugin.  With a validation after each save, an iteration has that in it, too, and what validation waits for
is part of the wait.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch.distributed as dist
from benchmarks.loops.clock import Clock
from benchmarks.loops.wide import BATCH, Wide, samples
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from stillframe.integrations.lightning import CheckpointIO

VALIDATED = "stillframe, validation after each save"
WAYS: dict[str, Callable[[], Any]] = {
    "Lightning": TorchCheckpointIO,
    "Lightning, AsyncCheckpointIO": lambda: AsyncCheckpointIO(TorchCheckpointIO()),
    VALIDATED: CheckpointIO,
    "stillframe": CheckpointIO,
}
SHARDED = ("Lightning", VALIDATED, "stillframe")


class Module(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, model: Wide) -> None:
        super().__init__()
        self.model = model

    def configure_model(self) -> None:
        if dist.is_initialized():
            for each in (*self.model.layers, self.model):
                fully_shard(each, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, _: int) -> Any:
        return self.model(**batch)["loss"]

    def validation_step(self, batch: Any, _: int) -> None:
        self.model(**batch)

    def configure_optimizers(self) -> Any:
        return self.model.optimizer()


def train(model: Wide, steps: int, way: str | None, place: Path, clock: Clock) -> None:
    class Saves(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if way is not None:
                with clock.saving():
                    trainer.save_checkpoint(place / f"{trainer.global_step % 2}.ckpt")

    options: dict[str, Any] = {}
    if way is not None and not (dist.is_initialized() and way == "Lightning"):  # there it takes none of its own
        options["plugins"] = [WAYS[way]()]
    if dist.is_initialized():
        ranks = dist.get_world_size()
        strategy = ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
        options |= {"strategy": strategy, "devices": ranks}
    trainer = lightning.Trainer(
        callbacks=[Saves()], max_steps=steps, accelerator="cpu", val_check_interval=1, num_sanity_val_steps=0,
        limit_val_batches=1 if way == VALIDATED else 0, **options,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    loader = DataLoader(samples(steps), BATCH)
    trainer.fit(Module(model), loader, loader)
