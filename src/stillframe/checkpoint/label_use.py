"""Which saves have lost their label (:mod:`.labels`), and go for it."""

from __future__ import annotations

from collections.abc import Collection

from stillframe.checkpoint.catalog import Catalog
from stillframe.checkpoint.labels import age, home_of, kept_in
from stillframe.errors import ConfigError
from stillframe.format import names
from stillframe.model import SaveId, check_label_name
from stillframe.store.posix import PosixStore


class LabelUse:
    """Finds saves that have lost their label: a later save has its name, or somebody has removed the directory.

    For rank 0's keeper, after it has committed a save with a label: its own files are in the root, so that listings of
    it are fresh.  That a directory is missing counts only if this keeper has seen it: a root may be a partial copy.
    A directory that was renamed or copied within the root counts as the label, too; so does any that is not ours.
    In a home outside the root other things come and go: there only a later save of the same name counts.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._names: dict[SaveId, str] = {}
        """Of each save, with its home if that is not the root; empty if it has no label."""
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
        for save in sorted(saves, key=age):
            newest[self._name(save)] = save
        doubtful: list[SaveId] = []
        lost: dict[SaveId, str] = {}
        for save in saves:
            name = self._name(save)
            if not name or names.label_partial(save) in listed:  # it has none, or that has yet to appear
                continue
            if "/" in name:
                lost |= self._replaced(save) if newest[name] != save else {}
            elif name in listed and newest[name] == save:
                self._seen.add(save)
            elif name in listed or save in self._seen:
                doubtful.append(save)
        return lost | (self._judge(doubtful, listed) if doubtful else {})

    def _replaced(self, save: SaveId) -> dict[SaveId, str]:
        """Of a label in a home: a later save of this root has the name."""
        own = kept_in(self._catalog.store, names.key(save, names.LABEL))
        owner = None if own is None else kept_in(home_of(self._catalog, own.home), own.key)
        if own is None or owner is None or (owner.name, owner.root) != (own.name, own.root) or owner.age <= own.age:
            return {}
        return {save: f"its label {own.name!r} is that of a later save, of step {owner.save.step}"}

    def _judge(self, doubtful: Collection[SaveId], listed: Collection[str]) -> dict[SaveId, str]:
        store = self._catalog.store
        kept = {name: kept_in(store, f"{name}/{names.LABEL}") for name in listed if _may_be_label(name)}
        named = {each.save for each in kept.values() if each is not None}
        ours = {names.RUN, *(name for name, each in kept.items() if each is not None)}
        # What somebody has made there by hand may be a copy of the label, in whatever form: then nothing is lost.
        is_clear = all(name in ours or names.parse_step_dir(name) is not None for name in self._directories)
        lost = {}
        for save in doubtful:
            own = kept_in(self._catalog.store, names.key(save, names.LABEL))
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
            kept = kept_in(self._catalog.store, names.key(save, names.LABEL))
            self._names[save] = "" if kept is None else f"{kept.home}/{kept.name}" if kept.home else kept.name
        return self._names[save]


def _may_be_label(name: str) -> bool:
    try:
        check_label_name(name)
    except ConfigError:
        return False
    return True
