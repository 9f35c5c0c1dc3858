"""Run by torchrun for test_agree.py: ``agree_worker.py ROOT SCENARIO …``; each says what came of it."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import stillframe
from stillframe import Checkpointer, StillframeError, version
from stillframe.save.device import HostDevice
from tests.ranks import saying
from tests.ranks.leaving import leave
from tests.support import until

RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])


scenario = ""


def say(*words: object) -> None:
    saying.say(f"[{RANK} {scenario}] {' '.join(map(str, words))}")


def told(work: Callable[[], Any]) -> None:
    """Do it and say how it ended, and after how long."""
    began = time.monotonic()
    try:
        say("ok", work())
    except StillframeError as error:
        say(type(error).__name__, f"{time.monotonic() - began:.1f}s", str(error).replace("\n", " | "))


def mesh() -> Any:
    return dist.device_mesh.init_device_mesh("cpu", (WORLD,))


def sharded(rows: int = 8, value: float = 1.0) -> Any:
    return distribute_tensor(torch.full((rows, 4), value), mesh(), [Shard(0)])


# --- bad input ---------------------------------------------------------------------------------


def other_root(root: str) -> None:
    told(lambda: Checkpointer(root + ("/other" if RANK == 1 else ""), deadline_s=5))


def other_version(root: str) -> None:
    ours = version.VERSION
    version.VERSION = "9.9.9" if RANK == 1 else ours
    told(lambda: Checkpointer(root, deadline_s=5))
    version.VERSION = ours


def missing_rank(root: str) -> None:
    """The last of its launch: from here on the ranks are out of step."""
    if RANK != 1:
        told(lambda: Checkpointer(root, deadline_s=2))


def too_large_a_world(root: str) -> None:
    told(lambda: Checkpointer(root, rank=RANK, world_size=WORLD + 2, deadline_s=2))


def other_steps(root: str) -> None:
    with Checkpointer(root, deadline_s=2, on_error="warn") as checkpointer:
        save = checkpointer.save(10 + RANK, {"x": torch.zeros(4)})
        told(save.wait)


def other_shape(root: str) -> None:
    """A tensor whose parts the ranks hold together has another whole shape on one of them."""
    with Checkpointer(root, deadline_s=20, on_error="warn") as checkpointer:
        tensor = sharded()
        local = tensor.to_local()
        rows = 8 if RANK == 0 else 10
        odd = torch.distributed.tensor.DTensor.from_local(
            local if RANK == 0 else torch.zeros(5, 4), mesh(), [Shard(0)], run_check=False,
            shape=torch.Size((rows, 4)), stride=(4, 1),
        )  # fmt: skip
        told(checkpointer.save(1, {"model": {"w": odd}}).wait)


def missing_tensor(root: str) -> None:
    with Checkpointer(root, deadline_s=20, on_error="warn") as checkpointer:
        state = {"model": {"w": sharded(), "b": sharded(4)}}
        if RANK == 1:
            del state["model"]["b"]
        told(checkpointer.save(1, state).wait)
        told(checkpointer.save(2, {"model": {"w": sharded()}}).wait)


def other_step_to_restore(root: str) -> None:
    with Checkpointer(root, deadline_s=20) as checkpointer:
        state = {"w": sharded()}
        checkpointer.save(1, state).wait()
        told(lambda: checkpointer.restore(state, step=1 + RANK))


def mismatch_on_one(root: str) -> None:
    """Nothing is touched on any rank if the checkpoint does not fit on one of them."""
    with Checkpointer(root, deadline_s=20) as checkpointer:
        checkpointer.save(1, {"x": torch.ones(4)}).wait()
        live = {"x": torch.zeros(4 + RANK)}
        told(lambda: checkpointer.restore(live))
        say("touched" if live["x"].any() else "untouched")


class Refusing:
    """A part of the state that rank 1 cannot take."""

    def state_dict(self) -> dict[str, int]:
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if RANK == 1:
            raise RuntimeError(f"cannot take {state}")


def refused_by_an_object(root: str) -> None:
    """All ranks are told that the state was read, but not taken, and the next restore is as any other."""
    with Checkpointer(root, deadline_s=20) as checkpointer:
        checkpointer.save(1, {"x": torch.ones(4), "loader": Refusing()}).wait()
        live: dict[str, Any] = {"x": torch.zeros(4), "loader": Refusing()}
        told(lambda: checkpointer.restore(live))
        live["x"] = torch.zeros(4)
        say("again", checkpointer.restore(live, exclude="loader").step, live["x"].tolist())


def failure_on_one(root: str) -> None:
    """A rank that cannot stage fails the step for all, at once."""
    with Checkpointer(root, deadline_s=60, on_error="warn") as checkpointer:
        tensor = torch.ones(1 << 20)
        if RANK == 1:
            checkpointer._stager._make_arena = _no_memory
        told(checkpointer.save(1, {"x": tensor}).wait)


def _no_memory(nbytes: int) -> Any:
    raise MemoryError("there is no memory for an arena")


def uncaptured_on_one(root: str) -> None:
    """One rank has no memory for what ``save`` copies at once: nothing is raised, and the others need not wait."""
    with Checkpointer(root, deadline_s=60, on_error="warn") as checkpointer:
        state = {"norm": torch.nn.BatchNorm1d(4)}
        with contextlib.ExitStack() as failing:
            if RANK == 1:
                error = torch.OutOfMemoryError("on purpose")
                failing.enter_context(mock.patch.object(HostDevice, "gather", side_effect=error))
            save = checkpointer.save(1, state)
        told(save.wait)
        told(checkpointer.save(2, state).wait)


def refused_on_one(root: str) -> None:
    """A state that one rank cannot store: the others are told at once, not at the deadline."""
    with Checkpointer(root, deadline_s=60, on_error="warn") as checkpointer:
        state: dict[str, Any] = {"x": torch.ones(4)}
        if RANK == 1:
            state["bad"] = object()
        told(lambda: checkpointer.save(1, state).wait())
        told(lambda: checkpointer.save(2, {"x": torch.ones(4)}).wait())


def same_name(root: str) -> None:
    """Each rank has a tensor of its own, on a mesh of its own, under the same name."""
    own = dist.device_mesh.DeviceMesh("cpu", [RANK])
    tensor = distribute_tensor(torch.full((4, 4), float(RANK)), own, [Shard(0)])
    with Checkpointer(root, deadline_s=20) as checkpointer:
        checkpointer.save(1, {"w": tensor}).wait()
        live = {"w": torch.full((4, 4), 9.0)}
        say("restored", checkpointer.restore(live).step, live["w"].unique().tolist())


# --- no collective -----------------------------------------------------------------------------


class Collectives(TorchDispatchMode):
    """Counts the collectives issued while it is active."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace in ("c10d", "_c10d_functional", "c10d_functional")
        return func(*args, **(kwargs or {}))


