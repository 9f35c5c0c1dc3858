"""The roots that integrations have open for saving: DCP makes a writer, DeepSpeed names a directory, for every save."""

from __future__ import annotations

import os
import threading
from typing import Any

import torch.distributed as dist

import stillframe
from stillframe.integrations.live import LiveState


class OpenRoot:
    """A root that is open for saving.  Thread: any."""

    def __init__(self, root: str, rank: int, world_size: int, arena: int | str, keep: Any) -> None:
        self.root, self.seat = root, (rank, world_size)
        # "warn": whoever asked for the save waits for it, and is told.
        self.checkpointer = stillframe.Checkpointer(
            root, arena=arena, keep=keep, rank=rank, world_size=world_size, on_error="warn", shared=True
        )
        self.live = LiveState()
        self.lazy: set[threading.Event] = set()
        """An event per lazy save under way, set at its end; until then the root stays open and the next save waits."""
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


_open: dict[str, OpenRoot] = {}
_known: set[str] = set()
_owner = os.getpid()
_opening = threading.RLock()


def seat() -> tuple[int, int]:
    """This process among the ranks of torch.distributed, or alone."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def open_root(
    root: str | os.PathLike[str],
    rank: int,
    world_size: int,
    arena: int | str = "auto",
    keep: Any = None,
) -> OpenRoot:
    """This root, open for saving.

    Other roots are closed first, since each holds memory for a whole state; but a root that comes back (two models
    that take turns) stays open beside the other.

    Blocks, if the root was not open, until every rank opens it and the keeper of an earlier run has finished.
    Raises: :class:`BusyError`, if that run still trains.
    """
    global _owner
    path = os.path.abspath(os.fspath(root))
    with _opening:
        if _owner != os.getpid():  # a fork: what is open is the parent's
            _open.clear()
            _owner = os.getpid()
        opened = _open.pop(path, None)
        if opened is not None and opened.seat != (rank, world_size):
            opened.checkpointer.close()
            opened = None
        if opened is None:
            idle = [each for each in _open.values() if not each.lazy]
            for other in idle[: -1 if path in _known else None]:
                _open.pop(other.root).checkpointer.close()
            opened = OpenRoot(path, rank, world_size, arena, keep)
            _known.add(path)
        _open[path] = opened  # the last used comes last
        return opened


def close_root(root: str) -> None:
    """Finish the saves to this root and close it, if it is open."""
    with _opening:
        opened = _open.pop(root, None)
        if opened is not None and _owner == os.getpid():
            opened.checkpointer.close()
