"""Corners that once were wrong: odd optimizers, shared memory, interrupts, failing memory, deaf keepers."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import signal
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import stillframe
from stillframe import Catalog, Checkpointer, ConfigError, MismatchError, spi
from stillframe.link.arena import Arena
from stillframe.save.audit import Audit
from stillframe.save.keeper_client import KeeperClient
from tests.support import assert_same, keeper_is_gone, kill, pause, run_child, until

COUNT = 12_000_000


def test_another_keeper_never_gets_spans_that_are_still_to_be_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The death of one keeper is dealt with completely before the next can be started."""
    fail_all = KeeperClient._on_exit
    order: list[str] = []

    def slow_exit(self: KeeperClient, *arguments: Any) -> None:
        order.append("exit")
        fail_all(self, *arguments)

    give_back_all = Arena.give_back_all

    def slow_give_back(self: Arena, holder: object) -> None:
        threading.Event().wait(0.3)
        give_back_all(self, holder)

    monkeypatch.setattr(KeeperClient, "_on_exit", slow_exit)
    monkeypatch.setattr(Arena, "give_back_all", slow_give_back)
    weights = torch.zeros(COUNT)
    with Checkpointer(tmp_path, arena="64MiB", on_error="warn") as checkpointer:
        checkpointer.save(0, {"weights": weights}).wait()
        for step in range(1, 6):
            if step == 1:
                kill(spi.keeper_pid(checkpointer) or 0)
            checkpointer.fence()
            weights.fill_(float(step))
            checkpointer.save(step, {"weights": weights})
        checkpointer.wait()
    assert order
    for step in Catalog(tmp_path).steps():
        assert torch.equal(stillframe.load(tmp_path, step)["weights"], torch.full((COUNT,), float(step))), step


def test_memory_that_cannot_be_had_fails_saves_but_hangs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = torch.nn.Parameter(torch.zeros(COUNT))
    optimizer = torch.optim.SGD([weights], lr=0.1)
    touch = Arena.touch

    def refuse(self: Arena, span: int) -> None:
        raise stillframe.ConfigError("no memory for the arena")

    monkeypatch.setattr(Arena, "touch", refuse)
    with Checkpointer(tmp_path, arena="64MiB", on_error="warn") as checkpointer:
        for step in range(6):
            save = checkpointer.save(step, {"weights": weights})
            weights.grad = torch.ones(COUNT)
            optimizer.step()
            with pytest.raises(stillframe.ConfigError, match="no memory"):
                save.wait()
        monkeypatch.setattr(Arena, "touch", touch)
        checkpointer.save(9, {"weights": weights}).wait()


def test_an_automatic_arena_that_cannot_be_had_fails_that_save_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memfd_create = os.memfd_create

    def refuse(name: str, flags: int) -> int:
        if name == "stillframe-arena":
            raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))
        return memfd_create(name, flags)

    with Checkpointer(tmp_path, on_error="warn") as checkpointer:
        monkeypatch.setattr(os, "memfd_create", refuse)
        with pytest.raises(stillframe.ConfigError, match="cannot be allocated: Too many open files in system"):
            checkpointer.save(1, {"weights": torch.zeros(COUNT)}).wait()
        monkeypatch.setattr(os, "memfd_create", memfd_create)
        checkpointer.save(2, {"weights": torch.zeros(COUNT)}).wait()


def test_a_save_that_is_interrupted_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Audit) -> None:
        raise KeyboardInterrupt

    with Checkpointer(tmp_path, audit=True) as checkpointer:
        monkeypatch.setattr(Audit, "begin", interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpointer.save(1, {"weights": torch.zeros(10)})
        monkeypatch.undo()
        checkpointer.save(1, {"weights": torch.zeros(10)}).wait()


def test_a_buffer_beside_a_parameter_in_one_storage_is_captured(tmp_path: Path) -> None:
    class Flat(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            flat = torch.zeros(8_000_000)
            self.weight = torch.nn.Parameter(flat[:4_000_000])
            self.register_buffer("count", flat[4_000_000:])

    model = Flat()
    count = model.get_buffer("count")
    with Checkpointer(tmp_path) as checkpointer:
        for step in range(5):
            checkpointer.save(step, {"model": model})
            count.add_(1.0)  # as a forward does
            checkpointer.fence()
    for step in range(5):
        assert torch.equal(stillframe.load(tmp_path, step)["model"]["count"], torch.full((4_000_000,), float(step)))


def test_optimizer_state_of_another_dtype_than_its_parameter_comes_back_exactly(tmp_path: Path) -> None:
    def make() -> torch.optim.Optimizer:
        return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(100, dtype=torch.bfloat16))])

    optimizer = make()
    parameter = optimizer.param_groups[0]["params"][0]
    optimizer.state[parameter] = {"step": torch.tensor(3.0), "master": torch.randn(100), "exp_avg": torch.randn(100)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"optimizer": optimizer}).wait()
        fresh = make()
        checkpointer.restore({"optimizer": fresh})
    assert_same(fresh.state_dict()["state"], optimizer.state_dict()["state"])


def test_every_scheduler_of_torch_can_be_saved(tmp_path: Path) -> None:
    def make() -> Any:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 4])

    scheduler = make()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"scheduler": scheduler}).wait()
        fresh = make()
        fresh.milestones.clear()
        checkpointer.restore({"scheduler": fresh})
    assert fresh.milestones == scheduler.milestones
    assert type(fresh.milestones) is type(scheduler.milestones)