def no_collective(root: str) -> None:
    """Rank 1 is not even there while rank 0 saves: nothing that rank 0 does waits for it."""
    replicated = distribute_tensor(torch.ones(6, 3), mesh(), [Replicate()])
    state = {"w": sharded(), "r": replicated, "rng": stillframe.RNG()}
    with Checkpointer(root, deadline_s=60) as checkpointer:
        checkpointer.save(1, state).wait()
        dist.barrier()
        store = checkpointer._group._store
        checkpointer._group._store = None  # a use of the store fails, too
        if RANK == 1:
            time.sleep(2)
        with Collectives() as collectives:  # type: ignore[no-untyped-call]
            began = time.monotonic()
            for step in (2, 3, 4):
                checkpointer.save(step, state)
                checkpointer.fence()
                checkpointer.wait("sealed")
            blocked_s = time.monotonic() - began
        checkpointer._group._store = store
        say("collectives", collectives.count)
        with Collectives() as collectives:  # type: ignore[no-untyped-call]
            dist.all_reduce(torch.ones(1))
        say("collectives", collectives.count)
        say("steady", "at once" if blocked_s < 1.5 else f"after {blocked_s:.1f}s")
        checkpointer.wait()
        say("committed", checkpointer.stats().committed)


# --- roots that are not shared -----------------------------------------------------------------


