"""Codecs of the user's own types: a value is taken apart into plain values and tensors, and put together again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from stillframe.errors import ConfigError

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Codec:
    kind: type
    name: str
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


_by_kind: dict[type, Codec] = {}
_by_name: dict[str, Codec] = {}


def register_leaf(kind: type[_T], name: str, encode: Callable[[_T], Any], decode: Callable[[Any], _T]) -> None:
    """Teach stillframe to store instances of ``kind`` (exactly that class, not its subclasses).

    ``encode(value)`` gives any nesting of plain values and tensors; ``decode`` gets the same
    nesting back.  ``name`` is what the checkpoint records: keep it for as long as checkpoints
    that use it should load.  Registering the same class and name again replaces the functions,
    also if its module has made the class anew (in a notebook, a cell that is run again).

    Raises: :class:`ConfigError` if the name belongs to another class, or the class to another name.
    """
    if not isinstance(kind, type) or not isinstance(name, str) or not name:
        raise ConfigError(f"register_leaf({kind!r}, {name!r}): give a class and a name")
    if not callable(encode) or not callable(decode):
        raise ConfigError(f"register_leaf({kind.__qualname__}, {name!r}): encode and decode must be callable")
    taken = _by_name.get(name)
    known = _by_kind.get(kind)
    if taken is not None and taken.kind is not kind and not _is_made_anew(taken.kind, kind):
        raise ConfigError(f"register_leaf: {name!r} is registered already, for {_full_name(taken.kind)}: give another")
    if known is not None and known.name != name:
        raise ConfigError(f"register_leaf: {_full_name(kind)} is registered already, as {known.name!r}: keep that name")
    _by_kind[kind] = _by_name[name] = Codec(kind, name, encode, decode)
    if taken is not None and taken.kind is not kind:
        _by_kind.pop(taken.kind, None)


def register_attributes(kind: type[_T], name: str) -> None:
    """The same for a class whose instances are known to be nothing but their attributes, of plain values and tensors:
    they are put into a new one without a call of its ``__init__``."""

    def made(attributes: dict[str, Any]) -> _T:
        value = kind.__new__(kind)
        vars(value).update(attributes)
        return value

    register_leaf(kind, name, lambda value: dict(vars(value)), made)


def _is_made_anew(before: type, kind: type) -> bool:
    """Whether a class has taken the place of another in its module: of two that only have the same name, none has."""
    in_module = getattr(sys.modules.get(kind.__module__), kind.__qualname__, None)
    return in_module is kind and _full_name(before) == _full_name(kind)


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def codec_of(kind: type) -> Codec | None:
    return _by_kind.get(kind)


def codec_named(name: str) -> Codec | None:
    return _by_name.get(name)
