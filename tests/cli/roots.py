"""Real roots for the tests of the command line, and the command itself as a real process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stillframe import Checkpointer

REPOSITORY = Path(__file__).resolve().parent.parent.parent
COMMAND = [sys.executable, "-m", "stillframe"]
STEPS = (10, 20, 30)


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "NO_COLOR", "FORCE_COLOR"}}
    return {**kept, "PYTHONPATH": str(REPOSITORY / "src"), "PYTHONWARNINGS": "error", **more}


def stillframe(*arguments: object, code: int = 0, cwd: Path | None = None, **env: str) -> str:
    """What the command printed; fails the test if it ended with another code, or with a traceback."""
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, env=environment(**env), cwd=cwd, timeout=100
    )
    assert done.returncode == code, f"{done.returncode}: {done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done.stderr if code and not done.stdout else done.stdout


def answer(*arguments: object, code: int = 0) -> Any:
    return json.loads(stillframe(*arguments, "--json", code=code))


class Net(torch.nn.Module):
    """A tied weight, a buffer, and two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 16)
        self.body = torch.nn.Linear(16, 16)
        self.norm = torch.nn.BatchNorm1d(16)
        self.head = torch.nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight
        self.low = torch.nn.Parameter(torch.randn(7, 3).bfloat16())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.norm(self.body(self.embed(x))))
        return y + self.low.float().sum()


def make_state() -> dict[str, Any]:
    torch.manual_seed(0)
    model = Net()
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "step": 0,
        "config": {"lr": 1e-3, "betas": (0.9, 0.95), "name": "net"},
        "array": np.arange(12, dtype=np.int32).reshape(3, 4),
        "table": torch.arange(10.0),
    }


def train(state: dict[str, Any], step: int) -> None:
    state["model"](torch.randint(0, 50, (8,))).square().mean().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    state["step"] = step


def make_root(root: Path) -> dict[str, Any]:
    """Three checkpoints of a small training run; gives the state as it was last saved."""
    state = make_state()
    with Checkpointer(root, arena="64MiB") as checkpointer:
        for step in STEPS:
            train(state, step)
            checkpointer.save(step, state)
            checkpointer.wait()
    return state


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def segment(root: Path, step: int, rank: int = 0) -> Path:
    return next((root / f"step-{step:012d}").glob(f"rank-{rank:05d}-*.safetensors"))
