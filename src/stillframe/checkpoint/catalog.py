"""The one place that decides what is a checkpoint: a step whose manifest is published.

Restore, list, prune and "latest" all ask here.  Reads only, except for :meth:`Catalog.mark_damaged`,
which un-publishes a manifest found to be lying.  An open :class:`Checkpoint` holds a shared lock on
its manifest: retention passes it over.  Each rank's seal and segment are opened when first asked for,
and stay readable from then on, whatever happens.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from pathlib import Path
from types import TracebackType

from stillframe.errors import FormatError, IntegrityError, NotFoundError, StorageError
from stillframe.format import limits, names
from stillframe.format.records import Manifest, RankEntry, Seal, decode_manifest, decode_seal
from stillframe.model import check_step
from stillframe.store import durable
from stillframe.store.direct import ReadFile


class Catalog:
    """The checkpoints in a root.  Holds no state: every call looks at the file system.

    ``rank``: of a root that the other ranks do not see, what this one has committed there for itself.
    """

    def __init__(self, root: str | os.PathLike[str], rank: int | None = None) -> None:
        self.root = Path(os.path.abspath(root))
        self.rank = rank

    def steps(self) -> list[int]:
        """The committed steps, oldest first; none if the root does not exist."""
        return [step for step in self.step_dirs() if self.is_committed(step)]

    def latest(self) -> int | None:
        """The newest committed step."""
        return next((step for step in reversed(self.step_dirs()) if self.is_committed(step)), None)

    def open(self, step: int | None = None) -> Checkpoint:
        """The checkpoint of a step (the newest if none is given), held open until closed.

        Raises: :class:`NotFoundError`; :class:`IntegrityError` if manifest, seal or sizes are
        wrong (the data itself is checked as it is read); :class:`VersionError`.
        """
        if step is None:
            step = self.latest()
            if step is None:
                raise NotFoundError(f"there is no checkpoint in {self.root}")
        return Checkpoint(self, check_step(step))

    def dir(self, step: int) -> Path:
        return self.root / names.step_dir(step)

    def step_dirs(self) -> list[int]:
        """Every step that has a directory, committed or not, oldest first."""
        try:
            with os.scandir(self.root) as entries:
                found = [entry.name for entry in entries if entry.is_dir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError(f"listing {self.root}: {error}") from error
        return sorted(step for name in found if (step := names.parse_step_dir(name)) is not None)

    def damaged(self) -> list[int]:
        """Steps that were checkpoints until they were found damaged, oldest first."""
        return [
            step
            for step in self.step_dirs()
            if not self.is_committed(step) and os.path.lexists(self.damaged_path(step))
        ]

    def is_committed(self, step: int) -> bool:
        return os.path.lexists(self.manifest_path(step))

    def is_committed_otherwise(self, step: int) -> bool:
        """Whether there are manifests of the other kind: of all ranks, or of some that did not share the root."""
        try:
            found = [names.parse_manifest(name) for name in os.listdir(self.dir(step))]
        except OSError:
            return False
        return any(
            each is not None and each.is_published and (each.rank is None) != (self.rank is None) for each in found
        )

    def manifest_path(self, step: int) -> Path:
        return self.dir(step) / names.manifest(self.rank)

    def damaged_path(self, step: int) -> Path:
        return self.dir(step) / names.damaged_manifest(self.rank)

    def lacks(self, step: int) -> str:
        """What is wrong with a committed step as far as names and sizes tell; empty if nothing is.

        A manifest that is gone by now is no fault: raises :class:`NotFoundError`.  Raises: :class:`VersionError`, and
        :class:`StorageError` for what cannot be looked at.
        """
        path = self.manifest_path(step)
        try:
            manifest = decode_manifest(durable.read_small(path, limits.MAX_MANIFEST_BYTES), file=str(path))
            for entry in manifest.ranks:
                for name, size in ((entry.segment, entry.segment_bytes), (entry.seal, None)):
                    try:
                        found = os.lstat(self.dir(step) / name).st_size
                    except FileNotFoundError:
                        os.lstat(path)  # gone, too: then retention has just removed it all
                        return f"{name} is missing"
                    if size is not None and found != size:
                        return f"{name} has {found} bytes instead of {size}"
        except FileNotFoundError:
            raise NotFoundError(f"step {step} is gone from {self.root}") from None
        except IntegrityError as error:
            return str(error)
        except OSError as error:
            problem = durable.read_error(f"looking at {path}", error)
            if isinstance(problem, IntegrityError):
                return str(problem)
            raise problem from error
        return ""

    def mark_damaged(self, step: int) -> bool:
        """Un-publish a checkpoint whose bytes are wrong, keeping its files for a person to look at.

        Tells whether it could; a root that cannot be written stays as it is.
        """
        if self.dir(step).is_symlink():
            return False  # what a link leads to is not this root's to change
        try:
            durable.publish(self.manifest_path(step), self.damaged_path(step))
        except OSError:
            return False
        return True


class Sealed:
    """One rank's part of a checkpoint: its seal, and its segment open for reading."""

    def __init__(self, path: Path, manifest: Manifest, entry: RankEntry) -> None:
        self.path = path / entry.segment
        self.rank = entry.rank
        self.seal = _read_seal(path / entry.seal, manifest, entry)
        try:
            self.file = ReadFile(self.path)
        except OSError as error:
            raise durable.read_error(f"{self.path} cannot be opened", error) from error
        size = self.seal.segment.bytes
        if self.file.size != size or self.file.size != entry.segment_bytes:
            self.file.close()
            raise IntegrityError(f"{self.path} has {self.file.size} bytes instead of {size}")


