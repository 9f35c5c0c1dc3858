"""Reading a segment: chunks in parallel, each verified before anybody sees a byte of it.  Knows no torch."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from stillframe.catalog import Checkpoint
from stillframe.errors import IntegrityError
from stillframe.format.digest import digest
from stillframe.model import BLOCK_BYTES
from stillframe.storage import durable
from stillframe.storage.direct import aligned_buffer
from stillframe.units import round_up

READERS = 3
"""Threads: one waits for the disk while another checks and a third places."""

Place = Callable[[int, int, mmap.mmap], None]
"""``place(start, end, buffer)``: these bytes of the data lie, verified, at the start of ``buffer``."""


def read_chunks(checkpoint: Checkpoint, numbers: Iterable[int], place: Place) -> None:
    """Verify the header, then read these chunks and hand each to ``place``, from several threads.

    Raises: :class:`IntegrityError` naming file, chunk and tensors; the first error stops all readers.
    """
    check_header(checkpoint)
    numbered = iter(sorted(numbers))
    taking = threading.Lock()
    is_failed = threading.Event()

    def work() -> None:
        segment = checkpoint.seal.segment
        buffer = aligned_buffer(min(segment.chunk_bytes, segment.data_bytes))
        try:
            for number in _shared(numbered, taking, is_failed):
                place(*read_chunk(checkpoint, number, buffer), buffer)
        except BaseException:
            is_failed.set()
            raise

    with ThreadPoolExecutor(READERS, "stillframe-read") as pool:
        futures = [pool.submit(work) for _ in range(READERS)]
    for future in futures:
        future.result()


def read_chunk(checkpoint: Checkpoint, number: int, buffer: mmap.mmap) -> tuple[int, int]:
    """Read and verify one chunk; tells which bytes of the data it is.  Raises :class:`IntegrityError`."""
    segment = checkpoint.seal.segment
    start = number * segment.chunk_bytes
    end = min(start + segment.chunk_bytes, segment.data_bytes)
    where = f"{checkpoint.segment_path}, chunk {number}"
    with memoryview(buffer) as memory:
        try:
            count = checkpoint.file.read_at(memory[: round_up(end - start, BLOCK_BYTES)], segment.data_start + start)
        except OSError as error:
            raise durable.read_error(f"{where} cannot be read{_tensors(checkpoint, start, end)}", error) from error
        if count < end - start:
            raise IntegrityError(f"{where} is cut short{_tensors(checkpoint, start, end)}")
        if digest(memory[: end - start]) != segment.chunks[number]:
            raise IntegrityError(f"{where} is damaged: its checksum does not match{_tensors(checkpoint, start, end)}")
    return start, end


def check_header(checkpoint: Checkpoint) -> None:
    """The bytes before the data are those that were written."""
    segment = checkpoint.seal.segment
    buffer = aligned_buffer(segment.data_start)
    with memoryview(buffer) as memory:
        try:
            count = checkpoint.file.read_at(memory[: segment.data_start], 0)
        except OSError as error:
            raise durable.read_error(f"{checkpoint.segment_path}: the header cannot be read", error) from error
        if count < segment.data_start or digest(memory[: segment.data_start]) != segment.header:
            raise IntegrityError(f"{checkpoint.segment_path}: the header is damaged: its checksum does not match")


def _shared(numbered: Iterator[int], taking: threading.Lock, is_failed: threading.Event) -> Iterator[int]:
    while not is_failed.is_set():
        with taking:
            number = next(numbered, None)
        if number is None:
            return
        yield number


def _tensors(checkpoint: Checkpoint, start: int, end: int) -> str:
    names = [shard.name for shard in checkpoint.seal.shards if shard.start < end and start < shard.end]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f" (it holds {', '.join(map(repr, names[:3]))}{more})" if names else ""
