"""What stillframe costs on this machine, as ratios measured in one run: `make bench`.

Every figure is set beside its own yardstick (a raw O_DIRECT writer or reader of the same size, the same loop
without saving), measured in the same run and repeated in turns, so that the noise of the machine hits both.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a script, from anywhere

from benchmarks.figures import Figures, drop_caches, write_raw

import stillframe
from stillframe.model import CHUNK_BYTES
from stillframe.storage.direct import ReadFile, aligned_buffer
from stillframe.units import GIB, format_bytes


class Bench:
    def __init__(self, root: Path, size: int, repeat: int, console: Console) -> None:
        self.root = root
        self.size = size
        self.repeat = repeat
        self.console = console
        self.figures = Figures(console)
        self.add = self.figures.add

    def fresh(self, name: str) -> Path:
        path = self.root / name
        shutil.rmtree(path, ignore_errors=True)
        return path

    # --- yardsticks ------------------------------------------------------------------------

    def raw_write(self) -> float:
        """Bytes per second of a plain O_DIRECT writer, fsync included."""
        began, ended = write_raw(self.root / "raw.bin", self.size, memoryview(self.buffer))
        return self.size / (ended - began)

    def raw_read(self) -> float:
        """Bytes per second of a plain O_DIRECT reader, with as many threads as ours."""
        file = ReadFile(self.root / "raw.bin")
        buffers = [memoryview(aligned_buffer(CHUNK_BYTES)) for _ in range(3)]
        drop_caches()
        began = time.perf_counter()
        with ThreadPoolExecutor(3) as pool:
            list(
                pool.map(lambda at: file.read_at(buffers[at // CHUNK_BYTES % 3], at), range(0, self.size, CHUNK_BYTES))
            )
        seconds = time.perf_counter() - began
        file.close()
        return self.size / seconds

    # --- questions -------------------------------------------------------------------------

    def state(self, count: int = 96) -> dict[str, torch.Tensor]:
        items = self.size // 4 // count
        return {f"layer{index}": torch.full((items,), float(index)) for index in range(count)}

    def stall(self, compute_s: float, iterations: int, name: str) -> None:
        """Save at every iteration under emulated forward and backward (the CPU is free, as on a GPU node)."""
        state = self.state()
        parameters = list(state.values())

        def loop(checkpointer: stillframe.Checkpointer | None) -> tuple[list[float], float]:
            blocked = []
            began = time.perf_counter()
            for step in range(1, iterations + 1):
                time.sleep(compute_s)
                before = time.perf_counter()
                if checkpointer:
                    checkpointer.fence()
                waited = time.perf_counter() - before
                for parameter in parameters:
                    parameter[0] += 1
                before = time.perf_counter()
                if checkpointer:
                    checkpointer.save(step + base, state)
                blocked.append(waited + time.perf_counter() - before)
            return blocked, time.perf_counter() - began

        base = 0
        alone_s = loop(None)[1] / iterations
        with stillframe.Checkpointer(self.fresh("stall"), keep=stillframe.KeepLast(2)) as checkpointer:
            checkpointer.save(0, state)  # the arena is touched for the first time
            checkpointer.wait()
            blocked_all: list[float] = []
            ratios = []
            totals = []
            for _ in range(self.repeat):
                alone_s = loop(None)[1] / iterations
                began = time.perf_counter()
                blocked, seconds = loop(checkpointer)
                checkpointer.wait()
                totals.append(time.perf_counter() - began)
                blocked_all += blocked
                ratios.append(seconds / iterations / alone_s)
                base += iterations
        if name == "keeps up":
            self.add(
                "blocked per save (save + fence)", [each * 1e3 for each in blocked_all], "ms", "≤ 2", lambda v: v <= 2
            )
            self.add("iteration time ÷ without saving", ratios, "×", "≤ 1.05", lambda v: v <= 1.05)
        else:
            rates = [self.raw_write() for _ in range(self.repeat)]
            ideal = self.size * iterations / statistics.median(rates)
            self.add(
                f"total time ÷ (bytes ÷ raw rate), {compute_s:g} s of compute",
                [total / ideal for total in totals], "×", "≤ 1.10", lambda v: v <= 1.10,
                f"raw writer {statistics.median(rates) / 1e9:.2f} GB/s",
            )  # fmt: skip

    def durable(self) -> None:
        """One save at a time, from save() to committed, against the raw writer."""
        state = self.state()
        raw, ours = [], []
        with stillframe.Checkpointer(self.fresh("durable"), keep=stillframe.KeepLast(1)) as checkpointer:
            checkpointer.save(0, state).wait()
            for step in range(1, self.repeat * 2 + 1):
                raw.append(self.raw_write())
                next(iter(state.values()))[0] += 1
                began = time.perf_counter()
                checkpointer.save(step, state).wait()
                ours.append(self.size / (time.perf_counter() - began))
        ratios = [each / statistics.median(raw) for each in ours]
        beside = f"{statistics.median(ours) / 1e9:.2f} of {statistics.median(raw) / 1e9:.2f} GB/s"
        self.add("durable rate ÷ raw O_DIRECT writer", ratios, "×", "≥ 0.90", lambda v: v >= 0.90, beside)

    def restore(self) -> None:
        """Cold, verified, into live tensors, against the raw reader."""
        state = self.state()
        raw, ours = [], []
        self.raw_write()
        with stillframe.Checkpointer(self.fresh("restore")) as checkpointer:
            checkpointer.save(1, state).wait()
            for _ in range(self.repeat * 2):
                raw.append(self.raw_read())
                drop_caches()
                began = time.perf_counter()
                checkpointer.restore(state)
                ours.append(self.size / (time.perf_counter() - began))
        ratios = [each / statistics.median(raw) for each in ours]
        beside = f"{statistics.median(ours) / 1e9:.2f} of {statistics.median(raw) / 1e9:.2f} GB/s"
        self.add("cold verified restore ÷ raw O_DIRECT reader", ratios, "×", "≥ 0.90", lambda v: v >= 0.90, beside)

    def many(self) -> None:
        """save() of 10,000 tensors: a flat dict, and a real module with its optimizer."""
        flat: dict[str, object] = {f"tensor{index}": torch.zeros(1024) for index in range(10_000)}
        model = torch.nn.ModuleList([torch.nn.Linear(32, 32) for _ in range(1250)])
        optimizer = torch.optim.AdamW(model.parameters())
        torch.stack([parameter.sum() for parameter in model.parameters()]).sum().backward()
        optimizer.step()
        for name, state in (("flat dict", flat), ("module + AdamW", {"model": model, "optimizer": optimizer})):
            samples = []
            with stillframe.Checkpointer(self.fresh("many"), keep=stillframe.KeepLast(1)) as checkpointer:
                for step in range(12):
                    began = time.perf_counter()
                    checkpointer.save(step, state)
                    samples.append((time.perf_counter() - began) * 1e3)
                    checkpointer.wait()
            self.add(f"save() of 10,000 tensors, {name}", samples[1:], "ms", "≤ 20", lambda v: v <= 20)

    def interference(self) -> None:
        """A loop of pure Python while a flush runs, against the same loop a moment later with the flush held.

        The keeper is stopped and continued (SIGSTOP, SIGCONT) every 40 ms, so both sides of each pair meet the
        same weather: on a shared machine the loop alone varies by far more than what is to be measured.
        """
        state = self.state()

        def spin(seconds: float) -> float:
            count = 0
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                count += 1
            return count / seconds

        slower = []
        with stillframe.Checkpointer(self.fresh("spin"), keep=stillframe.KeepLast(1)) as checkpointer:
            checkpointer.save(0, state).wait()
            keeper = checkpointer.keeper_pid
            assert keeper is not None
            for step in range(1, self.repeat * 8 + 1):
                next(iter(state.values()))[0] += 1
                save = checkpointer.save(step, state)
                save.wait("staged")
                while True:
                    beside = spin(0.04)
                    if save.phase != "staged":
                        break
                    os.kill(keeper, signal.SIGSTOP)
                    alone = spin(0.04)
                    os.kill(keeper, signal.SIGCONT)
                    slower.append((alone / beside - 1) * 100)
                checkpointer.wait()
        low, _, high = statistics.quantiles(slower)
        note = f"{len(slower)} pairs, quartiles {low:.1f} and {high:.1f}"
        self.add("pure-Python loop slows, while a flush runs", slower, "%", "≤ 3", lambda v: v <= 3, note)

    def run(self) -> None:
        self.buffer = aligned_buffer(CHUNK_BYTES)
        self.buffer.write(os.urandom(CHUNK_BYTES))
        questions: list[tuple[str, Callable[[], None]]] = [
            ("save at every iteration, 1.0 s of emulated compute", lambda: self.stall(1.0, 5, "keeps up")),
            ("save at every iteration, storage cannot keep up", lambda: self.stall(0.05, 8, "cannot")),
            ("durable rate", self.durable),
            ("restore", self.restore),
            ("many tensors", self.many),
            ("interference", self.interference),
        ]
        for title, question in questions:
            self.console.print(f"[bold]{title}[/bold]")
            question()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, help="directory on the disk to measure (default: beside this file)")
    parser.add_argument("--gib", type=float, default=1.5, help="size of the state")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    console = Console()
    size = int(options.gib * GIB) // (96 * 4096) * 96 * 4096
    parent = options.root or Path(__file__).resolve().parent.parent / "runs"
    parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(parent).free
    if free < 6 * size:
        console.print(f"{parent} has {format_bytes(free)} free; this needs {format_bytes(6 * size)}")
        return 2
    console.print(f"{format_bytes(size)} of fp32 in 96 tensors, {os.cpu_count()} cores, torch {torch.__version__}")
    with tempfile.TemporaryDirectory(dir=parent) as directory:
        bench = Bench(Path(directory), size, options.repeat, console)
        bench.run()
    console.print(bench.figures.table("stillframe, core"))
    if options.json:
        bench.figures.write(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
