"""Accelerate on stillframe.  As a program: one life of a run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy
import torch
from torch.utils.data import DataLoader, IterableDataset

import stillframe
from stillframe import Catalog
from tests.loops.conformance import Conformance, OnOtherRanks, assert_goes_on
from tests.loops.driving import BATCH, Life, Living, Wish, digest_of, standing
from tests.loops.sharding import allow_fsdp


class Where:
    """What the program knows of its position; registered for checkpointing."""

    def __init__(self, ranks: int) -> None:
        self.epoch = self.batch = self.step = 0
        self.ranks = ranks

    def state_dict(self) -> dict[str, int]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, int]) -> None:
        """``batch`` counts the batches of each rank."""
        ranks = self.ranks
        vars(self).update(state, batch=state["batch"] * state["ranks"] // ranks, ranks=ranks)


class Noise:
    """Draws from all generators where a batch is put together: in a worker, if there are any."""

    def __call__(self, samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        batch = {name: torch.stack([each[name] for each in samples]) for name in samples[0]}
        masked = torch.rand(batch["labels"].shape) < 0.1 * (random.random() + numpy.random.rand())
        return {**batch, "labels": batch["labels"].masked_fill(masked, -100)}


class Streamed(IterableDataset[Any]):
    """The order is drawn when the first sample is asked for."""

    def __init__(self, samples: list[Any]) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[Any]:
        for number in torch.randperm(len(self._samples)):
            yield self._samples[number]


def train(life: Life) -> None:
    from accelerate import Accelerator
    from accelerate.utils import (
        DataLoaderConfiguration,
        FullyShardedDataParallelPlugin,
        GradientAccumulationPlugin,
        ProjectConfiguration,
        set_seed,
    )

    wish = life.wish
    is_stateful, is_sharded = "stateful" in wish.kind, "fsdp" in wish.kind
    plugin = None
    if is_sharded:
        allow_fsdp()
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=plugin,
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=2 if "accumulated" in wish.kind else 1, sync_each_batch=is_sharded
        ),
        dataloader_config=DataLoaderConfiguration(
            use_stateful_dataloader=is_stateful, use_seedable_sampler="seedable" in wish.kind
        ),
        project_config=ProjectConfiguration(
            project_dir=wish.place, automatic_checkpoint_naming=True, total_limit=wish.keep or None
        ),
    )
    stillframe.integrations.accelerate.attach(accelerator)
    model, where = life.model(), Where(life.ranks)
    if Catalog(Path(wish.place, "_stillframe")).latest() is None:
        set_seed(3)  # a life before this one may have left nothing: then this is the first
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    workers = 0 if "alone" in wish.kind else 2
    collate = None if is_stateful and workers else Noise()  # there the numbers that workers draw do not come back
    is_streamed = "streamed" in wish.kind
    data: Any = Streamed(life.data()) if is_streamed else life.data()
    loader: Any = DataLoader(data, BATCH, shuffle=not is_streamed, num_workers=workers, collate_fn=collate)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    assert accelerator.is_fsdp2 == is_sharded
    accelerator.register_for_checkpointing(where)
    accelerator.load_state()
    begun = standing(model, optimizer, scheduler)
    while where.step < wish.steps:
        is_skipping = where.batch and not is_stateful
        batches = accelerator.skip_first_batches(loader, where.batch) if is_skipping else loader
        for batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            where.batch, where.step = where.batch + 1, where.step + 1
            accelerator.save_state()
            life.saved(where.step)
            if where.step == wish.steps:
                break
        else:
            where.epoch, where.batch = where.epoch + 1, 0
    more = {"begun": begun, "ended": standing(model, optimizer, scheduler)}
    life.ended(accelerator.unwrap_model(model), optimizer, scheduler, **more)
    accelerator.end_training()


class TestAccelerate(Conformance):
    module = "tests.loops.test_accelerate"
    kinds = ("", "streamed alone")
    others: ClassVar[tuple[str, ...]] = ("accumulated alone", "stateful")

    @staticmethod
    def checkpoints(place: Path) -> dict[int, Path]:
        found = (place / "checkpoints").glob("checkpoint_*")
        return {int(path.name.rpartition("_")[2]) + 1: path for path in found}

    @staticmethod
    def read(path: Path) -> str:
        step = int(path.name.rpartition("_")[2]) + 1
        found = stillframe.load(path.parent.parent / "_stillframe", step, only="models/*")
        return digest_of(found["models"][0]["model"].values())

    def test_killed_between_micro_batches_and_with_a_loader_that_knows_its_position(self, tmp_path: Path) -> None:
        for kind in self.others:
            self.die(Wish(str(tmp_path / kind), kill_at=5, kind=kind))
            assert_goes_on(self.live(Wish(str(tmp_path / kind), seed=2, kind=kind)), self.calm(kind))


class TestSharded(OnOtherRanks, TestAccelerate):
    """The same with FSDP2, on two ranks."""

    kinds = ("fsdp", "fsdp accumulated alone")
    sharded = "fsdp seedable accumulated alone"
    # Two lives end between the micro-batches of an update, and one at the end of an epoch.
    turns = ((2, sharded), (1, sharded), (2, sharded), (1, sharded.removeprefix("fsdp ")))
    test_killed_between_micro_batches_and_with_a_loader_that_knows_its_position = None  # type: ignore[assignment]
    kills = (4, 7)  # at the end of an epoch; and between the micro-batches of an update
    ranks = 1
    test_a_run_that_is_killed_again_and_again_ends_alike = None  # type: ignore[assignment]
    test_a_full_disk_costs_saves_and_neither_training_nor_older_ones = None  # type: ignore[assignment]

    def living(self, wish: Wish, ranks: int = 1) -> Living:
        return Living(self.module, wish, 2)


if __name__ == "__main__":
    train(Life())
