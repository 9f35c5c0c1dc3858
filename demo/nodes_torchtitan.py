"""torchtitan's own ``Trainer`` on several hosts: as :mod:`demo.nodes_train`, with torchtitan's loop in place of ours.

    torchrun --nnodes N --nproc-per-node 1 … demo/nodes_torchtitan.py --root DIR --steps N [--no-save] [--record FILE]

What makes torchtitan run without an accelerator is that of its tests (:mod:`tests.engines.titan`).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a script, from anywhere

from tests.engines import titan  # before torchtitan  # isort: skip
from demo import options
from demo.nodes_train import KEPT, PAUSE_S, SHARED_EVERY, SILENCE
from demo.ranks_train import of_all_ranks
from demo.record import Record, Started, Step, fingerprint
from demo.train import tell
from tests.loops.driving import Life
from torchtitan.config import CommConfig

import stillframe
from stillframe.integrations.torchtitan import Manager


def configured(given: argparse.Namespace) -> Any:
    checkpoint = Manager.Config(
        enable=not given.no_save,
        interval=1,
        keep_latest_k=KEPT,
        root=str(given.root / "{node}"),
        options={"tiers": [stillframe.Tier(given.root / "shared", every=SHARED_EVERY)]},
        last_save_model_only=False,
    )
    config = titan.config(str(given.root.parent / "torchtitan"), given.steps, checkpoint)
    config.model_spec = titan.model(dim=128, hidden_dim=512)
    config.comm = CommConfig(train_timeout_seconds=SILENCE.seconds)
    return config


class Told:
    """What a run tells, heard from the manager that torchtitan calls."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._manager, self._metrics = trainer, trainer.checkpointer, trainer.metrics_processor
        self._load, self._save, self._log = self._manager.load, self._manager.save, self._metrics.log
        self._manager.load, self._manager.save, self._metrics.log = self._loading, self._saving, self._logging
        self._loss, self._begun_s = 0.0, 0.0
        self.started: Started | None = None
        self.steps: list[Step] = []

    def _loading(self, step: int) -> bool:
        begun_s = time.monotonic()
        is_loaded: bool = self._load(step)
        found = self._manager.restored
        self._begun_s = time.monotonic()
        parameters = sum(each.numel() for part in self._trainer.model_parts for each in part.parameters())
        self.started = Started(
            parameters, torch.get_num_threads(), found.step, self._begun_s - begun_s, dist.get_rank(), os.getpid(),
            source=found.source, restored_bytes=found.bytes,
        )  # fmt: skip
        tell(self.started)
        return is_loaded

    def _logging(self, step: int, loss: float, *more: Any, **named: Any) -> None:
        self._loss = loss
        self._log(step, loss, *more, **named)

    def _saving(self, step: int, last_step: bool = False) -> bool:
        trained_s = time.monotonic()
        is_saved: bool = self._save(step, last_step=last_step)
        save_s = time.monotonic() - trained_s
        self.steps.append(Step(step, self._loss, self._begun_s, trained_s - self._begun_s, 0, 0, 0, save_s))
        if dist.get_rank() == 0:
            tell(self.steps[-1])
        time.sleep(PAUSE_S)
        self._begun_s = time.monotonic()
        return is_saved


def main() -> None:
    given = options.parser("Train a small Llama on several hosts with torchtitan.").parse_args()
    torch.set_num_threads(1)
    trainer = configured(given).build()
    Life.seed(1)  # torchtitan seeds torch alone
    titan.add_dropout(trainer)
    told = Told(trainer)
    trainer.train()
    assert told.started is not None
    own = {
        "model": {name: each for part in trainer.model_parts for name, each in part.named_parameters()},
        "optimizer": trainer.optimizers,
        "scheduler": trainer.lr_schedulers,
        "data": trainer.dataloader,
        "trainer": trainer,
        "rng": stillframe.RNG(),
    }
    together = of_all_ranks(fingerprint({f"rank {dist.get_rank()}": own}))
    trainer.close()
    if dist.get_rank() == 0:
        options.write(given, Record(told.started, told.steps, [], together))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
