"""What saving from several ranks costs on this machine: two real torchrun ranks, one disk, one root.

Both ranks hold DTensor shards of one model and of its optimizer's state, save at every iteration, and write raw
files in turns with that (raw, ours, raw, ...), so that the noise of the machine hits both.  Compute is emulated by
waiting: the CPU is free, as on a GPU node.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a script, from anywhere

from benchmarks.figures import Figures, write_raw

import stillframe
from stillframe.format.digest import digest_of
from stillframe.model import CHUNK_BYTES
from stillframe.storage.direct import aligned_buffer
from stillframe.units import GIB, format_bytes

RANKS = 2
PARAMETERS = 32
PARTS = ("parameter", "exp_avg", "exp_avg_sq")
COLUMNS = 1024
RAW_FILES = 2
"""Per rank and turn; more would not fit beside the checkpoints."""
CHECKPOINTS_AT_ONCE = 4
"""One kept, one that retention is removing, one being written and one that waits for the other rank's seal."""
HURRY_S = 0.05
SLACK = 1.6
DEADLINE_S = 120.0


@dataclass
class Loop:
    """What one rank saw of one loop; the times are those of ``time.monotonic()``, which all processes share."""

    began_s: float
    ended_s: float
    blocked_s: list[float] = field(default_factory=list)
    requested_s: list[float] = field(default_factory=list)
    sealed_s: list[float] = field(default_factory=list)
    committed_s: list[float] = field(default_factory=list)
    own_cpu_s: float = 0.0
    """Of this rank and its keeper, until all is committed."""
    all_cpu_s: float = 0.0
    """Of the whole machine in the same time."""
    until_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.ended_s - self.began_s


# --- the ranks -----------------------------------------------------------------------------


class Rank:
    """One of the training processes."""

    def __init__(self, options: argparse.Namespace) -> None:
        dist.init_process_group("gloo", timeout=timedelta(seconds=DEADLINE_S))
        self.rank = dist.get_rank()
        self.root: Path = options.root
        self.options = options
        mesh = init_device_mesh("cpu", (RANKS,))
        rows = int(options.gib * GIB) // (PARAMETERS * len(PARTS) * COLUMNS * 4)
        self.state, self.locals = make_state(mesh, rows, self.rank)
        self.bytes = sum(local.nbytes for local in self.locals)
        self.buffer = memoryview(aligned_buffer(CHUNK_BYTES))
        self.buffer[:] = os.urandom(CHUNK_BYTES)
        self.step = 0

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def run(self) -> dict[str, Any]:
        repeat, iterations = self.options.repeat, self.options.iterations
        self.raw()  # the first writes after a pause are slower
        raw = [self.raw()]
        compute_s = self.agree(self.options.compute_s or self.relaxed_s(raw[0]))
        with stillframe.Checkpointer(
            self.root / "run", keep=stillframe.KeepLast(1), deadline_s=DEADLINE_S
        ) as checkpointer:
            self.loop(checkpointer, 0.0, 1)  # the arena is touched for the first time
            alone, relaxed, hurried = [], [], []
            for turn in range(1, repeat + 1):
                self.say(f"turn {turn} of {repeat}: {compute_s:.2f} s of compute, without and with saving")
                alone.append(self.loop(None, compute_s, iterations))
                relaxed.append(self.loop(checkpointer, compute_s, iterations))
            for turn in range(1, repeat + 1):
                self.say(f"turn {turn} of {repeat}: storage cannot keep up; raw writers")
                hurried.append(self.loop(checkpointer, HURRY_S, iterations))
                raw.append(self.raw())
            self.say("restoring")
            restored = self.is_restored(checkpointer)
            stats = checkpointer.stats()
        return {
            "bytes": self.bytes,
            "compute_s": compute_s,
            "raw": raw,
            "alone": [asdict(each) for each in alone],
            "relaxed": [asdict(each) for each in relaxed],
            "hurried": [asdict(each) for each in hurried],
            "is_restored": restored,
            "saves": stats.saves,
            "arena_wait_s": stats.arena_wait_s,
        }

    def agree(self, seconds: float) -> float:
        told = [seconds]
        dist.broadcast_object_list(told, src=0)
        return told[0]

    def relaxed_s(self, raw: tuple[float, float]) -> float:
        """As much compute as lets this disk take both ranks' bytes in time."""
        seconds = (raw[1] - raw[0]) / RAW_FILES
        return max(1.0, round(SLACK * seconds, 1))

    def raw(self) -> tuple[float, float]:
        """Both ranks write plain files at the same time: when this one began and ended."""
        paths = [self.root / f"raw-{self.rank}-{number}.bin" for number in range(RAW_FILES)]
        dist.barrier()
        spans = [write_raw(path, self.bytes, self.buffer) for path in paths]
        dist.barrier()
        for path in paths:
            path.unlink()
        dist.barrier()
        return spans[0][0], spans[-1][1]

    def loop(self, checkpointer: stillframe.Checkpointer | None, compute_s: float, iterations: int) -> Loop:
        """Ends when the last iteration does; then, if it has saved, waits for what is not committed yet."""
        saves = []
        dist.barrier()
        own_s, all_s = own_cpu_s(checkpointer), machine_cpu_s()
        loop = Loop(time.monotonic(), 0.0)
        for _ in range(iterations):
            time.sleep(compute_s)
            dist.barrier()  # where gradients are reduced
            before = time.monotonic()
            if checkpointer:
                checkpointer.fence()
            waited = time.monotonic() - before
            self.update()
            before = time.monotonic()
            if checkpointer:
                saves.append(checkpointer.save(self.step, self.state))
            loop.blocked_s.append(waited + time.monotonic() - before)
        loop.ended_s = time.monotonic()
        if checkpointer:
            checkpointer.wait()
        loop.until_s = time.monotonic()
        loop.own_cpu_s, loop.all_cpu_s = own_cpu_s(checkpointer) - own_s, machine_cpu_s() - all_s
        for save in saves:
            times = save.times
            assert times.sealed_s is not None
            assert times.committed_s is not None
            loop.requested_s.append(times.requested_s)
            loop.sealed_s.append(times.sealed_s)
            loop.committed_s.append(times.committed_s)
        dist.barrier()
        return loop

    def update(self) -> None:
        """Stands for ``optimizer.step()``: cheap, and every tensor changes."""
        self.step += 1
        for local in self.locals:
            local[0, 0] += 1

    def is_restored(self, checkpointer: stillframe.Checkpointer) -> bool:
        """Whether every byte comes back that was there at the last save."""
        checkpointer.fence()
        before = fingerprint(self.locals)
        for local in self.locals:
            local.zero_()
        step = checkpointer.restore(self.state)
        return step == self.step and fingerprint(self.locals) == before


