"""Plain Python values ↔ JSON, exactly: what comes back has the type and the bits that went in.

JSON's own types stand for themselves (``null``, booleans, integers of any size, finite floats,
strings; an array is a list).  Everything else is an object with the key ``"$"`` that names its
type.  Nothing is ever imported because a file names it: an enum's class must already be loaded.
``encode`` refuses what it cannot give back exactly; nothing here ever falls back to pickle.
"""

from __future__ import annotations

import base64
import enum
import math
import pathlib
import re
import struct
import sys
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

from stillframe.errors import FormatError, UnsupportedStateError
from stillframe.format import limits

TAG = "$"
_INTS = {int}
_JSON_SCALARS = {type(None), bool, int, str, float}
_NUMPY_KINDS = "biufcmM"
_NUMPY_DTYPE = re.compile(rf"[<>|=][{_NUMPY_KINDS}]\d+(\[\w+\])?", re.ASCII)
_MAX_INT_BITS = 8192


class Unencodable(Exception):
    """Why a value cannot be stored; the walker adds the path and turns it into UnsupportedStateError."""


_Encoder = Callable[[Any], dict[str, Any]]
_Decoder = Callable[[dict[str, Any]], Any]
_encoders: dict[type, tuple[str, _Encoder]] = {}
_decoders: dict[str, _Decoder] = {}


class Elsewhere:
    """Stands in a list of a state for an item that another rank gives."""

    def __repr__(self) -> str:
        return "ELSEWHERE"

    def __copy__(self) -> Elsewhere:
        return self

    def __deepcopy__(self, _memo: object) -> Elsewhere:
        return self


ELSEWHERE = Elsewhere()


def is_elsewhere(data: Any) -> bool:
    """Of an encoded value."""
    return isinstance(data, dict) and data.get(TAG) == "elsewhere"


def register_value(kind: type, tag: str, encode: _Encoder, decode: _Decoder) -> None:
    """Add a built-in value type (stillframe's own use; users have ``register_leaf``)."""
    _encoders[kind] = (tag, encode)
    _decoders[tag] = decode


def is_value(kind: type) -> bool:
    """Whether exact instances of this type are encoded here, as leaves."""
    return (
        kind in _JSON_SCALARS
        or kind in (set, frozenset, Counter)
        or kind in _encoders
        or issubclass(kind, enum.Enum)
        or _is_numpy_scalar(kind)
    )


def is_plain_list(items: list[Any]) -> bool:
    """Whether a list holds only JSON scalars that need no tags: it is then one value, encoded at C speed."""
    kinds = set(map(type, items))
    if kinds == _INTS:  # an optimizer numbers its parameters: at each save, and there are thousands
        return bool(min(items) >= -(1 << 63) and max(items) < 1 << 63)
    if not kinds <= _JSON_SCALARS:
        return False
    if str in kinds and not _is_text("".join(item for item in items if type(item) is str)):
        return False
    if float in kinds and not all(math.isfinite(item) for item in items if type(item) is float):
        return False
    return int not in kinds or all(-(1 << 63) <= item < 1 << 63 for item in items if type(item) is int)


def encode(value: Any, depth: int = 0) -> Any:
    """The JSON form; raises :class:`Unencodable`."""
    kind = type(value)
    if kind is float:
        return value if math.isfinite(value) else {TAG: "float", "bits": struct.pack(">d", value).hex()}
    if kind is str:
        return _checked_text(value)
    if kind is int:
        if value.bit_length() > _MAX_INT_BITS:
            raise Unencodable(f"an int of more than {_MAX_INT_BITS} bits")
        return value
    if kind in _JSON_SCALARS:
        return value
    if depth > limits.MAX_DEPTH:
        raise Unencodable(f"nested deeper than {limits.MAX_DEPTH} levels, or it contains itself")
    if kind is list:
        return [encode(item, depth + 1) for item in value]
    if kind is tuple:
        return {TAG: "tuple", "items": [encode(item, depth + 1) for item in value]}
    if kind in (set, frozenset):
        return {TAG: kind.__name__, "items": sorted((encode(item, depth + 1) for item in value), key=repr)}
    if kind is Counter:  # MultiStepLR keeps its milestones in one
        return {TAG: "counter", "items": [[encode(key), encode(count)] for key, count in value.items()]}
    if kind in _encoders:
        tag, encoder = _encoders[kind]
        return {TAG: tag, **encoder(value)}
    if isinstance(value, enum.Enum):
        return _encode_enum(value)
    if _is_numpy_scalar(kind):
        if isinstance(value, str):
            return {TAG: "numpy.str", "data": _checked_text(str.__str__(value))}
        if isinstance(value, bytes):
            return {TAG: "numpy.bytes", "data": _to_base64(bytes(value))}
        if value.dtype.kind not in _NUMPY_KINDS:
            raise Unencodable(f"a numpy scalar of dtype {value.dtype}")
        return {TAG: "numpy", "dtype": value.dtype.str, "data": _to_base64(value.tobytes())}
    raise Unencodable(f"an object of type {kind.__module__}.{kind.__qualname__}")


