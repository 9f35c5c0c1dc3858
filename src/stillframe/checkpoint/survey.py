"""What lies in a root: each step and its state, the keepers at work, and what nobody will turn into a checkpoint.

Looks at names, sizes and manifests; never at data, and a manifest that cannot be read is a finding, not an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stillframe.checkpoint.catalog import Catalog, Checkpoint
from stillframe.checkpoint.lock import Life, Owner, is_held, life_of, owner_of
from stillframe.errors import IntegrityError, NotFoundError, StillframeError, StorageError, VersionError
from stillframe.format import names
from stillframe.format.records import Manifest
from stillframe.model import check_step
from stillframe.store import files as user_files
from stillframe.store import infos
from stillframe.store.protocol import Info, Store
from stillframe.units import format_ranks

State = Literal["committed", "in progress", "incomplete", "damaged", "newer format", "unreadable"]


@dataclass(frozen=True, slots=True)
class StepFile:
    """A file of stillframe's in a step's directory."""

    name: str
    bytes: int
    rank: int | None
    attempt: str | None


@dataclass(frozen=True, slots=True)
class Step:
    """One directory of a root."""

    step: int
    state: State
    manifest: Manifest | None
    """If it could be read; of a root that is not shared, the first rank's."""
    here: tuple[int, ...]
    """The ranks whose part is committed here, or, of one that is not committed, sealed."""
    bytes: int
    """Of its files; of a committed one, of those that belong to it."""
    files: tuple[StepFile, ...]
    reason: str = ""
    """What is wrong with it."""

    @property
    def stray_bytes(self) -> int:
        """Of files of other attempts beside a committed one."""
        return sum(file.bytes for file in self.files) - self.bytes

    @property
    def rank(self) -> int | None:
        """As :class:`Catalog` wants it: ``None`` if the manifest commits all ranks."""
        return self.manifest.rank if self.manifest is not None else None


@dataclass(frozen=True, slots=True)
class Survey:
    root: Path
    steps: tuple[Step, ...]
    owners: dict[int, Owner]
    """The keepers at work here, by rank, as far as locks tell."""
    last_words: dict[int, Owner]
    """What the locks' files say of keepers that are gone."""
    spare_bytes: int
    """Of segments that are kept to be written over."""

    @property
    def latest(self) -> int | None:
        return max((each.step for each in self.steps if each.state == "committed"), default=None)

    def with_state(self, *states: State) -> list[Step]:
        return [each for each in self.steps if each.state in states]


def check_root(root: str | os.PathLike[str]) -> Path:
    """The root, if that is what it is; else :class:`NotFoundError` that says what it may have been."""
    path = Path(os.path.abspath(root))
    kind = user_files.kind_of(path)
    if kind == "nothing":
        raise NotFoundError(f"there is no directory {path}")
    if kind != "directory":
        raise NotFoundError(f"{path} is a file; give the root: the directory that holds the step-… directories")
    entries = user_files.names_in(path)
    if any(names.parse_step_dir(name) is not None or names.parse_lock(name) is not None for name in entries):
        return path
    if names.parse_step_dir(path.name) is not None:
        raise NotFoundError(f"{path} is one step of a root; give the root: {path.parent}")
    inside = [name for name in entries if _is_root(path / name)]
    if inside:
        raise NotFoundError(f"{path} is no root, but {path / inside[0]} is one{_and_more(inside)}")
    what = "is empty" if not entries else f"holds no checkpoint (but {entries[0]!r}{_and_more(entries)})"
    raise NotFoundError(f"{path} {what}; give the root that the Checkpointer was made with")


def _and_more(entries: list[str]) -> str:
    return f" and {len(entries) - 1} more" if len(entries) > 1 else ""


def _is_root(path: Path) -> bool:
    try:
        return bool(Catalog(path).step_dirs())
    except StorageError:
        return False


def survey(root: str | os.PathLike[str], newest: int | None = None) -> Survey:
    """All steps, or so many of the newest.

    Raises: :class:`NotFoundError` if it is no root, :class:`StorageError` if it cannot be listed.
    """
    catalog = Catalog(check_root(root))
    store = catalog.store
    listed = list(store.list())
    ranks = sorted(rank for name in listed if (rank := names.parse_lock(name)) is not None)
    owners = {rank: owner for rank in ranks if (owner := owner_of(store, rank)) is not None}
    held = {rank: owner for rank, owner in owners.items() if is_held(store, rank)}
    gone = {rank: owner for rank, owner in owners.items() if rank not in held}
    dirs = catalog.step_dirs() if newest is None else catalog.step_dirs()[-newest:]
    steps = [found for step in dirs if (found := look(catalog, step)) is not None]
    spares = [_size(store, name) for name in listed if names.parse_spare(name) is not None]
    return Survey(catalog.root, tuple(steps), held, gone, sum(spares))


def _size(store: Store, key: str) -> int:
    info = store.head(key)
    return info.size if info is not None else 0


