"""The checkpointers behind integrations whose own objects come and go with every save."""

from __future__ import annotations

import os
from dataclasses import dataclass

import stillframe
from stillframe.errors import ConfigError


@dataclass
class Run:
    """A root that is open for saving, and the number of its next step."""

    root: str
    rank: int
    world_size: int
    checkpointer: stillframe.Checkpointer
    next_step: int

    def take_step(self, step: int | None) -> int:
        """The step of a save: the one given, or the next; the same on every rank."""
        step = self.next_step if step is None else step
        self.next_step = max(self.next_step, step + 1)
        return step

    def close(self) -> None:
        """Wait until everything is committed; may be called again.  Raises: the error of a save that failed."""
        if _runs.get(os.getpid()) is self:
            del _runs[os.getpid()]
        self.checkpointer.close()


_runs: dict[int, Run] = {}
"""At most one, of this process: a keeper and an arena belong to it."""


def open_run(root: str | os.PathLike[str], rank: int, world_size: int, arena: int | str = "auto") -> Run:
    """The run that saves to this root; one that saves to another is finished first.

    Blocks, the first time, until every rank is here and the keeper of a run before has finished.
    """
    path = os.path.abspath(os.fspath(root))
    run = _runs.get(os.getpid())
    if run is not None and (run.root, run.rank, run.world_size) == (path, rank, world_size):
        return run
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank} of {world_size}")
    if run is not None:
        run.close()
    # "warn": whoever asked for the save waits for it, and is told.
    checkpointer = stillframe.Checkpointer(
        path, arena=arena, rank=rank, world_size=world_size, on_error="warn", shared=True
    )
    try:
        run = Run(path, rank, world_size, checkpointer, checkpointer.next_step())
    except BaseException:
        checkpointer.close()
        raise
    _runs[os.getpid()] = run
    return run
