"""Real training on this CPU, with and without saving, in turns within one process.

Without an accelerator, copying and writing use the cores and the memory bandwidth that training uses: what is
measured here is the interference that the emulated compute of the other questions leaves out.  Each pair of turns
(a few iterations without saving, as many with a save at each) meets the same weather; the figure is the ratio.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Protocol

import torch
from benchmarks import states
from benchmarks.case import GIB, Case
from benchmarks.systems import SYSTEMS
from benchmarks.systems.base import State, System, tensors_of
from demo.gpt import GPT, Sizes
from demo.text import Text

ITERATIONS = 6
_ROWS = 8

MODELS = {
    "gpt-5M": Sizes(width=256, heads=4, layers=6),
    "gpt-10M": Sizes(),
    "gpt-25M": Sizes(width=512, heads=8),
    "python": None,
}


class Trainee(Protocol):
    """Something that trains: what it saves, and one iteration in two halves."""

    state: State
    tokens: int

    def compute(self) -> None: ...
    def update(self) -> None: ...


class TrainedGPT:
    def __init__(self, sizes: Sizes) -> None:
        torch.manual_seed(1)
        self.model = GPT(sizes)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.text = Text(_ROWS, sizes.context)
        self.data = {"position": 0, "rounds": 0}
        self.tokens = _ROWS * sizes.context
        self.compute()
        self.update()  # makes the optimizer's state
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        moments = {
            f"{names[id(parameter)]}.{kind}": values[kind]
            for parameter, values in self.optimizer.state.items()
            for kind in ("exp_avg", "exp_avg_sq")
        }
        weights = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        self.state: State = {"model": weights, "optimizer": moments}

    def compute(self) -> None:
        inputs, targets = self.text.batch(self.data)
        self.optimizer.zero_grad()
        self.model(inputs, targets).backward()

    def update(self) -> None:
        self.optimizer.step()


class PythonLoop:
    """A loop that holds the interpreter all the time, as a data pipeline or a scheduler in Python does."""

    def __init__(self, size: int) -> None:
        self.state = states.make_state(size)
        self.tokens = 15_000_000
        self.step = 0

    def compute(self) -> None:
        total = 0
        for number in range(self.tokens):
            total += number & 7

    def update(self) -> None:
        self.step += 1
        states.set_step(self.state, self.step)


def training(case: Case, directory: Path) -> dict[str, Any]:
    """Pairs of turns of :data:`ITERATIONS` iterations; ``case.detail`` names the model."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    sizes = MODELS[case.detail]
    trainee: Trainee = TrainedGPT(sizes) if sizes else PythonLoop(int(case.gib * GIB))
    system = SYSTEMS[case.system](directory, trainee.state)
    run(trainee, system, 1, 0, [])  # plans, and touches its buffers for the first time
    step = 1
    quiet: list[float] = []
    saving: list[float] = []
    blocked: list[float] = []
    for pair in range(case.iterations // ITERATIONS):
        for is_saving in (pair % 2 == 0, pair % 2 == 1):
            os.sync()
            seconds = run(trainee, system, ITERATIONS, step, blocked if is_saving else None)
            (saving if is_saving else quiet).append(seconds)
            step += ITERATIONS if is_saving else 0
    tokens = trainee.tokens * ITERATIONS
    right = case.system == "none" or restores(system, trainee, step + 1)
    system.close()
    return {
        "bytes": states.bytes_of(trainee.state), "quiet": [tokens / each for each in quiet],
        "saving": [tokens / each for each in saving], "blocked_s": blocked, "is_right": right,
    }  # fmt: skip


def run(trainee: Trainee, system: System, iterations: int, step: int, blocked: list[float] | None) -> float:
    """Seconds of some iterations, with a save at the end of each if ``blocked`` is there to note what it cost.

    The time until the last save is complete is part of it, so that nobody's work is left out.
    """
    began = time.perf_counter()
    for number in range(step + 1, step + iterations + 1):
        trainee.compute()
        computed = time.perf_counter()
        system.fence()
        fenced = time.perf_counter()
        trainee.update()
        updated = time.perf_counter()
        if blocked is not None:
            system.save(number)
            blocked.append(fenced - computed + time.perf_counter() - updated)
    system.finish()
    return time.perf_counter() - began


def restores(system: System, trainee: Trainee, step: int) -> bool:
    """Whether a save comes back, if training goes on as soon as the fence lets it."""
    system.save(step)
    expected = states.digest_of(trainee.state)
    system.fence()
    trainee.compute()
    trainee.update()
    system.finish()
    with torch.no_grad():
        for _, tensor in tensors_of(trainee.state):
            tensor.zero_()
    system.restore(step)
    return states.digest_of(trainee.state) == expected
