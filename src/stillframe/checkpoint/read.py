"""Reading a segment: chunks in parallel, each verified before anybody sees a byte of it.  Knows no torch."""

from __future__ import annotations

import bisect
import contextlib
import mmap
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from stillframe.checkpoint.catalog import Checkpoint, RankPart, read_error
from stillframe.errors import IntegrityError, StorageError
from stillframe.format.digest import digest
from stillframe.model import BLOCK_BYTES
from stillframe.store.blob import aligned_buffer
from stillframe.units import round_up

READERS = 5
"""Threads: while some check and place, others keep the disk busy; three lost a tenth of the raw rate."""

_READS = 2
"""What has a wrong checksum is read a second time before it is called damaged."""

Place = Callable[[int, Sequence[int], int, int, mmap.mmap], None]
"""``place(rank, shards, start, end, buffer)``: these bytes of the rank's data, which belong to these shards, lie,
verified, at the start of ``buffer``."""


OnDamage = Callable[[int, int | None, IntegrityError], None]
"""``on_damage(rank, chunk, error)``: the chunk, or the header if it is ``None``, is not as it was written."""


def read_chunks(
    checkpoint: Checkpoint, wanted: Iterable[tuple[int, int]], place: Place, on_damage: OnDamage | None = None
) -> None:
    """Verify the headers, then read these (rank, chunk) and hand each to ``place``, from several threads.

    Raises: :class:`IntegrityError` naming file, chunk and tensors; the first error stops all readers.  With
    ``on_damage`` that one is told instead, and everything else is read.
    """
    ordered = sorted(wanted)
    parts = {rank: checkpoint.of(rank) for rank in dict.fromkeys(rank for rank, _ in ordered)}
    # One whose every shard is empty has its header checked all the same.
    for each in parts.values() or (checkpoint.of(rank) for rank in checkpoint.ranks[:1]):
        with _told(on_damage, each.rank, None):
            check_header(each)
    largest = max(
        (min(each.seal.segment.chunk_bytes, each.seal.segment.data_bytes) for each in parts.values()), default=0
    )
    starts = {rank: [shard.start for shard in each.seal.shards] for rank, each in parts.items()}
    numbered = iter(ordered)
    taking = threading.Lock()
    is_failed = threading.Event()

    def work() -> None:
        buffer = aligned_buffer(largest)
        try:
            for rank, number in _shared(numbered, taking, is_failed):
                with _told(on_damage, rank, number):
                    start, end = read_chunk(parts[rank], number, buffer)
                    first = max(bisect.bisect_right(starts[rank], start) - 1, 0)
                    place(rank, range(first, bisect.bisect_left(starts[rank], end)), start, end, buffer)
        except BaseException:
            is_failed.set()
            raise

    with ThreadPoolExecutor(READERS, "stillframe-read") as pool:
        futures = [pool.submit(work) for _ in range(READERS)]
        try:
            for future in futures:
                future.result()
        except BaseException:  # Ctrl-C too: nobody reads on for somebody who has gone
            is_failed.set()
            raise


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


def check_header(part: RankPart) -> None:
    """The bytes before the data are those that were written."""
    segment = part.seal.segment
    buffer = aligned_buffer(segment.data_start)
    with memoryview(buffer) as memory:
        for _ in range(_READS):
            try:
                count = part.read(0, memory[: segment.data_start])
            except StorageError as error:
                raise read_error(f"{part.path}: the header cannot be read", error) from error
            if count >= segment.data_start and digest(memory[: segment.data_start]) == segment.header:
                return
    raise IntegrityError(f"{part.path}: the header is damaged: its checksum does not match")


@contextlib.contextmanager
def _told(on_damage: OnDamage | None, rank: int, number: int | None) -> Iterator[None]:
    try:
        yield
    except IntegrityError as error:
        if on_damage is None:
            raise
        on_damage(rank, number, error)


def _shared(
    numbered: Iterator[tuple[int, int]], taking: threading.Lock, is_failed: threading.Event
) -> Iterator[tuple[int, int]]:
    while not is_failed.is_set():
        with taking:
            number = next(numbered, None)
        if number is None:
            return
        yield number


def _tensors(part: RankPart, start: int, end: int) -> str:
    names = [shard.name for shard in part.seal.shards if shard.start < end and start < shard.end]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f" (it holds {', '.join(map(repr, names[:3]))}{more})" if names else ""