def unshared(root: str) -> None:
    """Each rank has its own root; the newest step that all have sealed is the one restored."""
    os.environ["STILLFRAME_NODE"] = f"node{RANK}"
    template = root + "/{node}/run"
    state: dict[str, Any] = {"w": sharded(), "own": {"rank": RANK}}
    with Checkpointer(template, deadline_s=10, keep=stillframe.KeepLast(2), on_error="warn") as checkpointer:
        for step in (1, 2, 3, 4):
            state["w"].to_local().fill_(step)
            checkpointer.save(step, state).wait()
            dist.barrier()
        own = stillframe.Catalog(Path(root) / f"node{RANK}" / "run", RANK)
        with contextlib.suppress(AssertionError):  # what is there is said
            until(lambda: len(own.steps()) < 4, "retention, which comes after the commit", 20)
        say("kept", own.steps())
        if RANK == 1:
            state["w"].to_local().fill_(5)
            alone = checkpointer.save(5, state)
            alone.wait("sealed")
            told(alone.wait)
    dist.barrier()
    state["w"].to_local().fill_(0)
    state["own"]["rank"] = -1
    with Checkpointer(template, deadline_s=20, keep=stillframe.KeepLast(2)) as checkpointer:
        step_found = checkpointer.restore(state).step
        say("restored", step_found, state["w"].to_local().unique().tolist(), state["own"])
        state["w"].to_local().fill_(7)
        told(checkpointer.save(5, state).wait)
        say("again", checkpointer.restore(state).step, state["w"].to_local().unique().tolist())


def lost_node(root: str) -> None:
    """A rank whose root is empty while the other's is not: no silent fresh start."""
    template = root + "/{node}"
    os.environ["STILLFRAME_NODE"] = f"node{RANK}"
    state = {"w": sharded()}
    with Checkpointer(template, deadline_s=20) as checkpointer:
        checkpointer.save(1, state).wait()
    dist.barrier()
    os.environ["STILLFRAME_NODE"] = "node0" if RANK == 0 else "new"
    with Checkpointer(template, deadline_s=20) as checkpointer:
        told(lambda: checkpointer.restore(state))


def unshared_by_flag(root: str) -> None:
    """Several ranks in one directory that is not said to be shared keep out of each other's way."""
    state: dict[str, Any] = {"w": sharded(), "own": {"rank": RANK}}
    with Checkpointer(root, shared=False, deadline_s=20, keep=stillframe.KeepLast(1)) as checkpointer:
        for step in (1, 2, 3):
            state["w"].to_local().fill_(step + 10 * RANK)
            checkpointer.save(step, state).wait()
            dist.barrier()
        say("restored", checkpointer.restore(state).step, state["w"].to_local().unique().tolist(), state["own"])


# --- environment only --------------------------------------------------------------------------


def only_environment(root: str) -> None:
    """torchrun's variables are enough; torch.distributed is never initialised."""
    state: dict[str, Any] = {"x": torch.full((4,), float(RANK)), "rank": {"number": RANK}}
    with Checkpointer(root, deadline_s=30) as checkpointer:
        checkpointer.save(1, state).wait()
        state["x"].zero_()
        state["rank"]["number"] = -1
        say("restored", checkpointer.restore(state).step, state["x"].unique().tolist(), state["rank"])


if __name__ == "__main__":
    torch.manual_seed(0)
    for scenario in sys.argv[2:]:
        if scenario != "only_environment" and not dist.is_initialized():
            dist.init_process_group("gloo")
        globals()[scenario](f"{sys.argv[1]}/{scenario}")
    if dist.is_initialized():
        leave()
