"""Seals and manifests: one rank's promise, and the commit.

Both are one JSON object in one envelope::

    {"stillframe": 1, "kind": "seal", "xxh3_128": "<digest of the body's bytes>", "body": {...}}

so every byte of the body is covered by a checksum, and a reader knows the version before it
looks any further.  A seal has its ``brief`` before the body: what a commit needs to know of it, so that whoever
commits thousands of ranks reads the first bytes of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import msgspec

from stillframe.errors import FormatError, UnsupportedStateError, VersionError
from stillframe.format import limits, names
from stillframe.format.digest import digest, is_digest
from stillframe.format.segment import Shard, check_shards
from stillframe.format.tree import Node, check_tree
from stillframe.model import BLOCK_BYTES, MAX_STEP

Kind = Literal["seal", "manifest", "failure"]
_TOO_LARGE = (
    "the {what} would take {size} bytes; the format allows {limit}: put large Python values in a tensor or an array"
)
_MAX_BYTES: dict[Kind, int] = {
    "seal": limits.MAX_SEAL_BYTES,
    "manifest": limits.MAX_MANIFEST_BYTES,
    "failure": limits.MAX_FAILURE_BYTES,
}


HEAD_BYTES = 4096, 64 * 1024
"""A seal's brief lies within the first of these, or, if it names many teams, within the second."""


_BODY = b',"body":'


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class _Envelope(_Record, frozen=True):
    stillframe: int
    kind: str
    xxh3_128: str
    body: msgspec.Raw


class _SealHead(_Record, frozen=True):
    """A seal's envelope without its body."""

    stillframe: int
    kind: str
    xxh3_128: str
    brief: SealBrief


class _SealEnvelope(_Record, frozen=True):
    stillframe: int
    kind: str
    xxh3_128: str
    brief: SealBrief
    body: msgspec.Raw


class _Peek(msgspec.Struct, frozen=True):
    """What is looked at before anything else, whatever else there is."""

    stillframe: int
    kind: str = ""


class Segment(_Record, frozen=True):
    """How a segment's bytes are divided into chunks, and the digest of each."""

    file: str
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


class Team(_Record, frozen=True):
    """Ranks that hold boxes of the same tensors, and a digest of these tensors: every rank must seal the same digest.

    ``ranks`` is a digest of the ranks' numbers; there may be thousands.
    """

    ranks: str
    size: int
    tensors: str


class SealBrief(_Record, frozen=True):
    """What a commit needs to know of a seal."""

    step: int
    rank: int
    world_size: int
    attempt: str
    segment_bytes: int
    teams: list[Team]


class SealDraft(_Record, frozen=True):
    """What of a seal is known when the save is requested; tree, shards and values are already JSON."""

    step: int
    rank: int
    world_size: int
    attempt: str
    shards: msgspec.Raw
    tree: msgspec.Raw
    values: msgspec.Raw
    teams: list[Team] = []


class Seal(_Record, frozen=True):
    step: int
    rank: int
    world_size: int
    attempt: str
    segment: Segment
    shards: list[Shard]
    tree: Node
    values: list[Any]
    teams: list[Team] = []


class RankEntry(_Record, frozen=True):
    """What a manifest says of one rank."""

    rank: int
    segment: str
    segment_bytes: int
    seal: str
    seal_digest: str
    """Of the seal's body, as it stands in its envelope; in version 1, of its whole file."""


class Manifest(_Record, frozen=True):
    step: int
    attempt: str
    world_size: int
    created_unix_s: float
    stage_s: float
    """From ``save()`` to staged, on the rank that wrote this."""
    commit_s: float
    """From ``save()`` to this manifest."""
    ranks: list[RankEntry]
    seal_s: float | None = None
    """From ``save()`` to sealed, on the rank that wrote this; a manifest of version 1 does not tell."""
    rank: int | None = None
    """The one rank that this commits, in a root that the other ranks do not see; ``None``: it commits all."""

    @property
    def bytes(self) -> int:
        return sum(entry.segment_bytes for entry in self.ranks)


