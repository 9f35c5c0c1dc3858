"""One save on its way to storage: chunks in any order, then seal, commit.

Chunks are hashed and written by a few threads (both release the GIL, so the hash of one chunk
runs under the write of another).  The first error decides: later chunks are only given back.
"""

from __future__ import annotations

import contextlib
import enum
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

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
from stillframe.store.blob import aligned_buffer
from stillframe.store.protocol import Writer, read_range
from stillframe.units import round_up


class State(enum.Enum):
    """How far a save has come in the keeper.  It only goes forward; ``error`` says whether it will fail."""

    RECEIVING = "staging"
    """Chunks come in, and are hashed and written."""
    STAGED = "flushing"
    """All have come: from here on the keeper can finish alone."""
    SEALED = "sealed"
    """This rank's bytes and seal are durable; other ranks are waited for."""
    SETTLED = "settled"
    """Committed or failed, and told."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What tells whether two saves of one layout have the same lazily staged bytes."""

    layout: str
    digests: tuple[str, ...]


class SegmentWriter:
    """Thread: chunks from any; :meth:`seal` and :meth:`commit` once, after all of them.

    ``tidying`` is held while the blob is made: a step may be saved again that is just being pruned.
    ``is_counted``: another rank counts the seal, and commits.
    """

    def __init__(
        self,
        begin: Begin,
        header: bytes,
        draft: SealDraft,
        catalog: Catalog,
        tidying: threading.Lock,
        is_counted: bool = False,
    ) -> None:
        self.begin = begin
        self.draft = draft
        self.state = State.RECEIVING
        self.error: Exception | None = None
        self.staged_s: float | None = None
        self.flush_begin_s: float | None = None
        self.sealed_s: float | None = None
        self.received_bytes = 0
        self.flushed_bytes = 0
        self.pending: list[Future[None]] = []
        self.is_counted = is_counted
        self.is_promised = False
        """It may be, or become, part of a checkpoint: its files must stay."""
        self.catalog = catalog
        self._store = catalog.store
        self._segment_key = catalog.key(begin.step, names.segment(draft.rank, draft.attempt))
        self._seal_key = catalog.key(begin.step, names.seal(draft.rank, draft.attempt))
        self._header = header
        self._digests: list[str | None] = [None] * (-(-begin.data_bytes // CHUNK_BYTES))
        self._lazy: dict[int, str] = {}
        self._writer: Writer | None = None
        self._entry: RankEntry | None = None
        self._opening = threading.Lock()
        self._tidying = tidying

    def guard(self, work: Callable[[], object]) -> None:
        """Do a piece of the work, unless the save has failed already; keep the first error."""
        if self.error is None:
            try:
                work()
            except Exception as error:  # kept, and reported when the save ends
                self.error = self.error or error

    def open(self) -> Writer:
        with self._opening:
            if self._writer is None:
                with self._tidying:
                    if self.catalog.is_committed(self.begin.step):
                        raise ExistsError(f"step {self.begin.step} is already a checkpoint in {self.catalog.root}")
                    if self.begin.label is not None:
                        labels.check_free(self.catalog, self.begin.label)
                    writer = self._store.writer(self._segment_key, len(self._header) + self.begin.data_bytes)
                    self._writer = writer
                header = aligned_buffer(len(self._header))
                header[: len(self._header)] = self._header
                writer.write_at(memoryview(header)[: len(self._header)], 0)
            return self._writer

    def write(self, chunk: Chunk, memory: memoryview) -> None:
        """Hash a chunk and write it at its place; ``memory`` is its whole span."""
        writer = self.open()
        data = memory[: chunk.nbytes]
        self._digests[chunk.index] = digest(data)
        self._fingerprint(chunk.index, data)
        padded = round_up(chunk.nbytes, BLOCK_BYTES)
        memory[chunk.nbytes : padded] = bytes(padded - chunk.nbytes)
        writer.write_at(memory[:padded], len(self._header) + chunk.index * CHUNK_BYTES)

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
        writer = self.open()
        chunks = [each for each in self._digests if each is not None]
        if len(chunks) != len(self._digests):
            where = self._store.where(self._segment_key)
            raise StorageError(f"sealing {where}: {len(chunks)} of {len(self._digests)} chunks arrived")
        writer.finish()
        if self.begin.label is not None:
            labels.write(self.catalog, self.begin.step, self.draft.attempt, self.begin.label, not self.is_counted)
        segment = Segment(
            file=names.segment(self.draft.rank, self.draft.attempt),
            bytes=len(self._header) + self.begin.data_bytes,
            data_start=len(self._header),
            header=digest(self._header),
            chunk_bytes=CHUNK_BYTES,
            chunks=chunks,
        )
        data, known_by = encode_seal(self.draft, segment)
        self.is_promised = self.is_counted  # a put that raises may have happened
        self._store.put(self._seal_key, data)
        self.sealed_s = time.monotonic()
        seal_name = names.seal(self.draft.rank, self.draft.attempt)
        self._entry = RankEntry(self.draft.rank, segment.file, segment.bytes, seal_name, known_by)

    def commit(self, ranks: list[RankEntry]) -> None:
        """Publish the manifest: from here on the checkpoint exists.  Blocks; raises."""
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
            rank=self.catalog.rank,
        )
        key, data = self.catalog.manifest_key(self.begin.step), encode_manifest(manifest)
        self.is_promised = True  # a put that raises may have happened
        try:
            is_ours = self._store.put_new(key, data)
        except StorageError:
            self._take_back(key, data)
            raise
        if not is_ours:
            self.is_promised = False
            raise ExistsError(f"{self._store.where(key)} exists already")

    def _take_back(self, key: str, data: bytes) -> None:
        """A failure is a failure for everybody; unless it is certain that the manifest is gone, its files stay.

        Only the manifest that was put: the put may have failed because another's was there that could not be read.
        """
        with contextlib.suppress(StorageError):
            if self._store.head(key) is not None and read_range(self._store, key, 0, len(data) + 1) == data:
                self._store.delete([key])
            self.is_promised = self._store.head(key) is not None

    def publish_label(self) -> None:
        """After the commit, by the keeper that made it.  Blocks; raises."""
        if self.begin.label is not None:
            try:
                labels.publish(self.catalog, self.begin.step, self.draft.attempt, self.begin.label)
            except StorageError as error:
                message = f"step {self.begin.step} is committed, but its label is not published: {error}"
                raise StorageError(message) from error

    def close(self) -> None:
        if self._writer is not None:
            self._writer.abort()

    def discard(self) -> None:
        """Remove the files of this save; best effort, a later sweep gets the rest.

        Only if it made any: one refused because the step exists must not touch that checkpoint.
        """
        self.close()
        own = [self._segment_key, self._seal_key] if self._writer is not None else []
        with contextlib.suppress(StorageError):
            self._store.delete([*own, f"{names.step_dir(self.begin.step)}/"])
        if self.begin.label is not None:
            labels.discard(self.catalog, self.begin.step, self.draft.attempt)


def report_failure(catalog: Catalog, failure: Failure) -> None:
    """Tell the other ranks, who may be waiting, that this one will not come; best effort, they have a deadline."""
    key = catalog.key(failure.step, names.failure(failure.rank, failure.attempt))
    with contextlib.suppress(StorageError):
        catalog.store.put(key, encode_failure(failure))


def read_draft(data: bytes, begin: Begin) -> tuple[bytes, SealDraft]:
    header, draft = data[: begin.header_bytes], data[begin.header_bytes :]
    return header, msgspec.json.decode(draft, type=SealDraft)
