"""Hugging Face's Trainer with ``save_steps=1`` and ``save_total_limit=2``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.loops.clock import Clock
from benchmarks.loops.wide import BATCH, Wide, samples
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from stillframe.integrations.transformers import install

OURS = "stillframe"
WAYS = ("Trainer", OURS)


def train(model: Wide, steps: int, way: str | None, place: Path, clock: Clock) -> None:
    class Saves(TrainerCallback):
        """Trainer saves between the two; it logs and evaluates nothing here."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.begin_save()

        def on_save(self, *_: Any, **__: Any) -> None:
            clock.end_save()

    arguments = TrainingArguments(
        str(place), max_steps=steps, save_strategy="no" if way is None else "steps", save_steps=1, save_total_limit=2,
        logging_strategy="no", per_device_train_batch_size=BATCH, report_to=[], disable_tqdm=True, use_cpu=True,
        dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Trainer(
        model, arguments, train_dataset=samples(steps), optimizers=(model.optimizer(), None), callbacks=[Saves()]
    )
    trainer.remove_callback(PrinterCallback)
    if way == OURS:
        install(trainer)
    trainer.train()
