"""JSON that somebody else may have written, or a failing disk: one way to read it, one error for all that is wrong."""

from __future__ import annotations

from typing import TypeVar

import msgspec

_T = TypeVar("_T")


def decode_json(data: bytes | msgspec.Raw, into: type[_T]) -> _T:
    """Raises :class:`ValueError`: it is no JSON, no UTF-8, nested too deeply, or not what it should be."""
    try:
        return msgspec.json.decode(data, type=into)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None
