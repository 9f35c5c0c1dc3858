"""One checkpoint, open for reading: its manifest, and each rank's seal and segment."""

from __future__ import annotations

import bisect
import contextlib
import threading
from collections import OrderedDict
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING

from stillframe.checkpoint.seals import read_seal
from stillframe.checkpoint.shards import ShardIndex
from stillframe.errors import FormatError, IntegrityError, NotFoundError, StillframeError, StorageError
from stillframe.format import limits, names
from stillframe.format.records import Manifest, RankEntry, Seal, decode_seal
from stillframe.model import SaveId
from stillframe.store import opened
from stillframe.store.lock import FileLock, NoLocks
from stillframe.store.protocol import Missing, NotOurs, Store, read_all

if TYPE_CHECKING:
    from stillframe.checkpoint.catalog import Catalog

PARSED = 16
"""So many ranks' seals are held on to; more than there are threads that read."""


def read_error(doing: str, error: StorageError) -> StillframeError:
    """What a failed read of a checkpoint means: damage if what should be there is not, else a trouble of the moment."""
    if isinstance(error, Missing | NotOurs):
        return IntegrityError(f"{doing}: {error}")
    return StorageError(f"{doing}: {error}; the checkpoint itself may be whole")


class RankPart:
    """One rank's part of a checkpoint: its seal, and its segment."""

    def __init__(self, store: Store, manifest: Manifest, entry: RankEntry) -> None:
        self.rank = entry.rank
        key = names.key(manifest.save, names.segment(entry.rank))
        self.path = store.where(key)
        self.seal = _read_seal(store, manifest, entry)
        try:
            self._segment = opened(store, key)
        except StorageError as error:
            raise read_error(f"{self.path} cannot be read", error) from error
        info, size = self._segment.info, self.seal.segment.bytes
        if info is None or not info.is_ours or info.size != size or size != entry.segment_bytes:
            found = "is missing" if info is None else f"has {info.size} bytes instead of {size}"
            raise IntegrityError(f"{self.path} {found if info is None or info.is_ours else 'is not a regular file'}")

    @cached_property
    def _starts(self) -> list[int]:
        return [shard.start for shard in self.seal.shards]

    def shards_between(self, start: int, end: int) -> range:
        """The numbers of the shards that have bytes in this part of the data."""
        return range(max(bisect.bisect_right(self._starts, start) - 1, 0), bisect.bisect_left(self._starts, end))

    def read(self, offset: int, into: memoryview) -> int:
        """Bytes of the segment.  Raises :class:`StorageError`."""
        return self._segment.read(offset, into)

    def lend(self, offset: int, length: int) -> memoryview | None:
        """As :class:`stillframe.store.protocol.Opened` has it.  Raises :class:`StorageError`."""
        return self._segment.lend(offset, length)


class Checkpoint:
    """One committed checkpoint, open for reading.  Thread: :meth:`of` is safe from any.

    A few seals are held on to, however many ranks there are; :attr:`index` knows where the shards of all of them lie.
    """

    def __init__(self, catalog: Catalog, save: SaveId) -> None:
        self.root, self.path = catalog.root, catalog.dir(save)
        self.save = save
        self._catalog = catalog
        self._opening = threading.Lock()
        self._parts: OrderedDict[int, RankPart] = OrderedDict()
        self._structures: dict[int, str] = {}
        """Of the trees that were read, by the first rank that has the same."""
        self._lock: FileLock | None = None
        try:
            self._hold()
            if not catalog.is_committed(save):
                raise catalog.not_found(save.step)
            self.manifest = catalog.manifest(save)
            self._entries = {entry.rank: entry for entry in self.manifest.ranks}
            self.index = ShardIndex(self._entries)
            if len(self._entries) == 1:
                self.of(*self._entries)
        except BaseException:
            self.close()
            raise

    @property
    def step(self) -> int:
        return self.save.step

    @property
    def world_size(self) -> int:
        """How many ranks wrote it."""
        return self.manifest.world_size

    @property
    def ranks(self) -> list[int]:
        """Whose parts can be read here: all, or some where the roots are not shared."""
        return list(self._entries)

    def like(self, rank: int) -> int:
        """The first rank, of those here, whose tree has the same structure as this one's."""
        like = self._entries[rank].like
        return rank if like is None else like

    def of(self, rank: int) -> RankPart:
        """One rank's part.  Its seal is read, unless it is among those that were asked for last.

        Raises: :class:`NotFoundError` if this root does not hold it; :class:`IntegrityError`; :class:`VersionError`.
        """
        with self._opening:
            part = self._parts.get(rank)
            if part is None:
                entry = self._entries.get(rank)
                if entry is None:
                    raise NotFoundError(f"the part of rank {rank} is not in {self.path}; this root is not shared")
                part = RankPart(self._catalog.store, self.manifest, entry)
                self._check_like(rank, part.seal)
                self._parts[rank] = part
            self._parts.move_to_end(rank)
            if len(self._parts) > PARSED:
                self._parts.popitem(last=False)
            return part

    def _check_like(self, rank: int, seal: Seal) -> None:
        """The manifest is not taken at its word: a tree that is said to be like another would not be looked at."""
        like = self.like(rank)
        if self._structures.setdefault(like, seal.structure) != seal.structure:
            raise FormatError(
                f"{self.path}: rank {rank} has another structure than rank {like}, whose its manifest says"
            )

    def seal_bytes(self, rank: int) -> bytes:
        """The seal of one rank as it is stored, verified.  Raises: as :meth:`of`."""
        store, key = self._catalog.store, names.key(self.save, names.seal(rank))
        where = store.where(key)
        try:
            data = read_all(store, key, limits.MAX_SEAL_BYTES)
        except StorageError as error:
            raise read_error(f"{where} cannot be read", error) from error
        if decode_seal(data, file=where)[1] != self._entries[rank].seal_digest:
            raise IntegrityError(f"{where} is damaged: its checksum is not the one in the manifest")
        return data

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
        """Ask retention to pass it over, as far as locks go; where there are none, what is removed is found missing."""
        with contextlib.suppress(NoLocks, StorageError):  # reading it says what is wrong
            self._lock = FileLock(self._catalog.store, self._catalog.commit_key(self.save), is_shared=True)
            self._lock.acquire()


def _read_seal(store: Store, manifest: Manifest, entry: RankEntry) -> Seal:
    where = store.where(names.key(manifest.save, names.seal(entry.rank)))
    try:
        seal, known_by = read_seal(store, manifest.save, entry.rank)
    except StorageError as error:
        raise read_error(f"{where} cannot be read", error) from error
    if known_by != entry.seal_digest:
        raise IntegrityError(f"{where} is damaged: its checksum is not the one in the manifest")
    if (seal.save, seal.rank, seal.world_size) != (manifest.save, entry.rank, manifest.world_size):
        raise FormatError(f"{where} belongs to another checkpoint")
    return seal
