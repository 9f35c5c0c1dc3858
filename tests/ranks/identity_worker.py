"""Run by torchrun for test_identity.py: two ranks that save the same step differently, fail, retry and go back."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from stillframe import Checkpointer, StillframeError
from tests.ranks import saying

RANK = int(os.environ["RANK"])


LARGE_BYTES = 70 << 20
"""More than a seal may be."""
FAILURES: dict[str, Callable[[], object]] = {
    "disk": lambda: _raise(OSError("the loader's disk is gone")),
    "memory": lambda: _raise(torch.OutOfMemoryError("no memory for the state dict")),
    "interrupt": lambda: _raise(KeyboardInterrupt()),
    "too large": lambda: "a" * LARGE_BYTES,
}


def _raise(error: BaseException) -> object:
    raise error


class Loader:
    """Something whose state dict fails while a save asks for it."""

    def __init__(self) -> None:
        self.fail: Callable[[], object] = lambda: 1

    def state_dict(self) -> dict[str, object]:
        return {"x": self.fail()}

    def load_state_dict(self, state: dict[str, object]) -> None:
        pass


def told(about: str, work: Callable[[], Any]) -> None:
    """Do it and say how it ended, and after how long."""
    began = time.monotonic()
    try:
        found = work()
        saying.say(f"[{RANK} {about}] ok {found if found is not None else ''}")
    except (StillframeError, OSError, torch.OutOfMemoryError, KeyboardInterrupt) as error:
        took_s = time.monotonic() - began
        saying.say(f"[{RANK} {about}] {type(error).__name__} {took_s:.1f}s {error}".replace("\n", " | "))


def main(root: str) -> None:
    dist.init_process_group("gloo")
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "rank": RANK}

    def update(times: int = 1) -> None:
        for _ in range(times):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()

    with Checkpointer(root, deadline_s=4, on_error="warn") as checkpointer:

        def save(step: int, what: Any = state) -> int:
            save = checkpointer.save(step, what)
            save.wait()
            return save.attempt

        update()
        told("first", lambda: save(1))
        update(1 + RANK)
        told("other updates", lambda: save(2))
        told("after that", lambda: save(3))
        dist.barrier()
        told("refused on one", lambda: save(4, {"x": object()} if RANK == 1 else state))
        dist.barrier()  # rank 0 has been told, too: both count one failure
        told("again", lambda: save(4))
        told("next", lambda: save(5))
        if RANK == 1:  # a failure that rank 0 knows nothing of
            told("alone", lambda: checkpointer.save(6, {"x": object()}))
        dist.barrier()
        told("other attempts", lambda: save(6))
        dist.barrier()
        told("and on", lambda: save(7))
        loader = Loader()
        told("loader", lambda: save(8, {**state, "loader": loader}))
        for step, (how, fail) in enumerate(FAILURES.items(), 9):
            dist.barrier()
            loader.fail = fail if RANK == 1 else loader.fail
            told(how, lambda step=step: save(step, {**state, "loader": loader}))  # type: ignore[misc]
        loader.fail = lambda: 1
        dist.barrier()
        told("after all", lambda: save(20, {**state, "loader": loader}))
        told("rewind", lambda: checkpointer.rewind(3))
        told("restore", lambda: checkpointer.restore(state).step)
        told("passed again", lambda: save(4))
    dist.destroy_process_group()


main(sys.argv[1])
