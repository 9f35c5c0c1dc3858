"""Runs cases one at a time, each in processes of its own and a fresh directory, and keeps what they gave.

Systems take turns (A B C, A B C), so that the noise of the machine hits all alike.  A run that takes longer than
its limit is ended and reported as hanging; a system that fails or hangs is not run again on the same case.  Results
are written after every run, so that Ctrl-C loses only the one it meets.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
from benchmarks.case import Case, Outcome
from benchmarks.disk import Watched, build_library
from benchmarks.systems import SYSTEMS
from rich.console import Console

from stillframe.units import format_bytes

_SUBREAPER = 36
_SAMPLE_S = 0.1
_STRIDE = 5
"""Each turn begins so many cases later than the one before."""
_HANGS = "hangs"
_POPULATE_WRITE = 23
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_REPOSITORY = Path(__file__).resolve().parent.parent


class Cannot(Exception):
    """The benchmarks cannot start; says why and what to do."""


@dataclass
class Harness:
    """``root``: a directory on the disk to measure.  ``log``: where the output of the measured processes goes."""

    root: Path
    log: Path
    console: Console

    def __post_init__(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        ctypes.CDLL(None).prctl(_SUBREAPER, 1)  # what a measured process leaves behind becomes ours to end
        self._others = set(psutil.Process().children(recursive=True))
        self._library: Path | None = None

    def check_room(self, cases: Sequence[Case]) -> None:
        """Raise :class:`Cannot` if the largest case has not the disk or the memory that it needs."""
        disk = max(cases, key=lambda case: case.disk_bytes)
        free = shutil.disk_usage(self.root).free
        if free < disk.disk_bytes * 1.1:
            raise Cannot(
                f"{self.root} has {format_bytes(free)} free, and {disk.system} with {disk.gib:g} GiB needs "
                f"{format_bytes(int(disk.disk_bytes * 1.1))}: make room, give another --root, or leave out questions"
            )
        memory = max(cases, key=lambda case: case.memory_bytes)
        available = available_memory()
        if available < memory.memory_bytes:
            raise Cannot(
                f"{format_bytes(available)} of memory are available, and {memory.system} with {memory.gib:g} GiB needs "
                f"{format_bytes(memory.memory_bytes)}: leave out sizes with --max-gib, or questions"
            )

    def turns(self, cases: Sequence[Case], turns: int) -> Iterator[Outcome]:
        """Every case, ``turns`` times, in turns."""
        failed: dict[Case, str] = {}
        hanging: dict[str, str] = {}
        total = len(cases) * turns
        began = time.monotonic()
        for number in range(total):
            turn, place = divmod(number, len(cases))
            case = cases[(place + turn * _STRIDE) % len(cases)]
            turn += 1
            reason = failed.get(case) or hanging.get(case.system)
            if reason:
                yield Outcome(case=case, turn=turn, error=reason)
                continue
            left = (time.monotonic() - began) / number * (total - number) if number else 0.0
            about = f"{case.system:<20} {case.gib:g} GiB"
            about += f" × {case.ranks} ranks" if case.ranks > 1 else ""
            about += f", {case.detail or case.shape}" if case.detail or case.shape != "layers" else ""
            self.console.print(f"  [{number + 1}/{total}] {about}", end="", highlight=False, soft_wrap=True)
            outcome = self.run(case, turn)
            if outcome.error:
                failed[case] = outcome.error
                if outcome.error.startswith(_HANGS):
                    hanging[case.system] = outcome.error
            self.console.print(f"  {describe(outcome)}", end="", markup=False, highlight=False, soft_wrap=True)
            self.console.print(f"  [dim]about {left / 60:.0f} min left here[/dim]" if left > 30 else "")
            yield outcome

    def run(self, case: Case, turn: int = 1) -> Outcome:
        """Run a case once."""
        directory = Path(tempfile.mkdtemp(dir=self.root, prefix=f"{case.system}-"))
        result, self._measured = directory.with_suffix(".result"), directory.with_suffix(".measured")
        watched = None
        try:
            touch_memory(case.memory_bytes + case.disk_bytes)
            if case.is_watched or case.disk_rate:
                watched = Watched(self.library(), self.root, case.disk_rate)
            error = self._run(case, directory, result, watched)
            if error is None:
                told = msgspec.json.decode(result.read_bytes())
                figures, error = told.get("figures", {}), told.get("error")
                if case.is_watched and error is None:
                    figures["peak_bytes"] = self._peak
                return Outcome(case=case, turn=turn, error=error, figures=figures)
            return Outcome(case=case, turn=turn, error=error)
        except RuntimeError as cannot:
            return Outcome(case=case, turn=turn, error=str(cannot))
        finally:
            with signals_held():
                self._end_descendants()
                if watched:
                    watched.close()
                shutil.rmtree(directory, ignore_errors=True)
                for path in self.root.glob(f"{directory.name}.*"):
                    path.unlink()
                os.sync()  # what removing costs is not for the next one to pay

    def library(self) -> Path:
        if self._library is None:
            self._library = build_library(self.root)
        return self._library

    def _run(self, case: Case, directory: Path, result: Path, watched: Watched | None) -> str | None:
        """None, or why there is no result."""
        encoded = msgspec.json.encode(case).decode()
        module = ["-m", "benchmarks.worker", encoded, str(directory), str(result)]
        if case.is_sharded:
            module = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={case.ranks}", *module]
        environment = {
            "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",  # virtual machines may show AMX and forbid it
            **os.environ,
            "BENCH_MEASURED": str(self._measured),
            **(watched.environment if watched else {}),
            "PYTHONPATH": os.pathsep.join([str(_REPOSITORY), str(_REPOSITORY / "src")]),
            "PYTHONWARNINGS": "ignore",
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),  # peers want ninja
        }
        with self.log.open("a") as log:
            log.write(f"\n=== {encoded}\n")
            log.flush()
            process = subprocess.Popen(
                [sys.executable, *module], env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        self._peak = 0
        done = threading.Event()
        sampler = threading.Thread(target=self._sample, args=(process.pid, done), daemon=True)
        if case.is_watched:
            sampler.start()
        limit_s = case.limit_s + (SYSTEMS[case.system].start_s if case.system in SYSTEMS else 0)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return f"{_HANGS}: no result within {limit_s:.0f} s"
        finally:
            done.set()
            if case.is_watched:
                sampler.join()
        if result.exists():
            return None
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"ended with {name} and no result; {self.log.name} has what it printed"

    def _sample(self, pid: int, done: threading.Event) -> None:
        """The memory of a process and its descendants at its peak; pages that several share count once."""
        while not done.wait(_SAMPLE_S) and not self._measured.exists():
            with contextlib.suppress(psutil.Error, OSError):
                tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
                self._peak = max(self._peak, sum(_proportional_bytes(each.pid) for each in tree))

    def _end_descendants(self) -> None:
        """End whatever the last run left, and wait until it is gone."""
        for _ in range(10):  # what one of them has just started is found the next time
            left = set(psutil.Process().children(recursive=True)) - self._others
            if not left:
                return
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(list(left), timeout=10)


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Ctrl-C and its like wait until this is done."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def available_memory() -> int:
    """Bytes that may be used without swapping, in this container if it is one."""
    available = int(psutil.virtual_memory().available)
    with contextlib.suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        available = min(available, limit - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    return available


def touch_memory(size: int) -> None:
    """Use so much memory for a moment, if there is, before a run.

    A virtual machine gives memory that is free back to its host, and the next use of each page waits for the host:
    2.5 s for a GiB on the machine where this was noticed.  Who writes through the page cache would pay for that.
    """
    size = min(size, int(available_memory() * 0.7))
    with contextlib.suppress(OSError, ValueError), mmap.mmap(-1, size, flags=_PRIVATE) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory.madvise(_POPULATE_WRITE)


def _proportional_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def describe(outcome: Outcome) -> str:
    """One run in a few words, for the person who watches."""
    figures = outcome.figures
    if outcome.error:
        return f"cannot: {outcome.error}"
    if not outcome.is_good:
        return "WRONG: what it wrote does not restore bit for bit"
    first = figures["ranks"][0] if isinstance(figures.get("ranks"), list) else figures
    if "loops" in first:
        loops = first["loops"]
        blocked = ", ".join(f"{sum(each['blocked_s']) / max(each['saves'], 1) * 1e3:.3g}" for each in loops)
        return f"blocked {blocked} ms a save"
    if "durable_s" in first:
        return f"durable at {first['bytes'] / min(first['durable_s']) / 1e9:.2f} GB/s at best"
    if "cold_s" in first:
        return f"cold restore at {first['bytes'] / min(first['cold_s']) / 1e9:.2f} GB/s at best"
    if "saving" in first:
        return f"{sum(first['saving']) / sum(first['quiet']):.3f} of the speed without saving"
    return "done"
