"""One directory of checkpoints, as Lightning sees it: a name in it stands for a save in the root that lies there.

A name that Lightning has removed, or points a link away from, goes once a save that was requested before is committed,
so that a crash finds the old one or the new one.  Exactly one side deletes: the keeper, at our request.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Collection
from typing import Any

import torch

from stillframe import Catalog, Save, spi
from stillframe.errors import ExistsError, NotFoundError, StillframeError, StorageError, UnsupportedStateError
from stillframe.integrations.frameworks import agreed
from stillframe.integrations.pickled import to_leaves
from stillframe.open_roots import Admission, How, OpenRoot, admitting, close_root, find_root, seat
from stillframe.store import files

logger = logging.getLogger("stillframe")

ROOT = "_stillframe"
SHARDED = "sharded"
"""In the metadata of a save: the keys of what is divided among the ranks, a line each."""
_MAX_COPIES = 2


class Directory:
    """Thread: :meth:`save` and :meth:`close` the training thread's, the rest any."""

    def __init__(self, path: str, how: How) -> None:
        self.path, self.root, self._how = path, os.path.join(path, ROOT), how
        self._lock = threading.Lock()
        self._live: list[tuple[spi.LiveState, Save]] = []
        self._opened: OpenRoot | None = None
        self._newest: Save | None = None
        self._requested: dict[str, Save] = {}
        """By name, those that are not committed; failed ones, too."""
        self._doomed: dict[str, tuple[int, int]] = {}
        """Names to remove: the step of each, and that which has to be committed first."""
        self._new_links: dict[str, str] = {}
        """Those that wait for a commit."""

    @functools.cached_property
    def _links(self) -> dict[str, str]:
        """What points where, by name."""
        return {name: to for name, to in files.links_in(self.path).items() if wanted(name) is None}

    def save(self, name: str, checkpoint: dict[str, Any], sharded: Collection[str] | None = None) -> Save:
        """Request it.  The name appears when it is committed.

        ``sharded``: the keys of what is divided among the ranks.  If given, all ranks save together: each calls it,
        with a dict of its own.  Else this rank saves alone.
        Raises: :class:`ExistsError`, :class:`UnsupportedStateError`, :class:`BusyError`, :class:`StorageError`.
        """
        label, step = spi.Label(name, home=".."), checkpoint.get("global_step")
        least = step if isinstance(step, int) and step >= 0 else 0
        rank, ranks = (0, 1) if sharded is None else seat()
        with contextlib.ExitStack() as stack:

            def admit() -> Admission:
                self._make_way(name)
                return stack.enter_context(admitting(self.root, ranks, self._how, least=least))

            admission = (admit() if sharded is None else agreed(admit)).of(rank)
            self._opened = stack.enter_context(admission.enter(self.root, self._how))
            live = self._free_copies()
            state = live.state(_storable(checkpoint, sharded))
            told = {SHARDED: "\n".join(sorted(sharded))} if sharded else None
            save = self._opened.save(admission.ticket, state, label=label, metadata=told)
        self._live.append((live, save))
        with self._lock:
            self._newest = self._requested[name] = save
            self._doomed.pop(name, None)  # the new save takes the name over, and the old one goes
        save.then(self._committed)
        return save

    def _make_way(self, name: str) -> None:
        """A link of this name goes.  Raises :class:`ExistsError` for a file."""
        path = os.path.join(self.path, name)
        if name in self._links:
            self.remove(name)
        elif files.kind_of(path) == "file":
            raise ExistsError(f"{path} is a file that Lightning wrote: remove it, or give another dirpath or name")

    @property
    def _is_live(self) -> bool:
        """Another root may have taken its place; then all that was requested is committed or has failed."""
        return find_root(self.root) is self._opened

    def _free_copies(self) -> spi.LiveState:
        """One whose last state has been staged, since its copies are used again; else a new one, or wait."""
        for each in self._live:
            if each[1].phase != "captured":
                self._live.remove(each)
                return each[0]
        if len(self._live) < _MAX_COPIES:
            return spi.LiveState(by_optimizers=True)  # Lightning's averages of weights change when an epoch ends
        live, save = self._live.pop(0)
        with contextlib.suppress(StillframeError):
            save.wait("staged")
        return live

    def _committed(self, save: Save) -> None:
        """Thread: that of the commits.  Links first: what they pointed to may be among those that go."""
        with self._lock:
            names = {name for name, each in self._requested.items() if each.phase == "committed"}
            for name in names:
                del self._requested[name]
            ready = {link: to for link, to in self._new_links.items() if to not in self._requested}
            for link, to in ready.items():
                files.point(os.path.join(self.path, link), to)
                files.remove_link(os.path.join(self.path, _wish(link)))
                self._links[link] = to
                del self._new_links[link]
            going = {
                name: step
                for name, (step, after) in self._doomed.items()
                if after <= save.step and name not in self._links.values()
            }
        if going and self._opened is not None:
            spi.remove(self._opened.run, list(going.values()), force=True)
            with self._lock:
                for name, step in going.items():
                    if self._doomed.get(name, (None,))[0] == step:
                        del self._doomed[name]

    def forget(self, name: str) -> None:
        """Who asked for it was told that it is not saved."""
        with self._lock:
            self._requested.pop(name, None)

    def has(self, name: str) -> bool:
        """Whether it will be there; not whether it is."""
        with self._lock:
            save = self._requested.get(name)
            return save is not None and save.error is None

    def remove(self, name: str) -> bool:
        """Whether it is one of ours, which then goes."""
        path = os.path.join(self.path, name)
        if self._links.pop(name, None) is not None or name in self._new_links:
            self._new_links.pop(name, None)
            files.remove_link(path)
            return True
        with self._lock:
            save = self._requested.pop(name, None)
            known = spi.save_of(path) if save is None else None
            step = save.step if save is not None else known.step if known is not None else None
            newest = self._newest if self._is_live else None
            if step is None:
                return False
            if newest is not None:
                self._doomed[name] = step, newest.step
        if newest is not None:
            newest.then(self._committed)
        else:
            with contextlib.suppress(NotFoundError):
                Catalog(self.root).delete(step, force=True)
        return True

    def link(self, name: str, to: str) -> None:
        """Have a name point to another one, when that is there."""
        if name not in self._links and spi.save_of(os.path.join(self.path, name)) is not None:
            self.remove(name)
        with self._lock:
            self._new_links[name] = to
            newest = self._newest if self._is_live else None
        if newest is None:
            files.point(os.path.join(self.path, name), to)
        else:
            files.point(os.path.join(self.path, _wish(name)), to)
            newest.then(self._committed)

    def wait(self) -> dict[str, StillframeError]:
        """Until everything that was requested is committed or has failed.  Returns why, by name."""
        with self._lock:
            requested = dict(self._requested)
        for save in requested.values():
            with contextlib.suppress(StillframeError):
                save.wait()
        return {name: save.error for name, save in requested.items() if save.error is not None}

    def failed_here(self) -> dict[int, str]:
        """Why this rank has no part of a save, by step.  Blocks until it has sealed the others."""
        with self._lock:
            requested = dict(self._requested)
        for save in requested.values():
            with contextlib.suppress(StillframeError):
                save.wait("sealed")
        return {save.step: str(save.error) for save in requested.values() if save.error is not None}

    def failed_elsewhere(self, failed: dict[int, str]) -> None:
        """These steps fail here, too, without waiting for the word of the rank that has failed."""
        with self._lock:
            going = [save for save in self._requested.values() if save.step in failed and save.error is None]
        for save in going:
            if self._is_live and self._opened is not None:
                spi.withdraw(self._opened.run, spi.Ticket(save.step, save.attempt), StorageError(failed[save.step]))

    def finish(self) -> dict[str, StillframeError]:
        """As :meth:`wait`; and what was removed is gone then."""
        failed = self.wait()
        if self._newest is not None and self._newest.phase == "committed" and self._doomed and self._is_live:
            try:
                self._committed(self._newest)
            except StillframeError as error:
                logger.warning("what Lightning has removed from %s stays for now: %s", self.path, error)
        return failed

    def close(self) -> None:
        """After :meth:`finish`."""
        close_root(self.root)


def _storable(checkpoint: dict[str, Any], sharded: Collection[str] | None) -> Any:
    """What is stored of Lightning's dict.  ``sharded``: keys of what goes back into live objects, so it stays as it is.

    Raises: :class:`UnsupportedStateError`, with path and type.
    """

    def leaf(path: tuple[Any, ...], value: Any) -> Any:
        if sharded is not None and path and path[0] in sharded:
            return value
        if sharded is not None and isinstance(value, torch.Tensor) and hasattr(value, "device_mesh"):
            raise UnsupportedStateError(
                f"{spi.path_text(path)} is a {type(value).__name__}: only {', '.join(sharded)} may hold such"
            )
        return to_leaves(value, None, path)

    return spi.mapped(checkpoint, leaf)


def _wish(name: str) -> str:
    """The name of a link that says what another one is to point to; if we are killed before, the next run does it."""
    return f".{name}.next"


def wanted(name: str) -> str | None:
    return name[1:-5] if name.startswith(".") and name.endswith(".next") else None
