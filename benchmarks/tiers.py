"""What carrying a checkpoint on costs: ``python -m benchmarks.tiers [--gib 1] [--turns 5] [--s3]``.

1. From directory to directory, beside a raw O_DIRECT copy of the same bytes.
2. With ``--s3``: to a real S3 server on this machine (the tests' own, Ceph's gateway) and back, beside obstore, boto3
   and s3torchconnector (:mod:`benchmarks.objects`).  ``--nagle``: with a gateway as it is set up by default, which
   answers most small requests 40 ms late.  ``--only-s3``: nothing else.
3. Training beside promotion at full rate: iteration and blocked time per save, with and without a tier.

Turns alternate; medians and all ratios come from one run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from benchmarks import objects
from benchmarks.disk import drop_caches
from benchmarks.objects import AT_ONCE, timed
from rich.console import Console

from stillframe import Catalog, Checkpointer, KeepLast, Tier
from stillframe.checkpoint.promote import promote
from stillframe.model import CHUNK_BYTES
from stillframe.store.blob import aligned_buffer
from stillframe.units import GIB, round_up

_BLOCK = 4096
_WIDTH, _STEPS = 1024, 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--s3", action="store_true")
    parser.add_argument("--only-s3", action="store_true")
    parser.add_argument("--nagle", action="store_true")
    parser.add_argument("--root", type=Path, default=None, help="where to write; by default in the temporary directory")
    options = parser.parse_args()
    console = Console()
    home = Path(tempfile.mkdtemp(prefix="sf-tiers-", dir=options.root))
    try:
        state = {"w": torch.randn(int(options.gib * GIB) // 4)}
        with Checkpointer(home / "root") as checkpointer:
            checkpointer.save(1, state).wait()
        if not options.only_s3:
            directories(console, home, options.turns)
        if options.s3 or options.only_s3:
            with objects.server(is_prompt=not options.nagle) as ceph:
                objects.compare(console, ceph, home, state, options.turns)
        del state
        if not options.only_s3:
            training(console, home, options.turns)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _say(
    console: Console, name: str, nbytes: int, ours: list[tuple[float, float]], raw: list[tuple[float, float]]
) -> None:
    one, other = (statistics.median(seconds for seconds, _ in each) for each in (ours, raw))
    ratio = statistics.median(b / a for (a, _), (b, _) in zip(ours, raw, strict=True))
    cpu = statistics.median(seconds for _, seconds in ours) / (nbytes / GIB)
    console.print(
        f"{name}: {nbytes / GIB / one:.2f} GiB/s; raw {nbytes / GIB / other:.2f} GiB/s; ratio {ratio:.2f} "
        f"(medians of {len(ours)}); {cpu:.2f} CPU s per GiB",
        highlight=False,
    )  # fmt: skip


# --- directory to directory --------------------------------------------------------------------


def _copy(source: Path, target: Path) -> None:
    """Several threads, O_DIRECT on both sides, fsync: nothing is verified."""
    size = source.stat().st_size
    reading = os.open(source, os.O_RDONLY | os.O_DIRECT)
    writing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    os.posix_fallocate(writing, 0, size)

    def work(thread: int) -> None:
        buffer = memoryview(aligned_buffer(CHUNK_BYTES))
        for at in range(thread * CHUNK_BYTES, size, AT_ONCE * CHUNK_BYTES):
            count = round_up(min(CHUNK_BYTES, size - at), _BLOCK)
            os.preadv(reading, [buffer[:count]], at)
            os.pwrite(writing, buffer[:count], at)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(work, range(AT_ONCE)))
    os.ftruncate(writing, size)
    os.fsync(writing)
    os.close(reading)
    os.close(writing)


def directories(console: Console, home: Path, turns: int) -> None:
    source = Catalog(home / "root")
    save = source.newest()
    assert save is not None
    segment = next((home / "root").glob("step-*/rank-*.safetensors"))
    ours, raw = [], []
    for _ in range(turns):
        drop_caches(home)
        ours.append(timed(lambda: promote(source, Catalog(home / "tier"), save)))
        shutil.rmtree(home / "tier")
        drop_caches(home)
        raw.append(timed(lambda: _copy(segment, home / "copy")))
        (home / "copy").unlink()
    _say(console, "directory to directory", segment.stat().st_size, ours, raw)


# --- training beside it ------------------------------------------------------------------------


def training(console: Console, home: Path, turns: int) -> None:
    """A step that computes on one core; a save of about 100 MiB at each step, carried on to the tier as fast as it goes."""
    torch.set_num_threads(1)
    found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for _ in range(turns):
        for has_tier in (False, True):
            found[has_tier].append(_train(home, has_tier))
    plain, tiered = ([statistics.median(column) for column in zip(*found[each], strict=True)] for each in (False, True))
    console.print(
        f"training: iteration {plain[0] * 1e3:.1f} ms, beside promotion {tiered[0] * 1e3:.1f} ms "
        f"(ratio {tiered[0] / plain[0]:.3f}); blocked per save {plain[1] * 1e3:.2f} and {tiered[1] * 1e3:.2f} ms",
        highlight=False,
    )


def _train(home: Path, has_tier: bool) -> tuple[float, float]:
    """Median seconds of an iteration, and blocked seconds per save."""
    model = torch.nn.Sequential(*(torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    tiers = [Tier(home / "train-tier", keep=KeepLast(1))] if has_tier else []
    times = []
    with Checkpointer(home / "train", keep=KeepLast(2), tiers=tiers) as checkpointer:
        for step in range(1, _STEPS + 1):
            began = time.perf_counter()
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.randn(256, _WIDTH)).square().mean().backward()
            optimizer.step()
            checkpointer.save(step, {"model": model, "optimizer": optimizer})
            times.append(time.perf_counter() - began)
        stats = checkpointer.stats()
    shutil.rmtree(home / "train")
    shutil.rmtree(home / "train-tier", ignore_errors=True)
    return statistics.median(times[5:]), stats.blocked_s / stats.saves


if __name__ == "__main__":
    main()