def catalogs(root: Path, step: int | None) -> tuple[int | None, list[Catalog]]:
    """A step (the newest if none is given), and the catalogs in which it is a checkpoint.

    That is one; or, in a root that the ranks did not share, one for each rank that has committed it here.
    """
    shared = Catalog(root)
    for each in reversed(shared.step_dirs()) if step is None else [step]:
        if shared.is_committed(each):
            return each, [shared]
        try:
            found = [names.parse_manifest(name) for name in shared.store.list(names.step_dir(each))]
        except StorageError:
            continue
        own = sorted(file.rank for file in found if file is not None and file.is_published and file.rank is not None)
        if own:
            return each, [Catalog(root, rank) for rank in own]
    return step, []


def open_checkpoint(root: str | os.PathLike[str], step: int | None = None, rank: int | None = None) -> Checkpoint:
    """A step's checkpoint (the newest if none is given); of a root that is not shared, ``rank``'s, or the first's.

    Raises: :class:`NotFoundError`, :class:`IntegrityError`, :class:`VersionError`.
    """
    path = check_root(root)
    step, found = catalogs(path, None if step is None else check_step(step))
    for catalog in found:
        if rank is None or catalog.rank is None or catalog.rank == rank:
            return catalog.open(step)
    if found:
        own = format_ranks(catalog.rank for catalog in found if catalog.rank is not None)
        raise NotFoundError(f"step {step} of rank {rank} is not in {path}; there is {own}'s")
    here = None if step is None else look(Catalog(path), step)
    if here is not None and here.state == "damaged":
        raise IntegrityError(f"step {step} in {path} is no checkpoint any more: {here.reason}")
    if here is not None and here.state == "in progress":
        raise NotFoundError(f"step {step} in {path} is being saved right now, and not committed yet")
    return _nearest(path, step)


def _nearest(path: Path, step: int | None) -> Checkpoint:
    """Raises: there is no such step."""
    known = [each for each in Catalog(path).step_dirs() if catalogs(path, each)[1]]
    if not known or step is None:
        raise NotFoundError(f"there is no checkpoint in {path}")
    nearest = min(known, key=lambda each: abs(each - step))
    raise NotFoundError(f"step {step} is not a checkpoint in {path}; the nearest is step {nearest}")


def look(catalog: Catalog, step: int) -> Step | None:
    """One step; ``None`` if it is gone by now.

    A run may be saving or removing it just now: what looks damaged is looked at again before it is called so.
    """
    found = _look(catalog, step)
    return _look(catalog, step) if found is not None and found.state in ("damaged", "incomplete") else found


def _look(catalog: Catalog, step: int) -> Step | None:
    store, directory = catalog.store, names.step_dir(step)
    try:
        found = infos(store, directory)
        if not found and store.head(directory) is None:
            return None
    except StorageError as error:
        return Step(step, "unreadable", None, (), 0, (), str(error))
    files = tuple(_files(found))
    manifests = [names.parse_manifest(file.name) for file in files]
    published = [each.rank for each in manifests if each is not None and each.is_published]
    if published:
        return _committed([Catalog(store, rank) for rank in published], step, files, found)
    size = sum(file.bytes for file in files)
    sealed = tuple(sorted({file.rank for file in files if file.rank is not None and file.name.endswith(".seal.json")}))
    if any(each is not None and each.is_damaged for each in manifests):
        return Step(step, "damaged", None, sealed, size, files, "it was found damaged, and withdrawn")
    own = {(file.rank, file.attempt) for file in files if file.rank is not None and file.attempt is not None}
    if any(life_of(store, rank, attempt) is Life.ALIVE for rank, attempt in own):
        return Step(step, "in progress", None, sealed, size, files)
    return Step(step, "incomplete", None, sealed, size, files, "no run is working on it any more")


def _files(found: dict[str, Info]) -> Iterator[StepFile]:
    """Those whose names are stillframe's."""
    for name, info in sorted(found.items()):
        file = names.parse_rank_file(name)
        if file is not None:
            yield StepFile(name, info.size, file.rank, file.attempt)
        elif names.parse_manifest(name) is not None:
            yield StepFile(name, info.size, None, None)


def _committed(published: list[Catalog], step: int, files: tuple[StepFile, ...], found: dict[str, Info]) -> Step | None:
    """By one manifest of all ranks, or by those of some that did not share the root."""
    size = sum(file.bytes for file in files)
    manifests, lacking = [], []
    for catalog in published:
        try:
            manifests.append(catalog.manifest(step))
            lacking += [lack] if (lack := catalog.lacks(manifests[-1], found)) else []
        except NotFoundError:
            return None
        except VersionError as error:
            return Step(step, "newer format", None, (), size, files, str(error))
        except IntegrityError as error:
            lacking.append(str(error))
        except StillframeError as error:
            return Step(step, "unreadable", None, (), size, files, str(error))
    first = manifests[0] if manifests else None
    if first is not None:
        size = sum(file.bytes for file in files if file.attempt in (None, first.attempt))
    here = () if lacking else tuple(sorted({entry.rank for manifest in manifests for entry in manifest.ranks}))
    return Step(step, "damaged" if lacking else "committed", first, here, size, files, "; ".join(lacking[:3]))
