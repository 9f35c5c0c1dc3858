"""The roots that integrations have open for saving: DCP makes a writer, DeepSpeed names a directory, for every save.

For each save one rank decides (:func:`admit`): it opens the root, or finds it open, and issues a ticket.  Whoever
brings the ranks together carries that to the others, which come in by it (:meth:`Admission.enter`).  So ranks never
wait for one another here, whatever roots each has open, and whichever of them fails.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

import stillframe
from stillframe import spi
from stillframe.errors import BusyError, ConfigError
from stillframe.integrations.live import LiveState

_MAX_LIVE = 2


class OpenRoot:
    """A root that is open for saving.  Thread: any."""

    def __init__(self, root: str, run: spi.Run, seat: tuple[int, int]) -> None:
        self.root, self.run, self.seat = root, run, seat
        self.users = 0
        """Saves that need it open."""
        self._saving = threading.Lock()

    def save(self, ticket: spi.Ticket, state: Any, label: stillframe.Label | None = None) -> stillframe.Save:
        """From one thread at a time."""
        with self._saving:
            return spi.save(self.run, state, ticket, label=label)


_open: dict[str, OpenRoot] = {}
_known: set[str] = set()
_live: OrderedDict[str, LiveState] = OrderedDict()
_owner = os.getpid()
_opening = threading.RLock()


@dataclass(frozen=True)
class Admission:
    """One rank's part in one save."""

    root: str
    run: str
    ticket: spi.Ticket
    rank: int
    world_size: int

    @contextlib.contextmanager
    def enter(self, root: str, arena: int | str = "auto", keep: Any = None) -> Iterator[OpenRoot]:
        """The root, open for this save until the ``with`` ends.  ``root``: as this rank names it.

        Raises: :class:`ConfigError` if another rank names another root; :class:`BusyError`.
        """
        if os.path.abspath(root) != self.root:
            raise ConfigError(f"the ranks differ: rank 0 saves to {self.root}, rank {self.rank} to {root}")
        opened = _enter(self.root, self.run, (self.rank, self.world_size), arena, keep)
        try:
            yield opened
        finally:
            with _opening:
                opened.users -= 1

    def withdraw(self, error: BaseException, may_join: bool) -> bool:
        """Tell the others that this rank will not save.  ``may_join``: if need be, open the root for that.

        Returns whether they are told.
        """
        opened = find_root(self.root)
        if opened is None and not may_join:
            return False
        if opened is None:
            opened = _enter(self.root, self.run, (self.rank, self.world_size), "auto", None)
            opened.users -= 1
        if opened.run.name == self.run:  # else rank 0 has closed that run long ago
            spi.withdraw(opened.run, self.ticket, error)
        return True


def seat() -> tuple[int, int]:
    """This process among the ranks of torch.distributed, or alone."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def admit(
    root: str | os.PathLike[str],
    world_size: int,
    *,
    step: int | None = None,
    least: int = 0,
    arena: int | str = "auto",
    keep: Any = None,
) -> list[Admission]:
    """On rank 0: open the root if it is not, and issue a ticket; returns every rank's admission.

    Blocks, if the root was not open, until the keeper of an earlier run has finished there.
    Raises: :class:`BusyError` if that run still trains; :class:`ExistsError`; :class:`StorageError`.
    """
    path = os.path.abspath(os.fspath(root))
    opened = _enter(path, None, (0, world_size), arena, keep)
    try:
        ticket = spi.issue(opened.run, step, least=least)
    finally:
        with _opening:
            opened.users -= 1
    return [Admission(path, opened.run.name, ticket, rank, world_size) for rank in range(world_size)]


def _enter(path: str, run: str | None, seat: tuple[int, int], arena: int | str, keep: Any) -> OpenRoot:
    """This root, open in this run (``None``: in any), and counted as used.

    Other roots are closed first, since each holds memory for a whole state; but a root that comes back (two models
    that take turns) stays open beside the other, and so does one that is used.
    """
    with _opening:
        _forget_forked()
        opened = _open.get(path)
        if opened is not None and (opened.seat != seat or run not in (None, opened.run.name)):
            if opened.users:
                raise BusyError(f"another save to {path}, of other ranks, is under way: wait for its end")
            _open.pop(path).run.close()
            opened = None
        if opened is None:
            idle = [each for each in _open.values() if not each.users]
            for other in idle[: -1 if path in _known else None]:
                _open.pop(other.root).run.close()
            rank, world_size = seat
            opened = OpenRoot(path, spi.join(path, run, rank=rank, world_size=world_size, arena=arena, keep=keep), seat)
            _known.add(path)
        _open.pop(path, None)
        _open[path] = opened  # the last used comes last
        opened.users += 1
        return opened


def _forget_forked() -> None:
    global _owner
    if _owner != os.getpid():  # a fork: what is open is the parent's
        _open.clear()
        _owner = os.getpid()


def find_root(root: str | os.PathLike[str]) -> OpenRoot | None:
    """This root, if this process has it open."""
    with _opening:
        _forget_forked()
        return _open.get(os.path.abspath(os.fspath(root)))


def settle_root(root: str | os.PathLike[str], world_size: int, arena: int | str = "auto", keep: Any = None) -> None:
    """On rank 0: block until what was saved to this root, here or by a run before, is committed or has failed.

    Raises: :class:`BusyError` if another run trains there.
    """
    path = os.path.abspath(os.fspath(root))
    opened = find_root(path)
    if opened is None:
        opened = _enter(path, None, (0, world_size), arena, keep)
        opened.users -= 1
    spi.settle(opened.run)


def close_root(root: str) -> None:
    """Finish the saves to this root and close it, if it is open."""
    with _opening:
        _forget_forked()
        opened = _open.pop(root, None)
    if opened is not None:
        opened.run.close()


def fence() -> None:
    """Wait until everything that was requested in this process has been copied."""
    with _opening:
        _forget_forked()
        opened = list(_open.values())
    for each in opened:
        each.run.fence()


def live_state(root: str | os.PathLike[str]) -> LiveState:
    """Makes the states of saves to this root.  Only behind a :func:`fence`: the copies of the one before are reused."""
    path = os.path.abspath(os.fspath(root))
    with _opening:
        live = _live.pop(path, None) or LiveState()
        _live[path] = live
        while len(_live) > _MAX_LIVE:
            _live.popitem(last=False)
        return live
