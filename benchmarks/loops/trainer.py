"""Hugging Face's Trainer with ``save_steps=1`` and ``save_total_limit=2``.  On several ranks: with FSDP2, in both forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from benchmarks.loops.clock import Clock
from benchmarks.loops.wide import BATCH, Wide, samples
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from stillframe.integrations.transformers import install

OURS = "stillframe"
WAYS = ("Trainer", OURS)
FULL, PARTS = "FULL_STATE_DICT", "SHARDED_STATE_DICT"
SHARDED = tuple(f"{system}, {form}" for form in (FULL, PARTS) for system in WAYS)


def train(model: Wide, steps: int, way: str | None, place: Path, clock: Clock) -> None:
    class Saves(TrainerCallback):
        """Trainer saves between the two; it logs and evaluates nothing here."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.begin_save()

        def on_save(self, *_: Any, **__: Any) -> None:
            clock.end_save()

    system, _, form = (way or "").partition(", ")
    options: dict[str, Any] = {}
    if dist.is_initialized():
        wrapped = {"version": 2, "state_dict_type": form or FULL, "transformer_layer_cls_to_wrap": ["Linear"]}
        options = {"fsdp": True, "fsdp_config": wrapped}
    arguments = TrainingArguments(
        str(place), max_steps=steps, save_strategy="no" if way is None else "steps", save_steps=1, save_total_limit=2,
        logging_strategy="no", per_device_train_batch_size=BATCH, report_to=[], disable_tqdm=True, use_cpu=True,
        dataloader_pin_memory=False, optim="adamw_torch_fused", learning_rate=1e-3, **options,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=samples(steps), callbacks=[Saves()])
    trainer.remove_callback(PrinterCallback)
    if system == OURS:
        install(trainer)
    trainer.train()
    assert trainer.accelerator.is_fsdp2 == dist.is_initialized()
