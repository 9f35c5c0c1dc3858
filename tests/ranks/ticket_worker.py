"""Ranks whose saves through torch.distributed.checkpoint overlap, fail, or are some rank's alone.

``ticket_worker.py ROOT CASE…``; each case checks that nothing is torn, and that the next save works at once.
"""

from __future__ import annotations

import importlib
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import stillframe
from stillframe.integrations.dcp import Stager, Writer
from tests.ranks.leaving import leave

warnings.simplefilter("ignore")
dcp: Any = importlib.import_module("torch.distributed.checkpoint")
Way = Callable[[Any, Writer], None]
AT_ONCE_S = 60.0
"""Far below the deadline of 600 s; the machine may be busy."""


def state(number: float) -> dict[str, Any]:
    """Every item of it tells which save it belongs to, on whatever rank it lies."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"w": distribute_tensor(torch.full((4,), float(number)), mesh, [Shard(0)]), "n": number}


def save(root: Path, number: float, *, step: int | None = None, planner: Any = None, **more: Any) -> None:
    began = time.monotonic()
    try:
        dcp.save(state(number), storage_writer=Writer(root, step=step), planner=planner, **more)
    finally:
        assert time.monotonic() - began < AT_ONCE_S


def expect(root: Path, wanted: dict[int, float] | set[float]) -> None:
    """Nothing else is there, and nothing of it is torn."""
    dist.barrier()
    found = {}
    for step in stillframe.Catalog(root).steps():
        loaded = stillframe.load(root, step)
        assert loaded["w"].tolist() == [loaded["n"]] * 4, (step, loaded)
        found[step] = loaded["n"]
    if isinstance(wanted, set):
        assert sorted(found.values()) == sorted(wanted), found
    else:
        assert found == wanted, found
    dist.barrier()


def refused(work: Callable[[], None], *words: str) -> None:
    """On every rank."""
    try:
        work()
    except dcp.CheckpointException as error:
        for word in words:
            assert word in str(error), error  # noqa: PT017
    else:
        raise AssertionError("it was saved")


class Late(dcp.DefaultSavePlanner):  # type: ignore[misc]
    """One rank is late with what comes between DCP's plan and the writer."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def finish_plan(self, plan: Any) -> Any:
        time.sleep(1.0 * (dist.get_rank() == self._rank))
        return super().finish_plan(plan)


class Fails(dcp.DefaultSavePlanner):  # type: ignore[misc]
    """Some ranks fail there, or when the writer asks for the data."""

    def __init__(self, where: str, ranks: tuple[int, ...], **options: Any) -> None:
        super().__init__(**options)
        self._fails_in = where if dist.get_rank() in ranks else ""

    def finish_plan(self, plan: Any) -> Any:
        if self._fails_in == "finish_plan":
            raise RuntimeError("on purpose")
        return super().finish_plan(plan)

    def lookup_object(self, index: Any) -> Any:
        if self._fails_in == "write_data":
            raise RuntimeError("on purpose")
        return super().lookup_object(index)


def overlap(root: Path) -> None:
    """Rank 0 is late with the first save, rank 1 with the second: each rank writes them in another order."""
    groups = [dist.new_group() for _ in range(3)]
    saving = [
        dcp.async_save(state(n), storage_writer=Writer(root), process_group=groups[n], planner=Late(rank=n))
        for n in (0, 1)
    ]
    for each in saving:
        each.result()
    expect(root, {0.0, 1.0})
    for first in range(2, 11, 3):  # without any delay but chance
        saving = [
            dcp.async_save(state(n), storage_writer=Writer(root), process_group=groups[n - first])
            for n in range(first, first + 3)
        ]
        for each in saving:
            each.result()
    expect(root, {float(n) for n in range(11)})


