"""One save on its way to storage: chunks in any order, then seal, commit.

Chunks are hashed and written by a few threads (both release the GIL, so the hash of one chunk
runs under the write of another).  The first error decides: later chunks are only given back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import msgspec

from stillframe.checkpoint import labels
from stillframe.checkpoint.catalog import Catalog
from stillframe.errors import ExistsError, StillframeError, StorageError, from_record
from stillframe.format import names
from stillframe.format.digest import digest, digest_of
from stillframe.format.records import (
    Failure,
    SealBrief,
    SealDraft,
    Segment,
    encode_failure,
    encode_manifest,
    encode_seal,
    make_manifest,
)
from stillframe.keeper.epochs import CurrentEpoch
from stillframe.keeper.terms import NEWS_S
from stillframe.link.messages import Begin, Chunk, Uncommitted
from stillframe.model import BLOCK_BYTES, CHUNK_BYTES, SaveId
from stillframe.store.blob import aligned_buffer
from stillframe.store.protocol import Writer
from stillframe.units import round_up
from stillframe.untrusted import decoder_of


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

    ``is_counted``: another rank counts the seal, and commits.  ``before_open`` runs before the segment is made.
    """

    def __init__(
        self,
        begin: Begin,
        header: bytes,
        draft: SealDraft,
        catalog: Catalog,
        epoch: CurrentEpoch,
        is_counted: bool = False,
        before_open: Callable[[], None] = lambda: None,
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
        self.is_told = False
        """It was rank 0 that said it failed."""
        self.word: Uncommitted | None = None
        """Rank 0's, if it has come through the trainers."""
        self.on_waiting: Callable[[], None] = lambda: None
        """Called now and then while it waits for rank 0 to begin the epoch."""
        self._mentioned_s = 0.0
        self.catalog = catalog
        self._store = catalog.store
        self._epoch = epoch
        self._id: SaveId | None = None
        self._parent: SaveId | None = None
        self._header = header
        self._label_problem = ""
        self._digests: list[str | None] = [None] * (-(-begin.data_bytes // CHUNK_BYTES))
        self._lazy: dict[int, str] = {}
        self._writer: Writer | None = None
        self._is_discarded = False
        self._sealed: tuple[SealBrief, str] | None = None
        self._opening = threading.Lock()
        self._before_open = before_open

    def guard(self, work: Callable[[], object]) -> None:
        """Do a piece of the work, unless the save has failed already; keep the first error."""
        if self.error is None:
            try:
                work()
            except Exception as error:  # kept, and reported when the save ends
                self.error = self.error or error

    @property
    def id(self) -> SaveId | None:
        """Which save it is, once its epoch is known."""
        return self._id

    def identify(self) -> SaveId:
        """Blocks until the epoch is known; raises."""
        if self._id is None:
            begun = self._epoch.current(self._while_waiting)
            if begun.parent is not None and self.begin.step <= begun.parent.step:  # saved since the trainer looked
                raise ExistsError(
                    f"step {self.begin.step} does not come after step {begun.parent.step}, the newest checkpoint in "
                    f"{self.catalog.root}: restore() first, and go on after the step it returns"
                )
            self._parent = begun.parent
            self._id = SaveId(self.begin.step, begun.epoch, self.begin.attempt)
        return self._id

    def heed(self) -> None:
        """Raises rank 0's reason, if it has said through the trainers that it will not commit this save.

        Then it never will, as after an outcome in the root; and unless it says so, no file of ours needs to stay.
        """
        if (word := self.word) is not None:
            self.is_promised, self.is_told = self.is_promised and word.files_stay, True
            raise from_record(word.kind, word.message)

    def _while_waiting(self, waited_s: float) -> None:
        self.heed()
        if waited_s - self._mentioned_s > NEWS_S:
            self._mentioned_s = waited_s
            self.on_waiting()

    def _key(self, name: str) -> str:
        return names.key(self.identify(), name)

    def open(self) -> Writer:
        with self._opening:
            if self._writer is None:
                key = self._key(names.segment(self.draft.rank))
                self._before_open()
                self._writer = self._store.writer(key, len(self._header) + self.begin.data_bytes)
                header = aligned_buffer(len(self._header))
                header[: len(self._header)] = self._header
                self._writer.write_at(memoryview(header)[: len(self._header)], 0)
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
    def sealed(self) -> tuple[SealBrief, str]:
        """What the manifest will say of this rank, once it is sealed: the seal's brief, and its digest."""
        assert self._sealed is not None
        return self._sealed

    def seal(self) -> None:
        """Segment durable, then seal durable.  Blocks; raises."""
        writer = self.open()
        chunks = [each for each in self._digests if each is not None]
        if len(chunks) != len(self._digests):
            where = self._store.where(self._key(names.segment(self.draft.rank)))
            raise StorageError(f"sealing {where}: {len(chunks)} of {len(self._digests)} chunks arrived")
        writer.finish()
        self._write_label()
        segment = Segment(
            bytes=len(self._header) + self.begin.data_bytes,
            data_start=len(self._header),
            header=digest(self._header),
            chunk_bytes=CHUNK_BYTES,
            chunks=chunks,
        )
        data, brief, known_by = encode_seal(self.draft, self.identify(), self._parent, segment)
        self.is_promised = self.is_counted or self.catalog.rank is not None  # a put that raises may have happened
        self._store.put(self._key(names.seal(self.draft.rank)), data)
        self.sealed_s = time.monotonic()
        self._sealed = brief, known_by

    def commit(self, seals: list[tuple[SealBrief, str]]) -> None:
        """Publish the manifest: from here on the checkpoint exists.  Blocks.

        Raises: :class:`BusyError` if another run has taken over; :class:`StorageError`, also if nobody can tell
        whether it was published: a manifest is never taken back.
        """
        key, data = self._key(names.MANIFEST), encode_manifest(make_manifest(seals, self.draft.metadata))
        self.is_promised = True  # a put that raises may have happened
        try:
            is_ours = self._store.put_new(key, data)
        except StorageError as error:
            is_ours = self._make_sure(key, data, error)
        if not is_ours:
            raise ExistsError(f"{self._store.where(key)} exists already, and is not this one")
        self.check_newest()

    def check_newest(self) -> None:
        """Raises :class:`BusyError` if another run has taken over."""
        self._epoch.check_newest(self.identify().epoch)

    def _make_sure(self, key: str, data: bytes, error: StorageError) -> bool:
        """After a put that raised: if it is there, put it again, so that it is durable.  Raises if it is not."""
        try:
            if self._store.head(key) is None and not self._store.caps.lands_late:
                self.is_promised = False
                raise error
            return self._store.put_new(key, data)
        except StorageError as again:
            if again is error:
                raise
            raise StorageError(f"cannot determine whether step {self.begin.step} was committed: {error}") from error

    def _write_label(self) -> None:
        """What goes wrong is told when the save is committed."""
        if self.begin.label is not None:
            draft = self.draft
            try:
                labels.write(
                    self.catalog, self.identify(), self.begin.label, draft.rank, draft.world_size, not self.is_counted
                )
            except StillframeError as error:
                self._label_problem = str(error)

    def publish_label(self) -> str:
        """After the commit.  Blocks.  Returns what went wrong with the label, or nothing: the checkpoint stands."""
        if self.begin.label is None:
            return ""
        if not self.is_counted and not self._label_problem:
            try:
                labels.publish(self.catalog, self.identify())
            except StillframeError as error:
                self._label_problem = str(error)
        elif not self.is_counted:
            labels.discard(self.catalog, self.identify())
        name, problem = self.begin.label.name, self._label_problem
        return f"step {self.begin.step} is committed, but not as {name!r}: {problem}" if problem else ""

    def close(self) -> None:
        if self._writer is not None:
            self._writer.abort()

    def discard(self) -> None:
        """Remove the files of this save, unless they were promised; best effort, retention gets the rest.

        May be called again.
        """
        self.close()
        if self._id is not None and not self.is_promised and not self._is_discarded:
            self._is_discarded = True
            own = [self._key(name) for name in (names.seal(self.draft.rank), names.segment(self.draft.rank))]
            with contextlib.suppress(StorageError):
                self._store.delete([*own, f"{names.step_dir(self._id)}/"])
            if self.begin.label is not None:
                labels.discard(self.catalog, self._id)


def report_failure(catalog: Catalog, failure: Failure) -> None:
    """Tell rank 0, which may be waiting, that this one will not come; best effort, it has a deadline."""
    with contextlib.suppress(StorageError):
        catalog.store.put(names.key(failure.save, names.failure(failure.rank)), encode_failure(failure), durable=False)


def read_draft(begin: Begin, fd: int) -> tuple[Begin, bytes, SealDraft]:
    """The message with all of its label, the header of the segment, and the draft of the seal."""
    header = os.pread(fd, begin.header_bytes, 0)
    draft = os.pread(fd, begin.draft_bytes, begin.header_bytes)
    if begin.label is not None and begin.label_bytes:
        data = os.pread(fd, begin.label_bytes, begin.header_bytes + begin.draft_bytes)
        contents = msgspec.msgpack.decode(data, type=tuple[tuple[str, bytes], ...])
        label = dataclasses.replace(begin.label, contents=contents)
        begin = msgspec.structs.replace(begin, label=label, label_bytes=0)
    return begin, header, decoder_of(SealDraft).decode(draft)
