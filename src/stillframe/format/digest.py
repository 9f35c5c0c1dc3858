"""The one checksum of the format: xxh3-128, as 32 hexadecimal digits."""

from __future__ import annotations

import re
from collections.abc import Iterable

import xxhash

_HEX = re.compile(r"[0-9a-f]{32}", re.ASCII)


def digest(data: bytes | bytearray | memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def digest_of(parts: Iterable[bytes | memoryview]) -> str:
    """The digest of the parts laid end to end."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.hexdigest()


def is_digest(text: str) -> bool:
    return _HEX.fullmatch(text) is not None
