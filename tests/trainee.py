"""A real training run for the tests to kill: `python -m tests.trainee ROOT STEPS`.

Prints "go" when it starts to train and "end DIGEST" when it is through; saves at every iteration.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import xxhash

import stillframe
from tests.ranks.saying import say
from tests.support import bytes_of, make_model, train_step


def make_state() -> dict[str, Any]:
    torch.manual_seed(7)
    torch.set_num_threads(1)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    ballast = torch.zeros(6_000_000)  # two chunks, so that a kill also falls into staging and flushing
    return {
        "model": model, "optimizer": optimizer, "scheduler": scheduler, "ballast": ballast,
        "data": {"position": 0, "seen": []}, "rng": stillframe.RNG(),
    }  # fmt: skip


def advance(state: dict[str, Any]) -> None:
    train_step(state["model"], state["optimizer"])
    state["scheduler"].step()
    state["ballast"].add_(1.0)
    state["data"]["position"] += 8
    state["data"]["seen"].append(torch.rand(()).item())


def digest(state: dict[str, Any]) -> str:
    """Of everything a resumed run must have right."""
    parts = [state["model"].state_dict(), state["optimizer"].state_dict()["state"]]
    result = xxhash.xxh3_128()
    for part in parts:
        for _, value in sorted(_flat(part).items()):
            result.update(bytes_of(value))
    result.update(bytes_of(state["ballast"]))
    result.update(repr((state["data"], state["scheduler"].state_dict()["_last_lr"])).encode())
    result.update(bytes_of(torch.rand(4)))
    return result.hexdigest()


def _flat(tree: dict[Any, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for key, value in tree.items():
        found.update(_flat(value, f"{prefix}{key}/") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return found


def undisturbed(steps: int) -> str:
    state = make_state()
    for _ in range(steps):
        advance(state)
    return digest(state)


def main(root: Path, steps: int) -> None:
    state = make_state()
    with stillframe.Checkpointer(root, arena="64MiB", keep=stillframe.KeepLast(2)) as checkpointer:
        start = checkpointer.restore(state).step or 0
        say(f"go {start}")
        for step in range(start + 1, steps + 1):
            checkpointer.fence()  # the ballast is updated by hand
            advance(state)
            checkpointer.save(step, state)
    say(f"end {digest(state)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
