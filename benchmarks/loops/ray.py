"""Ray Train with one worker; two checkpoints stay.  Its own way: torch.save, then ``ray.train.report``."""

from __future__ import annotations

import pickle
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
from benchmarks.loops.clock import Clock
from benchmarks.loops.wide import BATCH, WIDTH, Wide
from ray.train import Checkpoint, CheckpointConfig, CheckpointUploadMode, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

import stillframe

OURS = "stillframe"
_MODES = {"Ray Train": CheckpointUploadMode.SYNC, "Ray Train, async": CheckpointUploadMode.ASYNC}
WAYS = (*_MODES, OURS)
_TIMES = "times.pickle"


def train(model: Wide, steps: int, way: str | None, place: Path, clock: Clock) -> None:
    """The worker's clock counts, and becomes this one: both read the clock of the machine."""
    if not ray.is_initialized():
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    TorchTrainer(
        _loop,
        train_loop_config={"model": model, "steps": steps, "way": way, "place": str(place)},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(storage_path=str(place), name="run", checkpoint_config=CheckpointConfig(num_to_keep=2)),
    ).fit()
    hook = clock._hook
    clock.__dict__.update(pickle.loads((place / _TIMES).read_bytes()), _hook=hook)


def _loop(config: dict[str, Any]) -> None:
    model, place, way = config["model"], Path(config["place"]), config["way"]
    optimizer = model.optimizer()
    state = {"model": model, "optimizer": optimizer}
    with Clock() as clock:
        if way == OURS:
            with stillframe.integrations.ray.checkpointer(state, place / "_stillframe") as checkpoints:
                for step in _steps(model, optimizer, config["steps"]):
                    with clock.saving():
                        checkpoints.report(step, {"step": step})
        else:
            for step in _steps(model, optimizer, config["steps"]):
                if way is not None:
                    with clock.saving():
                        _report(step, model, optimizer, _MODES[way])
    (place / _TIMES).write_bytes(pickle.dumps({key: value for key, value in vars(clock).items() if key != "_hook"}))


def _steps(model: Wide, optimizer: torch.optim.Optimizer, steps: int) -> Any:
    for step in range(steps):
        model(torch.randn(BATCH, WIDTH))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        yield step


def _report(step: int, model: Wide, optimizer: torch.optim.Optimizer, mode: CheckpointUploadMode) -> None:
    """As Ray's guides do it; where Ray uploads in the background, it removes the directory."""
    directory = tempfile.mkdtemp(prefix="sf-ray-")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{directory}/state.pt")
    ray.train.report(
        {"step": step},
        checkpoint=Checkpoint.from_directory(directory),
        checkpoint_upload_mode=mode,
        delete_local_checkpoint_after_upload=True,
    )
