"""For code that saves through stillframe inside somebody else's loop (DCP, DeepSpeed): tickets.

A ``Checkpointer`` takes the step from its caller, who counts alike on every rank.  A loop that does not number its
saves cannot promise that: saves overlap, or fail on one rank.  But it brings the ranks together once for each save, and
there one rank issues a ticket::

    ticket = spi.issue(checkpointer)                    # on one rank, which sends it to all
    spi.save(checkpointer, state, ticket)               # on every rank

A save under a ticket is exactly one save: ranks with different tickets write to different directories, and a ticket is
used once.  A rank that got one and will not save says so with :func:`withdraw`.

Nor need the ranks meet to begin a run: one begins it, and sends its name with the tickets; the others :func:`join` it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from stillframe.checkpoint.labels import read_alias
from stillframe.checkpointer import Checkpointer
from stillframe.errors import StillframeError
from stillframe.model import Label, Ticket, check_step
from stillframe.retention import Keep
from stillframe.save.fence import Holds, OptimizerFence
from stillframe.save.saves import Save

__all__ = ["Run", "Ticket", "UpdateGate", "issue", "join", "read_alias", "save", "settle", "withdraw"]


class Run(Checkpointer):
    """A checkpointer whose ranks never talk to one another; for saving only, in a root that they share.

    What a ``Checkpointer``'s ranks agree on when they make it, the caller sends: ``name``.
    """

    _ranks_talk = False

    def __init__(self, root: str | os.PathLike[str], name: str, **options: Any) -> None:
        self.name = name
        super().__init__(root, on_error="warn", shared=True, **options)  # "warn": who asked for a save waits for it

    def _name_run(self, keep: Keep | None) -> str:
        return self.name


def join(
    root: str | os.PathLike[str],
    name: str | None = None,
    *,
    rank: int,
    world_size: int,
    arena: int | str = "auto",
    keep: Keep | None = None,
) -> Run:
    """Open a root for saves with tickets.  Without a ``name``: begin a run, on rank 0; the others join it by its name.

    Never waits for another rank.  Failed saves are logged.  Raises: :class:`ConfigError`, :class:`KeeperError`.
    """
    return Run(root, name or secrets.token_hex(4), rank=rank, world_size=world_size, arena=arena, keep=keep)


def issue(checkpointer: Checkpointer, step: int | None = None, *, least: int = 0) -> Ticket:
    """On one rank: the identity of the next save, for every rank.  Without ``step``: the next, and not below ``least``.

    Blocks until the root is ours; the keeper of a run that was just killed may be finishing there.
    Raises: :class:`BusyError`; :class:`ExistsError` if the step is a checkpoint, or being saved; :class:`StorageError`.
    """
    checkpointer._lifetime.check_open("issue")
    checkpointer._keeper.wait_ready()
    checkpointer._keeper.start_epoch()  # ranks that save before this one, or when it fails, wait for nothing
    return checkpointer._steps.issue(None if step is None else check_step(step), least)


def save(
    checkpointer: Checkpointer,
    state: Any,
    ticket: Ticket,
    *,
    metadata: Mapping[str, Any] | None = None,
    label: Label | None = None,
) -> Save:
    """As ``Checkpointer.save``, under the identity of the ticket.

    Raises also: :class:`ExistsError` if this rank has used the ticket before.  If it raises, the other ranks are told.
    """
    checkpointer._lifetime.check_open("save")
    return checkpointer._saver.save(ticket, state, metadata, label)


def withdraw(checkpointer: Checkpointer, ticket: Ticket, error: BaseException) -> None:
    """Give the ticket up: its step is free for another attempt.  Never blocks for another rank.

    A rank that has not begun to save tells the others, which then need not wait.  A save that has begun ends as it may.
    """
    if not checkpointer._steps.withdraw(ticket):
        checkpointer._saver.give_up(ticket.step, ticket.attempt, error)


def settle(checkpointer: Checkpointer) -> None:
    """Block until the root is ours, and everything that was saved here is committed or has failed.

    Raises: :class:`BusyError` if another run trains there; :class:`KeeperError`.
    """
    checkpointer._keeper.wait_ready()
    with contextlib.suppress(StillframeError):  # whoever asked for the save is told
        checkpointer.wait("committed")


class UpdateGate:
    """Holds back every optimizer's update in this process, for saves that another thread has yet to request.

    ``fence`` is called after a wait, before the update: it waits for what has been requested meanwhile.
    """

    def __init__(self, fence: Callable[[], None]) -> None:
        self._fence = fence
        self._holds = Holds()
        self._owner_pid = os.getpid()
        self._hook = OptimizerFence(self.wait)

    @property
    def is_ours(self) -> bool:
        """Not in a forked child: the threads that would release it do not exist there."""
        return os.getpid() == self._owner_pid

    def hold(self, hint: str) -> Callable[[], None]:
        """From now on, until the function returned is called.  After a while a wait is mentioned, with the ``hint``."""
        return self._holds.add(hint)

    def wait(self) -> None:
        """Block until nothing is held."""
        if self.is_ours and self._holds.wait():
            self._fence()
