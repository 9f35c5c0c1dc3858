"""The one place that decides what is a checkpoint: a step whose manifest is published.

Restore, list, prune and "latest" all ask here.  Reads only, except for :meth:`Catalog.mark_damaged`,
which un-publishes a manifest found to be lying.  An open :class:`Checkpoint` holds a shared lock on
its manifest, and its files open: retention passes it over, and it stays readable whatever happens.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from types import TracebackType

from stillframe.errors import FormatError, IntegrityError, NotFoundError, StorageError, VersionError
from stillframe.format import limits, names
from stillframe.format.digest import digest
from stillframe.format.records import Manifest, RankEntry, Seal, decode_manifest, decode_seal
from stillframe.model import check_step
from stillframe.storage import durable
from stillframe.storage.direct import ReadFile


class Catalog:
    """The checkpoints in a root.  Holds no state: every call looks at the file system."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(os.path.abspath(root))

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
        return Checkpoint(self.dir(check_step(step)), step)

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
            if not self.is_committed(step) and os.path.lexists(self.dir(step) / names.DAMAGED_MANIFEST)
        ]

    def is_committed(self, step: int) -> bool:
        return os.path.lexists(self.dir(step) / names.MANIFEST)

    def mark_damaged(self, step: int) -> bool:
        """Un-publish a checkpoint whose bytes are wrong, keeping its files for a person to look at.

        Tells whether it could; a root that cannot be written stays as it is.
        """
        if self.dir(step).is_symlink():
            return False  # what a link leads to is not this root's to change
        try:
            durable.publish(self.dir(step) / names.MANIFEST, self.dir(step) / names.DAMAGED_MANIFEST)
        except OSError:
            return False
        return True


class Checkpoint:
    """One committed checkpoint, open for reading."""

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        self.step = step
        self._closing = contextlib.ExitStack()
        try:
            self.manifest = self._open_manifest()
            entry = self._only_rank()
            self.seal = self._open_seal(entry)
            self.file = self._open_segment(entry)
        except BaseException:
            self.close()
            raise

    @property
    def segment_path(self) -> Path:
        return self.path / self.seal.segment.file

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
        path = self.path / names.MANIFEST
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
        if os.fstat(fd).st_nlink == 0:
            raise self._not_found()
        try:
            data = durable.read_open(fd, limits.MAX_MANIFEST_BYTES)
        except OSError as error:
            raise durable.read_error(f"{path} cannot be read", error) from error
        manifest = decode_manifest(data, file=str(path))
        if manifest.step != self.step:
            raise FormatError(f"{path} is the manifest of step {manifest.step}")
        return manifest

    def _not_found(self) -> NotFoundError:
        known = Catalog(self.path.parent).steps()
        nearest = min(known, key=lambda step: abs(step - self.step), default=None)
        hint = "the root has no checkpoint" if nearest is None else f"the nearest is step {nearest}"
        return NotFoundError(f"step {self.step} is not a checkpoint in {self.path.parent}; {hint}")

    def _only_rank(self) -> RankEntry:
        if self.manifest.world_size != 1:
            raise VersionError(
                f"{self.path} was written by {self.manifest.world_size} ranks; this stillframe reads one: upgrade it"
            )
        return self.manifest.ranks[0]

    def _open_seal(self, entry: RankEntry) -> Seal:
        path = self.path / entry.seal
        try:
            data = durable.read_small(path, limits.MAX_SEAL_BYTES)
        except OSError as error:
            raise durable.read_error(f"{path} cannot be read", error) from error
        if digest(data) != entry.seal_digest:
            raise IntegrityError(f"{path} is damaged: its checksum is not the one in the manifest")
        seal = decode_seal(data, file=str(path))
        if (seal.step, seal.rank, seal.attempt) != (self.step, entry.rank, self.manifest.attempt):
            raise FormatError(f"{path} belongs to another checkpoint")
        return seal

    def _open_segment(self, entry: RankEntry) -> ReadFile:
        path = self.path / entry.segment
        try:
            file = ReadFile(path)
        except OSError as error:
            raise durable.read_error(f"{path} cannot be opened", error) from error
        self._closing.callback(file.close)
        if file.size != self.seal.segment.bytes or file.size != entry.segment_bytes:
            raise IntegrityError(f"{path} has {file.size} bytes instead of {self.seal.segment.bytes}")
        return file
