"""What a save costs training under Lightning: ``python -m benchmarks.loop_lightning [--gib 0.5] [--steps 12] [--turns 3]``.

Lightning's own checkpoint plugin, its ``AsyncCheckpointIO``, and stillframe's, beside training that saves nothing, in one
run; turns alternate.  ``save``: the median time that ``trainer.save_checkpoint`` takes, at every second step.
``step``: the median time of all steps, with the save and with the wait before the update, if there is one.  ``end``:
from the last step until everything is on disk, which is when ``fit`` returns.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader

from stillframe.integrations.lightning import CheckpointIO
from stillframe.units import GIB

PLUGINS: dict[str, Any] = {
    "no save": None,
    "Lightning": TorchCheckpointIO,
    "Lightning, AsyncCheckpointIO": lambda: AsyncCheckpointIO(TorchCheckpointIO()),
    "stillframe": CheckpointIO,
}
_LAYERS, _BATCH = 8, 256


class Wide(L.LightningModule):  # type: ignore[misc]
    """Layers of one width; with AdamW the state is three times the parameters."""

    def __init__(self, gib: float) -> None:
        super().__init__()
        self.width = int((gib * GIB / 3 / 4 / _LAYERS) ** 0.5)
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(self.width, self.width) for _ in range(_LAYERS)))

    def training_step(self, batch: torch.Tensor, index: int) -> Any:
        return self.layers(torch.randn(_BATCH, self.width)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), fused=True)


class Clock(L.Callback):  # type: ignore[misc]
    """Saves at every second step, over the checkpoint before the last, and notes the times; the first two are not counted."""

    def __init__(self, place: Path, does_save: bool) -> None:
        self.place, self.does_save = place, does_save
        self.saves: list[float] = []
        self.steps: list[float] = []
        self.ended = self._began = time.perf_counter()

    def on_train_batch_start(self, *_: Any) -> None:
        self._began = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        step, began = trainer.global_step, time.perf_counter()
        if self.does_save and step % 2:
            trainer.save_checkpoint(self.place / f"{step % 4}.ckpt")
        self.ended = time.perf_counter()
        if step > 2:
            self.steps.append(self.ended - self._began)
            self.saves += [self.ended - began] if step % 2 else []


def turn(name: str, gib: float, steps: int) -> dict[str, float]:
    place = Path(tempfile.mkdtemp(prefix="sf-lightning-"))
    try:
        clock = Clock(place, name != "no save")
        plugins = [] if PLUGINS[name] is None else [PLUGINS[name]()]
        trainer = L.Trainer(
            plugins=plugins, callbacks=[clock], max_steps=steps, accelerator="cpu", logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        data: Any = torch.zeros(steps, 1)
        trainer.fit(Wide(gib), DataLoader(data))
        end = time.perf_counter() - clock.ended
        return {"save": statistics.median(clock.saves), "step": statistics.median(clock.steps), "end": end}
    finally:
        shutil.rmtree(place, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=0.5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in PLUGINS}
    for _ in range(options.turns):
        for name in PLUGINS:
            found[name].append(turn(name, options.gib, options.steps))
    table = Table(title=f"{options.gib:g} GiB, medians of {options.turns} turns, ms")
    for column in ("plugin", "save", "step", "end"):
        table.add_column(column, justify="left" if column == "plugin" else "right")
    for name, turns in found.items():
        table.add_row(
            name, *(f"{1e3 * statistics.median(each[key] for each in turns):,.1f}" for key in ("save", "step", "end"))
        )
    Console().print(table)


if __name__ == "__main__":
    main()