def failure(root: Path) -> None:
    """One rank fails after DCP's plan: DCP tells every rank; nothing is stored, and nobody waits."""
    for ranks in ((1,), (0,), (0, 1)):
        for where in ("finish_plan", "write_data"):
            place = root / f"{where}-{ranks}"
            refused(lambda: save(place, 1, planner=Fails(where, ranks)), "on purpose")  # noqa: B023
            save(place, 2)  # the first of all has failed
            refused(lambda: save(place, 3, step=50, planner=Fails(where, ranks)), "on purpose")  # noqa: B023
            save(place, 4, step=50)
            save(place, 5)
            expect(place, {2, 4, 5})
            assert stillframe.Catalog(place).steps()[-2:] == [50, 51]
            place = root / f"{where}-{ranks}-closed"
            refused(lambda: save(place, 1, planner=Fails(where, ranks)), "on purpose")  # noqa: B023
            began = time.monotonic()
            Writer(place).close()
            assert time.monotonic() - began < AT_ONCE_S
            save(place, 2)
            expect(place, {2})


def failure_in_threads(root: Path) -> None:
    group = dist.new_group()
    for n in range(4):
        planner = Fails("finish_plan", (1,)) if n % 2 == 0 else None
        saving = dcp.async_save(state(n), storage_writer=Writer(root), process_group=group, planner=planner)
        assert (saving.exception(AT_ONCE_S) is not None) == (n % 2 == 0)
    expect(root, {1, 3})


STAGES = ("set_up_storage_writer", "prepare_local_plan", "prepare_global_plan", "write_data", "finish")
ON_THE_COORDINATOR = ("prepare_global_plan", "finish")


class Breaks(Writer):
    """Fails on one rank before or after one of its stages."""

    def __init__(self, root: Path, stage: str, rank: int, is_done: bool) -> None:
        super().__init__(root)
        self.stage, self.rank, self.is_done = stage, rank, is_done


def _breaking(stage: str) -> Callable[..., Any]:
    def method(self: Breaks, *args: Any, **kwargs: Any) -> Any:
        breaks = self.stage == stage and self.rank == dist.get_rank()
        if breaks and not self.is_done:
            raise RuntimeError("on purpose")
        done = getattr(Writer, stage)(self, *args, **kwargs)
        if breaks:
            raise RuntimeError("on purpose")
        return done

    return method


for _stage in STAGES:
    setattr(Breaks, _stage, _breaking(_stage))


def every_stage(root: Path) -> None:
    """A writer fails at each stage on each rank, in every way that DCP saves: all are told, the next save is made."""
    group = dist.new_group()
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)

    def plain(found: Any, writer: Writer) -> None:
        dcp.save(found, storage_writer=writer)

    def thread(found: Any, writer: Writer) -> None:
        dcp.async_save(found, storage_writer=writer, process_group=group).result(AT_ONCE_S)

    def lazy(found: Any, writer: Writer) -> None:
        saving = dcp.async_save(found, storage_writer=writer, process_group=group, async_stager=Stager(writer))
        weight.grad = torch.ones(3)
        optimizer.step()  # waits for the copy, or for its failure
        error = saving.upload_completion.exception(AT_ONCE_S)
        assert error or saving.staging_completion.exception(AT_ONCE_S) is None
        saving.upload_completion.result()

    _every_stage(root, (plain, thread, lazy), {})


def every_stage_in_a_process(root: Path) -> None:
    """The same in DCP's process, which hears of nothing between two saves; every other next save is the trainer's."""
    group = dist.new_group()

    def process(found: Any, writer: Writer) -> None:
        kind = AsyncCheckpointerType.PROCESS
        saving = dcp.async_save(found, storage_writer=writer, async_checkpointer_type=kind, process_group=group)
        saving.result(AT_ONCE_S)

    def trainer(found: Any, writer: Writer) -> None:
        dcp.save(found, storage_writer=writer)

    _every_stage(root, (process,), {process: trainer})


