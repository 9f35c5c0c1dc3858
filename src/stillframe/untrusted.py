"""JSON that somebody else may have written, or a failing disk: one way to read it, one error for all that is wrong."""

from __future__ import annotations

import os
import threading
from typing import Any, TypeVar

import msgspec

_T = TypeVar("_T")
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
_making = threading.Lock()


def _renew() -> None:
    global _making
    _making = threading.Lock()


os.register_at_fork(after_in_child=_renew)  # a forked child may have it taken, by a thread that is not there


def decoder_of(into: type[_T]) -> msgspec.json.Decoder[_T]:
    """Made once, by one thread.

    msgspec looks at a type when it first decodes one: if two threads do that at once, the process ends with SIGSEGV.
    """
    found = _decoders.get(into)
    if found is None:
        with _making:
            found = _decoders.get(into) or _decoders.setdefault(into, msgspec.json.Decoder(into))
    return found


def decode_json(data: bytes | msgspec.Raw, into: type[_T]) -> _T:
    """Raises :class:`ValueError`: it is no JSON, no UTF-8, nested too deeply, or not what it should be."""
    try:
        return decoder_of(into).decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None
