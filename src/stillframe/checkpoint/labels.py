"""Labels: directories that others look for; each is an alias of one save, and appears, complete, after its commit.

``<root>/label-<save>.partial``   every rank puts its files there before it seals
``<root>/<name>``                 the same directory, once the save is committed; or ``<root>/<home>/<name>``
``<root>/latest``                 the name of the newest labelled checkpoint of the branch that asks for that
``<root>/step-…/label.json``      which label a save has, written before its manifest

A name goes to the newest save that asks for it; the save that had it before goes (:mod:`.label_use`).  ``latest`` is
written after the directory has appeared.  A crash in between leaves partial names, which the next run deals with.  A
label that fails never costs the checkpoint.  Only a file system can rename a directory, so only there are labels.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import msgspec

from stillframe.checkpoint.catalog import Catalog
from stillframe.errors import ConfigError, ExistsError, StateError, StorageError
from stillframe.format import limits, names
from stillframe.model import Label, SaveId, check_label_home, check_label_name
from stillframe.store.posix import PosixStore
from stillframe.store.protocol import Missing, NotOurs, Store, read_all
from stillframe.untrusted import decode_json


class Kept(msgspec.Struct, frozen=True):
    """What ``label.json`` in a save's directory, and in the label's own, holds."""

    save: SaveId
    name: str
    is_latest: bool
    files: int | None = None
    """So many it has; ``None``: not known."""
    home: str = ""
    """Where the directory is, seen from the root."""
    root: str = ""
    """The name of the root, where others may have the same home."""

    @property
    def age(self) -> tuple[int, int, int]:
        return age(self.save)

    @property
    def key(self) -> str:
        """Of the label's own ``label.json``, in its home."""
        return f"{self.name}/{names.LABEL}"


class _Alias(msgspec.Struct, frozen=True):
    """The last line of each file: whose alias it is."""

    step: int
    epoch: int
    attempt: int
    rank: int


def read_alias(data: bytes) -> tuple[SaveId, int] | None:
    """Which save, and which rank's part of it, a file of a label stands for; ``None`` if it does not say."""
    try:
        found = decode_json(data.rpartition(b"\n")[2], _Alias)
    except ValueError:
        return None
    save = SaveId(found.step, found.epoch, found.attempt)
    return (save, found.rank) if names.is_id(save) else None


def save_of(directory: str | os.PathLike[str]) -> SaveId | None:
    """Which save a directory is the label of; ``None`` if it is no label.  Raises :class:`StorageError`."""
    kept = kept_in(PosixStore(directory), names.LABEL)
    return None if kept is None else kept.save


# --- a save that has a label -----------------------------------------------------------------


def check_free(catalog: Catalog, label: Label) -> None:
    """Raises :class:`ExistsError` if something that is no label has the name; :class:`ConfigError`."""
    if not isinstance(catalog.store, PosixStore):
        raise ConfigError(f"{catalog.root} is not on a file system: it can have no labels")
    home = home_of(catalog, label.home)
    if home.head(label.name) is not None and kept_in(home, f"{label.name}/{names.LABEL}") is None:
        raise _taken(home, label.name)


def write(catalog: Catalog, save: SaveId, label: Label, rank: int, world_size: int, decides: bool) -> None:
    """This rank's files, durably.  ``decides``: its keeper is the one that will commit.

    Raises: :class:`StorageError`; :class:`ExistsError`; :class:`ConfigError`.
    """
    check_free(catalog, label)
    store, directory = catalog.store, names.label_partial(save)
    alias = msgspec.json.encode(_Alias(save.step, save.epoch, save.attempt, rank))
    for name in label.files:
        store.put(f"{directory}/{name}", label.content + b"\n" + alias)
    for name, content in label.contents:
        store.put(f"{directory}/{name}", content)
    if decides:
        is_alone = world_size == 1 or catalog.rank is not None
        count = len(label.names) if is_alone else label.total
        root = os.path.basename(store.where()) if label.home else ""
        kept = msgspec.json.encode(Kept(save, label.name, label.is_latest, count, label.home, root))
        store.put(f"{directory}/{names.LABEL}", kept)
        store.put(names.key(save, names.LABEL), kept)
    if label.segment:
        assert isinstance(store, PosixStore)
        store.link(names.key(save, names.segment(rank)), f"{directory}/{label.segment}")


