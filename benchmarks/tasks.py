"""What a measured process does: one function a task, each ``task(case, directory) -> figures``.

Every task that saves ends with a check that the last two saves restore bit for bit, into live tensors, through the
system's own restore.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch
from benchmarks import disk, states
from benchmarks.case import GIB, Case
from benchmarks.systems import SYSTEMS
from benchmarks.systems.base import State, System, init_alone, tensors_of

Figures = dict[str, Any]

_IN_A_TENSOR = 0.371
"""Where in a file of tensors a bit is changed: in the data of one, not between two, whatever the format."""


def make(case: Case, directory: Path, state: State | None = None) -> tuple[State, System]:
    if state is None:
        if case.is_sharded:
            init_alone()
            state = states.make_sharded(int(case.gib * GIB))
        else:
            state = states.make_state(int(case.gib * GIB), case.shape)
    directory.mkdir(parents=True, exist_ok=True)
    System.host_bytes = int(case.host_gib * GIB) if case.host_gib else None
    return state, SYSTEMS[case.system](directory, state, int(os.environ.get("RANK", "0")))


class Meter:
    """CPU seconds of this process with all its descendants and of the whole machine, and what they wrote if counted."""

    def __init__(self) -> None:
        self.began = self._read()
        self.before = disk.written()

    def read(self) -> Figures:
        own, machine = (now - began for now, began in zip(self._read(), self.began, strict=True))
        figures = {"cpu_s": own, "machine_cpu_s": machine}
        after = disk.written()
        if self.before and after:
            figures["written_bytes"] = after.bytes - self.before.bytes
            figures["file_syncs"] = after.file_syncs - self.before.file_syncs
            figures["directory_syncs"] = after.directory_syncs - self.before.directory_syncs
        measured()
        return figures

    def _read(self) -> tuple[float, float]:
        own = 0.0
        for process in (me := psutil.Process(), *me.children(recursive=True)):
            try:
                own += sum(process.cpu_times()[:4])  # with children that have ended
            except psutil.Error:
                continue
        times = psutil.cpu_times()
        return own, sum(times) - times.idle - times.iowait - times.steal - times.guest - times.guest_nice


def measured() -> None:
    """Tell the harness that what follows is only checking."""
    if "BENCH_MEASURED" in os.environ:
        Path(os.environ["BENCH_MEASURED"]).touch()


def is_right(system: System, state: State, steps: list[int]) -> bool:
    """Whether these steps come back bit for bit, in the tensors that were there before."""
    live = [tensor.data_ptr() for _, tensor in tensors_of(state)]
    for step in steps:
        states.set_step(state, step)
        expected = states.digest_of(state)
        states.scramble(state)
        system.restore(step)
        if states.digest_of(state) != expected or [tensor.data_ptr() for _, tensor in tensors_of(state)] != live:
            return False
    return True


def loop(case: Case, directory: Path) -> Figures:
    """The training loop: compute is waiting; the update changes every page of every tensor."""
    loops = [one_loop(case, every, directory / f"every-{every}") for every in case.every]
    return {"loops": loops, "is_right": all(each["is_right"] for each in loops)}


def one_loop(case: Case, every: int, directory: Path) -> Figures:
    state, system = make(case, directory)
    size = states.bytes_of(state)
    states.set_step(state, 1)
    began = time.perf_counter()
    system.save(1)  # plans, and touches its buffers for the first time
    first_s = time.perf_counter() - began
    system.finish()
    os.sync()
    time.sleep(case.compute_s)
    system.fence()
    states.set_step(state, 2)
    system.save(2)  # so that the first iteration finds a save in flight, as all others do
    blocked, iterations, steps = [], [], [1, 2]
    meter = Meter()
    barrier()
    loop_began = time.perf_counter()
    for step in range(3, case.iterations + 3):
        began = time.perf_counter()
        time.sleep(case.compute_s)
        computed = time.perf_counter()
        system.fence()
        fenced = time.perf_counter()
        states.set_step(state, step)
        time.sleep(case.update_s)
        updated = time.perf_counter()
        if (step - 2) % every == 0:
            system.save(step)
            steps.append(step)
        ended = time.perf_counter()
        blocked.append(fenced - computed + ended - updated)
        iterations.append(ended - began)
    looped = time.perf_counter()
    system.finish()
    finished = time.perf_counter()
    os.sync()  # for those that leave it to the kernel
    figures: Figures = {
        "every": every, "bytes": size, "saves": len(steps) - 2, "first_s": first_s,
        "blocked_s": blocked, "iteration_s": iterations, "loop_s": looped - loop_began,
        "finish_s": finished - looped, "sync_s": time.perf_counter() - finished, **meter.read(),
    }  # fmt: skip
    barrier()
    if case.disk_rate and case.system != "none" and figures["written_bytes"] < 0.9 * size * figures["saves"]:
        raise RuntimeError(f"only {figures['written_bytes']:,} bytes were written through the emulated disk")
    figures["is_right"] = case.system == "none" or is_right(system, state, steps[-2:])
    system.close()
    barrier()
    if os.environ.get("RANK", "0") == "0":
        shutil.rmtree(directory, ignore_errors=True)
    return figures


def persist(case: Case, directory: Path) -> Figures:
    """One save at a time, each followed until the system says that it is complete, then until it is on the disk."""
    state, system = make(case, directory)
    states.set_step(state, 0)
    system.save(0)
    system.finish()
    os.sync()
    own, durable = [], []
    meter = Meter()
    for step in range(1, case.iterations + 1):
        system.fence()
        states.set_step(state, step)
        began = time.perf_counter()
        system.save(step)
        system.finish()
        own.append(time.perf_counter() - began)
        os.sync()
        durable.append(time.perf_counter() - began)
    figures = {"bytes": states.bytes_of(state), "own_s": own, "durable_s": durable, **meter.read()}
    figures["is_right"] = case.system == "none" or is_right(system, state, [case.iterations - 1, case.iterations])
    system.close()
    return figures


def persist_raw(case: Case, directory: Path) -> Figures:
    """The yardstick of ``persist``: an O_DIRECT writer of one thread, to new files and over an old one."""
    size = int(case.gib * GIB)
    new, over, cpu = [], [], []
    data = disk.random_chunk()
    for turn in range(case.iterations):
        meter = Meter()
        new.append(disk.write_raw(directory / f"raw-{turn}", size, data))
        cpu.append(meter.read()["cpu_s"])
        over.append(disk.write_raw(directory / "raw-0", size, data, is_over=True))
    return {"bytes": size, "durable_s": new, "over_s": over, "cpu_s": sum(cpu)}


def restore(case: Case, directory: Path) -> Figures:
    """Into live tensors, cold and then warm."""
    state, system = make(case, directory)
    states.set_step(state, 1)
    system.save(1)
    system.finish()
    system.fence()
    expected = states.digest_of(state)
    cold: list[float] = []
    warm: list[float] = []
    right, how = [], ""
    for _ in range(case.iterations):
        for into in (cold, warm):
            states.scramble(state)
            if into is cold:
                how = disk.drop_caches(directory)
            began = time.perf_counter()
            system.restore(1)
            into.append(time.perf_counter() - began)
            right.append(states.digest_of(state) == expected)
    figures = {"bytes": states.bytes_of(state), "cold_s": cold, "warm_s": warm, "cold": how, "is_right": all(right)}
    figures["flipped"] = with_flipped_byte(system, directory, state, expected)
    system.close()
    return figures


def with_flipped_byte(system: System, directory: Path, state: State, expected: str) -> str:
    """What a restore says when one bit of the largest file has changed on the disk."""
    path = max((each for each in directory.rglob("*") if each.is_file()), key=lambda each: each.stat().st_size)
    with path.open("r+b") as file:
        file.seek(int(path.stat().st_size * _IN_A_TENSOR))
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    disk.drop_caches(directory)
    try:
        system.restore(1)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # as DCP's is
        return f"refused: {type(error).__name__}"
    return "not noticed" if states.digest_of(state) != expected else "not read"


def verify(case: Case, directory: Path) -> Figures:
    """What `stillframe verify` does: every byte read again and compared with its checksum, into no tensor."""
    from stillframe.checkpoint.catalog import Catalog
    from stillframe.checkpoint.verify import verify as read_again

    state, system = make(msgspec.structs.replace(case, system="stillframe"), directory)
    system.save(1)
    system.finish()
    system.close()
    cold, right = [], []
    for _ in range(case.iterations):
        disk.drop_caches(directory)
        began = time.perf_counter()
        with Catalog(directory).open(1) as checkpoint:
            verdict = read_again(checkpoint)
        cold.append(time.perf_counter() - began)
        right.append(verdict.is_whole and verdict.bytes >= states.bytes_of(state))
    return {"bytes": states.bytes_of(state), "cold_s": cold, "warm_s": [], "is_right": all(right)}


def restore_raw(case: Case, directory: Path) -> Figures:
    """The yardstick of ``restore``."""
    size = int(case.gib * GIB)
    path = directory / "raw"
    disk.write_raw(path, size, disk.random_chunk())
    cold = []
    for _ in range(case.iterations):
        disk.drop_caches(directory)
        cold.append(disk.read_raw(path, size))
    return {"bytes": size, "cold_s": cold, "warm_s": []}


def copy_rate(case: Case, _directory: Path) -> Figures:
    """The yardstick of the link: one thread that copies memory."""
    size = int(case.gib * GIB)
    source, target = torch.ones(size // 4), torch.zeros(size // 4)
    torch.set_num_threads(1)
    seconds = []
    for _ in range(case.iterations):
        began = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - began)
    return {"bytes": size, "copy_s": seconds}


def barrier() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def tasks() -> dict[str, Callable[[Case, Path], Figures]]:
    from benchmarks import clients, growing, training

    return {
        "loop": loop, "persist": persist, "persist-raw": persist_raw, "restore": restore, "restore-raw": restore_raw,
        "verify": verify,
        "copy-rate": copy_rate, "training": training.training, "save-cost": growing.save_cost,
        "deepspeed-loop": clients.deepspeed_loop, "dcp-calls": clients.dcp_calls, "commit-cost": growing.commit_cost, "collect-cost": growing.collect_cost,
    }  # fmt: skip
