"""Tensors that wrap others: subclasses with ``__tensor_flatten__``, such as quantised weights and optimizer states.

A wrapper has no memory of its own.  Its inner tensors have, and they are what a save copies and a restore fills.  An
inner tensor may be a wrapper again.

The rest of a wrapper (its class, and the context that ``__tensor_flatten__`` gives) is recorded so that a restore can
tell whether a live wrapper is of the same kind.  The context must be plain data; a dataclass or a named tuple of such
counts as plain.  A context that is something else could hide a difference, so such a wrapper is refused.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from stillframe.format import limits, values
from stillframe.format.values import TAG, Unencodable
from stillframe.state.dtypes import PLAIN_TENSORS
from stillframe.state.torch_internals import is_dtensor, is_pending, local_of

_MAX_PARTS = 64
"""Of a class's name that is looked up: a file may hold any."""

_NO_CONTENT = "requires_grad"
"""A field of a context that is no part of the content; where the tensor is, is none either."""


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A wrapper, taken apart."""

    kind: str
    """The full name of its class."""
    dtype: str
    shape: tuple[int, ...]
    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]
    context: Any
    """Encoded."""


def is_wrapper(value: object) -> bool:
    """Whether it can be taken apart; a DTensor is none, it has a way of its own."""
    kind = type(value)
    return (
        kind not in PLAIN_TENSORS
        and isinstance(value, torch.Tensor)
        and hasattr(kind, "__tensor_flatten__")
        and hasattr(kind, "__tensor_unflatten__")
        and not is_dtensor(value)
    )


def kind_of(tensor: object) -> str:
    kind = type(tensor)
    return f"{kind.__module__}.{kind.__qualname__}"


def take_apart(tensor: torch.Tensor) -> Wrapper:
    """Raises :class:`Unencodable` with the reason if the wrapper cannot be stored."""
    kind = kind_of(tensor)
    if is_pending(tensor):
        raise Unencodable(f"a tensor of class {kind}, which is yet to be received; wait for it")
    if tensor.is_nested:
        raise Unencodable(f"a tensor of class {kind}; give its values() and offsets()")
    try:
        names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        names = tuple(names)
        tensors = tuple(getattr(tensor, name) for name in names)
    except Exception as error:
        raise Unencodable(
            f"a tensor of class {kind}, whose __tensor_flatten__ raised {type(error).__name__}: {error}"
        ) from None
    if not names or len(set(names)) != len(names) or not all(isinstance(each, torch.Tensor) for each in tensors):
        raise Unencodable(f"a tensor of class {kind}, whose __tensor_flatten__ does not name its inner tensors")
    shape = tuple(tensor.shape)
    if not all(type(size) is int for size in shape):
        raise Unencodable(f"a tensor of class {kind}, whose shape is symbolic")
    try:
        encoded = _encode(context, 0)
    except Unencodable as reason:
        raise Unencodable(f"a tensor of class {kind}, whose flatten context holds {reason}") from None
    return Wrapper(kind, str(tensor.dtype).removeprefix("torch."), shape, names, tensors, encoded)


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors whose memory it is: itself, what this rank holds of a DTensor, the inner tensors of a wrapper.

    A wrapper that cannot be taken apart has none.
    """
    local = local_of(tensor)
    if not is_wrapper(local):
        yield local
        return
    try:
        inner = take_apart(local).tensors
    except Unencodable:
        return
    for each in inner:
        yield from plain_tensors(each)


def is_same_context(one: Any, other: Any) -> bool:
    """Of encoded contexts: equal but for the kind of sequence, the order of dicts, and what is no content."""
    return bool(_normal(one) == _normal(other))


# --- contexts -------------------------------------------------------------------------------


_VALUES = {type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size}


def _encode(value: Any, depth: int) -> Any:
    if depth > limits.MAX_DEPTH:
        raise Unencodable(f"something nested deeper than {limits.MAX_DEPTH} levels")
    kind = type(value)
    if kind in _VALUES:  # nearly all, and this runs at every save
        return values.encode(value, depth)
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return _record(value, zip(kind._fields, value, strict=True), depth)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        return _record(value, fields, depth)
    if kind is list:
        return [_encode(item, depth + 1) for item in value]
    if kind is tuple:
        return {TAG: "tuple", "items": [_encode(item, depth + 1) for item in value]}
    if isinstance(value, Mapping):
        pairs = [[_encode(key, depth + 1), _encode(item, depth + 1)] for key, item in value.items()]
        return {TAG: "dict", "items": pairs}
    if isinstance(value, enum.Enum):
        return {TAG: "enum", "type": f"{kind.__module__}:{kind.__qualname__}", "name": value.name}
    if kind in (torch.layout, torch.memory_format):
        return {TAG: "torch", "name": str(value)}
    return values.encode(value, depth)


