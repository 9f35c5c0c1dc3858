"""Labels: directories that others look for; each is an alias of one save, and appears, complete, after its commit.

``<root>/label-<save>.partial``   every rank puts its files there before it seals
``<root>/<name>``                 the same directory, once the save is committed
``<root>/latest``                 the name of the newest labelled checkpoint of the branch that asks for that
``<root>/step-…/label.json``      which label a save has, written before its manifest

A name goes to the newest save that asks for it; the save that had it before goes (:class:`LabelUse`).  ``latest`` is
written after the directory has appeared.  A crash in between leaves partial names, which the next run deals with.  A
label that fails never costs the checkpoint.  Only a file system can rename a directory, so only there are labels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

import msgspec

from stillframe.checkpoint.catalog import Catalog
from stillframe.errors import ConfigError, ExistsError, StateError, StorageError
from stillframe.format import limits, names
from stillframe.model import Label, SaveId, check_label_name
from stillframe.store.posix import PosixStore
from stillframe.store.protocol import Missing, NotOurs, read_all
from stillframe.untrusted import decode_json


class _Kept(msgspec.Struct, frozen=True):
    """What ``label.json`` in a save's directory, and in the label's own, holds."""

    save: SaveId
    name: str
    is_latest: bool
    files: int | None = None
    """So many it has; ``None``: not known."""

    @property
    def age(self) -> tuple[int, int, int]:
        return _age(self.save)


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


# --- a save that has a label -----------------------------------------------------------------


def check_free(catalog: Catalog, label: Label) -> None:
    """Raises :class:`ExistsError` if something that is no label has the name; :class:`ConfigError`."""
    if not isinstance(catalog.store, PosixStore):
        raise ConfigError(f"{catalog.root} is not on a file system: it can have no labels")
    if catalog.store.head(label.name) is not None and _kept(catalog, f"{label.name}/{names.LABEL}") is None:
        raise _taken(catalog, label.name)


def write(catalog: Catalog, save: SaveId, label: Label, rank: int, world_size: int, decides: bool) -> None:
    """This rank's files, durably.  ``decides``: its keeper is the one that will commit.

    Raises: :class:`StorageError`; :class:`ExistsError`; :class:`ConfigError`.
    """
    check_free(catalog, label)
    store, directory = catalog.store, names.label_partial(save)
    alias = msgspec.json.encode(_Alias(save.step, save.epoch, save.attempt, rank))
    for name in label.files:
        store.put(f"{directory}/{name}", label.content + b"\n" + alias)
    if decides:
        is_alone = world_size == 1 or catalog.rank is not None
        count = len(label.files) if is_alone else label.total
        kept = msgspec.json.encode(_Kept(save, label.name, label.is_latest, count))
        store.put(f"{directory}/{names.LABEL}", kept)
        store.put(names.key(save, names.LABEL), kept)


def publish(catalog: Catalog, save: SaveId) -> None:
    """The save is committed: let its label appear.  For the keeper that commits.

    Raises: :class:`StorageError`: the next run tries again; :class:`ExistsError`, :class:`StateError`: it is given up.
    """
    kept = _kept(catalog, names.key(save, names.LABEL))
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
        _delete_directory(catalog, names.label_partial(save))


def settle(catalog: Catalog, save: SaveId) -> None:
    """Of a save whose keeper has died: its label appears if it is a checkpoint, and is removed if it is none.

    Best effort: what cannot be told stays for the next run.
    """
    with contextlib.suppress(StorageError, ExistsError, StateError):
        if not isinstance(catalog.store, PosixStore) or not any(catalog.store.list(names.label_partial(save))):
            return
        if catalog.is_committed(save):
            publish(catalog, save)
        else:
            discard(catalog, save)


def _appear(catalog: Catalog, kept: _Kept) -> None:
    """Raises: :class:`StorageError`; :class:`StateError` if it lacks files; :class:`ExistsError`."""
    store, directory = catalog.store, names.label_partial(kept.save)
    assert isinstance(store, PosixStore)
    listed = list(store.list(directory))
    if (unfinished := [f"{directory}/{name}" for name in listed if names.is_unfinished(name)]) != []:
        store.delete(unfinished)  # of a keeper that died
    count = len(listed) - len(unfinished) - (names.LABEL in listed)
    if names.LABEL not in listed or (kept.files is not None and count != kept.files):
        raise StateError(f"{store.where(directory)} has {count} files of {kept.files}")
    if store.head(kept.name) is not None:
        other = _kept(catalog, f"{kept.name}/{names.LABEL}")
        if other is None or other.name != kept.name:
            raise _taken(catalog, kept.name)
        if other.age > kept.age:
            raise ExistsError(f"{store.where(kept.name)} is the label of a later save, {other.save}")
        store.rename(kept.name, names.label_partial(other.save))
        store.rename(directory, kept.name)
        _delete_directory(catalog, names.label_partial(other.save))
    else:
        store.rename(directory, kept.name)


def _taken(catalog: Catalog, name: str) -> ExistsError:
    return ExistsError(f"{catalog.store.where(name)} exists, and is no label: choose another name, or remove it first")


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
    kept = _kept(catalog, f"{latest}/{names.LABEL}")
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
        kept = _kept(catalog, names.key(save, names.LABEL))
        if kept is not None and kept.is_latest and _kept(catalog, f"{kept.name}/{names.LABEL}") == kept:
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
            kept = _kept(catalog, names.key(save, names.LABEL))
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


class LabelUse:
    """Finds saves that have lost their label: a later save has its name, or somebody has removed the directory.

    For rank 0's keeper, after it has committed a save with a label: its own files are in the root, so that listings of
    it are fresh.  That a directory is missing counts only if this keeper has seen it: a root may be a partial copy.
    A directory that was renamed or copied within the root counts as the label, too; so does any that is not ours.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._names: dict[SaveId, str] = {}
        """Of each save; empty if it has no label."""
        self._seen: set[SaveId] = set()
        self._directories: set[str] = set()

    def is_labelled(self, save: SaveId) -> bool:
        """Raises :class:`StorageError`."""
        is_able = isinstance(self._catalog.store, PosixStore) and self._catalog.rank is None
        return is_able and self._name(save) != ""

    def lost(self, saves: Collection[SaveId]) -> dict[SaveId, str]:
        """Of these checkpoints, those that have lost their label, and why.  Raises :class:`StorageError`."""
        self._names = {save: name for save, name in self._names.items() if save in saves}
        self._seen &= set(saves)
        entries = list(self._catalog.store.list())
        listed = {entry.rstrip("/") for entry in entries}
        self._directories = {entry.rstrip("/") for entry in entries if entry.endswith("/")}
        newest: dict[str, SaveId] = {}
        for save in sorted(saves, key=_age):
            newest[self._name(save)] = save
        doubtful = []
        for save in saves:
            name = self._name(save)
            if not name or names.label_partial(save) in listed:  # it has none, or that has yet to appear
                continue
            if name in listed and newest[name] == save:
                self._seen.add(save)
            elif name in listed or save in self._seen:
                doubtful.append(save)
        return self._judge(doubtful, listed) if doubtful else {}

    def _judge(self, doubtful: Collection[SaveId], listed: Collection[str]) -> dict[SaveId, str]:
        kept = {name: _kept(self._catalog, f"{name}/{names.LABEL}") for name in listed if _may_be_label(name)}
        named = {each.save for each in kept.values() if each is not None}
        ours = {names.RUN, *(name for name, each in kept.items() if each is not None)}
        # What somebody has made there by hand may be a copy of the label, in whatever form: then nothing is lost.
        is_clear = all(name in ours or names.parse_step_dir(name) is not None for name in self._directories)
        lost = {}
        for save in doubtful:
            own = _kept(self._catalog, names.key(save, names.LABEL))
            if own is None or save in named:
                continue
            owner = kept.get(own.name)
            if owner is not None and owner.age > own.age:
                lost[save] = f"its label {own.name!r} is that of a later save, of step {owner.save.step}"
            elif own.name not in listed and is_clear:
                lost[save] = f"its label {own.name!r} was removed"
        return lost

    def _name(self, save: SaveId) -> str:
        if save not in self._names:
            kept = _kept(self._catalog, names.key(save, names.LABEL))
            self._names[save] = kept.name if kept is not None else ""
        return self._names[save]


