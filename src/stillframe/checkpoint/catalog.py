"""The one place that decides what is a checkpoint: a step whose manifest is published.

Restore, list, prune and "latest" all ask here.  Reads only, except for :meth:`Catalog.set_aside`, which un-publishes a
manifest.  An open :class:`Checkpoint` holds a shared lock on its manifest, where there are locks: retention passes it
over.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from types import TracebackType

from stillframe.errors import FormatError, IntegrityError, NotFoundError, StillframeError, StorageError
from stillframe.format import limits, names
from stillframe.format.records import Manifest, RankEntry, Seal, decode_manifest, decode_seal
from stillframe.model import check_step
from stillframe.store import infos, open_store
from stillframe.store.lock import FileLock, NoLocks
from stillframe.store.posix import PosixStore
from stillframe.store.protocol import Info, Missing, NotOurs, Store, read_all

_DAMAGE = {errno.EIO, errno.EUCLEAN, errno.EBADMSG}


def read_error(doing: str, error: StorageError) -> StillframeError:
    """What a failed read of a checkpoint means: damage, or a trouble of the moment (permissions, a timeout)."""
    code = getattr(error.__cause__, "errno", None)
    if isinstance(error, Missing | NotOurs) or code in _DAMAGE:
        return IntegrityError(f"{doing}: {error}")
    return StorageError(f"{doing}: {error}; the checkpoint itself may be whole")


class Catalog:
    """The checkpoints in a root.  Holds no state: every call looks at the store.

    ``rank``: in a root that the ranks do not share, the checkpoints that this rank has committed for itself.
    """

    def __init__(self, root: str | os.PathLike[str] | Store, rank: int | None = None) -> None:
        self.store = open_store(root)
        self.root = Path(self.store.where())
        self.rank = rank

    def steps(self) -> list[int]:
        """The committed steps, oldest first; none if the root does not exist."""
        return [step for step in self.step_dirs() if self.is_committed(step)]

    def latest(self, skipped: Collection[int] = ()) -> int | None:
        """The newest committed step, but for the skipped ones.  Looks no further than that one."""
        found = (step for step in reversed(self.step_dirs()) if step not in skipped)
        return next((step for step in found if self.is_committed(step)), None)

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

    def step_dirs(self) -> list[int]:
        """Every step that has a directory, committed or not, oldest first."""
        found = [names.parse_step_dir(name[:-1]) for name in self.store.list() if name.endswith("/")]
        return sorted(step for step in found if step is not None)

    def strange_steps(self) -> list[int]:
        """Steps in whose place is no directory but a link or a file, oldest first."""
        found = map(names.parse_step_dir, self.store.list())  # a directory's name ends in "/"
        return sorted(step for step in found if step is not None)

    def dir(self, step: int) -> Path:
        """The path of a step's directory, for messages."""
        return Path(self.store.where(names.step_dir(step)))

    def key(self, step: int, name: str) -> str:
        """Of a file in a step's directory."""
        return f"{names.step_dir(step)}/{name}"

    def manifest_key(self, step: int) -> str:
        return self.key(step, names.manifest(self.rank))

    def damaged_key(self, step: int) -> str:
        return self.key(step, names.damaged_manifest(self.rank))

    def is_committed(self, step: int) -> bool:
        """Raises :class:`StorageError` if that cannot be told."""
        return self.store.head(self.manifest_key(step)) is not None

    def is_committed_otherwise(self, step: int) -> bool:
        """Whether there are manifests of the other kind: of all ranks, or of some that did not share the root."""
        found = map(names.parse_manifest, self.store.list(names.step_dir(step)))
        return any(
            each is not None and each.is_published and (each.rank is None) != (self.rank is None) for each in found
        )

    def damaged(self) -> list[int]:
        """Steps that were checkpoints until they were found damaged, oldest first."""
        return [step for step in self.step_dirs() if not self.is_committed(step) and self.is_damaged(step)]

    def is_damaged(self, step: int) -> bool:
        """Of a step that is not committed."""
        return self.store.head(self.damaged_key(step)) is not None

    def manifest(self, step: int) -> Manifest:
        """Of a committed step.

        Raises: :class:`NotFoundError` if it is not committed; :class:`IntegrityError`; :class:`VersionError`;
        :class:`StorageError` if it cannot be read for now.
        """
        key = self.manifest_key(step)
        where = self.store.where(key)
        try:
            data = read_all(self.store, key, limits.MAX_MANIFEST_BYTES)
        except Missing:
            raise NotFoundError(f"step {step} is not a checkpoint in {self.root}") from None
        except StorageError as error:
            if isinstance(error, NotOurs) and step not in self.step_dirs():  # a file or a link in the step's place
                raise NotFoundError(f"step {step} is not a checkpoint in {self.root}") from None
            raise read_error(f"{where} cannot be read", error) from error
        manifest = decode_manifest(data, file=where)
        if (manifest.step, manifest.rank) != (step, self.rank):
            raise FormatError(f"{where} is the manifest of step {manifest.step}, rank {manifest.rank}")
        return manifest

    def lacks(self, manifest: Manifest, files: Mapping[str, Info] | None = None) -> str:
        """What a committed step lacks as far as names and sizes tell; empty if nothing.

        ``files``: of its directory, if they are known.  A manifest that is gone by now is no fault: raises
        :class:`NotFoundError`.  Raises :class:`StorageError` for what cannot be looked at.
        """
        step = manifest.step
        if files is None:
            files = infos(self.store, names.step_dir(step))
        for entry in manifest.ranks:
            for name, size in ((entry.segment, entry.segment_bytes), (entry.seal, None)):
                found = files.get(name)
                if found is None:
                    if not self.is_committed(step):  # gone, too: then retention has just removed it all
                        raise NotFoundError(f"step {step} is gone from {self.root}")
                    return f"{name} is missing"
                if not found.is_ours:
                    return f"{name} is not a regular file"
                if size is not None and found.size != size:
                    return f"{name} has {found.size} bytes instead of {size}"
        return ""

    def mark_damaged(self, step: int) -> bool:
        """Un-publish a checkpoint whose bytes are wrong, keeping its files for a person to look at.

        Returns whether it could; a root that cannot be written stays as it is.
        """
        return self.set_aside(step, self.damaged_key(step))

    def set_aside(self, step: int, to: str) -> bool:
        """Move the manifest to another key, so that the step is no checkpoint.  Returns whether it could.

        After a crash in between, both keys hold it: the step is still a checkpoint.
        """
        key = self.manifest_key(step)
        try:
            try:
                self.store.put(to, read_all(self.store, key, limits.MAX_MANIFEST_BYTES))
                self.store.delete([key])
            except Missing:
                return False
            except StorageError as error:
                if not isinstance(read_error("", error), IntegrityError):
                    raise
                self._move_unread(key, to)
        except StorageError:
            return False
        return True

    def _move_unread(self, key: str, to: str) -> None:
        """A link or a pipe in the manifest's place, or bytes that cannot be read: kept as it is, if it can be."""
        if isinstance(self.store, PosixStore):
            self.store.rename(key, to)
        else:
            self.store.put(to, b"")
            self.store.delete([key])