def make_state(mesh: DeviceMesh, rows: int, rank: int) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Parameters and the state of an AdamW as DTensors, half of each here; and the local tensors under them."""
    generator = torch.Generator().manual_seed(rank)
    locals_: list[torch.Tensor] = []

    def shard() -> DTensor:
        local = torch.rand((rows, COLUMNS), generator=generator)
        locals_.append(local)
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)

    names = [f"layers.{number}.weight" for number in range(PARAMETERS)]
    model = {name: shard() for name in names}
    moments = {name: {"step": torch.tensor(1.0), **{part: shard() for part in PARTS[1:]}} for name in names}
    groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "params": names}]
    return {"model": model, "optimizer": {"state": moments, "param_groups": groups}, "rank": rank}, locals_


def own_cpu_s(checkpointer: stillframe.Checkpointer | None) -> float:
    pids = [os.getpid()] + ([checkpointer.keeper_pid] if checkpointer and checkpointer.keeper_pid else [])
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")


def machine_cpu_s() -> float:
    """Busy time of all cores: everything but idle and waiting for I/O."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def fingerprint(tensors: list[torch.Tensor]) -> str:
    return digest_of(tensor.numpy().tobytes() for tensor in tensors)


def work(options: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.WARNING)
    rank = Rank(options)
    result = rank.run()
    results: list[Any] = [None] * RANKS
    dist.gather_object(result, results if rank.rank == 0 else None)
    if rank.rank == 0:
        options.result.write_text(json.dumps(results))
    dist.destroy_process_group()
    return 0


# --- the figures ---------------------------------------------------------------------------


def evaluate(results: list[dict[str, Any]], figures: Figures) -> None:
    """``results`` are those of the ranks, in order."""
    repeat = len(results[0]["hurried"])
    size = sum(result["bytes"] for result in results)
    loops = {
        kind: [[Loop(**result[kind][turn]) for result in results] for turn in range(repeat)]
        for kind in ("alone", "relaxed", "hurried")
    }
    blocked = [blocked_s * 1e3 for turn in loops["relaxed"] for loop in turn for blocked_s in loop.blocked_s]
    figures.add("blocked per save and rank (save + fence)", blocked, "ms", "≤ 3", lambda v: v <= 3)
    ratios = [
        max(loop.seconds for loop in ours) / max(loop.seconds for loop in alone)
        for ours, alone in zip(loops["relaxed"], loops["alone"], strict=True)
    ]
    figures.add("iteration time ÷ without saving", ratios, "×")

    # Each of our turns lies between two turns of the raw writers.
    spans = [[result["raw"][turn] for result in results] for turn in range(repeat + 1)]
    raw = [size * RAW_FILES / (max(end for _, end in span) - min(began for began, _ in span)) for span in spans]
    ours = [durable_rate(turn, size) for turn in loops["hurried"]]
    ratios = [rate / statistics.mean(raw[turn : turn + 2]) for turn, rate in enumerate(ours)]
    beside = f"{statistics.median(ours) / 1e9:.2f} of {statistics.median(raw) / 1e9:.2f} GB/s"
    figures.add("durable rate ÷ two raw O_DIRECT writers", ratios, "×", "≥ 0.85", lambda v: v >= 0.85, beside)
    figures.add("durable rate of both ranks", [rate / 1e9 for rate in ours], "GB/s")
    figures.add("two raw O_DIRECT writers", [rate / 1e9 for rate in raw], "GB/s")
    for kind, when in (("relaxed", "storage keeps up"), ("hurried", "it cannot")):
        commit = [late * 1e3 for turn in loops[kind] for late in commit_s(turn, slice(0, 1))]
        figures.add(f"last seal → commit, {when}", commit, "ms")
        known = [late * 1e3 for turn in loops[kind] for late in commit_s(turn, slice(None))]
        figures.add(f"last seal → every rank knows, {when}", known, "ms")
    figures.add("cores busy with other programs, where it cannot", list(map(cores_of_others, loops["hurried"])), "")
    restored = [float(result["is_restored"]) for result in results]
    figures.add("ranks whose bytes restore exactly", [sum(restored)], f"of {RANKS}", str(RANKS), lambda v: v == RANKS)