def publish(catalog: Catalog, save: SaveId) -> None:
    """The save is committed: let its label appear.  For the keeper that commits.

    Raises: :class:`StorageError`: the next run tries again; :class:`ExistsError`, :class:`StateError`: it is given up.
    """
    kept = kept_in(catalog.store, names.key(save, names.LABEL))
    if kept is None or kept.save != save:
        raise StateError(f"{catalog.store.where(names.key(save, names.LABEL))} is gone")
    try:
        _appear(catalog, kept)
    except (ExistsError, StateError):
        discard(catalog, save)
        raise
    if kept.is_latest:
        point_to_newest(catalog)


def discard(catalog: Catalog, save: SaveId) -> None:
    """The label of this save will not appear; best effort."""
    with contextlib.suppress(StorageError):
        catalog.store.delete([names.key(save, names.LABEL)])
    with contextlib.suppress(StorageError):
        _delete_directory(catalog.store, names.label_partial(save))


def settle(catalog: Catalog, save: SaveId) -> None:
    """Of a save whose keeper has died: its label appears if it is a checkpoint, and is removed if it is none.

    Best effort: what cannot be determined stays for the next run.
    """
    with contextlib.suppress(StorageError, ExistsError, StateError):
        if not isinstance(catalog.store, PosixStore) or not any(catalog.store.list(names.label_partial(save))):
            return
        if catalog.is_committed(save):
            publish(catalog, save)
        else:
            discard(catalog, save)


def _appear(catalog: Catalog, kept: Kept) -> None:
    """Raises: :class:`StorageError`; :class:`StateError` if it lacks files; :class:`ExistsError`."""
    store, directory = catalog.store, names.label_partial(kept.save)
    assert isinstance(store, PosixStore)
    home = home_of(catalog, kept.home)
    listed = list(store.list(directory))
    if (unfinished := [f"{directory}/{name}" for name in listed if names.is_unfinished(name)]) != []:
        store.delete(unfinished)  # of a keeper that died
    count = len(listed) - len(unfinished) - (names.LABEL in listed)
    if names.LABEL not in listed or (kept.files is not None and count != kept.files):
        raise StateError(f"{store.where(directory)} has {count} files of {kept.files}")
    if home.head(kept.name) is not None:
        other = kept_in(home, kept.key)
        if other is None or (other.name, other.root) != (kept.name, kept.root):
            raise _taken(home, kept.name)
        if other.age > kept.age:
            raise ExistsError(f"{home.where(kept.name)} is the label of a later save, {other.save}")
        home.rename(kept.name, names.label_partial(other.save), into=store)
        store.rename(directory, kept.name, into=home)
        _delete_directory(store, names.label_partial(other.save))
    else:
        store.rename(directory, kept.name, into=home)


def _taken(home: PosixStore, name: str) -> ExistsError:
    return ExistsError(f"{home.where(name)} exists, and is no label of this root: choose another name, or remove it")


# --- latest ----------------------------------------------------------------------------------


def point_to_newest(catalog: Catalog) -> None:
    """``latest`` names the newest checkpoint of the branch that has a label which asks for that; goes if there is none.

    Raises :class:`StorageError`.
    """
    latest = _latest(catalog)
    wanted = next(_candidates(catalog), None)
    if wanted is not None and wanted != latest:
        catalog.store.put(names.LATEST, wanted.encode())
    elif wanted is None and latest is not None:
        catalog.store.delete([names.LATEST])


def follow_branch(catalog: Catalog) -> None:
    """After the branch has changed: ``latest`` must not name what is not on it.

    What somebody else wrote there stays, and so does the choice of an earlier checkpoint of the branch.
    Raises :class:`StorageError`.
    """
    latest = _latest(catalog)
    if latest is None:
        return
    try:
        check_label_name(latest)
    except ConfigError:
        return
    kept = kept_in(catalog.store, f"{latest}/{names.LABEL}")
    if kept is None and catalog.store.head(latest) is not None:
        return
    if kept is None or not catalog.look().branch.has(kept.save) or not catalog.is_committed(kept.save):
        point_to_newest(catalog)