class RankPart:
    """One rank's part of a checkpoint: its seal, and its segment."""

    def __init__(self, store: Store, manifest: Manifest, entry: RankEntry) -> None:
        directory = names.step_dir(manifest.step)
        self.rank = entry.rank
        self.path = Path(store.where(f"{directory}/{entry.segment}"))
        self._store, self._key = store, f"{directory}/{entry.segment}"
        self.seal = _read_seal(store, f"{directory}/{entry.seal}", manifest, entry)
        try:
            info = store.head(self._key)
        except StorageError as error:
            raise read_error(f"{self.path} cannot be looked at", error) from error
        size = self.seal.segment.bytes
        if info is None or not info.is_ours or info.size != size or size != entry.segment_bytes:
            found = "is missing" if info is None else f"has {info.size} bytes instead of {size}"
            raise IntegrityError(f"{self.path} {found if info is None or info.is_ours else 'is not a regular file'}")

    def read(self, offset: int, into: memoryview) -> int:
        """Bytes of the segment.  Raises :class:`StorageError`."""
        return self._store.read(self._key, offset, into)


class Checkpoint:
    """One committed checkpoint, open for reading.  Thread: :meth:`of` is safe from any."""

    def __init__(self, catalog: Catalog, step: int) -> None:
        self.path = catalog.dir(step)
        self.step = step
        self._catalog = catalog
        self._opening = threading.Lock()
        self._parts: dict[int, RankPart] = {}
        self._lock: FileLock | None = None
        try:
            self._hold()
            try:
                self.manifest = catalog.manifest(step)
            except NotFoundError:
                raise self._not_found() from None
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

    def of(self, rank: int) -> RankPart:
        """One rank's part; its seal is read when first asked for.

        Raises: :class:`NotFoundError` if this root does not hold it; :class:`IntegrityError`; :class:`VersionError`.
        """
        with self._opening:
            part = self._parts.get(rank)
            if part is None:
                entry = self._entries.get(rank)
                if entry is None:
                    raise NotFoundError(f"the part of rank {rank} is not in {self.path}; this root is not shared")
                part = self._parts[rank] = RankPart(self._catalog.store, self.manifest, entry)
            return part

    def release(self, rank: int) -> None:
        """Forget one rank's seal; it is read again when asked for."""
        with self._opening:
            self._parts.pop(rank, None)

    def close(self) -> None:
        """Let go of the lock; may be called again."""
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _hold(self) -> None:
        """Keep retention away, as far as locks go; where there are none, what it removes is found missing."""
        try:
            self._lock = FileLock(self._catalog.store, self._catalog.manifest_key(self.step), is_shared=True)
            if self._lock.acquire() and self._lock.is_current():
                return
        except Missing:
            pass
        except (NoLocks, StorageError):
            return  # reading it says what is wrong
        raise self._not_found()  # retention has removed it, or is just doing so

    def _not_found(self) -> NotFoundError:
        known: list[int] = []
        with contextlib.suppress(StorageError):  # it is only for the hint
            known = self._catalog.steps()
        nearest = min(known, key=lambda step: abs(step - self.step), default=None)
        hint = "the root has no checkpoint" if nearest is None else f"the nearest is step {nearest}"
        return NotFoundError(f"step {self.step} is not a checkpoint in {self._catalog.root}; {hint}")


def _read_seal(store: Store, key: str, manifest: Manifest, entry: RankEntry) -> Seal:
    where = store.where(key)
    try:
        data = read_all(store, key, limits.MAX_SEAL_BYTES)
    except StorageError as error:
        raise read_error(f"{where} cannot be read", error) from error
    seal, known_by = decode_seal(data, file=where)
    if known_by != entry.seal_digest:
        raise IntegrityError(f"{where} is damaged: its checksum is not the one in the manifest")
    expected = manifest.step, entry.rank, manifest.attempt, manifest.world_size
    if (seal.step, seal.rank, seal.attempt, seal.world_size) != expected:
        raise FormatError(f"{where} belongs to another checkpoint")
    return seal