def _every_stage(root: Path, ways: Sequence[Way], others: Mapping[Way, Way]) -> None:
    """``others``: every second save that follows on a failure is made in this way."""
    for way in ways:
        place, number, good = root / way.__name__, 0, set[float]()
        doubtful: set[float] = set()
        """Every rank had sealed it when one failed: the keepers may commit it by themselves."""
        for stage in STAGES:
            for rank in (0,) if stage in ON_THE_COORDINATOR else (0, 1):
                for is_done in (False, True):
                    began = time.monotonic()
                    writer = Breaks(place, stage, rank, is_done)
                    refused(lambda: way(state(number), writer), "on purpose", f"(RANK {rank})")  # noqa: B023
                    if (stage, is_done) in (("write_data", True), ("finish", False)):
                        doubtful.add(number)
                    if (stage, is_done) == ("finish", True):
                        good.add(number)
                    (others.get(way, way) if number % 4 else way)(state(number + 1), Writer(place))
                    good.add(number + 1)
                    number += 2
                    assert time.monotonic() - began < AT_ONCE_S, (way, stage, rank, is_done)
        found = {stillframe.load(place, step)["n"] for step in stillframe.Catalog(place).steps()}
        expect(place, good | (found & doubtful))


def other_coordinator(root: Path) -> None:
    """Any rank may be DCP's coordinator, and another for the next save, also after one that has failed."""
    began = time.monotonic()
    for n, coordinator in enumerate((1, 1, 0, 1)):
        dcp.save_state_dict(state(n), storage_writer=Writer(root), coordinator_rank=coordinator)
        for stage in ("prepare_global_plan", "write_data"):
            writer = Breaks(root, stage, coordinator, is_done=False)
            broken = state(9)
            refused(
                lambda: dcp.save_state_dict(broken, storage_writer=writer, coordinator_rank=coordinator),  # noqa: B023
                "on purpose",
                f"(RANK {coordinator})",
            )
    expect(root, {0, 1, 2, 3})
    assert time.monotonic() - began < 2 * AT_ONCE_S


def cached(root: Path) -> None:
    """Plans from DCP's cache hold what an earlier save put into them."""

    class Cached(dcp.DefaultSavePlanner):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(enable_plan_caching=True)

    for n in range(3):
        save(root / "a", n, planner=Cached())
        save(root / "b", n + 0.5, planner=Cached())
    group = dist.new_group()
    for n in range(3, 6):
        dcp.async_save(state(n), storage_writer=Writer(root / "a"), process_group=group, planner=Cached()).result()
    writer = Writer(root / "a")
    for n in range(6, 8):
        lazy = dcp.async_save(
            state(n), storage_writer=writer, process_group=group, planner=Cached(), async_stager=Stager(writer)
        )
        lazy.upload_completion.result()
    refused(lambda: save(root / "a", 9, planner=FailsCached("write_data", (1,))), "on purpose")
    save(root / "a", 8, planner=Cached())
    expect(root / "a", {float(n) for n in range(9)})
    expect(root / "b", {0.5, 1.5, 2.5})


class FailsCached(Fails):
    def __init__(self, where: str, ranks: tuple[int, ...]) -> None:
        super().__init__(where, ranks, enable_plan_caching=True)


def alone(root: Path) -> None:
    """What a rank saves by itself, in between, is nobody else's business."""
    save(root / "run", 1)
    for place in (root / "best", root / "run"):
        if dist.get_rank() == 0:
            dcp.save({"w": torch.full((4,), 9.0), "n": 9}, storage_writer=Writer(place), no_dist=True)
        dist.barrier()
        save(root / "run", 2)
    expect(root / "best", {0: 9})
    expect(root / "run", {0: 1, 1: 2, 2: 9, 3: 2})
    own = root / f"lazy-{dist.get_rank()}"
    writer = Writer(own)
    mine = {"w": torch.full((4,), 1.0), "n": 1}
    lazy = dcp.async_save(mine, storage_writer=writer, async_stager=Stager(writer), no_dist=True)
    lazy.upload_completion.result(AT_ONCE_S)
    assert stillframe.load(own)["n"] == 1
    save(root / "run", 3)
    expect(root / "run", {0: 1, 1: 2, 2: 9, 3: 2, 4: 3})


