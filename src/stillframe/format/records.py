"""Seals and manifests: one rank's promise, and the commit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from stillframe.errors import FormatError, UnsupportedStateError
from stillframe.format import limits, names
from stillframe.format.digest import is_digest
from stillframe.format.envelope import TOO_LARGE, Record, unwrap, unwrap_head, wrap
from stillframe.format.layout import Layout, check_layout
from stillframe.format.segment import Shard, check_shards
from stillframe.format.tree import Node, check_tree
from stillframe.model import BLOCK_BYTES, SaveId
from stillframe.untrusted import decode_json

HEAD_BYTES = 4096, 64 * 1024
"""A seal's brief lies within the first of these, or, if it names many teams, within the second."""


class Segment(Record, frozen=True):
    """How a segment's bytes are divided into chunks, and the digest of each."""

    bytes: int
    data_start: int
    header: str
    """Digest of the bytes before ``data_start``."""
    chunk_bytes: int
    chunks: list[str]
    """Digest of each chunk of the data; all are ``chunk_bytes`` long but the last."""

    @property
    def data_bytes(self) -> int:
        return self.bytes - self.data_start


class Team(Record, frozen=True):
    """Ranks that hold boxes of the same tensors, and a digest of these tensors: every rank must seal the same digest.

    ``ranks`` is a digest of the ranks' numbers; there may be thousands.
    """

    ranks: str
    size: int
    tensors: str


class SealBrief(Record, frozen=True):
    """What a commit needs to know of a seal."""

    save: SaveId
    rank: int
    world_size: int
    parent: SaveId | None
    """The save that this epoch goes on from."""
    saved_unix_s: float
    """When ``save()`` was called, by this rank's clock."""
    updates: int | None
    """How many updates this rank had made since its epoch began; ``None`` if that is not known."""
    segment_bytes: int
    teams: list[Team]
    structure: str = ""
    """Equal for ranks whose trees have the same structure (:func:`structure_of`); empty: it is not known."""


class SealDraft(Record, frozen=True):
    """What of a seal the trainer knows when the save is requested; tree, shards and values are already JSON."""

    rank: int
    world_size: int
    saved_unix_s: float
    shards: msgspec.Raw
    tree: msgspec.Raw
    values: msgspec.Raw
    teams: list[Team] = msgspec.field(default_factory=list)
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)
    updates: int | None = None
    layouts: list[Layout] = msgspec.field(default_factory=list)
    structure: str = ""


class Seal(Record, frozen=True):
    save: SaveId
    rank: int
    world_size: int
    parent: SaveId | None
    saved_unix_s: float
    updates: int | None
    teams: list[Team]
    metadata: dict[str, Any]
    """As given to ``save()``; the manifest has rank 0's."""
    segment: Segment
    shards: list[Shard]
    tree: Node
    values: list[Any]
    layouts: list[Layout] = msgspec.field(default_factory=list)
    """Who holds which boxes of the tensors in the tree that name them."""
    structure: str = ""

    @property
    def brief(self) -> SealBrief:
        return SealBrief(
            self.save, self.rank, self.world_size, self.parent, self.saved_unix_s, self.updates, self.segment.bytes,
            self.teams, self.structure,
        )  # fmt: skip


class RankEntry(Record, frozen=True, omit_defaults=True):
    """What a manifest says of one rank."""

    rank: int
    segment_bytes: int
    seal_digest: str
    """Of the seal's body, as it stands in its envelope."""
    like: int | None = None
    """The first rank of this manifest whose tree has the same structure; ``None``: this one."""


class Manifest(Record, frozen=True):
    """The commit of a save.  It says nothing that the seals do not say, so whoever writes it writes the same bytes."""

    save: SaveId
    parent: SaveId | None
    world_size: int
    saved_unix_s: float
    """Rank 0's."""
    metadata: dict[str, Any]
    """Rank 0's."""
    ranks: list[RankEntry]

    @property
    def step(self) -> int:
        return self.save.step

    @property
    def bytes(self) -> int:
        return sum(entry.segment_bytes for entry in self.ranks)

    @property
    def rank(self) -> int | None:
        """The one rank whose part this is, in a root that the ranks do not share; ``None``: it is of all."""
        return None if len(self.ranks) == self.world_size else self.ranks[0].rank


class Failure(Record, frozen=True):
    """A rank's word that it will never seal this save."""

    save: SaveId
    rank: int
    error: str
    message: str


def encode_seal(
    draft: SealDraft, save: SaveId, parent: SaveId | None, segment: Segment
) -> tuple[bytes, SealBrief, str]:
    """The file, its brief, and the digest by which a manifest knows it."""
    brief = SealBrief(
        save, draft.rank, draft.world_size, parent, draft.saved_unix_s, draft.updates, segment.bytes, draft.teams,
        draft.structure,
    )  # fmt: skip
    fields = {name: getattr(brief, name) for name in brief.__struct_fields__ if name != "segment_bytes"}
    stored = {
        "metadata": draft.metadata,
        "segment": segment,
        "shards": draft.shards,
        "tree": draft.tree,
        "values": draft.values,
        "layouts": draft.layouts,
    }
    body = msgspec.json.encode({**fields, **stored})
    data, known_by = wrap("seal", body, brief)
    return data, brief, known_by


