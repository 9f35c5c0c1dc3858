"""What lies in a root: each save and its state, the keepers at work, and what nobody will turn into a checkpoint.

Looks at names, sizes and manifests; never at data, and a manifest that cannot be read is a finding, not an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from stillframe.checkpoint import epochs
from stillframe.checkpoint.catalog import Catalog, Checkpoint, View
from stillframe.checkpoint.lock import Owner, is_held, owner_of
from stillframe.errors import IntegrityError, NotFoundError, StillframeError, StorageError, VersionError
from stillframe.format import names
from stillframe.format.epochs import Aside, Reason
from stillframe.format.records import Manifest
from stillframe.lineage import Branch
from stillframe.model import SaveId, check_step
from stillframe.store import files as user_files
from stillframe.store import infos, is_url
from stillframe.store.protocol import Info, Store
from stillframe.units import format_ranks

State = Literal[
    "committed", "abandoned", "superseded", "in progress", "incomplete", "damaged", "quarantined", "removed",
    "newer format", "unreadable", "not in the root",
]  # fmt: skip
"""``abandoned``: a checkpoint off the branch; ``superseded``: the branch has another save of its step; ``removed``: its
tombstone is all that counts; ``not in the root``: only tiers have something of it, and no survey finds it."""

_ASIDE: dict[Reason, str] = {
    "pruned": "retention has removed it",
    "removed": "it was removed by hand",
    "left over": "it was never committed; a later run has removed it",
    "quarantined": "it was found damaged, and set aside",
}


@dataclass(frozen=True, slots=True)
class StepFile:
    """A file of stillframe's in the directory of a save."""

    name: str
    bytes: int
    rank: int | None


@dataclass(frozen=True, slots=True)
class Step:
    """One save: a directory of a root."""

    save: SaveId
    state: State
    manifest: Manifest | None
    """If it could be read; in a root that is not shared, what the seals here say."""
    here: tuple[int, ...]
    """The ranks whose part is committed here, or, of one that is not committed, sealed."""
    files: tuple[StepFile, ...]
    reason: str = ""
    """What is wrong with it, or why it does not count."""
    is_on_branch: bool = True
    is_pinned: bool = False

    @property
    def step(self) -> int:
        return self.save.step

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @property
    def is_tombstone(self) -> bool:
        """It is set aside, and nothing else is left of it."""
        return self.state == "removed" and all(file.name.startswith("aside") for file in self.files)


@dataclass(frozen=True)
class Survey:
    root: str
    saves: tuple[Step, ...]
    """In the order of their steps."""
    owners: dict[int, Owner]
    """The keepers at work here, by rank, as far as locks tell."""
    last_words: dict[int, Owner]
    """What the locks' files say of keepers that are gone."""
    spare_bytes: int
    """Of segments that are kept to be written over."""
    is_shared: bool
    branch: Branch
    """Which saves count, also of those that lie elsewhere."""

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """What lies on the branch: its checkpoints, whole or not, and what is being saved."""
        states = ("committed", "in progress", "damaged", "newer format", "unreadable")
        return tuple(each for each in self.saves if each.is_on_branch and each.state in states)

    @property
    def latest(self) -> int | None:
        return max((each.step for each in self.saves if each.state == "committed"), default=None)

    def with_state(self, *states: State) -> list[Step]:
        return [each for each in self.saves if each.state in states]