class Failure(_Record, frozen=True):
    """A rank's word that it will never seal this step; rank 0's, that it will never be committed."""

    step: int
    rank: int
    attempt: str
    error: str
    message: str


def encode_seal(draft: SealDraft, segment: Segment) -> tuple[bytes, str]:
    """The file, and the digest by which a manifest knows it."""
    fields = {name: getattr(draft, name) for name in draft.__struct_fields__}
    body = msgspec.json.encode({**fields, "segment": segment})
    brief = SealBrief(draft.step, draft.rank, draft.world_size, draft.attempt, segment.bytes, draft.teams)
    known_by = digest(body)
    return _limited("seal", _SealEnvelope(limits.VERSION, "seal", known_by, brief, msgspec.Raw(body))), known_by


def check_draft(draft: SealDraft) -> None:
    """Refuse, before anything is written, a state whose seal would be too large; leaves room for the checksums."""
    size = len(bytes(draft.shards)) + len(bytes(draft.tree)) + len(bytes(draft.values))
    if size > limits.MAX_SEAL_BYTES // 2:
        raise UnsupportedStateError(
            _TOO_LARGE.format(what="tree and plain values of the state", size=size, limit=limits.MAX_SEAL_BYTES // 2)
        )


def encode_manifest(manifest: Manifest) -> bytes:
    return _seal_up("manifest", msgspec.json.encode(manifest))


def encode_failure(failure: Failure) -> bytes:
    return _seal_up("failure", msgspec.json.encode(failure))


def _seal_up(kind: Kind, body: bytes) -> bytes:
    return _limited(kind, _Envelope(limits.VERSION, kind, digest(body), msgspec.Raw(body)))


def _limited(kind: Kind, envelope: _Envelope | _SealEnvelope) -> bytes:
    data = msgspec.json.encode(envelope) + b"\n"
    if len(data) > _MAX_BYTES[kind]:
        raise UnsupportedStateError(_TOO_LARGE.format(what=kind, size=len(data), limit=_MAX_BYTES[kind]))
    return data


def decode_seal(data: bytes, *, file: str) -> tuple[Seal, str]:
    """The seal, and the digest by which a manifest knows it.

    Raises: :class:`FormatError` or :class:`VersionError`, naming ``file``.
    """
    seal, envelope = _open("seal", data, Seal, file)
    try:
        _check_seal(seal)
        if isinstance(envelope, _SealEnvelope):
            brief = SealBrief(seal.step, seal.rank, seal.world_size, seal.attempt, seal.segment.bytes, seal.teams)
            if envelope.brief != brief:
                raise FormatError("brief and body differ")
    except FormatError as error:
        raise FormatError(f"{file}: {error}") from None
    return seal, envelope.xxh3_128 if envelope.stillframe > 1 else digest(data)


def decode_manifest(data: bytes, *, file: str) -> Manifest:
    """Raises :class:`FormatError` or :class:`VersionError`, naming ``file``."""
    manifest, _ = _open("manifest", data, Manifest, file)
    try:
        _check_manifest(manifest)
    except FormatError as error:
        raise FormatError(f"{file}: {error}") from None
    return manifest


def has_head(data: bytes) -> bool:
    """Whether these first bytes of a seal hold its brief."""
    return _BODY in data


def decode_seal_head(data: bytes, *, file: str) -> tuple[SealBrief, str]:
    """The brief, and the digest by which a manifest knows the seal, from its first bytes (:func:`has_head`)."""
    try:
        head = msgspec.json.decode(data.partition(_BODY)[0] + b"}", type=_SealHead)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise FormatError(f"{file} cannot be read: {error}") from None
    if (head.stillframe, head.kind) != (limits.VERSION, "seal") or not is_digest(head.xxh3_128):
        raise FormatError(f"{file} is no seal of this version")
    return head.brief, head.xxh3_128


def decode_failure(data: bytes, *, file: str) -> Failure:
    """Raises :class:`FormatError` or :class:`VersionError`, naming ``file``."""
    failure, _ = _open("failure", data, Failure, file)
    return failure


_T = TypeVar("_T")


def _peek(data: bytes, file: str) -> _Peek:
    try:
        peek = msgspec.json.decode(data, type=_Peek)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"{file} cannot be read: {error}") from None
    if peek.stillframe < 1:
        raise FormatError(f"{file} has format version {peek.stillframe}, which there never was")
    if peek.stillframe > limits.VERSION:
        raise VersionError(
            f"{file} has format version {peek.stillframe}; this stillframe reads up to {limits.VERSION}: upgrade it"
        )
    return peek


