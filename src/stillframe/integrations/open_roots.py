"""The roots that integrations have open for saving: DCP makes a writer, DeepSpeed names a directory, for every save.

For each save one rank decides (:func:`admitting`): it opens the root, or finds it open, and issues a ticket.  Whoever
brings the ranks together carries that to the others, which come in by it (:meth:`Admission.enter`).  So ranks never
wait for one another here, whatever roots each has open, and whichever of them fails.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch.distributed as dist

import stillframe
from stillframe import spi
from stillframe.errors import BusyError, ConfigError, StillframeError
from stillframe.store import root_address
from stillframe.store.files import kind_of

logger = logging.getLogger("stillframe")

_MAX_LIVE = 2
_ALONE = "Where all ranks save together, only rank 0 can save alone, too"
_IN_USE_S = 600.0
"""So long a save waits for one of other ranks to the same root: as long as ranks wait for one another."""


@dataclass(frozen=True)
class How:
    """How a root is opened.  Each rank has its own: what is secret in it is sent to nobody."""

    arena: int | str = "auto"
    keep: Any = None
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)


class OpenRoot:
    """A root that is open for saving.  Thread: any."""

    def __init__(self, root: str, run: spi.Run, seat: tuple[int, int], how: How) -> None:
        self.root, self.run, self.seat, self._how = root, run, seat, how
        self.users = 0
        """Those who need it open now."""
        self._saving = threading.Lock()

    def save(
        self,
        ticket: spi.Ticket,
        state: Any,
        label: spi.Label | None = None,
        since: spi.Versions | None = None,
    ) -> stillframe.Save:
        """From one thread at a time."""
        with self._saving:
            return spi.save(self.run, state, ticket, label=label, since=since)

    @property
    def is_idle(self) -> bool:
        """Closing it waits for nobody.  A save that is sealed here may wait for other ranks yet."""
        return not self.users and not self.run.stats().in_flight

    def fits(self, run: str | None, seat: tuple[int, int]) -> bool:
        return self.seat == seat and run in (None, self.run.name)

    def check(self, how: How) -> None:
        """Raises :class:`ConfigError` if something is asked for that this root is not open with; a default asks for
        nothing."""
        for each in fields(How):
            has, value = getattr(self._how, each.name), getattr(how, each.name)
            if value not in (has, each.default):
                both = f"{each.name}={has!r}, and cannot have {each.name}={value!r} too"
                raise ConfigError(
                    f"{self.root} is open in this process with {both if each.repr else f'other {each.name}'}: give the "
                    "same everywhere, or close the writer in between"
                )


class _Roots:
    """Those of this process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.changed = threading.Condition()  # its lock is reentrant: a round may end wherever garbage is collected
        self.open: dict[str, OpenRoot] = {}
        """The last used comes last."""
        self.changing: dict[str, OpenRoot | None] = {}
        """Being opened, or closed (that one).  It may take a while, so it is done without the lock."""
        self.known: set[str] = set()
        self.live: OrderedDict[str, spi.LiveState] = OrderedDict()

    def take_out(self, leaving: list[OpenRoot]) -> None:
        """From here on nobody uses them.  Under the lock; then :meth:`close`, without it; then :meth:`changes_end`."""
        for each in leaving:
            self.changing[each.root] = self.open.pop(each.root)

    def close(self, leaving: list[OpenRoot]) -> None:
        """Blocks until their saves are committed or have failed, which costs nobody else's save."""
        for each in leaving:
            try:
                each.run.close()
            except StillframeError as error:
                logger.warning("while closing %s: %s", each.root, error)

    def changes_end(self, *paths: str) -> None:
        with self.changed:
            for path in paths:
                self.changing.pop(path, None)
            self.changed.notify_all()


_roots = _Roots()


def _here() -> _Roots:
    global _roots
    if _roots.pid != os.getpid():  # a fork: what is open is the parent's
        _roots = _Roots()
    return _roots


@dataclass(frozen=True)
class Admission:
    """One rank's part in one save."""

    root: str
    run: str
    ticket: spi.Ticket
    rank: int
    world_size: int

    @contextlib.contextmanager
    def enter(self, root: str, how: How) -> Iterator[OpenRoot]:
        """The root, open for this save until the ``with`` ends.  ``root``: as this rank names it.

        Raises: :class:`ConfigError` if another rank names another root, or the root is open with other options;
        :class:`BusyError`.
        """
        if root_address(root) != self.root:
            raise ConfigError(f"the ranks differ: rank 0 saves to {self.root}, rank {self.rank} to {root}")
        opened = _enter(self.root, self.run, (self.rank, self.world_size), how)
        try:
            yield opened
        finally:
            _leave(opened)

    def withdraw(self, error: BaseException, how: How | None = None) -> bool:
        """Tell the others that this rank will not save.  ``how``: if need be, open the root for that.

        Returns whether they are told.
        """
        opened = find_root(self.root)
        if opened is None and how is None:
            return False
        if opened is None:
            opened = _enter(self.root, self.run, (self.rank, self.world_size), how or How())
            _leave(opened)
        if opened.run.name == self.run:  # else rank 0 has closed that run long ago
            spi.withdraw(opened.run, self.ticket, error)
        return True


