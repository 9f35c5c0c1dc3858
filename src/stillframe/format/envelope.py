"""The envelope of every small file: one JSON object, whose body is covered by a checksum.

    {"stillframe": 1, "kind": "manifest", "xxh3_128": "<digest of the body's bytes>", "body": {...}}

The digest is of the body's bytes as they stand in the file, so any JSON writer's spacing and order of keys will do, and
a reader knows the version before it looks any further.  A seal has a ``brief``: what a commit needs to know of it.
Where it stands before the body, as this module writes it, whoever commits thousands of ranks reads the first bytes of
each.
"""

from __future__ import annotations

import re
from typing import Any, Literal, TypeVar

import msgspec

from stillframe.errors import FormatError, UnsupportedStateError, VersionError
from stillframe.format import limits
from stillframe.format.digest import digest, is_digest
from stillframe.untrusted import decode_json

Kind = Literal[
    "seal", "manifest", "failure", "claim", "parent", "outcomes", "target", "tiers", "carrying", "aside",
    "request", "answer"
]  # fmt: skip
TOO_LARGE = (
    "the {what} would take {size} bytes; the format allows {limit}: put large Python values in a tensor or an array"
)
_MAX_BYTES: dict[Kind, int] = {"seal": limits.MAX_SEAL_BYTES, "manifest": limits.MAX_MANIFEST_BYTES}
_BODY = re.compile(rb',\s*"body"\s*:')
_T = TypeVar("_T")


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A body, or a part of one."""


class _Envelope(Record, frozen=True):
    stillframe: int
    kind: str
    xxh3_128: str
    body: msgspec.Raw
    brief: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _Peek(msgspec.Struct, frozen=True):
    """What is looked at before anything else, whatever else there is."""

    stillframe: int
    kind: str = ""


class _Head(Record, frozen=True):
    """An envelope without its body."""

    stillframe: int
    kind: str
    xxh3_128: str
    brief: msgspec.Raw


def wrap(kind: Kind, body: bytes | Record, brief: Record | None = None) -> tuple[bytes, str]:
    """The file, and the digest of its body.  Raises :class:`UnsupportedStateError` if it is too large."""
    inner = body if isinstance(body, bytes) else msgspec.json.encode(body)
    known_by = digest(inner)
    head: dict[str, Any] = {"stillframe": limits.VERSION, "kind": kind, "xxh3_128": known_by}
    if brief is not None:
        head["brief"] = brief
    data = msgspec.json.encode({**head, "body": msgspec.Raw(inner)}) + b"\n"
    if len(data) > limit(kind):
        raise UnsupportedStateError(TOO_LARGE.format(what=kind, size=len(data), limit=limit(kind)))
    return data, known_by


def limit(kind: Kind) -> int:
    """The most bytes that such a file may have."""
    return _MAX_BYTES.get(kind, limits.MAX_NOTE_BYTES)


def unwrap(kind: Kind, data: bytes, into: type[_T], file: str) -> tuple[_T, str, bytes]:
    """The body, its digest, and the brief, if there is one, still encoded.

    Raises: :class:`FormatError` or :class:`VersionError`, naming ``file``.
    """
    if len(data) > limit(kind):
        raise FormatError(f"{file}: {len(data)} bytes are more than the format allows")
    try:
        peek = decode_json(data, _Peek)
        _check_version(peek.stillframe, file)
        if peek.kind != kind:
            raise FormatError(f"{file} is a {peek.kind!r}, not a {kind}")
        envelope = decode_json(data, _Envelope)
        if digest(bytes(envelope.body)) != envelope.xxh3_128:
            raise FormatError(f"{file} is damaged: its checksum does not match")
        brief = b"" if isinstance(envelope.brief, msgspec.UnsetType) else bytes(envelope.brief)
        return decode_json(envelope.body, into), envelope.xxh3_128, brief
    except ValueError as error:
        raise FormatError(f"{file} cannot be read: {error}") from None


def _check_version(version: int, file: str) -> None:
    if version < 1:
        raise FormatError(f"{file} has format version {version}, which does not exist")
    if version > limits.VERSION:
        raise VersionError(
            f"{file} has format version {version}; this stillframe reads up to {limits.VERSION}: upgrade it"
        )


def unwrap_head(kind: Kind, data: bytes, into: type[_T], file: str) -> tuple[_T, str] | None:
    """The brief, and the digest of the body, from the first bytes of a file; ``None`` if these do not tell.

    Whoever wrote the file may have put the body first, or more space than expected: then it is read as a whole.
    Raises: :class:`VersionError`, naming ``file``.
    """
    found = _BODY.search(data)
    if found is None:
        return None
    try:
        head = decode_json(data[: found.start()] + b"}", _Head)
        _check_version(head.stillframe, file)
        if head.kind != kind or not is_digest(head.xxh3_128):
            return None
        return decode_json(head.brief, into), head.xxh3_128
    except (ValueError, FormatError):
        return None
