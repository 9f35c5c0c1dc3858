"""How the costs of stillframe itself grow: ``save()`` with tensors and bytes, the commit with ranks."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from benchmarks.case import GIB, Case
from rich.console import Console

import stillframe


def save_cost(case: Case, directory: Path) -> dict[str, Any]:
    """``save()`` of ``case.detail`` tensors in ``case.gib``: as a plain dict, or "module": with AdamW.

    ``first_s``: the first save of a state, which plans; in a checkpointer whose keeper and arena are already there.
    """
    kind, count = case.detail.split()
    items = max(1, int(case.gib * GIB) // 4 // int(count))
    state: dict[str, Any]
    if kind == "module":  # each weight comes with two moments and a step
        model = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(items)) for _ in range(int(count) // 4))
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        state = {"model": model, "optimizer": optimizer}
    else:
        state = {f"tensor{index}": torch.ones(items) for index in range(int(count))}
    first_s: list[float] = []
    save_s: list[float] = []
    with stillframe.Checkpointer(directory, keep=stillframe.KeepLast(1)) as checkpointer:
        checkpointer.save(0, {"arena": torch.ones(1)}).wait()
        for step in range(1, case.iterations + 2):
            began = time.perf_counter()
            save = checkpointer.save(step, state)
            saved = time.perf_counter() - began
            save.wait()
            (save_s if step > 1 else first_s).append(saved)
    return {"save_s": save_s, "first_s": first_s}


def commit_cost(case: Case, directory: Path) -> dict[str, Any]:
    """So many real keepers commit steps together."""
    from benchmarks.scale import many_keepers

    return asdict(many_keepers(directory / "root", int(case.detail), case.iterations, Console()))


def collect_cost(case: Case, directory: Path) -> dict[str, Any]:
    """Rank 0's own work for so many real seals."""
    from benchmarks.scale import collect

    return asdict(collect(directory / "root", int(case.detail), Console()))
