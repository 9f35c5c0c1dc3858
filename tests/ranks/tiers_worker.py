"""Two ranks with tiers, run by torchrun for test_tiers.py: ``tiers_worker.py DIRECTORY SCENARIO …``."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import stillframe
from stillframe import Catalog, Checkpointer, KeepLast, StillframeError, StorageError, Tier
from stillframe.restoring.sources import Sources
from tests import layout
from tests.ranks import saying

RANK = int(os.environ["RANK"])
scenario = ""


def say(*words: object) -> None:
    saying.say(f"[{RANK} {scenario}] {' '.join(map(str, words))}")


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((200_000,), float(step + 100 * RANK)), "step": step}


def is_right(live: dict[str, Any], step: int) -> bool:
    return live["step"] == step and bool((live["w"] == float(step + 100 * RANK)).all())


def train(checkpointer: Checkpointer, first: int, last: int, tier: Tier) -> None:
    for step in range(first, last + 1):
        save = checkpointer.save(step, state(step))
        save.wait()
        if save.step % 2 == 0:
            save.wait(tier=tier)


def shared(root: Path) -> None:
    """One root that both see, and a tier behind it."""
    tier = Tier(root / "tier", every=2, keep=KeepLast(2))
    with Checkpointer(root / "root", keep=KeepLast(1), tiers=[tier], deadline_s=60) as checkpointer:
        train(checkpointer, 1, 6, tier)
        say("steps", Catalog(root / "tier").steps(), checkpointer.stats().tiers[0].committed_step)
    dist.barrier()
    if RANK == 0:
        shutil.rmtree(root / "root")
    dist.barrier()
    live = state(-1)
    with Checkpointer(root / "root", keep=KeepLast(1), tiers=[tier], deadline_s=60) as checkpointer:
        report = checkpointer.restore(live)
        say("restored", report.step, Path(report.source).name, is_right(live, 6))
        train(checkpointer, 7, 8, tier)


def node_lost(root: Path) -> None:
    """A root each; the one of rank 1 is emptied, then those of both."""
    tier = Tier(root / "tier", every=2, keep=KeepLast(2))
    own = root / f"node{RANK}"

    def open_own() -> Checkpointer:
        return Checkpointer(own, shared=False, keep=KeepLast(2), tiers=[tier], deadline_s=60)

    with open_own() as checkpointer:
        train(checkpointer, 1, 4, tier)
    dist.barrier()
    if RANK == 1:
        shutil.rmtree(own)
    live = state(-1)
    with open_own() as checkpointer:
        report = checkpointer.restore(live)
        say("restored", report.step, Path(report.source).name, is_right(live, 4))
        train(checkpointer, 5, 7, tier)
    dist.barrier()
    live = state(-1)
    with open_own() as checkpointer:  # nothing is lost: each from its own
        report = checkpointer.restore(live)
        say("restored", report.step, Path(report.source).name, is_right(live, 7))
    dist.barrier()
    shutil.rmtree(own)
    live = state(-1)
    with open_own() as checkpointer:
        report = checkpointer.restore(live)
        say("restored", report.step, Path(report.source).name, is_right(live, 6))


def part_lost(root: Path) -> None:
    """A step that one node has lost before it could be carried is given up; later ones are carried."""
    tier = Tier(root / "tier", every=2)
    own = root / f"node{RANK}"
    with Checkpointer(own, shared=False, tiers=[], deadline_s=60) as checkpointer:
        checkpointer.save(2, state(2)).wait()
    dist.barrier()
    if RANK == 1:
        shutil.rmtree(own)
    dist.barrier()
    with Checkpointer(own, shared=False, tiers=[tier], deadline_s=60) as checkpointer:
        try:
            checkpointer.restore(state(-1))
        except StillframeError as error:
            say(type(error).__name__)
        train(checkpointer, 3, 4, tier)
        say("steps", Catalog(root / "tier").steps())


def half_carried(root: Path, lost: int = 1) -> None:
    """A node is lost when its part of the newest step was in the tier, and that of the other one was not."""
    tier = Tier(root / "tier", every=2)
    own = root / f"node{RANK}"

    def open_own() -> Checkpointer:
        return Checkpointer(own, shared=False, keep=KeepLast(2), tiers=[tier], deadline_s=60)

    with open_own() as checkpointer:
        train(checkpointer, 1, 4, tier)
    dist.barrier()
    if lost == RANK:
        shutil.rmtree(own)
        layout.manifest(root / "tier", 4).unlink()
        for name in (layout.segment, layout.seal):
            name(root / "tier", 4, 1 - lost).unlink()
        say("steps", Catalog(root / "tier").steps())
    dist.barrier()
    live = state(-1)
    with open_own() as checkpointer:
        report = checkpointer.restore(live)
        say("restored", report.step, Path(report.source).name, is_right(live, 4))
        checkpointer.save(5, state(5)).wait()
        checkpointer.wait(tier=tier, timeout_s=60)
        say("steps", Catalog(root / "tier").steps())


def half_carried_of_rank_0(root: Path) -> None:
    half_carried(root, 0)


def try_to_restore(root: Path, *tiers: Path, shared: bool, step: int, mark: float = 0.0) -> None:
    live = state(-1)
    try:
        report = stillframe.restore(root, live, shared=shared, tiers=[Tier(each) for each in tiers], deadline_s=60)
    except StillframeError as error:
        say(type(error).__name__, error)
    else:
        live["w"] -= mark
        say("restored", report.step, Path(report.source).name, is_right(live, step))


def two_runs(root: Path) -> None:
    """Both have saved step 2, and each has a tier; then a node of the second run is lost."""
    for name, mark in (("a", 0.0), ("b", 1000.0)):
        tier = Tier(root / f"tier_{name}", every=2)
        with Checkpointer(root / f"{name}{RANK}", shared=False, tiers=[tier], deadline_s=60) as checkpointer:
            checkpointer.save(2, {**state(2), "w": state(2)["w"] + mark}).wait(tier=tier)
    dist.barrier()
    if RANK == 1:
        shutil.rmtree(root / "b1")
    dist.barrier()
    own, a, b = root / f"b{RANK}", root / "tier_a", root / "tier_b"
    try_to_restore(own, a, shared=False, step=2)  # rank 0 refuses the tier; rank 1 has nothing to compare it with
    try_to_restore(root / f"nowhere{RANK}", b if RANK else a, shared=False, step=2)  # each reaches one of two tiers
    try_to_restore(own, a, b, shared=False, step=2, mark=1000.0)


def one_read_fails(root: Path) -> None:
    """After the step was chosen, on rank 1."""
    tier, choose = root.parent / "shared" / "tier", Sources.choose

    def choose_then_fail(self: Sources, *chosen: Any) -> None:
        choose(self, *chosen)
        store = self.reachable[1].store
        head = store.head

        def fail(_key: str) -> Any:
            store.head = head  # type: ignore[method-assign]
            raise StorageError("looking at it: Input/output error")

        if RANK == 1:
            store.head = fail  # type: ignore[method-assign, assignment]

    Sources.choose = choose_then_fail  # type: ignore[method-assign, assignment]
    try:
        try_to_restore(root / "nowhere", tier, shared=True, step=8)
    finally:
        Sources.choose = choose  # type: ignore[method-assign]
    try_to_restore(root / "nowhere", tier, shared=True, step=8)


def main() -> None:
    global scenario
    dist.init_process_group("gloo")
    for scenario in sys.argv[2:]:
        globals()[scenario](Path(sys.argv[1]) / scenario)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
