"""What staging from an accelerator costs: ``python -m benchmarks.device [--turns 5]``.

There is no accelerator here.  It is measured on the device of the tests, which is made of threads and copies to the host
at a set rate: a link to scale.  So the figures say what stillframe adds to the link, not how fast a GPU is.

1. Staging against the link: a state copied chunk by chunk by torch alone, and staged by a save; in turns.
2. The fence: how long the host stands in it, when copies are shorter than an iteration, and when it comes at once.
3. ``save()`` of many tensors on the device and in host memory: a process each, in turns.
4. How often the interpreter is taken for a chunk: beside a loop that never lets go of it by itself, each time costs one
   switch interval.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from rich.console import Console
from tests.device import queued

from stillframe import Checkpointer
from stillframe.model import CHUNK_BYTES

_LINK_BYTES_S = 400e6
_CHUNKS = 16
_LAYERS = 146, 400, 1250
"""Of eight tensors each: the first make as many as a model of 7 B has."""
_SWITCH_S = 0.05


def _chunks(device: str = "queued") -> list[torch.Tensor]:
    return [torch.ones(_CHUNKS * CHUNK_BYTES // 4, device=device)]


def _by_torch(state: torch.Tensor, into: torch.Tensor) -> float:
    stream = torch.Stream("queued")
    rows = state.view(torch.uint8).split(CHUNK_BYTES)
    torch.accelerator.synchronize()
    began = time.perf_counter()
    with queued.on_stream(stream):
        for row, span in zip(rows, into.split(CHUNK_BYTES), strict=True):
            span.copy_(row, non_blocking=True)
    stream.synchronize()
    return time.perf_counter() - began


def _by_save(checkpointer: Checkpointer, step: int, state: Any) -> float:
    torch.accelerator.synchronize()
    began = time.perf_counter()
    save = checkpointer.save(step, state)
    save.wait("staged")
    took_s = time.perf_counter() - began
    save.wait()
    return took_s


def _staging(turns: int) -> str:
    state = _chunks()
    into = torch.zeros(_CHUNKS * CHUNK_BYTES, dtype=torch.uint8)
    ratios, rates = [], []
    with _checkpointer() as checkpointer:
        _by_save(checkpointer, 0, state)
        queued.set_rate(_LINK_BYTES_S)
        for turn in range(1, turns + 1):
            raw_s, save_s = _by_torch(state[0], into), _by_save(checkpointer, turn, state)
            ratios.append(raw_s / save_s)
            rates.append(into.numel() / raw_s / 1e6)
    queued.set_rate(0)
    return f"staging: {_said(ratios, '.3f')} of torch's own copies ({_said(rates, '.0f')} MB/s)"


def _fences(turns: int) -> list[str]:
    """An iteration lasts twice as long as the copies; or the host is ahead, and everything is still to come."""
    state = _chunks()
    copies_s = _CHUNKS * CHUNK_BYTES / _LINK_BYTES_S
    found = []
    for name, pause_s in (("copies shorter than the iteration", 2 * copies_s), ("the host far ahead", 0.0)):
        waits = []
        with _checkpointer() as checkpointer:
            _by_save(checkpointer, 0, state)
            queued.set_rate(_LINK_BYTES_S)
            for turn in range(1, turns + 1):
                checkpointer.save(turn, state)
                time.sleep(pause_s)
                began = time.perf_counter()
                checkpointer.fence()
                waits.append(1e3 * (time.perf_counter() - began))
                checkpointer.wait()
            queued.set_rate(0)
        found.append(f"fence, {name} (copies take {copies_s:.2f} s): {_said(waits, '.2f')} ms")
    return found


def _saves(turns: int) -> list[str]:
    """A process each, as a job has its state on the device or not: in one process the second would lie where the first
    left room."""
    return [_save_of(layers, turns) for layers in _LAYERS]


def _save_of(layers: int, turns: int) -> str:
    took: dict[str, list[float]] = {"cpu": [], "queued": []}
    for _, device in product(range(turns), took):
        command = [sys.executable, "-m", "benchmarks.device", "--save", device, str(layers)]
        took[device].append(float(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))
    host_ms, device_ms = (statistics.median(times) for times in took.values())
    return (
        f"save() of {8 * layers} tensors, ms of CPU: host {_said(took['cpu'], '.2f')}; "
        f"device {_said(took['queued'], '.2f')}; {device_ms / host_ms:.2f}"
    )


def _one_save(device: str, layers: int) -> float:
    """Milliseconds of the training thread alone: others would be counted with it on a busy machine."""
    model = torch.nn.ModuleList(torch.nn.Linear(24, 24) for _ in range(layers)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    took = []
    with _checkpointer() as checkpointer:
        for step in range(32):
            began = time.thread_time()
            save = checkpointer.save(step, {"model": model, "optimizer": optimizer})
            took.append(1e3 * (time.thread_time() - began))
            save.wait()
    return statistics.median(took[2:])


def _takes(turns: int) -> str:
    state = _chunks()
    found = []
    with _checkpointer() as checkpointer:
        _by_save(checkpointer, 0, state)
        for turn in range(1, turns + 1):
            with _busy():
                began = time.perf_counter()
                save = checkpointer.save(turn, state)
                assert save.job.arrived.wait(60)
                found.append((time.perf_counter() - began) / _SWITCH_S / _CHUNKS)
            save.wait()
    return f"turns of the interpreter for a chunk, all of a save divided by {_CHUNKS}: {_said(found, '.1f')}"


@contextmanager
def _busy() -> Iterator[None]:
    """A thread that runs Python and nothing else."""
    over: list[None] = []
    before = sys.getswitchinterval()

    def run() -> None:
        while not over:
            pass

    thread = threading.Thread(target=run)
    sys.setswitchinterval(_SWITCH_S)
    thread.start()
    try:
        yield
    finally:
        over.append(None)
        thread.join()
        sys.setswitchinterval(before)


@contextmanager
def _checkpointer() -> Iterator[Checkpointer]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root, Checkpointer(root) as checkpointer:
        yield checkpointer


def _said(numbers: list[float], form: str) -> str:
    """The median, and from where to where they go."""
    ordered = sorted(numbers)
    return f"{statistics.median(ordered):{form}} ({ordered[0]:{form}} to {ordered[-1]:{form}})"


def main() -> None:
    """Prints one line for each question."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--save", nargs=2, metavar=("DEVICE", "LAYERS"), help="only this: a part of the third question")
    options = parser.parse_args()
    queued.load()
    if options.save is not None:
        print(_one_save(options.save[0], int(options.save[1])))
        return
    console = Console(highlight=False)
    questions: list[Callable[[int], str | list[str]]] = [_staging, _fences, _saves, _takes]
    for question in questions:
        said = question(options.turns)
        console.print(said if isinstance(said, str) else "\n".join(said), soft_wrap=True)


if __name__ == "__main__":
    main()