def _age(save: SaveId) -> tuple[int, int, int]:
    """Of two labels of one name, the save with the greater one has it."""
    return save.epoch, save.step, save.attempt


def _may_be_label(name: str) -> bool:
    try:
        check_label_name(name)
    except ConfigError:
        return False
    return True


def remove(catalog: Catalog, save: SaveId) -> None:
    """The label of a save that is set aside goes with it; best effort.

    Only the directory that was made for it: one of the same name that somebody has put there stays.
    """
    with contextlib.suppress(StorageError):
        if catalog.store.head(names.key(save, names.LABEL)) is None:  # the usual case; deleting costs an fsync
            _delete_directory(catalog, names.label_partial(save))
            return
        kept = _kept(catalog, names.key(save, names.LABEL))
        if kept is not None and _kept(catalog, f"{kept.name}/{names.LABEL}") == kept:
            if _latest(catalog) == kept.name:
                point_to_newest(catalog)  # before: it never names what is gone
            _delete_directory(catalog, kept.name)
    discard(catalog, save)


def _delete_directory(catalog: Catalog, directory: str) -> None:
    """With ``label.json`` last: until then it can be told whose it is."""
    listed = [name for name in catalog.store.list(directory) if not name.endswith("/")]
    catalog.store.delete([f"{directory}/{name}" for name in listed if name != names.LABEL])
    catalog.store.delete([f"{directory}/{names.LABEL}", f"{directory}/"])


def _kept(catalog: Catalog, key: str) -> _Kept | None:
    """What a ``label.json`` holds; ``None`` if it cannot be read as one.  Raises :class:`StorageError`: cannot tell."""
    try:
        kept = decode_json(read_all(catalog.store, key, limits.MAX_NOTE_BYTES), _Kept)
        check_label_name(kept.name)
    except (Missing, NotOurs, ValueError):  # ValueError: no such JSON, or a name that is none
        return None
    return kept
