"""Roots that are open for saving: each once in a process, shared by everyone here who saves to it.

For loops that name a place at every save, such as DCP's and DeepSpeed's.  For each save one rank decides
(:func:`admitting`): it opens the root, or finds it open, and issues a ticket.  Whoever brings the ranks together
carries that to the others, which come in by it (:meth:`Admission.enter`).  So ranks never wait for one another here,
whatever roots each has open, and whichever of them fails.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch.distributed as dist

from stillframe import spi
from stillframe.errors import BusyError, ConfigError, StillframeError
from stillframe.save.saves import Save
from stillframe.store import root_address
from stillframe.store.files import kind_of

logger = logging.getLogger("stillframe")

Seat = tuple[int, int]
"""A rank, and the number of those that save together."""
_ALONE = "Where all ranks save together, only rank 0 can save alone, too"
_IN_USE_S = 600.0
"""So long a save waits for one of other ranks to the same root: as long as ranks wait for one another."""
_REMEMBERED = 8


@dataclass(frozen=True)
class How:
    """How a root is opened.  Each rank has its own: what is secret in it is sent to nobody."""

    arena: int | str = "auto"
    keep: Any = None
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)


class OpenRoot:
    """A root that is open for saving.  Thread: any."""

    def __init__(self, path: str, run: spi.Run, seat: Seat, how: How) -> None:
        self.path, self.run, self._seat, self._how = path, run, seat, how
        self.users = 0
        """Those who need it open now."""
        self._saving = threading.Lock()

    def save(self, ticket: spi.Ticket, state: Any, **more: Any) -> Save:
        """As ``spi.save``; from one thread at a time."""
        with self._saving:
            return spi.save(self.run, state, ticket, **more)

    @property
    def is_idle(self) -> bool:
        """Closing it waits for nobody.  A save that is sealed here may wait for other ranks yet."""
        return not self.users and not self.run.stats().in_flight

    @property
    def is_first(self) -> bool:
        """Here the run began, and only here can it end: nobody else can begin one while this root is open."""
        return self._seat[0] == 0

    def fits(self, run: str | None, seat: Seat) -> bool:
        return self._seat == seat and run in (None, self.run.name)

    def check(self, how: How) -> None:
        """Raises :class:`ConfigError` if something is asked for that this root is not open with; a default asks for
        nothing."""
        for each in fields(How):
            has, value = getattr(self._how, each.name), getattr(how, each.name)
            if value not in (has, each.default):
                both = f"{each.name}={has!r}, and cannot have {each.name}={value!r} too"
                raise ConfigError(
                    f"{self.path} is open in this process with {both if each.repr else f'other {each.name}'}: give the "
                    "same everywhere, or close the writer in between"
                )


class _Roots:
    """Those of this process."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """In a forked child: what is open is the parent's."""
        self.changed = threading.Condition()  # its lock is reentrant: a save may end wherever garbage is collected
        self.open: dict[str, OpenRoot] = {}
        """The last used comes last."""
        self.changing: dict[str, OpenRoot | None] = {}
        """Being opened, or closed (that one).  It may take a while, so it is done without the lock."""
        self.recent: deque[str] = deque(maxlen=_REMEMBERED)

    def take_out(self, leaving: list[OpenRoot]) -> None:
        """From here on nobody uses them.  Under the lock; then :meth:`close`, without it."""
        for each in leaving:
            self.changing[each.path] = self.open.pop(each.path)

    def close(self, leaving: list[OpenRoot]) -> None:
        """Blocks until their saves are committed or have failed, which costs nobody else's save."""
        for each in leaving:
            try:
                each.run.close()
            except StillframeError as error:
                logger.warning("while closing %s: %s", each.path, error)

    def changes_end(self, *paths: str) -> None:
        with self.changed:
            for path in paths:
                self.changing.pop(path, None)
            self.changed.notify_all()


_roots = _Roots()
os.register_at_fork(after_in_child=_roots.forget)


@dataclass(frozen=True)
class Admission:
    """One rank's part in one save."""

    path: str
    run: str
    ticket: spi.Ticket
    rank: int
    world_size: int

    def of(self, rank: int) -> Admission:
        """Another rank's part in the same save."""
        return replace(self, rank=rank)

    @contextlib.contextmanager
    def enter(self, root: str | os.PathLike[str], how: How) -> Iterator[OpenRoot]:
        """The root, open for this save until the ``with`` ends.  ``root``: as this rank names it.

        If the block raises, and this rank has not saved, the others are told.
        Raises: :class:`ConfigError` if another rank names another root, or the root is open with other options;
        :class:`BusyError`.
        """
        if root_address(root) != self.path:
            raise ConfigError(f"the ranks differ: rank 0 saves to {self.path}, rank {self.rank} to {root}")
        with _using(self.path, self.run, (self.rank, self.world_size), how) as opened, _redeeming(opened, self.ticket):
            yield opened


