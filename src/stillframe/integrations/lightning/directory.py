"""One directory of checkpoints, as Lightning sees it: a name in it stands for a save in the root that lies there.

A name that Lightning has removed, or points a link away from, goes once a save that was requested before is committed,
so that a crash finds the old one or the new one.  Exactly one side deletes: the keeper, at our request.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any

from stillframe import Catalog, Save, spi
from stillframe.errors import ExistsError, NotFoundError, StillframeError
from stillframe.integrations.pickled import to_torch_saved, torch_loaded
from stillframe.open_roots import How, OpenRoot, admitting, close_root, find_root
from stillframe.store import files, root_address

ROOT = "_stillframe"
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
        self._links = {name: to for name, to in files.links_in(path).items() if _wanted(name) is None}
        """What points where, by name."""
        self._new_links: dict[str, str] = {}
        """Those that wait for a commit."""

    def save(self, name: str, checkpoint: dict[str, Any]) -> Save:
        """Request it.  The name appears when it is committed.

        Raises: :class:`ExistsError`, :class:`UnsupportedStateError`, :class:`BusyError`, :class:`StorageError`.
        """
        label, step = spi.Label(name, home=".."), checkpoint.get("global_step")
        path = os.path.join(self.path, name)
        if name in self._links:
            self.remove(name)
        elif files.kind_of(path) == "file":
            raise ExistsError(f"{path} is a file that Lightning wrote: remove it, or give another dirpath or name")
        live = self._free_copies()
        state = live.state(spi.mapped(checkpoint, to_torch_saved))
        least = step if isinstance(step, int) and step >= 0 else 0
        with (
            admitting(self.root, 1, self._how, least=least) as (admission,),
            admission.enter(self.root, self._how) as self._opened,
        ):
            save = self._opened.save(admission.ticket, state, label=label)
        self._live.append((live, save))
        with self._lock:
            self._newest = self._requested[name] = save
            self._doomed.pop(name, None)  # the new save takes the name over, and the old one goes
        save.then(self._committed)
        return save

    @property
    def _is_live(self) -> bool:
        """Another root may have taken its place; then all that was requested is committed or has failed."""
        return find_root(root_address(self.root)) is self._opened

    def _free_copies(self) -> spi.LiveState:
        """One whose last state has been staged, since its copies are used again; else a new one, or wait."""
        for each in self._live:
            if each[1].phase != "captured":
                self._live.remove(each)
                return each[0]
        if len(self._live) < _MAX_COPIES:
            return spi.LiveState()
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

    def close(self) -> dict[str, StillframeError]:
        failed = self.wait()
        if self._newest is not None and self._doomed and self._is_live:
            self._newest.then(self._committed)
        close_root(root_address(self.root))
        return failed


def _wish(name: str) -> str:
    """The name of a link that says what another one is to point to; if we are killed before, the next run does it."""
    return f".{name}.next"


def _wanted(name: str) -> str | None:
    return name[1:-5] if name.startswith(".") and name.endswith(".next") else None


def settle(path: str) -> None:
    """Block until the keeper of a run that was killed has committed what it holds here; then move that run's links.

    Every rank may call it.  Raises :class:`StorageError`.
    """
    spi.wait_finished(os.path.join(path, ROOT))
    links = files.links_in(path)
    for wish, to in links.items():
        name = _wanted(wish)
        if name is not None and links.get(name) != to and spi.save_of(os.path.join(path, to)) is not None:
            files.point(os.path.join(path, name), to)


def find(path: str) -> tuple[str, Any] | None:
    """The root, and the save that a path stands for; ``None`` if it is not of ours.  Raises :class:`StorageError`."""
    if "://" in path or files.kind_of(path) != "directory":
        return None
    place = files.real_path(path)
    save = spi.save_of(place)
    return None if save is None else (os.path.join(os.path.dirname(place), ROOT), save)


def read(path: str, found: tuple[str, Any], map_location: Any, weights_only: bool | None) -> Any:
    """The checkpoint, verified; a part that only pickle can hold as ``torch.load`` takes it with ``weights_only``.

    Raises: :class:`NotFoundError`, :class:`IntegrityError`, :class:`UnsupportedStateError`.
    """
    root, save = found
    try:
        state = spi.load_rank(root, save, 0)
    except NotFoundError as error:
        raise NotFoundError(f"{path} refers to {save} in {root}: was it moved without its root? ({error})") from error
    return spi.mapped(state, lambda at, value: torch_loaded(at, value, map_location, weights_only))
