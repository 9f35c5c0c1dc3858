"""Python objects in the dicts of DeepSpeed, DCP and Lightning: those that come back exactly, and those that only
pickle can hold.

The latter are stored as marked records, as ``torch.save`` writes them, in a tensor of their own.  Code of theirs runs
only with ``allow_pickle``; for Lightning, as in ``torch.load``, with ``weights_only=False``.
"""

from __future__ import annotations

import argparse
import io
import pickle
import types
from typing import Any

import torch

from stillframe import register_leaf
from stillframe.errors import FormatError, UnsupportedStateError
from stillframe.spi import Path, is_tensor, mapped, path_text, register_attributes, storable


class Opaque:
    """The marked record of bytes that only somebody else turns into a value.

    ``pickled``: the type that pickle makes of them, for people to read; empty if a planner of DCP made them.
    """

    def __init__(self, data: bytes, pickled: str = "") -> None:
        self.data, self.pickled = data, pickled


def to_leaves(node: Any, advice: str | None, path: Path = ()) -> Any:
    """The same nesting, with an :class:`Opaque` for what only pickle can hold; nothing else is copied.

    ``advice``: how the user can allow pickle, for the error; ``None``: it is allowed.
    Raises: :class:`UnsupportedStateError`, with path and type.
    """

    def leaf(path: Path, value: Any) -> Any:
        if is_tensor(value) or storable(value):
            return value
        kind, data = f"{type(value).__module__}.{type(value).__qualname__}", io.BytesIO()
        if advice is not None:
            raise UnsupportedStateError(
                f"{path_text(path)} is a {kind}, which only pickle can hold: leave it out, or {advice} "
                "(loading the checkpoint will then run code from it)"
            )
        try:
            torch.save(value, data)
        except Exception as error:  # of any object's own code
            raise UnsupportedStateError(f"{path_text(path)} is a {kind}, which cannot be stored: {error}") from error
        return Opaque(data.getvalue(), kind)

    return mapped(node, leaf, path)


def from_leaves(node: Any, map_location: Any, weights_only: bool | None, advice: str, path: Path = ()) -> Any:
    """The same nesting, with everything unpickled that was pickled; ``map_location``, ``weights_only``: as
    ``torch.load`` takes them, so by default no code runs.

    ``advice``: how the user can allow that, for the error.
    Raises: :class:`UnsupportedStateError`, with path and type.
    """
    place = map_location if isinstance(map_location, str | torch.device) else None

    def leaf(path: Path, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value if place is None else value.to(place)
        if not isinstance(value, Opaque) or not value.pickled:
            return value
        what = f"{path_text(path)} is a {value.pickled} that was pickled"
        return unpickled(io.BytesIO(value.data), map_location, weights_only, what, advice)

    return mapped(node, leaf, path)


def unpickled(file: Any, map_location: Any, weights_only: bool | None, what: str, advice: str = "") -> Any:
    """As ``torch.load``.  Raises: :class:`UnsupportedStateError` for what only code can read; :class:`FormatError`."""
    try:
        return torch.load(file, map_location, weights_only=weights_only)
    except Exception as error:  # of what the bytes name, or of bytes that are no such file
        if advice and isinstance(error, pickle.UnpicklingError):
            raise UnsupportedStateError(f"{what}: to run its code, {advice}") from error
        raise FormatError(f"{what}, and cannot be read: {error}") from error


def register_deepspeed_types() -> None:
    """The classes whose instances DeepSpeed itself puts into its dicts."""
    from deepspeed.checkpoint.universal_checkpoint import SubparamShape
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.utils.tensor_fragment import fragment_address

    for kind in (LossScaler, DynamicLossScaler, fragment_address, SubparamShape):
        register_attributes(kind, f"deepspeed.{kind.__name__}")


register_attributes(argparse.Namespace, "namespace.Namespace")
register_attributes(types.SimpleNamespace, "namespace.SimpleNamespace")
register_leaf(
    Opaque,
    "opaque",
    lambda value: [torch.frombuffer(bytearray(value.data + b"\0"), dtype=torch.uint8)[:-1], value.pickled],
    lambda parts: Opaque(parts[0].numpy().tobytes(), parts[1]),
)
