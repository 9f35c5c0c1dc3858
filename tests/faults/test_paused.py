"""A keeper that was paused while another run took its place: it commits nothing, deletes nothing, reports nothing.

The locks are of no use here: the file is removed, or there are none (NFS without a lock server), or every lock is
given to everyone, as on two nodes of a file system whose locks hold on one node only (Lustre's ``localflock``).
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from stillframe import Catalog, Checkpointer, KeepLast
from stillframe.checkpoint.verify import verify
from stillframe.format import names
from stillframe.model import SaveId
from stillframe.save import keeper_process
from stillframe.store.calls import Calls
from tests.faults.held import bootstrap
from tests.support import pause, start_child, until

STEPS = 4
FIRST = """
import os, sys, torch, stillframe
from stillframe import spi
from stillframe.errors import StillframeError
root = sys.argv[1]
exec(sys.argv[2])
checkpointer = stillframe.Checkpointer(root, keep=stillframe.KeepLast(1), on_error="warn")
state = {"weights": torch.zeros(3_000_000), "step": 0, "who": 1}
checkpointer.restore(state)
print("keeper", spi.keeper_pid(checkpointer), flush=True)
for step in range(1, 200):
    checkpointer.fence()
    state["weights"].add_(1.0)
    state["step"] = step
    save = checkpointer.save(step, state)
    try:
        save.wait("committed")
        print("committed", step, flush=True)
    except StillframeError as error:
        print("failed", step, type(error).__name__, flush=True)
        if "taken over" in str(error):
            break
checkpointer.close()
print("end", flush=True)
"""

LOCKS = {
    "removed": "",
    "none": "def lock(self, fd, is_shared): raise OSError(37, 'No locks available')\n",
    "lying": "def lock(self, fd, is_shared): pass\n",
}
_PATCH = "from stillframe.store.calls import Calls\n{lock}Calls.lock = lock\n"


def checkpoints(root: Path) -> set[SaveId]:
    catalog = Catalog(root)
    return {save for save in catalog.look().saves if catalog.is_committed(save)}


def second(root: Path) -> tuple[int, int]:
    """Another run: restores, saves, prunes.  Gives what it restored, and the last step that it saved."""
    state: dict[str, Any] = {"weights": torch.zeros(3_000_000), "step": 0, "who": 2}
    with Checkpointer(root, keep=KeepLast(2)) as checkpointer:
        found = checkpointer.restore(state).step or 0
        state["who"] = 2
        for step in range(found + 1, found + 1 + STEPS):
            checkpointer.fence()
            state["weights"].add_(1.0)
            state["step"] = step
            checkpointer.save(step, state)
        checkpointer.wait()
    return found, found + STEPS


def check_whole(root: Path, last: int) -> None:
    catalog = Catalog(root)
    for save in checkpoints(root):
        with catalog.open_save(save) as checkpoint:
            assert verify(checkpoint).is_whole, save
    state: dict[str, Any] = {"weights": torch.zeros(3_000_000), "step": 0, "who": 0}
    with Checkpointer(root) as checkpointer:
        assert checkpointer.restore(state).step == last
    assert (state["step"], state["who"]) == (last, 2)
    assert bool((state["weights"] == float(last)).all())


@pytest.mark.parametrize(
    ("locks", "moment_s"), [("removed", 0.0), ("removed", 0.006), ("removed", 0.012), ("none", 0.006), ("lying", 0.006)]
)
def test_a_paused_keeper_does_no_harm(
    tmp_path: Path, locks: str, moment_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    here = ""
    if lock := LOCKS[locks]:
        patch = _PATCH.format(lock=lock)
        start = f"keeper_process._BOOTSTRAP = {bootstrap(more=patch)!r}\n"
        here = f"{patch}from stillframe.save import keeper_process\n{start}"
        scope: dict[str, Any] = {}
        exec(lock, scope)
        monkeypatch.setattr(Calls, "lock", scope["lock"])
        monkeypatch.setattr(keeper_process, "_BOOTSTRAP", bootstrap(more=patch))
    child = start_child(FIRST, root, here)
    assert child.stdout is not None
    try:
        keeper = int(child.stdout.readline().split()[1])
        told = [child.stdout.readline().split() for _ in range(3)]
        assert all(words[0] == "committed" for words in told), told
        time.sleep(moment_s)
        pause(keeper)
        if locks == "removed":  # else the second run would wait here, if it could be locked out
            (root / names.lock(0)).unlink()
        found, last = second(root)
        assert found >= int(told[-1][1])
        before = checkpoints(root)
        os.kill(keeper, signal.SIGCONT)
        out, err = child.communicate(timeout=30)
    finally:
        child.kill()
        child.wait()
    lines = [line.split() for line in out.splitlines()]
    committed = [int(words[1]) for words in lines if words[0] == "committed"]
    assert all(step <= found for step in committed), f"it reported {committed}, but {found} was restored"
    assert any(words[0] == "failed" and words[2] == "BusyError" for words in lines), (out, err)
    assert before <= checkpoints(root), "it has deleted what is another's"
    until(lambda: not Path(f"/proc/{keeper}").exists(), "the end of the paused keeper")
    check_whole(root, last)
