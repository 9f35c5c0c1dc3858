"""The checkpointers behind integrations whose own objects come and go with every save."""

from __future__ import annotations

import os
import threading
from typing import Any

import torch.distributed as dist

import stillframe
from stillframe.integrations.still import Still


class Run:
    """A root that is open for saving.  Thread: any."""

    def __init__(self, root: str, rank: int, world_size: int, arena: int | str, keep: Any) -> None:
        self.root, self.seat = root, (rank, world_size)
        # "warn": whoever asked for the save waits for it, and is told.
        self.checkpointer = stillframe.Checkpointer(
            root, arena=arena, keep=keep, rank=rank, world_size=world_size, on_error="warn", shared=True
        )
        self.still = Still()
        self.lazy: set[threading.Event] = set()
        """Lazy saves under way, each as what is set at its end: the run stays, and the next one waits for them."""
        self._taking, self._saving = threading.Lock(), threading.Lock()
        try:
            self._next_step = self.checkpointer.next_step()
        except BaseException:
            self.checkpointer.close()
            raise

    def save(self, step: int, state: Any, label: stillframe.Label | None = None) -> stillframe.Save:
        """As ``Checkpointer.save``, from one thread at a time."""
        with self._saving:
            return self.checkpointer.save(step, state, label=label)

    def take_step(self, step: int | None = None, least: int = 0) -> int:
        """The step of a save, the same on every rank: the one given, or the next, and not below ``least``."""
        with self._taking:
            step = max(self._next_step, least) if step is None else step
            self._next_step = max(self._next_step, step + 1)
            return step


_runs: dict[str, Run] = {}
_known: set[str] = set()
_owner = os.getpid()
_opening = threading.RLock()


def seat() -> tuple[int, int]:
    """This process among the ranks of torch.distributed, or alone."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def open_run(
    root: str | os.PathLike[str],
    rank: int,
    world_size: int,
    arena: int | str = "auto",
    keep: Any = None,
) -> Run:
    """The run that saves to this root.

    Another root's is finished first, since each holds memory for a whole state; but one that comes back (two models
    that take turns) is kept beside the other.  Blocks, when it opens one, until every rank does, and until the keeper
    of a run before has finished.  Raises: :class:`BusyError`, if that one still trains.
    """
    global _owner
    path = os.path.abspath(os.fspath(root))
    with _opening:
        if _owner != os.getpid():  # a fork: the runs are the parent's
            _runs.clear()
            _owner = os.getpid()
        run = _runs.pop(path, None)
        if run is not None and run.seat != (rank, world_size):
            run.checkpointer.close()
            run = None
        if run is None:
            idle = [each for each in _runs.values() if not each.lazy]
            for other in idle[: -1 if path in _known else None]:
                _runs.pop(other.root).checkpointer.close()
            run = Run(path, rank, world_size, arena, keep)
            _known.add(path)
        _runs[path] = run  # the last used comes last
        return run


def close_run(root: str) -> None:
    """Finish the run that saves to this root, if there is one."""
    with _opening:
        run = _runs.pop(root, None)
        if run is not None and _owner == os.getpid():
            run.checkpointer.close()