def check_draft(draft: SealDraft) -> None:
    """Refuse, before anything is written, a state whose seal would be too large; leaves room for the checksums."""
    size = sum(memoryview(each).nbytes for each in (draft.shards, draft.tree, draft.values))
    if size > limits.MAX_SEAL_BYTES // 2:
        raise UnsupportedStateError(
            TOO_LARGE.format(what="tree and plain values of the state", size=size, limit=limits.MAX_SEAL_BYTES // 2)
        )


def make_manifest(seals: Sequence[tuple[SealBrief, str]], metadata: dict[str, Any]) -> Manifest:
    """Of these seals, in the order of their ranks, each with its digest: all ranks', or one in a root of its own.

    ``metadata``: that of the first seal.
    """
    first = seals[0][0]
    entries: list[RankEntry] = []
    structures: dict[str, int] = {}
    for brief, known_by in seals:
        like = structures.setdefault(brief.structure, brief.rank) if brief.structure else brief.rank
        entries.append(RankEntry(brief.rank, brief.segment_bytes, known_by, None if like == brief.rank else like))
    return Manifest(first.save, first.parent, first.world_size, first.saved_unix_s, metadata, entries)


def encode_manifest(manifest: Manifest) -> bytes:
    return wrap("manifest", manifest)[0]


def encode_failure(failure: Failure) -> bytes:
    return wrap("failure", failure)[0]


def decode_seal(data: bytes, *, file: str) -> tuple[Seal, str]:
    """The seal, and the digest by which a manifest knows it.

    Raises: :class:`FormatError` or :class:`VersionError`, naming ``file``.
    """
    seal, known_by, brief = unwrap("seal", data, Seal, file)
    with naming(file):
        _check_seal(seal)
        try:
            is_right = decode_json(brief, SealBrief) == seal.brief
        except ValueError:
            is_right = False
        if not is_right:
            raise FormatError("brief and body differ")
    return seal, known_by


def decode_seal_head(data: bytes, *, file: str) -> tuple[SealBrief, str] | None:
    """The brief, and the digest by which a manifest knows the seal, from its first bytes; ``None``: they are too few.

    Raises: :class:`VersionError`, naming ``file``.
    """
    return unwrap_head("seal", data, SealBrief, file)


def decode_manifest(data: bytes, *, file: str) -> Manifest:
    """Raises :class:`FormatError` or :class:`VersionError`, naming ``file``."""
    manifest, _, _ = unwrap("manifest", data, Manifest, file)
    with naming(file):
        _check_manifest(manifest)
    return manifest


def decode_failure(data: bytes, *, file: str) -> Failure:
    """Raises :class:`FormatError` or :class:`VersionError`, naming ``file``."""
    return unwrap("failure", data, Failure, file)[0]


@contextlib.contextmanager
def naming(file: str) -> Iterator[None]:
    """A :class:`FormatError` raised in the body names the file."""
    try:
        yield
    except FormatError as error:
        raise FormatError(f"{file}: {error}") from None


def check_id(save: SaveId) -> None:
    if not names.is_id(save):
        raise FormatError(f"impossible {save}")


def _check_common(save: SaveId, parent: SaveId | None, world_size: int) -> None:
    check_id(save)
    if parent is not None:
        check_id(parent)
        if parent.epoch >= save.epoch:
            raise FormatError(f"{save} cannot go on from {parent}")
    if not 1 <= world_size <= limits.MAX_RANKS:
        raise FormatError(f"impossible world size {world_size}")


def _check_seal(seal: Seal) -> None:
    _check_common(seal.save, seal.parent, seal.world_size)
    segment = seal.segment
    if not 0 <= seal.rank < seal.world_size:
        raise FormatError(f"impossible rank {seal.rank}")
    if segment.data_start % BLOCK_BYTES or not 0 < segment.data_start <= min(segment.bytes, limits.MAX_HEADER_BYTES):
        raise FormatError(f"impossible data start {segment.data_start}")
    if not 0 < segment.chunk_bytes <= limits.MAX_CHUNK_BYTES or segment.chunk_bytes % BLOCK_BYTES:
        raise FormatError(f"impossible chunk size {segment.chunk_bytes}")
    if len(segment.chunks) != -(-segment.data_bytes // segment.chunk_bytes):
        raise FormatError(f"{len(segment.chunks)} chunks do not make {segment.data_bytes} bytes")
    if not all(map(is_digest, [segment.header, *segment.chunks])):
        raise FormatError("a checksum is malformed")
    check_shards(seal.shards, segment.data_bytes)
    for layout in seal.layouts:
        check_layout(layout, seal.world_size)
    check_tree(seal.tree, seal.shards, seal.values, seal.layouts)


def _check_manifest(manifest: Manifest) -> None:
    _check_common(manifest.save, manifest.parent, manifest.world_size)
    if [entry.rank for entry in manifest.ranks] != list(range(manifest.world_size)):
        raise FormatError("the ranks are not 0, 1, 2, …")
    for entry in manifest.ranks:
        if entry.segment_bytes < 0 or not is_digest(entry.seal_digest):
            raise FormatError(f"rank {entry.rank} has an impossible size or a malformed checksum")
        if entry.like is not None and (not 0 <= entry.like < entry.rank or manifest.ranks[entry.like].like is not None):
            raise FormatError(f"rank {entry.rank} cannot be like rank {entry.like}")


def encode_shards(shards: Sequence[Shard]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(shards))


def encode_tree(tree: Node) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(tree))