def decode(data: Any) -> Any:
    """The value again; raises :class:`FormatError` on anything malformed."""
    try:
        return _decode(data)
    except RecursionError:
        raise FormatError("a value is nested too deeply") from None


def _decode(data: Any) -> Any:
    if isinstance(data, list):
        return [_decode(item) for item in data]
    if not isinstance(data, dict):
        return data
    tag = data.get(TAG)
    decoder = _decoders.get(tag) if isinstance(tag, str) else None
    if decoder is None:
        raise FormatError(f"a value is tagged {tag!r}, which is unknown here")
    try:
        return decoder(data)
    except (RecursionError, UnsupportedStateError):
        raise
    except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RuntimeError, struct.error) as error:
        raise FormatError(f"a value tagged {tag!r} is malformed: {error!r}") from None


def _checked_text(text: str) -> str:
    if not _is_text(text):
        raise Unencodable("a string with lone surrogates")
    return text


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _to_base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


def _from_base64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _is_numpy_scalar(kind: type) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(kind, numpy.generic)


def _encode_enum(value: enum.Enum) -> dict[str, Any]:
    kind = type(value)
    where = f"{kind.__module__}:{kind.__qualname__}"
    name = value.name
    if name is None or kind.__members__.get(name) is not value or _find_enum(where) is not kind:
        raise Unencodable(f"{value!r}, an enum value that cannot be found again by the name of its class and its own")
    return {TAG: "enum", "type": where, "name": name}


def _decode_enum(data: dict[str, Any]) -> enum.Enum:
    where, name = data["type"], data["name"]
    found = _find_enum(where)
    if found is None:
        raise UnsupportedStateError(f"the enum {where!r} is not loaded in this process: import it, then try again")
    member = found.__members__.get(name)
    if member is None:
        raise UnsupportedStateError(f"the enum {where!r} has no member {name!r} any more")
    return member


def _find_enum(where: str) -> type[enum.Enum] | None:
    """A loaded enum class; looked up in plain dictionaries, so that no module's or class's code runs."""
    module, _, qualname = where.partition(":")
    found: object = sys.modules.get(module)
    for part in qualname.split("."):
        found = vars(found).get(part) if isinstance(found, ModuleType | type) else None
    return found if isinstance(found, type) and issubclass(found, enum.Enum) else None


def _decode_numpy(data: dict[str, Any]) -> Any:
    import numpy

    if not _NUMPY_DTYPE.fullmatch(data["dtype"]):
        raise ValueError(f"dtype {data['dtype']!r}")
    dtype = numpy.dtype(data["dtype"])
    raw = _from_base64(data["data"])
    if len(raw) != dtype.itemsize:
        raise ValueError(f"{len(raw)} bytes for {dtype}")
    return numpy.frombuffer(raw, dtype)[0]


def _numpy_str(data: dict[str, Any]) -> Any:
    import numpy

    return numpy.str_(data["data"])


def _numpy_bytes(data: dict[str, Any]) -> Any:
    import numpy

    return numpy.bytes_(_from_base64(data["data"]))


def _decode_items(data: dict[str, Any]) -> list[Any]:
    items = data["items"]
    if not isinstance(items, list):
        raise ValueError("items")
    return [_decode(item) for item in items]


register_value(Elsewhere, "elsewhere", lambda _value: {}, lambda _data: ELSEWHERE)
register_value(bytes, "bytes", lambda value: {"data": _to_base64(value)}, lambda data: _from_base64(data["data"]))
register_value(
    bytearray,
    "bytearray",
    lambda value: {"data": _to_base64(value)},
    lambda data: bytearray(_from_base64(data["data"])),
)
register_value(
    complex,
    "complex",
    lambda value: {"bits": struct.pack(">dd", value.real, value.imag).hex()},
    lambda data: complex(*struct.unpack(">dd", bytes.fromhex(data["bits"]))),
)
register_value(
    type(pathlib.Path()),
    "path",
    lambda value: {"data": _checked_text(str(value))},
    lambda data: pathlib.Path(data["data"]),
)
register_value(
    range,
    "range",
    lambda value: {"items": [encode(each) for each in (value.start, value.stop, value.step)]},
    lambda data: range(*_decode_items(data)),
)
_decoders["float"] = lambda data: struct.unpack(">d", bytes.fromhex(data["bits"]))[0]
_decoders["tuple"] = lambda data: tuple(_decode_items(data))
_decoders["set"] = lambda data: set(_decode_items(data))
_decoders["frozenset"] = lambda data: frozenset(_decode_items(data))
_decoders["counter"] = lambda data: Counter(dict(_decode_items(data)))
_decoders["enum"] = _decode_enum
_decoders["numpy"] = _decode_numpy
_decoders["numpy.str"] = _numpy_str
_decoders["numpy.bytes"] = _numpy_bytes
