"""Reading a segment: chunks in parallel, each verified before anybody sees a byte of it.  Knows no torch."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from stillframe.checkpoint.catalog import Checkpoint, RankPart, read_error
from stillframe.errors import IntegrityError, StorageError
from stillframe.format.digest import digest
from stillframe.latch import Answer, Latch
from stillframe.model import BLOCK_BYTES
from stillframe.store.blob import aligned_buffer
from stillframe.units import round_up

READERS = 5
"""Threads: while some check and place, others keep the disk busy; three lost a tenth of the raw rate."""

_READS = 2
"""What has a wrong checksum is read a second time before it is called damaged."""

Place = Callable[[int, Sequence[int], int, int, memoryview], None]
"""``place(rank, shards, start, end, buffer)``: these bytes of the rank's data, which belong to these shards, lie,
verified, at the start of ``buffer`` until it returns."""


OnDamage = Callable[[int, int | None, IntegrityError], None]
"""``on_damage(rank, chunk, error)``: the chunk, or the header if it is ``None``, is not as it was written."""


def read_chunks(
    checkpoint: Checkpoint,
    wanted: Iterable[tuple[int, int]],
    place: Place,
    on_damage: OnDamage | None = None,
    is_over: Latch | None = None,
    borrows: bool = False,
) -> None:
    """Read these (rank, chunk), and each rank's header before them; hand each chunk to ``place``, from several threads.

    Rank by rank, so that few seals are needed at a time.  ``is_over`` opens when nobody needs to read on (Ctrl-C, too):
    a ``place`` that waits for something looks at it.  ``borrows``: a buffer may be the store's own, read-only, and end
    where the chunk ends; that saves a copy.

    Raises: :class:`IntegrityError` naming file, chunk and tensors; the first error stops all readers.  With
    ``on_damage`` that one is told instead, and everything else is read.
    """
    numbered = _by_rank(checkpoint, wanted)
    taking = threading.Lock()
    is_over = is_over or Latch()

    def work() -> None:
        buffer: mmap.mmap | None = None
        try:
            for part, number in _shared(numbered, taking, is_over):
                with _told(on_damage, part.rank, number):
                    if number is None:
                        read_header(part)
                        continue
                    segment = part.seal.segment
                    start = number * segment.chunk_bytes
                    end = min(start + segment.chunk_bytes, segment.data_bytes)
                    memory = borrow_chunk(part, number) if borrows else None
                    if memory is None:
                        largest = min(segment.chunk_bytes, segment.data_bytes)
                        if buffer is None or len(buffer) < largest:
                            buffer = aligned_buffer(largest)
                        read_chunk(part, number, buffer)
                        memory = memoryview(buffer)
                    place(part.rank, part.shards_between(start, end), start, end, memory)
        except BaseException:
            is_over.unlock()
            raise

    readers: list[Answer[None]] = []
    try:
        for _ in range(READERS):
            reader: Answer[None] = Answer()
            threading.Thread(target=reader.run, args=(work,), name="stillframe-read", daemon=True).start()
            readers.append(reader)
        for reader in readers:
            reader.get()
    finally:  # Ctrl-C too: nobody reads on for somebody who has gone
        is_over.unlock()
        for reader in readers:
            reader.wait()


def borrow_chunk(part: RankPart, number: int) -> memoryview | None:
    """One chunk, verified, in memory that the store has it in; ``None``: read it.  Raises :class:`StorageError`."""
    segment = part.seal.segment
    start = number * segment.chunk_bytes
    length = min(segment.chunk_bytes, segment.data_bytes - start)
    try:
        lent = part.lend(segment.data_start + start, length)
    except StorageError as error:
        where = f"{part.path}, chunk {number} cannot be read{_tensors(part, start, start + length)}"
        raise read_error(where, error) from error
    is_right = lent is not None and len(lent) == length and digest(lent) == segment.chunks[number]
    return lent if is_right else None


def read_chunk(part: RankPart, number: int, buffer: mmap.mmap) -> tuple[int, int]:
    """Read and verify one chunk; tells which bytes of the data it is.  Raises :class:`IntegrityError`."""
    segment = part.seal.segment
    start = number * segment.chunk_bytes
    end = min(start + segment.chunk_bytes, segment.data_bytes)
    where = f"{part.path}, chunk {number}"
    with memoryview(buffer) as memory:
        for _ in range(_READS):
            try:
                count = part.read(segment.data_start + start, memory[: round_up(end - start, BLOCK_BYTES)])
            except StorageError as error:
                raise read_error(f"{where} cannot be read{_tensors(part, start, end)}", error) from error
            if count >= end - start and digest(memory[: end - start]) == segment.chunks[number]:
                return start, end
    what = "is cut short" if count < end - start else "is damaged: its checksum does not match"
    raise IntegrityError(f"{where} {what}{_tensors(part, start, end)}")


def read_header(part: RankPart) -> mmap.mmap:
    """The bytes before the data, verified, at the start of a buffer.  Raises :class:`IntegrityError`."""
    segment = part.seal.segment
    buffer = aligned_buffer(segment.data_start)
    with memoryview(buffer) as memory:
        for _ in range(_READS):
            try:
                count = part.read(0, memory[: segment.data_start])
            except StorageError as error:
                raise read_error(f"{part.path}: the header cannot be read", error) from error
            if count >= segment.data_start and digest(memory[: segment.data_start]) == segment.header:
                return buffer
    raise IntegrityError(f"{part.path}: the header is damaged: its checksum does not match")


@contextlib.contextmanager
def _told(on_damage: OnDamage | None, rank: int, number: int | None) -> Iterator[None]:
    try:
        yield
    except IntegrityError as error:
        if on_damage is None:
            raise
        on_damage(rank, number, error)


def _by_rank(checkpoint: Checkpoint, wanted: Iterable[tuple[int, int]]) -> Iterator[tuple[RankPart, int | None]]:
    """Each rank's header (``None``), then its chunks.  A seal is read when its turn comes."""
    ordered = sorted(wanted)
    if not ordered:  # one whose every shard is empty has its header checked all the same
        yield from ((checkpoint.of(rank), None) for rank in checkpoint.ranks[:1])
    for rank, chunks in itertools.groupby(ordered, lambda each: each[0]):
        part = checkpoint.of(rank)
        yield part, None
        yield from ((part, number) for _, number in chunks)


def _shared(
    numbered: Iterator[tuple[RankPart, int | None]], taking: threading.Lock, is_over: Latch
) -> Iterator[tuple[RankPart, int | None]]:
    while not is_over.is_open:
        with taking:
            number = next(numbered, None)
        if number is None:
            return
        yield number


def _tensors(part: RankPart, start: int, end: int) -> str:
    names = [shard.name for shard in part.seal.shards if shard.start < end and start < shard.end]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f" (it holds {', '.join(map(repr, names[:3]))}{more})" if names else ""
