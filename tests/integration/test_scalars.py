"""The figures of a checkpointer in the loggers of experiments: read back with their own readers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from stillframe import Checkpointer, Tier
from stillframe.observe.scalars import add_scalars, scalars

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the loggers


def test_tensorboard_reads_them_by_step(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    tier = Tier(tmp_path / "tier")
    with (
        Checkpointer(tmp_path / "root", arena="64MiB", tiers=[tier]) as checkpointer,
        SummaryWriter(str(tmp_path / "log")) as writer,
    ):
        for step in (3, 8):
            checkpointer.save(step, {"w": torch.ones(1 << 10)}).wait(tier=tier)
            add_scalars(writer, checkpointer.stats(), step)
    read = EventAccumulator(str(tmp_path / "log"))
    read.Reload()
    assert [(each.step, each.value) for each in read.Scalars("stillframe/saves_committed")] == [(3, 1.0), (8, 2.0)]
    tags = read.Tags()["scalars"]
    of_tier = next(tag for tag in tags if tag.startswith("stillframe/tier_committed_step/"))
    assert [each.value for each in read.Scalars(of_tier)] == [3.0, 8.0]


def test_what_has_no_value_yet_is_left_out(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "root", arena="64MiB") as checkpointer:
        found = scalars(checkpointer.stats())
        assert found["stillframe/saves"] == 0.0
        assert "stillframe/committed_step" not in found


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_an_offline_run_of_wandb_takes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setenv("WANDB_SILENT", "true")
    with Checkpointer(tmp_path / "root", arena="64MiB") as checkpointer:
        checkpointer.save(3, {"w": torch.ones(1 << 10)}).wait()
        with wandb.init(mode="offline", dir=str(tmp_path), project="stillframe") as run:
            run.log(scalars(checkpointer.stats()), step=3)
        files = list(tmp_path.rglob("*.wandb"))
    assert files
    assert b"stillframe/saves_committed" in files[0].read_bytes()
