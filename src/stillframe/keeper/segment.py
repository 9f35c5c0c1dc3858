"""One save on its way to storage: chunks in any order, then finish, seal, commit.

Chunks are hashed and written by a few threads (both release the GIL, so the hash of one chunk
runs under the write of another).  The first error decides: later chunks are only given back.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stillframe.checkpoint.catalog import Catalog
from stillframe.errors import ExistsError, StorageError
from stillframe.format import names
from stillframe.format.digest import digest, digest_of
from stillframe.format.records import (
    Failure,
    Manifest,
    RankEntry,
    SealDraft,
    Segment,
    encode_failure,
    encode_manifest,
    encode_seal,
)
from stillframe.keeper import labels
from stillframe.link.messages import Begin, Chunk
from stillframe.model import BLOCK_BYTES, CHUNK_BYTES
from stillframe.store import durable
from stillframe.store.direct import WriteFile, aligned_buffer
from stillframe.units import round_up


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What tells whether two saves of one layout have the same lazily staged bytes."""

    layout: str
    digests: tuple[str, ...]


class Flush:
    """Thread: chunks from any; :meth:`seal` and :meth:`commit` once, after all of them.

    ``tidying`` is held while directories are made or removed: a step may be saved again that is just being pruned.
    """

    def __init__(
        self, begin: Begin, header: bytes, draft: SealDraft, catalog: Catalog, tidying: threading.Lock
    ) -> None:
        self.begin = begin
        self.draft = draft
        self.error: Exception | None = None
        self.staged_s: float | None = None
        self.flush_begin_s: float | None = None
        self.sealed_s: float | None = None
        self.received_bytes = 0
        self.flushed_bytes = 0
        self.pending: list[Future[None]] = []
        self.is_counted = False
        """Another rank counts the seal."""
        self.is_promised = False
        """It is committed, or sealed and another rank may commit it: its files must stay."""
        self.dir = catalog.dir(begin.step)
        self._catalog = catalog
        self._header = header
        self._digests: list[str | None] = [None] * (-(-begin.data_bytes // CHUNK_BYTES))
        self._lazy: dict[int, str] = {}
        self._file: WriteFile | None = None
        self._entry: RankEntry | None = None
        self._has_files = False
        self._opening = threading.Lock()
        self._tidying = tidying

    @property
    def _segment_path(self) -> Path:
        return self.dir / names.segment(self.draft.rank, self.draft.attempt)

    @property
    def _seal_path(self) -> Path:
        return self.dir / names.seal(self.draft.rank, self.draft.attempt)

    @property
    def _partial_path(self) -> Path:
        return self._segment_path.with_name(self._segment_path.name + names.PARTIAL)

    def attempt(self, work: Callable[[], object]) -> None:
        """Do a piece of the work, unless the save has failed already; keep the first error."""
        if self.error is None:
            try:
                work()
            except Exception as error:  # kept, and reported when the save ends
                self.error = self.error or error

    def open(self) -> WriteFile:
        with self._opening:
            if self._file is None:
                with durable.storage_errors(f"creating {self._partial_path}"), self._tidying:
                    if self._catalog.is_committed(self.begin.step):
                        raise ExistsError(f"step {self.begin.step} is already a checkpoint in {self.dir.parent}")
                    if self.begin.label is not None:
                        labels.check_free(self._catalog, self.begin.label)
                    file = self._file = self._create()
                    header = aligned_buffer(len(self._header))
                    header[: len(self._header)] = self._header
                    file.write_at(memoryview(header)[: len(self._header)], 0)
            return self._file

    def _create(self) -> WriteFile:
        """The segment's file; the coordinator may be sweeping the step's empty directory away just now."""
        for is_last in (False, False, True):
            durable.make_dirs(self.dir.parent)
            durable.make_dir(self.dir)
            self._has_files = True
            try:
                is_reused = self._take_spare()
                return WriteFile(self._partial_path, len(self._header) + self.begin.data_bytes, is_reused=is_reused)
            except FileNotFoundError:
                if is_last:
                    raise
        raise AssertionError

    def _take_spare(self) -> bool:
        """Whether a segment that retention let go lies under our name now, to be written over.

        Every byte of it will be: a segment is sealed only when all its chunks have been written.
        """
        try:
            durable.move(self._catalog.root / names.spare(self.draft.rank), self._partial_path)
        except OSError:
            return False
        if durable.is_nobody_elses(self._partial_path):
            return True
        durable.remove(self._partial_path)
        return False

    def write(self, chunk: Chunk, memory: memoryview) -> None:
        """Hash a chunk and write it at its place; ``memory`` is its whole span."""
        file = self.open()
        data = memory[: chunk.nbytes]
        self._digests[chunk.index] = digest(data)
        self._fingerprint(chunk.index, data)
        padded = round_up(chunk.nbytes, BLOCK_BYTES)
        memory[chunk.nbytes : padded] = bytes(padded - chunk.nbytes)
        offset = len(self._header) + chunk.index * CHUNK_BYTES
        with durable.storage_errors(f"writing {self._partial_path}"):
            file.write_at(memory[:padded], offset)

    def count_flushed(self, nbytes: int, begun_s: float) -> None:
        with self._opening:
            self.flush_begin_s = min(self.flush_begin_s or begun_s, begun_s)
            self.flushed_bytes += nbytes

    def _fingerprint(self, index: int, data: memoryview) -> None:
        at = index * CHUNK_BYTES
        ranges = [(max(start - at, 0), min(end - at, len(data))) for start, end in self.begin.lazy]
        parts = [data[start:end] for start, end in ranges if start < end]
        if sum(map(len, parts)) == len(data):
            self._lazy[index] = self._digests[index] or ""
        elif parts:
            self._lazy[index] = digest_of(parts)

    @property
    def fingerprint(self) -> Fingerprint | None:
        """``None`` if nothing was staged lazily."""
        digests = tuple(self._lazy[index] for index in sorted(self._lazy))
        return Fingerprint(self.begin.layout, digests) if digests else None

    @property
    def entry(self) -> RankEntry:
        """What the manifest says of this rank, once it is sealed."""
        assert self._entry is not None
        return self._entry

    def seal(self) -> None:
        """Segment durable, then seal durable.  Blocks; raises."""
        file = self.open()
        chunks = [each for each in self._digests if each is not None]
        if len(chunks) != len(self._digests):
            raise StorageError(f"sealing {self._segment_path}: {len(chunks)} of {len(self._digests)} chunks arrived")
        with durable.storage_errors(f"sealing {self._segment_path}"):
            file.finish()
            durable.publish(self._partial_path, self._segment_path)
            if self.begin.label is not None:
                decides = not self.is_counted
                labels.write(self._catalog, self.begin.step, self.draft.attempt, self.begin.label, decides)
            segment = Segment(
                file=self._segment_path.name,
                bytes=len(self._header) + self.begin.data_bytes,
                data_start=len(self._header),
                header=digest(self._header),
                chunk_bytes=CHUNK_BYTES,
                chunks=chunks,
            )
            data, known_by = encode_seal(self.draft, segment)
            path = self._seal_path
            partial = path.with_name(path.name + names.PARTIAL)
            durable.write_partial(partial, data)
            self.is_promised = self.is_counted  # from its rename on, whether that is durable or not
            durable.publish(partial, path)
        self.sealed_s = time.monotonic()
        self._entry = RankEntry(self.draft.rank, segment.file, segment.bytes, path.name, known_by)

    def commit(self, ranks: list[RankEntry]) -> None:
        """Publish the manifest: from here on the checkpoint exists.  Blocks; raises."""
        rank = self._catalog.rank
        now = time.monotonic()
        manifest = Manifest(
            step=self.begin.step,
            attempt=self.draft.attempt,
            world_size=self.draft.world_size,
            created_unix_s=time.time(),
            stage_s=(self.staged_s or now) - self.begin.requested_s,
            commit_s=now - self.begin.requested_s,
            ranks=ranks,
            seal_s=(self.sealed_s or now) - self.begin.requested_s,
            rank=rank,
        )
        partial = self.dir / names.manifest_partial(self.draft.attempt, rank)
        with durable.storage_errors(f"publishing the manifest of step {self.begin.step}"):
            durable.write_partial(partial, encode_manifest(manifest))
            durable.publish_new(partial, self._catalog.manifest_path(self.begin.step))
        self.is_promised = True

    def publish_label(self) -> None:
        """After the commit, by the keeper that made it.  Blocks; raises."""
        if self.begin.label is not None:
            with durable.storage_errors(f"step {self.begin.step} is committed, but its label is not published"):
                labels.publish(self._catalog, self.begin.step, self.draft.attempt, self.begin.label)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def discard(self) -> None:
        """Remove the files of this save; best effort, a later sweep gets the rest.

        Only if it made any: one refused because the step exists must not touch that checkpoint.
        """
        self.close()
        if self._has_files:
            for path in (self._segment_path, self._seal_path):
                for each in (path, path.with_name(path.name + names.PARTIAL)):
                    with contextlib.suppress(OSError):
                        durable.remove(each)
            with contextlib.suppress(OSError):
                durable.remove(self.dir / names.manifest_partial(self.draft.attempt, self._catalog.rank))
        if self.begin.label is not None:
            labels.discard(self._catalog, self.begin.step, self.draft.attempt)
        with contextlib.suppress(OSError):
            durable.remove_dir(self.dir)


def report_failure(directory: Path, failure: Failure) -> None:
    """Tell the other ranks, who may be waiting, that this one will not come; best effort, they have a deadline."""
    path = directory / names.failure(failure.rank, failure.attempt)
    partial = path.with_name(path.name + names.PARTIAL)
    with contextlib.suppress(OSError):
        durable.make_dirs(directory)
        durable.write_partial(partial, encode_failure(failure))
        durable.publish(partial, path)


def read_draft(fd_bytes: bytes, begin: Begin) -> tuple[bytes, SealDraft]:
    header, draft = fd_bytes[: begin.header_bytes], fd_bytes[begin.header_bytes :]
    return header, msgspec.json.decode(draft, type=SealDraft)
