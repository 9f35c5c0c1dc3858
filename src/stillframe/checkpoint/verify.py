"""Reading every byte of a checkpoint again: is it what was written?"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from stillframe.checkpoint.catalog import Catalog, Checkpoint
from stillframe.checkpoint.opened import PARSED
from stillframe.checkpoint.read import read_chunks, read_header
from stillframe.errors import IntegrityError, NotFoundError
from stillframe.format import names
from stillframe.model import SaveId

_RANKS_AT_ONCE = PARSED
"""Their seals are in memory together."""


@dataclass(frozen=True, slots=True)
class Damage:
    """Something that is not as it was written."""

    file: str
    """Its path, or its URL."""
    rank: int
    chunk: int | None
    """``None``: it is not one chunk that is damaged, but the seal, the header, or all of the file."""
    tensors: tuple[str, ...]
    """What lies in it."""
    message: str


@dataclass(slots=True)
class Verdict:
    """What :func:`verify` found of one checkpoint."""

    save: SaveId
    bytes: int = 0
    """Read and found whole."""
    damages: list[Damage] = field(default_factory=list)

    @property
    def step(self) -> int:
        return self.save.step

    @property
    def is_whole(self) -> bool:
        return not self.damages


def verify(checkpoint: Checkpoint, on_bytes: Callable[[int], None] = lambda _count: None) -> Verdict:
    """Every seal, header and chunk of every rank against its checksum; goes on after damage, so that all is named.

    ``on_bytes`` is told, from several threads, of bytes that have been read.
    Raises: :class:`StorageError` if something cannot be read for now (permissions, no descriptors).
    """
    verdict = Verdict(checkpoint.save)
    lock = threading.Lock()

    def read(_rank: int, _shards: object, start: int, end: int, _buffer: object) -> None:
        with lock:
            verdict.bytes += end - start
        on_bytes(end - start)

    def damaged(rank: int, chunk: int | None, error: IntegrityError) -> None:
        part = checkpoint.of(rank)
        segment = part.seal.segment
        tensors: tuple[str, ...] = ()
        if chunk is not None:
            start, end = chunk * segment.chunk_bytes, (chunk + 1) * segment.chunk_bytes
            tensors = tuple(shard.name for shard in part.seal.shards if shard.start < end and start < shard.end)
        with lock:
            verdict.damages.append(Damage(part.path, rank, chunk, tensors, str(error)))
        on_bytes(segment.chunk_bytes if chunk is not None else 0)

    ranks = checkpoint.manifest.ranks
    for at in range(0, len(ranks), _RANKS_AT_ONCE):
        wanted: list[tuple[int, int]] = []
        for entry in ranks[at : at + _RANKS_AT_ONCE]:
            try:
                part = checkpoint.of(entry.rank)
                if not part.seal.segment.chunks:
                    read_header(part)  # of the others it is checked before their chunks
            except IntegrityError as error:
                verdict.damages.append(
                    Damage(f"{checkpoint.path}/{names.segment(entry.rank)}", entry.rank, None, (), str(error))
                )
            else:
                wanted += [(entry.rank, number) for number in range(len(part.seal.segment.chunks))]
        if wanted:
            read_chunks(checkpoint, wanted, read, damaged, borrows=True)
        for entry in ranks[at : at + _RANKS_AT_ONCE]:
            checkpoint.release(entry.rank)
    verdict.damages.sort(key=lambda damage: (damage.rank, -1 if damage.chunk is None else damage.chunk))
    return verdict


def verify_save(catalog: Catalog, save: SaveId, on_bytes: Callable[[int], None] = lambda _count: None) -> Verdict:
    """As :func:`verify`; a manifest, seal or size that is wrong is damage, too.

    Raises: :class:`NotFoundError`, also if it is removed meanwhile; :class:`StorageError`; :class:`VersionError`.
    """
    try:
        with catalog.open_save(save) as checkpoint:
            found = verify(checkpoint, on_bytes)
    except IntegrityError as error:
        found = Verdict(save, damages=[Damage(catalog.dir(save), -1, None, (), str(error))])
    if found.damages and not catalog.is_committed(save):
        raise NotFoundError(f"{save} was removed from {catalog.root} while it was read")
    return found
