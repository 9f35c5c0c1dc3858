"""What lies in a root: each step and its state, whoever holds the root, and what nobody will turn into a checkpoint.

Looks at names, sizes and manifests; never at data, and a manifest that cannot be read is a finding, not an error.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stillframe.checkpoint.catalog import Catalog, Checkpoint
from stillframe.checkpoint.lock import Holder, Life, holder_of, is_held, life_of
from stillframe.errors import IntegrityError, NotFoundError, StillframeError, StorageError, VersionError
from stillframe.format import limits, names
from stillframe.format.records import Manifest, decode_manifest
from stillframe.model import check_step
from stillframe.store import durable
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
    holders: dict[int, Holder]
    """The keepers at work here, by rank, as far as locks tell."""
    last_words: dict[int, Holder]
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
    try:
        entries = sorted(os.listdir(path))
    except FileNotFoundError:
        raise NotFoundError(f"there is no directory {path}") from None
    except NotADirectoryError:
        raise NotFoundError(
            f"{path} is a file; give the root: the directory that holds the step-… directories"
        ) from None
    except OSError as error:
        raise StorageError(f"listing {path}: {error.strerror}") from error
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
        return path.is_dir() and any(names.parse_step_dir(name) is not None for name in os.listdir(path))
    except OSError:
        return False


def survey(root: str | os.PathLike[str], newest: int | None = None) -> Survey:
    """All steps, or so many of the newest.

    Raises: :class:`NotFoundError` if it is no root, :class:`StorageError` if it cannot be listed.
    """
    path = check_root(root)
    catalog = Catalog(path)
    try:
        listed = os.listdir(path)
    except OSError as error:
        raise StorageError(f"listing {path}: {error.strerror}") from error
    ranks = sorted(rank for name in listed if (rank := names.parse_lock(name)) is not None)
    spares = [path / name for name in listed if names.parse_spare(name) is not None]
    holders = {rank: holder for rank in ranks if (holder := holder_of(path, rank)) is not None}
    held = {rank: holder for rank, holder in holders.items() if is_held(path, rank)}
    gone = {rank: holder for rank, holder in holders.items() if rank not in held}
    dirs = catalog.step_dirs() if newest is None else catalog.step_dirs()[-newest:]
    steps = [found for step in dirs if (found := look(catalog, step)) is not None]
    return Survey(path, tuple(steps), held, gone, sum(map(_size, spares)))


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def catalogs(root: Path, step: int | None) -> tuple[int | None, list[Catalog]]:
    """A step (the newest if none is given), and the catalogs in which it is a checkpoint.

    That is one; or, in a root that the ranks did not share, one for each rank that has committed it here.
    """
    shared = Catalog(root)
    for each in reversed(shared.step_dirs()) if step is None else [step]:
        if shared.is_committed(each):
            return each, [shared]
        try:
            found = map(names.parse_manifest, os.listdir(shared.dir(each)))
        except OSError:
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
        raise NotFoundError(f"step {step} of rank {rank} is not in {path}; there is {format_ranks(_own(found))}'s")
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


def _own(found: list[Catalog]) -> list[int]:
    return [catalog.rank for catalog in found if catalog.rank is not None]


def look(catalog: Catalog, step: int) -> Step | None:
    """One step; ``None`` if it is gone by now.

    A run may be saving or removing it just now: what looks damaged is looked at again before it is called so.
    """
    found = _look(catalog, step)
    return _look(catalog, step) if found is not None and found.state in ("damaged", "incomplete") else found


def _look(catalog: Catalog, step: int) -> Step | None:
    directory = catalog.dir(step)
    try:
        files = tuple(_files(directory))
    except FileNotFoundError:
        return None
    except OSError as error:
        return Step(step, "unreadable", None, (), 0, (), f"{directory} cannot be listed: {error.strerror}")
    found = [names.parse_manifest(file.name) for file in files]
    published = [each.rank for each in found if each is not None and each.is_published]
    if published:
        return _committed([Catalog(catalog.root, rank) for rank in published], step, files)
    size = sum(file.bytes for file in files)
    sealed = tuple(sorted({file.rank for file in files if file.rank is not None and file.name.endswith(".seal.json")}))
    if any(each is not None and each.is_damaged for each in found):
        return Step(step, "damaged", None, sealed, size, files, "it was found damaged, and withdrawn")
    if any(file.rank is not None and _is_alive(catalog.root, file) for file in files):
        return Step(step, "in progress", None, sealed, size, files)
    return Step(step, "incomplete", None, sealed, size, files, "no run is working on it any more")


def _files(directory: Path) -> list[StepFile]:
    """Those whose names are stillframe's."""
    found = []
    with os.scandir(directory) as entries:
        for entry in entries:
            file = names.parse_rank_file(entry.name)
            if file is None and names.parse_manifest(entry.name) is None:
                continue
            try:
                size = entry.stat(follow_symlinks=False).st_size
            except FileNotFoundError:
                continue
            found.append(StepFile(entry.name, size, file.rank if file else None, file.attempt if file else None))
    return sorted(found, key=lambda file: file.name)


def _is_alive(root: Path, file: StepFile) -> bool:
    assert file.rank is not None
    assert file.attempt is not None
    return life_of(root, file.rank, file.attempt) is Life.ALIVE


def _committed(published: list[Catalog], step: int, files: tuple[StepFile, ...]) -> Step | None:
    """By one manifest of all ranks, or by those of some that did not share the root."""
    size = sum(file.bytes for file in files)
    manifests, lacking = [], []
    for catalog in published:
        path = catalog.manifest_path(step)
        try:
            lacking += [lack] if (lack := catalog.lacks(step)) else []
            if not lacking:
                manifests.append(decode_manifest(durable.read_small(path, limits.MAX_MANIFEST_BYTES), file=str(path)))
        except NotFoundError:
            return None
        except VersionError as error:
            return Step(step, "newer format", None, (), size, files, str(error))
        except (StillframeError, OSError) as error:
            return Step(step, "unreadable", None, (), size, files, str(error))
    first = manifests[0] if manifests else _readable(published[0], step)
    if first is not None:
        size = sum(file.bytes for file in files if file.attempt in (None, first.attempt))
    here = tuple(sorted({entry.rank for manifest in manifests for entry in manifest.ranks}))
    return Step(step, "damaged" if lacking else "committed", first, here, size, files, "; ".join(lacking[:3]))


def _readable(catalog: Catalog, step: int) -> Manifest | None:
    path = catalog.manifest_path(step)
    try:
        return decode_manifest(durable.read_small(path, limits.MAX_MANIFEST_BYTES), file=str(path))
    except (StillframeError, OSError):
        return None
