"""Python objects in the dicts of DeepSpeed, DCP and Lightning: those that come back exactly, and those that only
pickle can hold.

The latter are stored as marked records, bytes in a tensor of their own.  They are unpickled only with ``allow_pickle``;
those of Lightning as ``torch.load`` does it with ``weights_only``.
"""

from __future__ import annotations

import argparse
import functools
import io
import pickle
import types
from collections.abc import Mapping
from typing import Any

import torch

from stillframe import register_leaf
from stillframe.errors import FormatError, UnsupportedStateError
from stillframe.spi import is_tensor, mapped, storable

_Path = tuple[Any, ...]
_PLAIN = {str, int, float, bool, type(None)}


class Opaque:
    """The marked record of bytes that only somebody else turns into a value.

    ``pickled``: the type that pickle makes of them, for people to read; empty if a planner of DCP made them.
    """

    def __init__(self, data: bytes, pickled: str = "") -> None:
        self.data, self.pickled = data, pickled


def to_leaves(node: Any, allow_pickle: bool, how: str, path: _Path = ()) -> Any:
    """The same nesting, with an :class:`Opaque` for what only pickle can hold; nothing else is copied.

    ``how`` tells the user, in an error, how to allow pickle.
    Raises: :class:`UnsupportedStateError`, with path and type.
    """

    def leaf(path: _Path, value: Any) -> Any:
        is_fine = type(value) in _PLAIN or is_tensor(value) or storable(value)
        return value if is_fine else _pickled(path, value, allow_pickle, how)

    return mapped(node, leaf, path)


def _pickled(path: _Path, value: Any, allow_pickle: bool, how: str) -> Opaque:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if not allow_pickle:
        raise UnsupportedStateError(
            f"{_text(path)} is a {kind}, which only pickle can hold: leave it out, or {how} "
            "(loading the checkpoint will then run code from it)"
        )
    return Opaque(pickle.dumps(value), kind)


def from_leaves(node: Any, device: torch.device, allow_pickle: bool, how: str, path: _Path = ()) -> Any:
    """The same nesting, with everything unpickled that was pickled, and all tensors on ``device``.  Raises as
    ``to_leaves``."""

    def leaf(path: _Path, value: Any) -> Any:
        if not isinstance(value, Opaque) or not value.pickled:
            return value.to(device) if isinstance(value, torch.Tensor) else value
        if not allow_pickle:
            raise UnsupportedStateError(f"{_text(path)} is a {value.pickled} that was pickled: to run its code, {how}")
        return pickle.loads(value.data)

    return mapped(node, leaf, path)


def read_pickled_file(path: str, map_location: Any, allow_pickle: bool, how: str) -> Any:
    """What ``torch.save`` wrote, as DeepSpeed itself does.  Raises :class:`FormatError`."""
    if not allow_pickle:
        raise FormatError(
            f"{path} was not written by stillframe; if it is DeepSpeed's own, and you trust it, {how}: loading it runs "
            "code from it"
        )
    try:
        return torch.load(path, map_location=map_location, weights_only=False)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise FormatError(f"{path} was not written by stillframe, and cannot be read: {error}") from error


def to_torch_saved(path: _Path, value: Any) -> Any:
    """What is stored for a value in Lightning's dict: what only pickle can hold, as ``torch.save`` writes it.

    Raises: :class:`UnsupportedStateError`, with path and type.
    """
    if type(value) in _PLAIN or is_tensor(value) or storable(value):
        return value
    kind, data = f"{type(value).__module__}.{type(value).__qualname__}", io.BytesIO()
    try:
        torch.save(value, data)
    except Exception as error:  # of any object's own code
        raise UnsupportedStateError(f"{_text(path)} is a {kind}, which cannot be stored: {error}") from error
    return Opaque(data.getvalue(), kind)


def torch_loaded(path: _Path, value: Any, map_location: Any, weights_only: bool | None) -> Any:
    """The opposite; ``weights_only``: as ``torch.load`` takes it, so by default no code runs.  Tensors are moved.

    Raises: :class:`UnsupportedStateError`, with path and type.
    """
    place = map_location if isinstance(map_location, str | torch.device) else None
    if isinstance(value, torch.Tensor):
        return value if place is None else value.to(place)
    if not isinstance(value, Opaque):
        return value
    try:
        return torch.load(io.BytesIO(value.data), place, weights_only=weights_only)
    except pickle.UnpicklingError as error:
        raise UnsupportedStateError(
            f"{_text(path)} is a {value.pickled} that was pickled: to run its code, give weights_only=False ({error})"
        ) from error


def register_attributes(kind: type, name: str) -> None:
    """Store instances of a class as their attributes."""
    register_leaf(kind, name, lambda value: dict(vars(value)), functools.partial(_with, kind))


def register_deepspeed_types() -> None:
    """The classes whose instances DeepSpeed itself puts into its dicts."""
    from deepspeed.checkpoint.universal_checkpoint import SubparamShape
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.utils.tensor_fragment import fragment_address

    for kind in (LossScaler, DynamicLossScaler, fragment_address, SubparamShape):
        register_attributes(kind, f"deepspeed.{kind.__name__}")


def _with(kind: Any, attributes: Mapping[str, Any]) -> Any:
    made = kind.__new__(kind)
    vars(made).update(attributes)
    return made


def _text(path: _Path) -> str:
    return "/".join(map(str, path))


register_attributes(argparse.Namespace, "namespace.Namespace")
register_attributes(types.SimpleNamespace, "namespace.SimpleNamespace")
register_leaf(
    Opaque,
    "opaque",
    lambda value: [torch.frombuffer(bytearray(value.data + b"\0"), dtype=torch.uint8)[:-1], value.pickled],
    lambda parts: Opaque(parts[0].numpy().tobytes(), parts[1]),
)