def mine(root: Path, number: float, **more: Any) -> None:
    """Saved by this rank alone, while the others do something else."""
    began = time.monotonic()
    dcp.save({"w": torch.full((4,), float(number)), "n": number}, storage_writer=Writer(root), no_dist=True, **more)
    assert time.monotonic() - began < AT_ONCE_S


def alone_after_failure(root: Path) -> None:
    """A rank that saves alone waits for nobody, not for those either that have left a save of all ranks unfinished."""
    for failing, saving in ((1, 0), (0, 1)):
        place = root / f"{failing} fails"
        refused(lambda: save(place / "run", 1, planner=Fails("finish_plan", (failing,))), "on purpose")  # noqa: B023
        if dist.get_rank() == saving:
            if saving == 0:  # on another thread than the one that DCP has left the save on
                own = {"w": torch.full((4,), 6.0), "n": 6}
                dcp.async_save(own, storage_writer=Writer(place / "run"), no_dist=True).result(AT_ONCE_S)
            mine(place / "best", 5)
        dist.barrier()
        expect(place / "best", {0: 5})
        save(place / "run", 2)
        expect(place / "run", {6, 2} if saving == 0 else {2})


def alone_beside(root: Path) -> None:
    """A rank saves alone while a save of all ranks is under way, to another root and to the same."""
    group, rank = dist.new_group(), dist.get_rank()
    together = dcp.async_save(state(1), storage_writer=Writer(root / "run"), process_group=group, planner=Late(rank=1))
    if rank == 0:
        mine(root / "best", 5)
        mine(root / "run", 6)
    together.result(AT_ONCE_S)
    expect(root / "best", {0: 5})
    expect(root / "run", {1, 6})
    for n in (7, 8):  # the same, lazily
        writer, best = Writer(root / "run"), Writer(root / "lazy best")
        saving = [dcp.async_save(state(n), storage_writer=writer, process_group=group, async_stager=Stager(writer))]
        for own in (best, writer) if rank == 0 else ():
            own_state = {"w": torch.full((4,), n + 0.5), "n": n + 0.5}
            saving.append(dcp.async_save(own_state, storage_writer=own, no_dist=True, async_stager=Stager(own)))
        for each in saving:
            each.upload_completion.result(AT_ONCE_S)
    expect(root / "lazy best", {7.5, 8.5})
    expect(root / "run", {1, 6, 7, 7.5, 8, 8.5})
    if rank == 1:
        mine(root / "of rank 1", 1)
        began = time.monotonic()
        refused(lambda: mine(root / "run", 9), "only rank 0 can save alone")
        assert time.monotonic() - began < AT_ONCE_S
    save(root / "run", 9)
    expect(root / "run", {1, 6, 7, 7.5, 8, 8.5, 9})


def two_roots(root: Path) -> None:
    """Saves to several roots at once, which the ranks begin in different order: none closes the other's."""
    roots = [(root / name, dist.new_group()) for name in ("model", "ema", "more")]
    for n in range(3):
        states = [state(n) for _ in roots]  # made by collectives
        saving = [
            dcp.async_save(found, storage_writer=Writer(place), process_group=group, planner=Late(rank=n % 2))
            for found, (place, group) in list(zip(states, roots, strict=True))[:: -1 if dist.get_rank() else 1]
        ]
        for each in saving:
            each.result(AT_ONCE_S)
    for n in range(3, 5):  # lazily, one order
        lazy = []
        for place, group in roots:
            writer = Writer(place)
            lazy.append(
                dcp.async_save(state(n), storage_writer=writer, process_group=group, async_stager=Stager(writer))
            )
        for response in lazy:
            response.upload_completion.result(AT_ONCE_S)
    for place, _ in roots:
        expect(place, {n: n for n in range(5)})
    refused(lambda: save(root / f"of rank {dist.get_rank()}", 1), "the ranks differ")
    save(root / "model", 4)


def main() -> None:
    dist.init_process_group("gloo")
    for case in sys.argv[2:]:
        globals()[case](Path(sys.argv[1], case))
        dist.barrier()
    leave()


if __name__ == "__main__":
    main()