def _record(value: Any, fields: Any, depth: int) -> Any:
    pairs = [[name, _encode(item, depth + 1)] for name, item in fields]
    return {TAG: "record", "type": kind_of(value), "items": pairs}


def _normal(data: Any) -> Any:
    if isinstance(data, list):
        return [_normal(item) for item in data]
    if not isinstance(data, dict):
        return type(data).__name__, repr(data)  # True and 1 differ, and 0.0 and -0.0
    tag = data.get(TAG)
    if tag in ("tuple", "torch.Size"):
        return _normal(data.get("items"))
    if tag == "torch.device":
        return tag
    items = data.get("items")
    if tag in ("dict", "record") and isinstance(items, list) and all(map(_is_pair, items)):
        pairs = [(_normal(key), _normal(item)) for key, item in items if key != _NO_CONTENT]
        return tag, data.get("type"), sorted(pairs, key=repr)
    return tag, sorted(((key, _normal(item)) for key, item in data.items() if key != TAG), key=repr)


def _is_pair(data: Any) -> bool:
    return isinstance(data, list) and len(data) == 2


def holds_its_tensors(tensor: torch.Tensor, own: Wrapper) -> bool:
    """Whether the inner tensors are where the class keeps its numbers: one that makes them anew cannot be filled."""
    again = take_apart(tensor)
    return again.names == own.names and all(
        one is other or is_wrapper(one) or not one.numel() or one.data_ptr() == other.data_ptr()
        for one, other in zip(own.tensors, again.tensors, strict=True)
    )


# --- making one -----------------------------------------------------------------------------


def put_together(
    kind: str, context: Any, tensors: Mapping[str, torch.Tensor], dtype: str, shape: Sequence[int]
) -> torch.Tensor | None:
    """A new wrapper of these inner tensors; ``None`` if it cannot be made exactly.

    Its class must be loaded already: nothing is imported because a file names it.  The result is taken apart again,
    and must consist of these very tensors and an equal context.
    """
    found = _loaded_class(kind)
    if found is None:
        return None
    try:
        strides = torch.empty(tuple(shape), device="meta").stride()
        device = next((each.device for each in tensors.values()), torch.device("cpu"))
        given = _decode(context, device)
        made = found.__tensor_unflatten__(dict(tensors), given, torch.Size(shape), strides)
        again = take_apart(made) if is_wrapper(made) else None
    except Exception:  # whatever a class makes of a context that it did not expect: it cannot be made
        return None
    is_right = (
        again is not None
        and (again.kind, again.dtype, again.shape) == (kind, dtype, tuple(shape))
        and is_same_context(again.context, context)
        and len(again.names) == len(tensors)
        and all(one is tensors.get(name) for name, one in zip(again.names, again.tensors, strict=True))
    )
    return made if is_right else None


def _loaded_class(kind: str) -> Any:
    """Looked up in plain dictionaries, so that no module's or class's code runs."""
    parts = kind.split(".")
    if len(parts) > _MAX_PARTS:
        return None
    for count in range(len(parts) - 1, 0, -1):
        found: object = sys.modules.get(".".join(parts[:count]))
        for part in parts[count:]:
            found = vars(found).get(part) if isinstance(found, ModuleType | type) else None
        if (
            isinstance(found, type)
            and issubclass(found, torch.Tensor)
            and kind == f"{found.__module__}.{found.__qualname__}"
        ):
            return found if hasattr(found, "__tensor_unflatten__") and hasattr(found, "__tensor_flatten__") else None
    return None


def _decode(data: Any, device: torch.device) -> Any:
    """Raises if it holds something that only its class could make."""
    if isinstance(data, list):
        return [_decode(item, device) for item in data]
    tag = data.get(TAG) if isinstance(data, dict) else None
    if tag == "tuple":
        return tuple(_decode(item, device) for item in data["items"])
    if tag == "dict":
        return {_decode(key, device): _decode(item, device) for key, item in data["items"]}
    if tag == "torch.device":
        return device
    return values.decode(data)
