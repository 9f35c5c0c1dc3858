"""Real roots for the tests of the command line, and the command itself as a real process."""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
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
    with tempfile.TemporaryDirectory() as place:
        out, err = Path(place, "out"), Path(place, "err")
        ended = _server().run(list(map(str, arguments)), environment(**env), cwd, out, err)
        stdout, stderr = out.read_text(), err.read_text()
    assert ended == code, f"{ended}: {stdout}\n{stderr}"
    assert "Traceback" not in stderr
    return stderr if code and not stdout else stdout


class Server:
    """Processes for commands, forked from one that has imported everything."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("server.py"))], env=environment(),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        atexit.register(self.close)

    def run(self, arguments: list[str], env: dict[str, str], cwd: Path | None, out: Path, err: Path) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"arguments": arguments, "env": env, "cwd": cwd and str(cwd), "out": str(out), "err": str(err)}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()


@functools.cache
def _server() -> Server:
    return Server()


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
