"""Real runs under strace: every call by which trainers and keepers change files, and every message between them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

SOURCE = Path(__file__).resolve().parents[3]
CALLS = (
    "open,openat,openat2,creat,mkdir,mkdirat,rmdir,unlink,unlinkat,rename,renameat,renameat2,link,linkat,symlink,"
    "symlinkat,write,pwrite64,writev,pwritev,pwritev2,sendfile,copy_file_range,splice,truncate,ftruncate,fallocate,"
    "fsync,fdatasync,sync_file_range,syncfs,sync,socketpair,sendmsg"
)
LONGEST_BYTES = 4 << 20
"""Of what is written by one call: all of it is in the trace."""
RUN_S = 240.0
LIVES = 10


@dataclass(frozen=True)
class Run:
    """The words of :mod:`.trainee`, and whether it ends by itself."""

    words: str
    ends: bool = True


ALONE = (
    Run("save:5"),
    Run("restore burst:3 settle save:3 burst:2 leave", ends=False),
    Run("restore save:4 burst:2 die", ends=False),
    Run("restore save:3 rewind:1 save:3"),
    Run("restore save:2 burst:2 keeper settle save:3"),
    Run("restore save:2 restore:1 save:3 burst:1 die", ends=False),
    Run("restore save:3 rewind:1 burst:2 leave", ends=False),
    Run("restore burst:4 settle save:2"),
)
"""On one root, one after the other."""
BRIEF = (Run("save:3 rewind:1 save:2 burst:1 die", ends=False),)
TOGETHER = (
    Run("save:4"),
    Run("restore save:2 burst:2 leave", ends=False),
    Run("restore save:3 burst:2 die", ends=False),
    Run("restore save:3 rewind:1 save:3"),
    Run("restore save:2 burst:2 1/die", ends=False),
    Run("restore save:2 restore:1 save:3"),
)
"""With two ranks."""


@cache
def why_not() -> str:
    """Why nothing can be recorded here; empty if it can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    try:
        command = ["strace", "-f", "--seccomp-bpf", "-o", "/dev/null", "true"]
        done = subprocess.run(command, capture_output=True, timeout=30)
    except subprocess.TimeoutExpired:
        return "strace hangs here"
    return "" if done.returncode == 0 else f"strace may not trace here: {done.stderr.decode().strip()[-200:]}"


def record(place: Path, runs: Sequence[Run], ranks: int = 1, seed: int = 0) -> list[Path]:
    """The traces of these runs on the root ``place/top/root``.  Raises ``AssertionError`` if one went another way."""
    (place / "top").mkdir()
    return [_record(place, number, run, ranks, seed + number) for number, run in enumerate(runs)]


def listing(trace: Path) -> Path:
    """The file that lists what was there when the run of this trace was over: a path within ``top`` in each line."""
    return trace.with_name(f"{trace.name}-there")


def _record(place: Path, number: int, run: Run, ranks: int, seed: int) -> Path:
    trace = place / f"trace-{number}"
    command = ["strace", "-f", "-ttt", "-y", "-xx", "-s", str(LONGEST_BYTES), "--seccomp-bpf"]
    command += ["-e", f"trace={CALLS}", "-e", "signal=none", "-o", str(trace), sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command += ["--monitor-interval", "0.1"]
    command += ["-m", "tests.torture.power_cut.trainee", str(place / "top" / "root"), str(number * LIVES), str(seed)]
    env = {**os.environ, "PYTHONPATH": f"{SOURCE / 'src'}:{SOURCE}", "OMP_NUM_THREADS": "1"}
    with open(place / f"output-{number}", "w+") as output:
        process = subprocess.Popen([*command, *run.words.split()], stdout=output, stderr=output, env=env, cwd=place)
        try:
            status = process.wait(RUN_S)
        except BaseException:
            started = psutil.Process(process.pid)
            for each in [*started.children(recursive=True), started]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            process.wait()
            raise
        output.seek(0)
        assert (status == 0) == run.ends, f"{run.words!r} has ended with {status}:\n{output.read()[-6000:]}"
    top = place / "top"
    listing(trace).write_text("".join(f"{each.relative_to(top)}\n" for each in sorted(top.rglob("*"))))
    return trace
