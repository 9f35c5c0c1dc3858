"""One rank of a run that is recorded: `python -m tests.torture.power_cut.trainee ROOT LIFE SEED WORD…`.

Each word is a deed: ``restore``; ``restore:1``, of the step so many before the newest; ``rewind:1``; ``save:3``, each
waits until it is committed; ``burst:3``, without waiting; ``settle``, until all are committed or have failed;
``keeper``, which dies; ``leave`` (the trainer dies, its keeper finishes); ``die`` (both do).  A word may be for one
rank alone: ``1/keeper``.

What is saved is a function of life, step and rank.  A life begins with the process, and with each step back; the
processes of one recording are ten lives apart.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch

import stillframe
from stillframe import spi

FLOATS = 250_000
"""Segments of more than 1 MiB are written over when they are let go."""
SHARDED = (6, 32)


@cache
def values(life: int, step: int, rank: int) -> dict[str, torch.Tensor]:
    """The tensors of one rank; no two saves have the same."""
    chance = torch.Generator().manual_seed((life * 10_000 + step) * 10 + rank)
    return {
        "weights": torch.randn(FLOATS, generator=chance),
        "half": torch.randn(40, 500, generator=chance).to(torch.bfloat16),
        "counts": torch.randint(0, 1 << 40, (999,), generator=chance),
    }


@cache
def whole(life: int, step: int) -> torch.Tensor:
    """A tensor that the ranks divide among themselves."""
    return torch.randn(SHARDED, generator=torch.Generator().manual_seed((life * 10_000 + step) * 10 + 9))


def empty_state() -> dict[str, Any]:
    """To restore into, alone."""
    tensors: dict[str, Any] = {name: torch.zeros_like(each) for name, each in values(0, 0, 0).items()}
    return {**tensors, "sharded": torch.zeros(SHARDED), "life": -1, "step": -1}


class Trainee:
    def __init__(self, root: Path, life: int, seed: int) -> None:
        self.rank, self.size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self._notes = os.open(root.parent.with_name("notes"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._chance = random.Random(seed)
        self._life, self._step = life, 0
        self._state = empty_state()
        if self.size > 1:
            self._state["sharded"] = _divided(self._state["sharded"])
        self.note("life", life)
        self.checkpointer = stillframe.Checkpointer(
            root, arena="64MiB", keep=stillframe.KeepLast(2), events=False, deadline_s=60, on_error="warn"
        )

    def note(self, what: str, number: int) -> None:
        """For the trace: what the messages to and from the keeper do not tell."""
        os.write(self._notes, f"{what} {number}".encode())

    def _go_back(self, back: str) -> int:
        self._life += 1
        self.note("life", self._life)
        self.note("back", self._step - int(back))
        return self._step - int(back)

    def restore(self, back: str = "") -> None:
        step = self._go_back(back) if back else None
        self._step = self.checkpointer.restore(self._state, step=step).step or 0
        if step is None:
            self.note("resumed", self._step)

    def rewind(self, back: str) -> None:
        step = self._go_back(back)
        self.checkpointer.rewind(step)
        self.note("rewound", step)
        assert self.checkpointer.restore(self._state).step == step
        self._step = step

    def _save(self) -> stillframe.Save:
        self._step += 1
        self.checkpointer.fence()
        for name, each in values(self._life, self._step, self.rank).items():
            self._state[name].copy_(each)
        sharded, full = self._state["sharded"], whole(self._life, self._step)
        (sharded.to_local() if self.size > 1 else sharded).copy_(full.chunk(self.size)[self.rank])
        self._state |= {"life": self._life, "step": self._step}
        return self.checkpointer.save(self._step, self._state)

    def save(self, count: str) -> None:
        for _ in range(int(count)):
            self._save().wait("committed")

    def burst(self, count: str) -> None:
        for _ in range(int(count)):
            self._save()

    def settle(self) -> None:
        with contextlib.suppress(stillframe.StillframeError):
            self.checkpointer.wait("committed")

    def keeper(self) -> None:
        os.kill(spi.keeper_pid(self.checkpointer) or 0, 9)

    def leave(self) -> None:
        self.checkpointer.wait("staged")
        os.kill(os.getpid(), 9)

    def die(self) -> None:
        time.sleep(self._chance.uniform(0, 0.03))
        self.keeper()
        os.kill(os.getpid(), 9)


def _divided(tensor: torch.Tensor) -> Any:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo")
    return distribute_tensor(tensor, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])


def main(root: str, life: str, seed: str, *words: str) -> None:
    torch.set_num_threads(1)
    trainee = Trainee(Path(root), int(life), int(seed))
    with trainee.checkpointer:
        for word in words:
            whose, _, deed = word.rpartition("/")
            name, _, argument = deed.partition(":")
            if whose in ("", str(trainee.rank)):
                getattr(trainee, name)(*([argument] if argument else []))


if __name__ == "__main__":
    main(*sys.argv[1:])