@contextlib.contextmanager
def admitting(
    root: str | os.PathLike[str], world_size: int, how: How, *, step: int | None = None, least: int = 0
) -> Iterator[Admission]:
    """On rank 0: open the root if it is not, and issue a ticket: its own admission, which makes those of the others.

    The root stays open for it until the ``with`` ends: nobody here can take it for a save of other ranks in between.
    If the block raises, the save is given up, also if all ranks have sealed it, unless it is committed already.

    Blocks, if the root was not open, until the keeper of an earlier run has finished there; and while a save of other
    ranks to it is under way in this process.
    Raises: :class:`BusyError` if that run still trains; :class:`ConfigError` if it is open with other options;
    :class:`ExistsError`; :class:`StorageError`.
    """
    path = root_address(root)
    with _using(path, None, (0, world_size), how) as opened:
        try:
            ticket = spi.issue(opened.run, step, least=least)
        except BusyError as error:
            is_alone = world_size == 1 < seat()[1]
            raise BusyError(f"{error}. {_ALONE}" if is_alone else str(error)) from None
        with _redeeming(opened, ticket):
            yield Admission(path, opened.run.name, ticket, 0, world_size)


@contextlib.contextmanager
def _redeeming(opened: OpenRoot, ticket: spi.Ticket) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        spi.withdraw(opened.run, ticket, error)
        raise


@contextlib.contextmanager
def _using(path: str, run: str | None, seat: Seat, how: How) -> Iterator[OpenRoot]:
    """This root, open in this run (``None``: in any).

    Other roots are closed first, since each holds memory for a whole state; but a root that comes back (two models
    that take turns) stays open beside the other, and so does one that is used.
    """
    opened = _enter(path, run, seat, how)
    try:
        yield opened
    finally:
        with _roots.changed:
            opened.users -= 1
            _roots.changed.notify_all()


def _enter(path: str, run: str | None, seat: Seat, how: How) -> OpenRoot:
    with _roots.changed:

        def is_free() -> bool:
            opened = _roots.open.get(path)
            return path not in _roots.changing and (opened is None or not opened.users or opened.fits(run, seat))

        if not _roots.changed.wait_for(is_free, _IN_USE_S):
            raise BusyError(f"another save to {path}, of other ranks, has been under way for {_IN_USE_S:g} s")
        opened = _roots.open.get(path)
        if opened is not None and opened.fits(run, seat):
            opened.check(how)
            _roots.open[path] = _roots.open.pop(path)
            opened.users += 1
            return opened
        idle = [each for each in _roots.open.values() if each is not opened and each.is_idle]
        leaving = idle[: -1 if path in _roots.recent else None] + ([] if opened is None else [opened])
        _roots.take_out(leaving)
        _roots.changing.setdefault(path)
    try:
        _roots.close(leaving)
        opened = OpenRoot(path, spi.Run(path, run, rank=seat[0], world_size=seat[1], **vars(how)), seat, how)
        opened.users = 1
        with _roots.changed:
            _roots.open[path] = opened
            _roots.recent.append(path)
        return opened
    finally:
        _roots.changes_end(path, *(each.path for each in leaving))


def settle_root(root: str | os.PathLike[str], how: How) -> None:
    """On rank 0: block until what was saved to this root, here or by a run before, is committed or has failed.

    A root that was not open is closed again: whoever only reads keeps no other run from saving there.  Where another
    run trains, nothing is waited for: its keepers are alive, and publish.
    Raises: :class:`StorageError`, :class:`KeeperError`, :class:`ConfigError`.
    """
    path = root_address(root)
    opened = find_root(path)
    if opened is not None:
        spi.settle(opened.run)
    elif kind_of(path) == "directory" and spi.has_saves(path):
        try:
            with _using(path, None, (0, seat()[1]), how) as opened, contextlib.suppress(BusyError):
                spi.settle(opened.run)
                spi.show_labels(path)
        finally:
            close_roots(lambda each: each is opened and not each.users)


def close_roots(chosen: Callable[[OpenRoot], bool]) -> None:
    """Finish the saves to these roots, and close them.  Blocks."""
    with _roots.changed:
        leaving = [each for each in _roots.open.values() if chosen(each)]
        _roots.take_out(leaving)
    try:
        _roots.close(leaving)
    finally:
        _roots.changes_end(*(each.path for each in leaving))


def close_root(root: str | os.PathLike[str]) -> None:
    """Finish the saves to this root and close it, if it is open."""
    path = root_address(root)
    close_roots(lambda each: each.path == path)


def find_root(root: str | os.PathLike[str]) -> OpenRoot | None:
    """This root, if this process has it open."""
    return _roots.open.get(root_address(root))


def fence() -> None:
    """Wait until everything that was requested in this process has been copied."""
    with _roots.changed:
        found = [*_roots.open.values(), *_roots.changing.values()]
    for each in found:
        if each is not None:
            each.run.fence()


def seat() -> Seat:
    """This process among the ranks of torch.distributed, or alone."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)
