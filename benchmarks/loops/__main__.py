"""``python -m benchmarks.loops trainer [--gib 0.5] [--steps 8] [--turns 3] [--directory DIRECTORY]``.

With ``torchrun --standalone --nproc-per-node 2 -m`` in the place of ``python -m``, FSDP2 divides the model.  The ranks
wait for one another, so of each save the slowest rank counts.

A save after every step.  The ways to save take turns in one process, each with a fresh model and a fresh directory; what
a turn has left to write is synced before the next one begins.  The first two steps of a turn are not counted: there
plans are made, and memory is touched for the first time.

save       the call that saves, until it returns
wait       what the next update waits for at stillframe's fence; the others have none
blocked    both
iteration  from the end of one update to the end of the next
end        from the last update until the framework has returned, with the last save; what is ours is durable then, of the
           others nobody calls fsync
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import statistics
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from benchmarks.loops.clock import Clock, Turn, slowest
from benchmarks.loops.wide import Wide
from rich.console import Console
from rich.table import Table
from tests.loops.sharding import allow_fsdp

NO_SAVE = "no save"
T = TypeVar("T")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=["trainer", "accelerate", "lightning", "torchtitan", "megatron", "ray"])
    parser.add_argument("--gib", type=float, default=0.5, help="of a checkpoint: weights, and two moments of each")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="where to write; default: where temporary files go")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    rank, ranks = seat()
    if ranks > 1:
        allow_fsdp()
    loop = importlib.import_module(f"benchmarks.loops.{options.framework}")
    ways = loop.WAYS if ranks == 1 else getattr(loop, "SHARDED", None)
    if ways is None:
        parser.error(f"{options.framework} is measured on one rank")
    found: dict[str, list[Turn]] = {NO_SAVE: [], **{way: [] for way in ways}}
    for _ in range(options.turns):
        for way, turns in found.items():
            os.sync()
            with shared_directory(options.directory) as place:
                with Clock() as clock:
                    loop.train(Wide(options.gib), options.steps, None if way == NO_SAVE else way, place, clock)
                turns.append(slowest(every(clock.turn(place / "_stillframe", rank))))
    size = f"{options.gib:g} GiB" if ranks == 1 else f"{options.gib:g} GiB on {ranks} ranks"
    if rank == 0:
        title = f"{options.framework}, {size}, {options.turns} turns of {options.steps} steps: median (least–most)"
        Console(width=160).print(table(title, found))


def seat() -> tuple[int, int]:
    """This rank, and how many there are."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def every(value: T) -> list[T]:
    """Of all ranks.  A collective."""
    ranks = seat()[1]
    if ranks == 1:
        return [value]
    said: list[Any] = [None] * ranks
    dist.all_gather_object(said, value)
    return said


@contextlib.contextmanager
def shared_directory(above: Path | None) -> Iterator[Path]:
    """Rank 0 makes it, and removes it when all are done with it."""
    with contextlib.ExitStack() as stack:
        made: str | None = None
        if seat()[0] == 0:
            made = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="sf-loop-", dir=above, ignore_cleanup_errors=True)
            )
        path = every(made)[0]
        assert path is not None
        yield Path(path)
        every(None)


def table(title: str, found: dict[str, list[Turn]]) -> Table:
    made = Table(title=title)
    for column in ("", "save, ms", "wait, ms", "blocked, ms", "iteration, s", "end, s"):
        made.add_column(column, justify="right" if column else "left")
    for way, turns in found.items():
        saves = [each for turn in turns for each in turn.saves_s]
        waits = [each for turn in turns for each in turn.waits_s]
        both = [sum(pair) for turn in turns for pair in zip(turn.saves_s, turn.waits_s, strict=True)]
        iterations = [each for turn in turns for each in turn.iterations_s]
        made.add_row(
            way, spread(saves, 1e3), spread(waits, 1e3), spread(both, 1e3), spread(iterations),
            spread([turn.end_s for turn in turns]),
        )  # fmt: skip
    return made


def spread(values: list[float], factor: float = 1) -> str:
    if not values:
        return ""
    middle, least, most = (shown(factor * each) for each in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({least}–{most})"


def shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    main()