def seat() -> tuple[int, int]:
    """This process among the ranks of torch.distributed, or alone."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


@contextlib.contextmanager
def admitting(
    root: str | os.PathLike[str],
    world_size: int,
    how: How,
    *,
    step: int | None = None,
    least: int = 0,
) -> Iterator[list[Admission]]:
    """On rank 0: open the root if it is not, and issue a ticket: every rank's admission.

    The root stays open for it until the ``with`` ends: nobody here can take it for a save of other ranks in between.

    Blocks, if the root was not open, until the keeper of an earlier run has finished there; and while a save of other
    ranks to it is under way in this process.
    Raises: :class:`BusyError` if that run still trains; :class:`ConfigError` if it is open with other options;
    :class:`ExistsError`; :class:`StorageError`.
    """
    path = root_address(root)
    opened = _enter(path, None, (0, world_size), how)
    try:
        try:
            ticket = spi.issue(opened.run, step, least=least)
        except BusyError as error:
            is_alone = world_size == 1 < seat()[1]
            raise BusyError(f"{error}. {_ALONE}" if is_alone else str(error)) from None
        yield [Admission(path, opened.run.name, ticket, rank, world_size) for rank in range(world_size)]
    finally:
        _leave(opened)


def _enter(path: str, run: str | None, seat: tuple[int, int], how: How) -> OpenRoot:
    """This root, open in this run (``None``: in any), and counted as used.

    Other roots are closed first, since each holds memory for a whole state; but a root that comes back (two models
    that take turns) stays open beside the other, and so does one that is used.
    """
    roots = _here()
    with roots.changed:

        def is_free() -> bool:
            opened = roots.open.get(path)
            return path not in roots.changing and (opened is None or not opened.users or opened.fits(run, seat))

        if not roots.changed.wait_for(is_free, _IN_USE_S):
            raise BusyError(f"another save to {path}, of other ranks, has been under way for {_IN_USE_S:g} s")
        opened = roots.open.get(path)
        if opened is not None and opened.fits(run, seat):
            opened.check(how)
            roots.open[path] = roots.open.pop(path)
            opened.users += 1
            return opened
        idle = [each for each in roots.open.values() if each is not opened and each.is_idle]
        leaving = idle[: -1 if path in roots.known else None] + ([] if opened is None else [opened])
        roots.take_out(leaving)
        roots.changing.setdefault(path)
    try:
        roots.close(leaving)
        rank, world_size = seat
        options = {each.name: getattr(how, each.name) for each in fields(How)}
        opened = OpenRoot(path, spi.join(path, run, rank=rank, world_size=world_size, **options), seat, how)
        opened.users = 1
        with roots.changed:
            roots.open[path] = opened
            roots.known.add(path)
        return opened
    finally:
        roots.changes_end(path, *(each.root for each in leaving))


def _leave(opened: OpenRoot) -> None:
    roots = _here()
    with roots.changed:
        opened.users -= 1
        roots.changed.notify_all()


def find_root(root: str | os.PathLike[str]) -> OpenRoot | None:
    """This root, if this process has it open."""
    return _here().open.get(root_address(root))


def settle_root(root: str | os.PathLike[str], world_size: int, how: How) -> None:
    """On rank 0: block until what was saved to this root, here or by a run before, is committed or has failed.

    A root that was not open is closed again: whoever only reads keeps no other run from saving there.  Where another
    run trains, nothing is waited for: its keepers are alive, and publish.
    Raises: :class:`StorageError`, :class:`KeeperError`, :class:`ConfigError`.
    """
    path = root_address(root)
    opened = find_root(path)
    if opened is not None:
        spi.settle(opened.run)
        return
    if kind_of(path) != "directory" or not spi.has_saves(path):
        return
    opened = _enter(path, None, (0, world_size), how)
    try:
        spi.settle(opened.run)
        spi.show_labels(path)
    except BusyError:
        pass
    finally:
        _leave(opened)
        _close_those(lambda each: each is opened and not each.users)


def close_root(root: str) -> None:
    """Finish the saves to this root and close it, if it is open."""
    _close_those(lambda each: each.root == root)


def close_unused_roots() -> None:
    """Finish the saves to the roots that nobody here uses any more, and close them.  Blocks."""
    _close_those(lambda each: not each.users)


def _close_those(chosen: Callable[[OpenRoot], bool]) -> None:
    roots = _here()
    with roots.changed:
        leaving = [each for each in roots.open.values() if chosen(each)]
        roots.take_out(leaving)
    try:
        roots.close(leaving)
    finally:
        roots.changes_end(*(each.root for each in leaving))


def fence() -> None:
    """Wait until everything that was requested in this process has been copied."""
    roots = _here()
    with roots.changed:
        found = [*roots.open.values(), *roots.changing.values()]
    for each in found:
        if each is not None:
            each.run.fence()


def live_state(root: str | os.PathLike[str]) -> spi.LiveState:
    """Makes the states of saves to this root.  Only behind a :func:`fence`: the copies of the one before are reused."""
    path, roots = root_address(root), _here()
    with roots.changed:
        live = roots.live.pop(path, None) or spi.LiveState()
        roots.live[path] = live
        while len(roots.live) > _MAX_LIVE:
            roots.live.popitem(last=False)
        return live
