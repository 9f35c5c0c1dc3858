"""Codecs of the user's own types: a value is taken apart into plain values and tensors, and put together again."""

from __future__ import annotations

import functools
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


def register_leaf(
    kind: type[_T],
    name: str,
    encode: Callable[[_T], Any] | None = None,
    decode: Callable[[Any], _T] | None = None,
) -> None:
    """Teach stillframe to store instances of ``kind`` (exactly that class, not its subclasses).

    ``encode(value)`` gives any nesting of plain values and tensors; ``decode`` gets the same
    nesting back.  Without both, the attributes of an instance are stored, and put into a new one
    without a call of its ``__init__``.  ``name`` is what the checkpoint records: keep it for as
    long as checkpoints that use it should load.  Registering the same class and name again
    replaces the functions, also if the class was made anew (in a notebook).

    Raises: :class:`ConfigError` if the name belongs to another class, or the class to another name; if both functions
    are left out for a class whose instances hold more than attributes.
    """
    if not isinstance(kind, type) or not isinstance(name, str) or not name:
        raise ConfigError(f"register_leaf({kind!r}, {name!r}): give a class and a name")
    if encode is None and decode is None:
        encode, decode = _attributes_of, functools.partial(_with_attributes, kind)
        if not _is_its_attributes(kind):
            raise ConfigError(
                f"register_leaf({kind.__qualname__}, {name!r}): its instances hold more than attributes: give encode "
                "and decode"
            )
    if not callable(encode) or not callable(decode):
        raise ConfigError(f"register_leaf({kind.__qualname__}, {name!r}): encode and decode must be callable")
    taken = _by_name.get(name)
    known = _by_kind.get(kind)
    if taken is not None and _full_name(taken.kind) != _full_name(kind):
        raise ConfigError(f"register_leaf: {name!r} is registered already, for {_full_name(taken.kind)}: give another")
    if known is not None and known.name != name:
        raise ConfigError(f"register_leaf: {_full_name(kind)} is registered already, as {known.name!r}: keep that name")
    _by_kind[kind] = _by_name[name] = Codec(kind, name, encode, decode)


def _full_name(kind: type) -> str:
    """The same for a class that was made anew: in a notebook's cell, or by a module that was loaded again."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_its_attributes(kind: type) -> bool:
    """Whether an instance has a ``__dict__``, and nothing beside it: neither slots nor what a built-in base holds."""
    if any(vars(base).get("__slots__") for base in kind.__mro__):
        return False
    try:
        return not vars(object.__new__(kind))
    except TypeError:
        return False


def _attributes_of(value: Any) -> dict[str, Any]:
    return dict(vars(value))


def _with_attributes(kind: type[_T], attributes: dict[str, Any]) -> _T:
    value = object.__new__(kind)
    vars(value).update(attributes)
    return value


def codec_of(kind: type) -> Codec | None:
    return _by_kind.get(kind)


def codec_named(name: str) -> Codec | None:
    return _by_name.get(name)
