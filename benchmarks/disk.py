"""The disk as the benchmarks see it: raw rates to compare with, cold reads, and a slower disk for all systems alike."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from stillframe.model import BLOCK_BYTES, CHUNK_BYTES
from stillframe.store.blob import aligned_buffer
from stillframe.units import round_up

_THREADS = 3


def random_chunk() -> memoryview:
    buffer = aligned_buffer(CHUNK_BYTES)
    buffer.write(os.urandom(CHUNK_BYTES))
    return memoryview(buffer)


def write_raw(path: Path, size: int, data: memoryview, is_over: bool = False) -> float:
    """Seconds of a plain O_DIRECT writer of one thread, fsync included; to a new file, or over an old one."""
    if not is_over:
        path.unlink(missing_ok=True)
    began = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_DIRECT | (0 if is_over else os.O_CREAT), 0o666)
    try:
        os.posix_fallocate(fd, 0, size)
        for at in range(0, size, CHUNK_BYTES):
            os.pwrite(fd, data[: round_up(min(CHUNK_BYTES, size - at), BLOCK_BYTES)], at)
        os.ftruncate(fd, size)
        os.fsync(fd)
    finally:
        os.close(fd)
    return time.perf_counter() - began


def read_raw(path: Path, size: int) -> float:
    """Seconds of a plain O_DIRECT reader with a few threads, into buffers of its own."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    buffers = [memoryview(aligned_buffer(CHUNK_BYTES)) for _ in range(_THREADS)]

    def read(thread: int) -> None:
        for at in range(thread * CHUNK_BYTES, size, _THREADS * CHUNK_BYTES):
            os.preadv(fd, [buffers[thread][: round_up(min(CHUNK_BYTES, size - at), BLOCK_BYTES)]], at)

    began = time.perf_counter()
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(read, range(_THREADS)))
    seconds = time.perf_counter() - began
    os.close(fd)
    return seconds


def drop_caches(directory: Path) -> str:
    """Make the next reads of what is in ``directory`` cold; returns how."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
        return "page cache dropped"
    except OSError:
        for path in directory.rglob("*"):
            if path.is_file():
                fd = os.open(path, os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)
        return "posix_fadvise(DONTNEED) on every file"


@dataclass(frozen=True)
class Written:
    """What the processes of one run did to the disk."""

    bytes: int
    file_syncs: int
    directory_syncs: int


def written() -> Written | None:
    """What was written so far in the run that this process belongs to, if that is counted."""
    page = os.environ.get("BENCH_DISK")
    return Written(*struct.unpack("QQQ", Path(page).read_bytes()[:24])) if page else None


class Watched:
    """Counts what a run writes and makes durable, and slows it to a rate; :file:`disk.c` says how."""

    def __init__(self, library: Path, directory: Path, rate: float | None) -> None:
        fd, path = tempfile.mkstemp(prefix="stillframe-bench-disk-")
        os.write(fd, bytes(32))
        os.close(fd)
        self.page = Path(path)
        self.environment = {
            "LD_PRELOAD": str(library),
            "BENCH_DISK": str(self.page),
            "BENCH_DISK_DEVICE": str(directory.stat().st_dev),
            **({"BENCH_DISK_RATE": str(rate)} if rate else {}),
        }

    def close(self) -> None:
        self.page.unlink(missing_ok=True)


def build_library(into: Path) -> Path:
    """Compile :file:`disk.c`."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise RuntimeError("no C compiler: install gcc to count fsyncs and to emulate a slower disk")
    library = into / "disk.so"
    source = Path(__file__).with_name("disk.c")
    command = [compiler, "-O2", "-Wall", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    built = subprocess.run(command, check=False, capture_output=True, text=True)
    if built.returncode:
        raise RuntimeError(f"{source.name} does not compile: {built.stderr.strip().splitlines()[-1:]}")
    return library
