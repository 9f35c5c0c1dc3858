"""Labels: directories that others look for, which appear, complete, when their step is committed.

``<root>/label-<step>-<attempt>.partial``   every rank puts its files there before it seals
``<root>/<name>``                           the same directory, once the step is committed
``<root>/latest``                           the name, if it asks for that
``<root>/step-…/label.json``                which label a step has, written before its manifest

A crash right after a commit leaves the partial name; the next run's sweep finishes it.  Only a file system can rename a
directory, so only there are labels.
"""

from __future__ import annotations

import contextlib

import msgspec

from stillframe.checkpoint.catalog import Catalog
from stillframe.errors import ConfigError, ExistsError, StillframeError, StorageError
from stillframe.format import limits, names
from stillframe.model import Label, check_label_name
from stillframe.store.posix import PosixStore
from stillframe.store.protocol import Missing, NotOurs, read_all


class _Kept(msgspec.Struct, frozen=True):
    """What ``label.json`` in a step's directory holds."""

    name: str
    is_latest: bool


def check_free(catalog: Catalog, label: Label) -> None:
    if not isinstance(catalog.store, PosixStore):
        raise ConfigError(f"{catalog.root} is not on a file system: it can have no labels")
    if catalog.store.head(label.name) is not None:
        where = catalog.store.where(label.name)
        raise ExistsError(f"{where} exists already: choose another name, or remove it first")


def write(catalog: Catalog, step: int, attempt: str, label: Label, decides: bool) -> None:
    """This rank's files, durably.  ``decides``: its keeper is the one that will commit.

    Raises :class:`StorageError`.
    """
    store, directory = catalog.store, names.label_partial(step, attempt)
    for name in label.files:
        store.put(f"{directory}/{name}", label.content)
    if decides:
        kept = _Kept(label.name, label.is_latest)
        store.put(f"{directory}/{names.LABEL}", _mark(step, attempt, kept))
        store.put(catalog.key(step, names.LABEL), msgspec.json.encode(kept))


def publish(catalog: Catalog, step: int, attempt: str, label: Label | _Kept) -> None:
    """The step is committed: let the label appear.  For the keeper that commits.  Raises :class:`StorageError`."""
    assert isinstance(catalog.store, PosixStore)
    if label.is_latest:  # first: what a crash prevents from here on, the next run finishes
        catalog.store.put(names.LATEST, label.name.encode())
    catalog.store.rename(names.label_partial(step, attempt), label.name)


def discard(catalog: Catalog, step: int, attempt: str) -> None:
    """The step will not be committed; best effort."""
    with contextlib.suppress(StorageError):
        catalog.store.delete([catalog.key(step, names.LABEL)])
    with contextlib.suppress(StorageError):
        _delete_directory(catalog, names.label_partial(step, attempt))


def finish(catalog: Catalog, attempt: str) -> None:
    """Deal with labels that earlier runs left unfinished: those of committed steps appear, others are removed.

    For rank 0, which holds the lock of the root.
    """
    entries = list(catalog.store.list())
    catalog.store.delete([name for name in entries if names.is_unfinished_latest(name)])
    found = [names.parse_label_partial(name.rstrip("/")) for name in entries]
    for step, its_attempt in sorted(each for each in found if each is not None and each[1] != attempt):
        with contextlib.suppress(StorageError):  # it stays for the next run: nobody can tell whether it is wanted
            kept = _kept(catalog, step)
            if kept is not None and _attempt_of(catalog, step) == its_attempt:
                publish(catalog, step, its_attempt, kept)
            else:
                discard(catalog, step, its_attempt)


def remove(catalog: Catalog, step: int) -> None:
    """The step's label goes with it, before its manifest; best effort.

    Only the directory that was made for it: one of the same name that somebody has put there stays.
    """
    with contextlib.suppress(StorageError):
        kept = _kept(catalog, step)
        if kept is not None:
            mark = read_all(catalog.store, f"{kept.name}/{names.LABEL}", limits.MAX_FAILURE_BYTES)
            if mark == _mark(step, _attempt_of(catalog, step), kept):
                _delete_directory(catalog, kept.name)


def _delete_directory(catalog: Catalog, directory: str) -> None:
    files = [f"{directory}/{name}" for name in catalog.store.list(directory) if not name.endswith("/")]
    catalog.store.delete([*files, f"{directory}/"])


def _mark(step: int, attempt: str, kept: _Kept) -> bytes:
    return msgspec.json.encode({"step": step, "attempt": attempt, "name": kept.name, "is_latest": kept.is_latest})


def _kept(catalog: Catalog, step: int) -> _Kept | None:
    """The label of a step; ``None`` if it has none that can be read.  Raises :class:`StorageError`: cannot tell."""
    try:
        data = read_all(catalog.store, catalog.key(step, names.LABEL), limits.MAX_FAILURE_BYTES)
        kept = msgspec.json.decode(data, type=_Kept)
        check_label_name(kept.name)
    except (Missing, NotOurs, ValueError):  # ValueError: msgspec's own, text that is not UTF-8, a name that is none
        return None
    return kept


def _attempt_of(catalog: Catalog, step: int) -> str:
    """Of the commit; empty if there is none.  Raises :class:`StorageError`: cannot tell."""
    try:
        return catalog.manifest(step).attempt
    except StorageError:
        raise
    except StillframeError:
        return ""
