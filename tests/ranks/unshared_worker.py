"""Two ranks with a root each, run by torchrun for test_unshared.py: ``unshared_worker.py ROOT SCENARIO …``."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from stillframe import Catalog, Checkpointer, KeepLast, StillframeError, StorageError, spi
from stillframe.link import liveness
from stillframe.save import keeper_process
from tests.ranks import saying

RANK = int(os.environ["RANK"])
DEADLINE_S = 60.0
scenario = ""


def say(*words: object) -> None:
    saying.say(f"[{RANK} {scenario}] {' '.join(map(str, words))}")


def told(work: Callable[[], Any]) -> None:
    try:
        say("ok", work())
    except StillframeError as error:
        say(type(error).__name__, str(error).replace("\n", " | "))


def state(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"w": torch.full((1000,), float(value + 100 * RANK))}


def open_own(root: str, **options: Any) -> Checkpointer:
    return Checkpointer(f"{root}/{RANK}", shared=False, deadline_s=DEADLINE_S, on_error="warn", **options)


def own_steps(root: str) -> list[int]:
    return Catalog(f"{root}/{RANK}", RANK).steps()


def restore_beside_a_wait(root: str) -> None:
    """Rank 0 restores while its save is on its way, rank 1 first waits for that."""
    with open_own(root) as checkpointer:
        checkpointer.save(1, state()).wait()
        if RANK == 0:
            pid = spi.keeper_pid(checkpointer)
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            threading.Timer(0.5, os.kill, (pid, signal.SIGCONT)).start()
        save = checkpointer.save(2, state())
        if RANK == 1:
            told(save.wait)
        told(lambda: checkpointer.restore(state()).step)
        say(save.phase)


def restore_without_saving(root: str) -> None:
    """Rank 1 waits for a save that rank 0 does not make."""
    with open_own(root) as checkpointer:
        checkpointer.save(1, state()).wait()
        if RANK == 1:
            told(checkpointer.save(2, state()).wait)
        told(lambda: checkpointer.restore(state()).step)
        told(checkpointer.save(2, state()).wait)


def staging_fails(root: str) -> None:
    def no_memory(nbytes: int) -> Any:
        raise MemoryError("there is no memory for an arena")

    with open_own(root) as checkpointer:
        make, checkpointer._stager._make_arena = checkpointer._stager._make_arena, no_memory
        if RANK == 0:
            checkpointer._stager._make_arena = make
        told(checkpointer.save(1, state()).wait)
        checkpointer._stager._make_arena = make
        told(checkpointer.save(1, state()).wait)


def two_attempts(root: str) -> None:
    """Rank 0 gives up a save that it has sealed, and tries again; for rank 1 the first attempt is complete."""
    with open_own(root) as checkpointer:
        if RANK == 0:
            save = checkpointer.save(1, state(1))
            save.wait("sealed")
            checkpointer._saves.fail(save.number, StorageError("given up"))
            checkpointer.save(1, state(2)).wait("sealed")
            dist.barrier()
        else:
            dist.barrier()
            told(checkpointer.save(1, state(1)).wait)
        live = state(0)
        told(lambda: checkpointer.restore(live).step)
        say(live["w"][0].item() - 100 * RANK)
        told(lambda: checkpointer.rewind(1))
        told(lambda: checkpointer.restore(live).step)
        say(live["w"][0].item() - 100 * RANK)


def settling_fails(root: str) -> None:
    """One rank cannot even begin to restore; what is saved afterwards belongs together all the same."""

    def fails() -> None:
        raise StorageError("the disk is asleep")

    with open_own(root) as checkpointer:
        checkpointer.save(1, state()).wait()
        with pytest.MonkeyPatch.context() as patch:
            if RANK == 1:
                patch.setattr(checkpointer._epochs, "_settle", fails)
            told(lambda: checkpointer.restore(state()).step)
        checkpointer.save(2, state()).wait()
        say("sequence", checkpointer._keeper._entered.sequence, "epoch", Catalog(f"{root}/{RANK}", RANK).find(2).epoch)
        told(lambda: checkpointer.restore(state()).step)


def keeper_waits(root: str) -> None:
    """A keeper that has sealed has nothing to tell until the other rank has."""
    with open_own(root) as checkpointer:
        checkpointer.save(1, state()).wait()
        dist.barrier()
        if RANK == 0:
            keeper_process._WATCH_MS = 50
            save = checkpointer.save(2, state())
            save.wait("sealed")
            liveness.STALL_S = 0.2
            pid = spi.keeper_pid(checkpointer)
            time.sleep(1.5)
            say("same keeper" if spi.keeper_pid(checkpointer) == pid else "another keeper")
            liveness.STALL_S = 300.0
            dist.barrier()
        else:
            dist.barrier()
            save = checkpointer.save(2, state())
        told(save.wait)


def retention(root: str) -> None:
    """Rank 1 lacks step 3, as if its node had been lost before it was sealed there."""
    with open_own(root) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state(step)).wait()
    if RANK == 1:
        own = Catalog(f"{root}/{RANK}", RANK)
        shutil.rmtree(own.dir(own.find(3)))
    dist.barrier()
    with open_own(root, keep=KeepLast(1)) as checkpointer:
        if RANK == 0:
            checkpointer.save(4, state(4)).wait("sealed")
        dist.barrier()  # else rank 1 may go on before that, and the save fails at once
        told(lambda: checkpointer.restore(state()).step)
        say("kept", own_steps(root))
        save_all(checkpointer, 3, 4, 5)
    say("kept", own_steps(root))
    dist.barrier()
    with open_own(root, keep=KeepLast(1)) as checkpointer:  # which restores nothing
        save_all(checkpointer, 6, 7)
    say("kept", own_steps(root))


def save_all(checkpointer: Checkpointer, *steps: int) -> None:
    for step in steps:
        checkpointer.save(step, state(step)).wait()
        dist.barrier()


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(exist_ok=True)
    dist.init_process_group("gloo")
    for scenario in sys.argv[2:]:
        globals()[scenario](f"{sys.argv[1]}/{scenario}")
        dist.barrier()
    dist.destroy_process_group()