def test_close_keeps_its_deadline_with_a_keeper_that_does_not_listen(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, on_error="warn")
    checkpointer.save(0, {"n": 0}).wait()
    keeper = spi.keeper_pid(checkpointer)
    assert keeper is not None
    pause(keeper)
    has_room = checkpointer._saver._budget._has_room
    for step in range(1, 2000):  # until the stager is blocked in a message, and the next save would be, too
        checkpointer.save(step, {"n": step})
        patience = time.monotonic() + 0.5
        while not has_room() and time.monotonic() < patience:
            time.sleep(0.005)
        if not has_room():
            break
    assert not has_room()
    began = time.monotonic()
    with pytest.raises(stillframe.DeadlineError):
        checkpointer.close(timeout_s=0.5)
    assert time.monotonic() - began < 10
    os.kill(keeper, signal.SIGCONT)
    until(lambda: keeper_is_gone(tmp_path), "the keeper finishes and leaves")
    assert 1 in Catalog(tmp_path).steps()


def test_a_failure_that_nobody_was_told_of_is_said_at_exit(tmp_path: Path) -> None:
    code = """
import os, signal, sys, torch, stillframe, logging
from stillframe import spi
logging.basicConfig(stream=sys.stdout)
checkpointer = stillframe.Checkpointer(sys.argv[1])
checkpointer.save(0, {"n": 0}).wait()
os.kill(spi.keeper_pid(checkpointer), signal.SIGSTOP)
save = checkpointer.save(1, {"n": 1})
save.wait("staged")
os.kill(spi.keeper_pid(checkpointer), signal.SIGKILL)
while save.phase != "failed": pass
"""
    assert "saving step 1 failed, and nothing raised its error" in run_child(code, tmp_path)


def test_another_default_device_is_no_trouble(tmp_path: Path) -> None:
    state = {"model": torch.nn.BatchNorm1d(10), "optimizer": torch.optim.SGD([torch.nn.Parameter(torch.ones(3))])}
    torch.set_default_device("meta")
    try:
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(1, state).wait()
            assert checkpointer.restore(state).step == 1
            loaded = stillframe.load(tmp_path)
    finally:
        torch.set_default_device(None)
    assert loaded["model"]["running_var"].tolist() == [1.0] * 10


def test_tensors_that_share_memory_only_in_the_live_state_are_a_mismatch(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"a": torch.ones(1000), "b": torch.zeros(1000)}).wait()
        shared = torch.full((1000,), 7.0)
        with pytest.raises(MismatchError, match="b: shares memory with a"):
            checkpointer.restore({"a": shared, "b": shared})
        assert shared.unique().tolist() == [7.0]


def test_a_root_that_cannot_take_what_is_stored_is_a_mismatch(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"a": 1}).wait()
        with pytest.raises(MismatchError):
            checkpointer.restore([1, 2])


def test_an_ordered_dict_inside_an_object_stays_one(tmp_path: Path) -> None:
    class Holder:
        def __init__(self) -> None:
            self.state: Any = None

        def state_dict(self) -> dict[str, Any]:
            return {"order": OrderedDict(b=1, a=2)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state

    holder = Holder()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"holder": holder}).wait()
        checkpointer.restore({"holder": holder})
    assert_same(holder.state, {"order": OrderedDict(b=1, a=2)})


def _train(root: str) -> None:
    Checkpointer(root).save(1, {"weights": torch.ones(1000)})


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_trainer_started_by_multiprocessing_loses_nothing_by_leaving(tmp_path: Path, method: Any) -> None:
    child = multiprocessing.get_context(method).Process(target=_train, args=(str(tmp_path),))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    until(lambda: Catalog(tmp_path).steps() == [1], "its keeper commits")
    until(lambda: keeper_is_gone(tmp_path), "the keeper leaves")


def test_a_closed_checkpointer_gives_its_arena_back(tmp_path: Path) -> None:
    def arenas() -> int:
        return Path("/proc/self/maps").read_text().count("stillframe-arena")

    gc.collect()  # those that other tests have dropped
    before = arenas()
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"weights": torch.ones(COUNT)}).wait()
    assert arenas() == before + 1
    checkpointer.close()
    assert checkpointer.stats().arena_bytes > 0
    assert arenas() <= before


def test_waiting_in_a_forked_child_is_refused(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"weights": torch.ones(COUNT)})
        child = os.fork()
        if child == 0:
            try:
                checkpointer.wait()
            except stillframe.ConfigError:
                os._exit(3)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


def test_an_automatic_arena_with_a_bound(tmp_path: Path) -> None:
    state = {"w": torch.ones(100 << 20, dtype=torch.uint8)}
    for number, (arena, expected) in enumerate((("auto:1TiB", 9 * 16), ("auto:40MiB", 40 // 16 * 16), ("auto:1", 32))):
        with Checkpointer(tmp_path / str(number), arena=arena) as checkpointer:
            checkpointer.save(1, state).wait()
            assert checkpointer.stats().arena_bytes == expected << 20, arena
    with pytest.raises(ConfigError, match="is not a size"):
        Checkpointer(tmp_path / "x", arena="automatic")