def _open(kind: Kind, data: bytes, into: type[_T], file: str) -> tuple[_T, _Envelope | _SealEnvelope]:
    if len(data) > _MAX_BYTES[kind]:
        raise FormatError(f"{file}: {len(data)} bytes are more than the format allows")
    peek = _peek(data, file)
    if peek.kind != kind:
        raise FormatError(f"{file} is a {peek.kind!r}, not a {kind}")
    try:
        envelope: _Envelope | _SealEnvelope
        if kind == "seal" and peek.stillframe > 1:
            envelope = msgspec.json.decode(data, type=_SealEnvelope)
        else:
            envelope = msgspec.json.decode(data, type=_Envelope)
        is_whole = digest(bytes(envelope.body)) == envelope.xxh3_128 and msgspec.json.encode(envelope) + b"\n" == data
        if not is_whole:
            raise FormatError(f"{file} is damaged: its checksum does not match")
        return msgspec.json.decode(envelope.body, type=into), envelope
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"{file} cannot be read: {error}") from None


def _check_common(step: int, rank_count: int, attempt: str) -> None:
    if not 0 <= step <= MAX_STEP or not 1 <= rank_count <= limits.MAX_RANKS:
        raise FormatError(f"impossible step {step} or world size {rank_count}")
    if names.parse_rank_file(names.segment(0, attempt)) is None:
        raise FormatError(f"{attempt!r} is not an attempt")


def _check_seal(seal: Seal) -> None:
    _check_common(seal.step, seal.world_size, seal.attempt)
    segment = seal.segment
    if not 0 <= seal.rank < seal.world_size or segment.file != names.segment(seal.rank, seal.attempt):
        raise FormatError(f"impossible rank {seal.rank} or segment {segment.file!r}")
    if segment.data_start % BLOCK_BYTES or not 0 < segment.data_start <= min(segment.bytes, limits.MAX_HEADER_BYTES):
        raise FormatError(f"impossible data start {segment.data_start}")
    if not 0 < segment.chunk_bytes <= limits.MAX_CHUNK_BYTES or segment.chunk_bytes % BLOCK_BYTES:
        raise FormatError(f"impossible chunk size {segment.chunk_bytes}")
    if len(segment.chunks) != -(-segment.data_bytes // segment.chunk_bytes):
        raise FormatError(f"{len(segment.chunks)} chunks do not make {segment.data_bytes} bytes")
    if not all(map(is_digest, [segment.header, *segment.chunks])):
        raise FormatError("a checksum is malformed")
    check_shards(seal.shards, segment.data_bytes)
    check_tree(seal.tree, seal.shards, seal.values)


def _check_manifest(manifest: Manifest) -> None:
    _check_common(manifest.step, manifest.world_size, manifest.attempt)
    ranks = list(range(manifest.world_size)) if manifest.rank is None else [manifest.rank]
    if [entry.rank for entry in manifest.ranks] != ranks or not 0 <= ranks[0] < manifest.world_size:
        raise FormatError(f"the ranks are not {'0, 1, 2, …' if manifest.rank is None else manifest.rank}")
    for entry in manifest.ranks:
        expected = names.segment(entry.rank, manifest.attempt), names.seal(entry.rank, manifest.attempt)
        if (entry.segment, entry.seal) != expected or entry.segment_bytes < 0:
            raise FormatError(f"rank {entry.rank} names the files {entry.segment!r} and {entry.seal!r}")
        if not is_digest(entry.seal_digest):
            raise FormatError(f"rank {entry.rank} has a malformed checksum")


def encode_shards(shards: Sequence[Shard]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(shards))


def encode_tree(tree: Node) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(tree))
