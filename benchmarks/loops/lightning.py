"""``trainer.save_checkpoint``, with Lightning's own plugin, with its ``AsyncCheckpointIO``, and with ours.

The last two checkpoints are written over in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
from benchmarks.loops.clock import Clock
from benchmarks.loops.wide import BATCH, Wide, samples
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch.utils.data import DataLoader

from stillframe.integrations.lightning import CheckpointIO

WAYS: dict[str, Callable[[], Any]] = {
    "Lightning": TorchCheckpointIO,
    "Lightning, AsyncCheckpointIO": lambda: AsyncCheckpointIO(TorchCheckpointIO()),
    "stillframe": CheckpointIO,
}


class Module(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, model: Wide) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, _: int) -> Any:
        return self.model(**batch)["loss"]

    def configure_optimizers(self) -> Any:
        return self.model.optimizer()


def train(model: Wide, steps: int, way: str | None, place: Path, clock: Clock) -> None:
    class Saves(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if way is not None:
                with clock.saving():
                    trainer.save_checkpoint(place / f"{trainer.global_step % 2}.ckpt")

    trainer = lightning.Trainer(
        plugins=[] if way is None else [WAYS[way]()], callbacks=[Saves()], max_steps=steps, accelerator="cpu",
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    loader = DataLoader(samples(steps), BATCH)
    trainer.fit(Module(model), loader)