def _latest(catalog: Catalog) -> str | None:
    try:
        return read_all(catalog.store, names.LATEST, limits.MAX_NOTE_BYTES).decode(errors="replace").strip()
    except (Missing, NotOurs):
        return None


def _candidates(catalog: Catalog) -> Iterator[str]:
    """The labels of the branch that ask for ``latest`` and have appeared, the newest first."""
    for save in catalog.committed():
        kept = kept_in(catalog.store, names.key(save, names.LABEL))
        if kept is not None and kept.is_latest and kept_in(catalog.store, kept.key) == kept:
            yield kept.name


# --- what others have left -------------------------------------------------------------------


def finish(catalog: Catalog, epoch: int) -> None:
    """Deal with labels that earlier epochs left unfinished: those of checkpoints appear, others are removed.

    For rank 0.  Raises :class:`StorageError`.
    """
    entries = list(catalog.store.list())
    catalog.store.delete([name for name in entries if names.is_unfinished_latest(name)])
    found = [names.parse_label_partial(name.rstrip("/")) for name in entries]
    has_appeared = False
    for save in sorted(save for save in found if save is not None and save.epoch < epoch):
        with contextlib.suppress(StorageError):  # it stays for the next run: nobody can tell whether it is wanted
            kept = kept_in(catalog.store, names.key(save, names.LABEL))
            if kept is not None and kept.save == save and catalog.is_committed(save):
                with contextlib.suppress(ExistsError, StateError):
                    _appear(catalog, kept)
                    has_appeared = has_appeared or kept.is_latest
                    continue
            discard(catalog, save)
    if has_appeared:
        point_to_newest(catalog)
    else:
        follow_branch(catalog)


def publish_committed(catalog: Catalog) -> None:
    """Let the labels of checkpoints appear that a crash has prevented.  For one that has the root to himself, and has
    no save under way.  Raises :class:`StorageError`."""
    found = [names.parse_label_partial(name.rstrip("/")) for name in catalog.store.list()]
    for save in sorted(save for save in found if save is not None):
        if catalog.is_committed(save):
            with contextlib.suppress(ExistsError, StateError):
                publish(catalog, save)


def age(save: SaveId) -> tuple[int, int, int]:
    """Of two labels of one name, the save with the greater one has it."""
    return save.epoch, save.step, save.attempt


def remove(catalog: Catalog, save: SaveId) -> None:
    """The label of a save that is set aside goes with it; best effort.

    Only the directory that was made for it: one of the same name that somebody has put there stays.
    """
    if not isinstance(catalog.store, PosixStore):
        return  # there are none: nothing is asked
    with contextlib.suppress(StorageError):
        if catalog.store.head(names.key(save, names.LABEL)) is None:  # the usual case; deleting costs an fsync
            _delete_directory(catalog.store, names.label_partial(save))
            return
        kept = kept_in(catalog.store, names.key(save, names.LABEL))
        home = catalog.store if kept is None else home_of(catalog, kept.home)
        if kept is not None and kept_in(home, kept.key) == kept:
            if kept.is_latest and _latest(catalog) == kept.name:
                point_to_newest(catalog)  # before: it never names what is gone
            _delete_directory(home, kept.name)
    discard(catalog, save)


def _delete_directory(store: Store, directory: str) -> None:
    """With ``label.json`` last: until then it can be told whose it is."""
    listed = [name for name in store.list(directory) if not name.endswith("/")]
    store.delete([f"{directory}/{name}" for name in listed if name != names.LABEL])
    store.delete([f"{directory}/{names.LABEL}", f"{directory}/"])


def home_of(catalog: Catalog, home: str) -> PosixStore:
    """The store that a label's directory is in."""
    store = catalog.store
    assert isinstance(store, PosixStore)
    return PosixStore(os.path.normpath(f"{store.where()}/{home}"), calls=store.calls) if home else store


def kept_in(store: Store, key: str) -> Kept | None:
    """What a ``label.json`` holds; ``None`` if it cannot be read as one.  Raises :class:`StorageError`: cannot tell."""
    try:
        kept = decode_json(read_all(store, key, limits.MAX_NOTE_BYTES), Kept)
        check_label_name(kept.name)
        check_label_home(kept.home)
    except (Missing, NotOurs, ValueError):  # ValueError: no such JSON, or a name that is none
        return None
    return kept