def open_root(root: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> Catalog:
    """The catalog of a root, if that is what it is; else :class:`NotFoundError` that says what it may have been."""
    catalog = Catalog(root, storage_options=storage_options)
    if is_url(catalog.root):
        _check_objects(catalog.store)
    else:
        _check_directory(Path(catalog.root))
    return catalog


def _check_objects(store: Store) -> None:
    entries = [name.rstrip("/") for name in store.list()]
    if not _has_steps(entries) and names.RUN not in entries:
        raise NotFoundError(f"{store.where()} holds no checkpoint; give the root that the Checkpointer was made with")


def _check_directory(path: Path) -> None:
    kind = user_files.kind_of(path)
    if kind == "nothing":
        raise NotFoundError(f"there is no directory {path}")
    if kind != "directory":
        raise NotFoundError(f"{path} is a file; give the root: the directory that holds the step-… directories")
    entries = user_files.names_in(path)
    if _has_steps(entries) or (names.RUN in entries and _is_run(path / names.RUN)):
        return
    if names.parse_step_dir(path.name) is not None:
        raise NotFoundError(f"{path} is one step of a root; give the root: {path.parent}")
    inside = [name for name in entries if _is_root(path / name)]
    if inside:
        raise NotFoundError(f"{path} is not a root, but {path / inside[0]} is one{_and_more(inside)}")
    what = "is empty" if not entries else f"holds no checkpoint (but {entries[0]!r}{_and_more(entries)})"
    raise NotFoundError(f"{path} {what}; give the root that the Checkpointer was made with")


def _has_steps(entries: list[str]) -> bool:
    return any(names.parse_step_dir(name) is not None for name in entries)


def _is_run(path: Path) -> bool:
    """Whether a run that has saved nothing yet has left this."""
    if user_files.kind_of(path) != "directory":
        return False
    return any(
        names.parse_lock(name) is not None or names.parse_epoch(name) is not None for name in user_files.names_in(path)
    )


def _is_root(path: Path) -> bool:
    try:
        return user_files.kind_of(path) == "directory" and _has_steps(user_files.names_in(path))
    except StorageError:
        return False


def _and_more(entries: list[str]) -> str:
    return f" and {len(entries) - 1} more" if len(entries) > 1 else ""


def survey(
    root: str | os.PathLike[str], newest: int | None = None, *, storage_options: Mapping[str, Any] | None = None
) -> Survey:
    """All saves, or those of so many of the newest steps of the branch.

    Raises: :class:`NotFoundError` if it is no root, :class:`StorageError` if it cannot be listed.
    """
    return _survey(open_root(root, storage_options), newest)


def _survey(catalog: Catalog, newest: int | None = None) -> Survey:
    store = catalog.store
    ranks = sorted(rank for name in store.list(names.RUN) if (rank := names.parse_lock(name)) is not None)
    owners = {rank: owner for rank in ranks if (owner := owner_of(store, rank)) is not None}
    held = {rank: owner for rank, owner in owners.items() if is_held(store, rank)}
    gone = {rank: owner for rank, owner in owners.items() if rank not in held}
    view = catalog.look()
    looks = _Looks(catalog, view, {owner.run for owner in held.values()})
    wanted = view.saves
    if newest is not None:
        wanted = tuple(save for saves in list(view.on_branch.values())[-newest:] for save in saves)
    found = looks.all(wanted)
    if newest is None:
        found += [looks.strange(save) for save in view.strange]
    spares = [_size(store, name) for name in store.list() if names.parse_spare(name) is not None]
    in_order = tuple(sorted(found, key=lambda each: each.save))
    return Survey(catalog.root, in_order, held, gone, sum(spares), view.is_shared, view.branch)


def _size(store: Store, key: str) -> int:
    info = store.head(key)
    return info.size if info is not None else 0


def open_checkpoint(
    root: str | os.PathLike[str],
    step: int | None = None,
    rank: int | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """A step's checkpoint (the newest if none is given), which has a part of ``rank`` if one is given.

    Raises: :class:`NotFoundError`, :class:`IntegrityError`, :class:`VersionError`.
    """
    catalog = open_root(root, storage_options)
    try:
        checkpoint = catalog.open(step)
    except NotFoundError:
        if step is not None:
            _explain(catalog, check_step(step))
        raise
    if rank is not None and rank not in checkpoint.ranks:
        checkpoint.close()
        what = f"it was saved by {checkpoint.world_size}"
        if len(checkpoint.ranks) < checkpoint.world_size:
            what = f"here is the part of {format_ranks(checkpoint.ranks)}"
        raise NotFoundError(f"step {checkpoint.step} has no rank {rank}; {what}")
    return checkpoint


def _explain(catalog: Catalog, step: int) -> None:
    """Raises, if there is a better reason why a step is no checkpoint than that it is not there."""
    for each in reversed(_survey(catalog).saves):
        if each.step == step and each.state in ("quarantined", "damaged"):
            raise IntegrityError(f"step {step} in {catalog.root} is no longer a checkpoint: {each.reason}")
        if each.step == step and each.state == "in progress":
            raise NotFoundError(f"step {step} in {catalog.root} is being saved right now, and not committed yet")


class _Looks:
    """Looks at the saves of a root.  ``alive``: the runs whose keepers hold a lock."""

    def __init__(self, catalog: Catalog, view: View, alive: set[str]) -> None:
        self._catalog = catalog
        self._view = view
        self._alive = alive
        self._live_epochs: dict[int, bool] = {}
        self._newest_epoch = max(catalog.epochs(), default=0)

    def all(self, saves: tuple[SaveId, ...]) -> list[Step]:
        found = [made for save in saves if (made := self.one(save)) is not None]
        branch: dict[int, SaveId] = {}
        for each in found:  # in rising order: of several saves of one step the newest counts
            if each.is_on_branch and each.state in ("committed", "damaged", "newer format"):
                branch[each.step] = each.save
        return [self._placed(each, branch) for each in found]

    def strange(self, save: SaveId) -> Step:
        reason = f"{self._catalog.dir(save)} is not a directory"
        return Step(save, "unreadable", None, (), (), reason, self._view.branch.has(save))

    def _placed(self, each: Step, branch: Mapping[int, SaveId]) -> Step:
        """With its place beside the branch, if it is a checkpoint that is not on it."""
        if each.state != "committed" or branch.get(each.step) == each.save:
            return each
        if each.step in branch:
            reason = f"the branch has another save of this step, of start {branch[each.step].epoch}"
            return replace(each, state="superseded", reason=reason, is_on_branch=False)
        return replace(each, state="abandoned", reason="training went on from an earlier step", is_on_branch=False)

    def one(self, save: SaveId) -> Step | None:
        """``None`` if it is gone by now.

        A run may be saving or removing it just now: what looks damaged is looked at again before it is called so.
        """
        found = self._one(save)
        return self._one(save) if found is not None and found.state in ("damaged", "incomplete") else found

    def _one(self, save: SaveId) -> Step | None:
        store, directory = self._catalog.store, names.step_dir(save)
        is_on_branch = self._view.branch.has(save)
        try:
            found = infos(store, directory)
            if not found and store.head(directory) is None:
                return None
        except StorageError as error:
            return Step(save, "unreadable", None, (), (), str(error), is_on_branch)
        files = tuple(_files(found))
        made = self._judged(save, files, found)
        return made and replace(made, is_on_branch=is_on_branch, is_pinned=names.PIN in found)

    def _judged(self, save: SaveId, files: tuple[StepFile, ...], found: dict[str, Info]) -> Step | None:
        ranks = {kind: _ranks(found, kind) for kind in ("seal", "aside")}
        is_local = bool(ranks["seal"]) and self._is_local(save)
        sealed = tuple(sorted(ranks["seal"] - ranks["aside"]))
        if names.aside() in found or (ranks["aside"] and not sealed):
            return self._set_aside(save, files, min(ranks["aside"], default=None))
        if names.MANIFEST in found or (is_local and sealed):
            made = self._committed(save, files, found)
            if made is None or made.state != "committed" or not ranks["aside"]:
                return made
            part = self._set_aside(save, files, min(ranks["aside"]))
            if part is None or part.state != "quarantined":  # the others' parts are going, too
                return made
            return replace(made, reason=f"the part of {format_ranks(ranks['aside'])} is quarantined: {part.reason}")
        if _ranks(found, "failure"):
            return Step(save, "incomplete", None, sealed, files, f"{format_ranks(_ranks(found, 'failure'))} failed")
        if self._is_alive(save.epoch):
            return Step(save, "in progress", None, sealed, files)
        return Step(save, "incomplete", None, sealed, files, "never committed, and no run is known to work on it")

    def _set_aside(self, save: SaveId, files: tuple[StepFile, ...], rank: int | None) -> Step | None:
        aside: Aside | None
        try:
            aside = Catalog(self._catalog.store, rank).aside(save) if rank is not None else self._catalog.aside(save)
        except VersionError as error:
            return Step(save, "newer format", None, (), files, str(error))
        except StillframeError as error:
            return Step(save, "unreadable", None, (), files, str(error))
        if aside is None:
            return None
        reason = _ASIDE[aside.reason] + (f": {aside.message}" if aside.message else "")
        return Step(save, "quarantined" if aside.reason == "quarantined" else "removed", None, (), files, reason)

    def _committed(self, save: SaveId, files: tuple[StepFile, ...], found: dict[str, Info]) -> Step | None:
        """By a manifest, or by the seals that are here."""
        try:
            manifest = self._catalog.manifest(save)
            lack = self._catalog.lacks(manifest, found)
        except NotFoundError:
            return None
        except VersionError as error:
            return Step(save, "newer format", None, (), files, str(error))
        except IntegrityError as error:
            return Step(save, "damaged", None, (), files, str(error))
        except StillframeError as error:
            return Step(save, "unreadable", None, (), files, str(error))
        if lack:
            return Step(save, "damaged", manifest, (), files, lack)
        return Step(save, "committed", manifest, tuple(entry.rank for entry in manifest.ranks), files)

    def _is_local(self, save: SaveId) -> bool:
        try:
            return not self._catalog.is_shared(save.epoch)
        except StillframeError:
            return False

    def _is_alive(self, epoch: int) -> bool:
        """Whether a keeper of the run that claimed this epoch, the newest, holds its lock."""
        if not self._alive or epoch < self._newest_epoch:
            return False
        if epoch not in self._live_epochs:
            claimed = epochs.read_claim(self._catalog.store, epoch)
            self._live_epochs[epoch] = claimed is not None and claimed.run in self._alive
        return self._live_epochs[epoch]


def _ranks(found: Mapping[str, Info], kind: str) -> set[int]:
    files = [names.parse_rank_file(name) for name in found]
    return {file.rank for file in files if file is not None and file.kind == kind and not file.is_partial}


def _files(found: dict[str, Info]) -> Iterator[StepFile]:
    """Those whose names are stillframe's."""
    for name, info in sorted(found.items()):
        if names.is_ours(name):
            file = names.parse_rank_file(name)
            yield StepFile(name, info.size, file.rank if file is not None else None)
