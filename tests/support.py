"""What several tests need: small real models, states compared bit for bit, training in a child process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests import layout
from tests.fork_server import SOURCE, Talker

CHILD_S = 120.0


def make_model(width: int = 32) -> torch.nn.Module:
    """Parameters, buffers that change in forward, and a tied weight."""
    model = torch.nn.Sequential(
        torch.nn.Linear(width, width),
        torch.nn.BatchNorm1d(width),
        torch.nn.Linear(width, width),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(width, width),
    )
    model[4].weight = model[2].weight
    return model


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, width: int = 32) -> None:
    """One iteration; draws its data and dropout from the global generator."""
    optimizer.zero_grad(set_to_none=True)
    model(torch.randn(8, width)).square().mean().backward()
    optimizer.step()


def bytes_of(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return bytes(flat.tolist()) if flat.numel() < 64 else flat.numpy().tobytes()


def assert_same(left: Any, right: Any, path: str = "state") -> None:
    """Equal in structure, types and bits."""
    assert type(left) is type(right), f"{path}: {type(left)} and {type(right)}"
    if isinstance(left, dict):
        assert list(left) == list(right), path
        assert [type(key) for key in left] == [type(key) for key in right], path
        for key in left:
            assert_same(left[key], right[key], f"{path}[{key!r}]")
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), path
        for index, (a, b) in enumerate(zip(left, right, strict=True)):
            assert_same(a, b, f"{path}[{index}]")
    elif isinstance(left, torch.Tensor):
        assert (left.dtype, left.shape) == (right.dtype, right.shape), path
        assert bytes_of(left) == bytes_of(right), f"{path} differs"
    elif isinstance(left, float):
        assert left.hex() == right.hex() if left == left else right != right, path
    elif type(left).__module__ == "numpy":
        assert left.dtype == right.dtype, path
        assert left.shape == right.shape, path
        assert left.tobytes() == right.tobytes(), path
    else:
        assert left == right, path


def until(is_true: Callable[[], object], what: str, timeout_s: float = 30.0) -> None:
    """Wait for a condition of another process; fails the test, naming it, when it does not come."""
    end = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < end, f"{what} did not happen within {timeout_s:g} s"
        time.sleep(0.005)


def is_alive(pid: int) -> bool:
    """Whether any thread of it is: of a process that was killed the first may be over while others hold its sockets."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return len(threads) > 1 or stat.rpartition(")")[2].split()[0] != "Z"


def start_child(code: str, *arguments: object) -> Talker:
    """A Python process that runs ``code`` with these ``sys.argv[1:]``; it can import the tests."""
    return Talker(code, *map(str, arguments))


def run_child(code: str, *arguments: object) -> str:
    """Run it to its end and give its output; fails the test if it fails."""
    child = start_child(code, *arguments)
    out, err = child.communicate(timeout=CHILD_S)
    assert child.returncode == 0, err
    return out


def run_fresh(code: str, *arguments: object) -> str:
    """As :func:`run_child`, in an interpreter that has imported nothing: for what looks at modules, or at memory."""
    path = {"PYTHONPATH": f"{SOURCE / 'src'}{os.pathsep}{SOURCE}"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **path}, timeout=CHILD_S)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def pause(pid: int) -> None:
    """SIGSTOP, until every thread stands: one that runs on another core goes on for a moment."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: all(_state(task) in "TtZX" for task in Path(f"/proc/{pid}/task").iterdir()), "all threads stopped")


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def keeper_is_gone(root: Path) -> bool:
    """Whether no keeper holds the root: its lock can be had."""
    import fcntl

    with layout.lock(root).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
