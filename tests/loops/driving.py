"""How a framework is driven: a life of a training run is a process, which does what its :class:`Wish` says.

The same small model, data and questions for every framework.  A driver is a module: run as a program it trains with its
framework and says at the end what came of it; imported by pytest it takes part in :mod:`tests.loops.conformance`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from tests.loops.sharding import whole
from tests.ranks.saying import say
from tests.support import bytes_of

SOURCE = Path(__file__).resolve().parent.parent.parent
LIFE_S = 500.0
SAMPLES, BATCH, STEPS = 16, 2, 12
"""So an epoch has eight steps on one rank, and four on two."""
_RESULT = "RESULT "


@dataclass(frozen=True)
class Wish:
    """What one life is to do."""

    place: str
    steps: int = STEPS
    kill_at: int = 0
    """SIGKILL comes when this step has been saved; 0: never."""
    delay_s: float = 0.0
    """And so much later."""
    seed: int = 1
    """Of everything that a restore has to put right."""
    keep: int = 0
    """How many checkpoints stay; 0: all."""
    kind: str = ""
    """What else a driver knows of."""


@dataclass(frozen=True)
class Result:
    """What came of a life that was left alone: digests, and the samples of each forward, in order."""

    parameters: str
    optimizer: str
    scheduler: str
    numbers: str
    """The next random numbers of Python, numpy and torch."""
    order: list[list[int]]
    more: dict[str, Any]


# --- in the process that trains --------------------------------------------------------------


class Life:
    """Thread: the training thread's."""

    def __init__(self, wish: Wish | None = None) -> None:
        self.wish = wish or Wish(**json.loads(sys.argv[1]))
        self.rank = int(os.environ.get("RANK", "0"))
        self.ranks = int(os.environ.get("WORLD_SIZE", "1"))
        self._order: list[list[int]] = []
        self.seed(self.wish.seed)

    @staticmethod
    def seed(number: int) -> None:
        """Of everything that draws."""
        random.seed(number)
        numpy.random.seed(number)
        torch.manual_seed(number)

    def model(self) -> Any:
        """A GPT-2 with dropout; notes the first token of each sample, which is the sample's number."""
        from transformers import GPT2Config, GPT2LMHeadModel

        shape: dict[str, Any] = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 16}
        model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0))  # type: ignore[no-untyped-call]
        torch.manual_seed(7)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        torch.manual_seed(self.wish.seed)
        model.register_forward_pre_hook(self._note, with_kwargs=True)
        return model

    def _note(self, model: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if model.training:
            self._order.append(kwargs["input_ids"][:, 0].tolist())

    def data(self) -> list[dict[str, torch.Tensor]]:
        made = torch.Generator().manual_seed(0)
        texts = [torch.randint(64, (8,), generator=made) for _ in range(SAMPLES)]
        for number, text in enumerate(texts):
            text[0] = number
        return [{"input_ids": text, "labels": text} for text in texts]

    def saved(self, step: int) -> None:
        """A driver calls it when a save was requested.  On the last rank this may be the end."""
        say(f"SAVED {step}")
        kill_at, is_late = self.wish.kill_at, step == self.wish.steps - 1
        if not kill_at or self.rank < self.ranks - 1 or not (step == kill_at or (is_late and step > kill_at)):
            return
        if not self.wish.delay_s or is_late:  # later there would be nothing left to go on with
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Timer(self.wish.delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def ended(self, model: torch.nn.Module, optimizer: Any, scheduler: Any, **more: Any) -> None:
        result = self.result(model, optimizer, scheduler, **more)
        if self.rank == 0:
            say(_RESULT + json.dumps(dataclasses.asdict(result)))

    def result(self, model: torch.nn.Module, optimizer: Any, scheduler: Any, **more: Any) -> Result:
        numbers = [random.random(), numpy.random.rand(3).tolist(), torch.rand(3).tolist()]
        return Result(
            digest_of(map(whole, model.state_dict().values())),
            digest_of(map(whole, _tensors_of(optimizer))),
            _digest(repr(scheduler.state_dict()).encode()),
            _digest(repr(numbers).encode()),
            self._order,
            more,
        )


def standing(model: torch.nn.Module, optimizer: Any, scheduler: Any) -> dict[str, str]:
    """Where a life stands, on however many ranks: digests of whole tensors.  A collective; it draws no numbers."""
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    parts = {"parameters": model.parameters(), "optimizer": _tensors_of(optimizer), "gradients": gradients}
    digests = {name: digest_of(map(whole, tensors)) for name, tensors in parts.items()}
    return {**digests, "scheduler": repr(scheduler.state_dict())}


def _tensors_of(optimizer: Any) -> list[Any]:
    state = [each for _, each in sorted(optimizer.state_dict()["state"].items())]
    return [each[name] for each in state for name in sorted(each)]


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def digest_of(tensors: Any) -> str:
    """As that of the parameters in a result, for whoever reads a checkpoint."""
    return _digest(*map(bytes_of, tensors))


# --- in the test -----------------------------------------------------------------------------


class Living:
    """A life under way, on so many ranks; no process outlives the ``with``."""

    def __init__(self, module: str, wish: Wish, ranks: int = 1) -> None:
        self.wish = wish
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        common = {
            **os.environ, "PYTHONPATH": f"{SOURCE / 'src'}{os.pathsep}{SOURCE}", "OMP_NUM_THREADS": "1",
            "ACCELERATE_USE_CPU": "1", "ACCELERATE_TORCH_DEVICE": "cpu", "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu",
        }  # fmt: skip
        self.processes = []
        for rank in range(ranks):
            seat = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            seat |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_WORLD_SIZE": str(ranks)}
            command = [sys.executable, "-W", "ignore", "-m", module, json.dumps(dataclasses.asdict(wish))]
            self.processes.append(
                subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=SOURCE,
                    env={**common, **(seat if ranks > 1 else {})},
                )
            )  # fmt: skip

    def __enter__(self) -> Living:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()

    @property
    def is_over(self) -> bool:
        return self.processes[-1].poll() is not None

    def wait(self) -> tuple[Result | None, str]:
        """What came of it, ``None`` if it was to be killed; and what rank 0 logged."""
        last = self.processes[-1]
        if self.wish.kill_at:
            _, said = last.communicate(timeout=LIFE_S)
            assert last.returncode == -signal.SIGKILL, said[-3000:]
            return None, said
        ends = [process.communicate(timeout=LIFE_S) for process in reversed(self.processes)]
        for process, (_, said) in zip(reversed(self.processes), ends, strict=True):
            assert process.returncode == 0, said[-5000:]
        out, said = ends[-1]
        (line,) = [each for each in out.splitlines() if each.startswith(_RESULT)]
        return Result(**json.loads(line.removeprefix(_RESULT))), said