class Checkpoint:
    """One committed checkpoint, open for reading.  Thread: :meth:`of` is safe from any."""

    def __init__(self, catalog: Catalog, step: int) -> None:
        self.path = catalog.dir(step)
        self.step = step
        self._catalog = catalog
        self._opening = threading.Lock()
        self._sealed: dict[int, Sealed] = {}
        self._closing = contextlib.ExitStack()
        try:
            self.manifest = self._open_manifest()
            self._entries = {entry.rank: entry for entry in self.manifest.ranks}
            if len(self._entries) == 1:
                self.of(*self._entries)
        except BaseException:
            self.close()
            raise

    @property
    def world_size(self) -> int:
        """How many ranks wrote it."""
        return self.manifest.world_size

    @property
    def ranks(self) -> list[int]:
        """Whose parts can be read here: all, or one where the roots are not shared."""
        return list(self._entries)

    def of(self, rank: int) -> Sealed:
        """One rank's part, opened when first asked for.

        Raises: :class:`NotFoundError` if this root does not hold it; :class:`IntegrityError`; :class:`VersionError`.
        """
        with self._opening:
            sealed = self._sealed.get(rank)
            if sealed is None:
                entry = self._entries.get(rank)
                if entry is None:
                    raise NotFoundError(f"the part of rank {rank} is not in {self.path}; this root is not shared")
                sealed = self._sealed[rank] = Sealed(self.path, self.manifest, entry)
                self._closing.callback(sealed.file.close)
            return sealed

    def release(self, rank: int) -> None:
        """Let go of one rank's part; it is opened again when asked for.  Nobody may be reading it."""
        with self._opening:
            sealed = self._sealed.pop(rank, None)
        if sealed is not None:
            sealed.file.close()

    def close(self) -> None:
        """Let go of the files and the lock; may be called again."""
        self._closing.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_manifest(self) -> Manifest:
        path = self._catalog.manifest_path(self.step)
        try:
            fd = durable.open_file(path)
        except (FileNotFoundError, NotADirectoryError):
            raise self._not_found() from None
        except OSError as error:
            raise durable.read_error(f"{path} cannot be opened", error) from error
        self._closing.callback(os.close, fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._not_found() from None  # retention is just removing it
        except OSError:
            pass  # no locks here: retention's unlink still leaves open files readable
        if not _is_same(fd, path):
            raise self._not_found()  # retention has removed it, or renamed it, before we had the lock
        try:
            data = durable.read_open(fd, limits.MAX_MANIFEST_BYTES)
        except OSError as error:
            raise durable.read_error(f"{path} cannot be read", error) from error
        manifest = decode_manifest(data, file=str(path))
        if (manifest.step, manifest.rank) != (self.step, self._catalog.rank):
            raise FormatError(f"{path} is the manifest of step {manifest.step}, rank {manifest.rank}")
        return manifest

    def _not_found(self) -> NotFoundError:
        known = self._catalog.steps()
        nearest = min(known, key=lambda step: abs(step - self.step), default=None)
        hint = "the root has no checkpoint" if nearest is None else f"the nearest is step {nearest}"
        return NotFoundError(f"step {self.step} is not a checkpoint in {self._catalog.root}; {hint}")


def _is_same(fd: int, path: Path) -> bool:
    """Whether the file open there is still the one of that name."""
    try:
        now, then = path.lstat(), os.fstat(fd)
    except OSError:
        return False
    return (now.st_ino, now.st_dev) == (then.st_ino, then.st_dev)


def _read_seal(path: Path, manifest: Manifest, entry: RankEntry) -> Seal:
    try:
        data = durable.read_small(path, limits.MAX_SEAL_BYTES)
    except OSError as error:
        raise durable.read_error(f"{path} cannot be read", error) from error
    seal, known_by = decode_seal(data, file=str(path))
    if known_by != entry.seal_digest:
        raise IntegrityError(f"{path} is damaged: its checksum is not the one in the manifest")
    expected = manifest.step, entry.rank, manifest.attempt, manifest.world_size
    if (seal.step, seal.rank, seal.attempt, seal.world_size) != expected:
        raise FormatError(f"{path} belongs to another checkpoint")
    return seal
