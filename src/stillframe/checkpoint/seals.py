"""Seals in a store: whole, or only what a commit needs to know of them."""

from __future__ import annotations

from stillframe.errors import FormatError
from stillframe.format import limits, names
from stillframe.format.records import HEAD_BYTES, Seal, SealBrief, decode_seal, decode_seal_head
from stillframe.model import SaveId
from stillframe.store.protocol import Store, read_all, read_range


def read_seal(store: Store, save: SaveId, rank: int) -> tuple[Seal, str]:
    """The seal, and the digest by which a manifest knows it.

    Raises: :class:`Missing`; :class:`StorageError`; :class:`FormatError`; :class:`VersionError`.
    """
    key = names.key(save, names.seal(rank))
    return decode_seal(read_all(store, key, limits.MAX_SEAL_BYTES), file=store.where(key))


def read_brief(store: Store, save: SaveId, rank: int, head: bytes = b"") -> tuple[SealBrief, str]:
    """What a commit needs to know of a seal, and its digest, from as few bytes as tell: a seal may have 128 MiB.

    ``head``: its first bytes, if they are known.
    Raises: as :func:`read_seal`, and :class:`FormatError` if it is the seal of another save or rank.
    """
    key = names.key(save, names.seal(rank))
    where = store.where(key)
    found = decode_seal_head(head, file=where)
    for count in HEAD_BYTES:
        if found is None and len(head) < count:
            found = decode_seal_head(read_range(store, key, 0, count), file=where)
    if found is None:
        seal, known_by = read_seal(store, save, rank)
        found = seal.brief, known_by
    brief = found[0]
    if (brief.save, brief.rank) != (save, rank):
        raise FormatError(f"{where} is the seal of {brief.save}, rank {brief.rank}")
    return found