def cores_of_others(turn: list[Loop]) -> float:
    """Cores that were busy with something else, kernel threads included: above 0.3 or so, the run was not quiet."""
    first = turn[0]
    return (first.all_cpu_s - sum(loop.own_cpu_s for loop in turn)) / (first.until_s - first.began_s)


def durable_rate(turn: list[Loop], size: int) -> float:
    """Bytes per second of all ranks, from the first save requested to the last one committed, which rank 0 does."""
    began = min(loop.requested_s[0] for loop in turn)
    ended = turn[0].committed_s[-1]
    return size * len(turn[0].requested_s) / (ended - began)


def commit_s(turn: list[Loop], ranks: slice) -> list[float]:
    """For each step: from the last rank's seal until these ranks knew that it is committed."""
    steps = range(len(turn[0].sealed_s))
    return [
        max(loop.committed_s[step] for loop in turn[ranks]) - max(loop.sealed_s[step] for loop in turn)
        for step in steps
    ]


# --- starting ------------------------------------------------------------------------------


def launch(options: argparse.Namespace, root: Path) -> list[dict[str, Any]]:
    """Run the ranks to their end; what they start never outlives this."""
    result = root / "result.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command += [str(Path(__file__).resolve()), "--root", str(root), "--result", str(result)]
    for name in ("gib", "repeat", "iterations", "compute_s"):
        if getattr(options, name) is not None:
            command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    source = Path(stillframe.__file__).resolve().parent.parent
    path = os.pathsep.join(filter(None, [str(source), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        command,
        start_new_session=True,
        env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path},
    )
    try:
        code = process.wait()
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)  # its own session: only what it has started
        process.wait()
        raise
    if code != 0:
        raise SystemExit(f"the ranks ended with exit code {code}")
    results: list[dict[str, Any]] = json.loads(result.read_text())
    return results


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, help="directory on the disk to measure (default: runs/bench-ranks)")
    parser.add_argument("--gib", type=float, help="size of the state of each rank (default: 1)")
    parser.add_argument("--repeat", type=int, help="turns of each kind (default: 5)")
    parser.add_argument("--iterations", type=int, help="saves in each turn (default: 5)")
    parser.add_argument(
        "--compute-s", type=float, help="emulated compute (default: what lets the disk keep up, at least 1 s)"
    )
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--short", action="store_true", help="0.25 GiB a rank, 2 turns of 3: to see that it runs")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name, usual, short in (("gib", 1.0, 0.25), ("repeat", 5, 2), ("iterations", 5, 3)):
        if getattr(options, name) is None:
            setattr(options, name, short if options.short else usual)
    return options


def main() -> int:
    options = parse()
    if options.result:
        return work(options)
    console = Console()
    parent = options.root or Path(__file__).resolve().parent.parent / "runs" / "bench-ranks"
    parent.mkdir(parents=True, exist_ok=True)
    needed = int(options.gib * GIB) * RANKS * (CHECKPOINTS_AT_ONCE + 1)
    free = shutil.disk_usage(parent).free
    if free < needed:
        console.print(f"{parent} has {format_bytes(free)} free; this needs {format_bytes(needed)}")
        return 2
    console.print(
        f"{RANKS} ranks, {format_bytes(options.gib * GIB)} of fp32 each in {PARAMETERS * len(PARTS)} DTensors, "
        f"{os.cpu_count()} cores, torch {torch.__version__}"
    )
    with tempfile.TemporaryDirectory(dir=parent) as directory:
        results = launch(options, Path(directory))
    if not any(parent.iterdir()):
        parent.rmdir()
    compute_s, waited_s = results[0]["compute_s"], max(result["arena_wait_s"] for result in results)
    console.print(f"{compute_s:g} s of emulated compute where storage keeps up; staging waited {waited_s:.1f} s for it")
    figures = Figures(console)
    evaluate(results, figures)
    console.print(figures.table("stillframe, two ranks"))
    if options.json:
        figures.write(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
