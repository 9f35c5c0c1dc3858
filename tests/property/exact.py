"""Everything that must survive a round trip, as one comparable value: types, order of keys, every bit."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import torch


def exact(value: Any) -> Any:
    """Two states are the same if and only if this gives equal results for both."""
    if isinstance(value, torch.Tensor):
        return ("tensor", value.dtype, tuple(value.shape), tensor_bytes(value))
    if isinstance(value, np.ndarray):
        return ("array", value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, np.generic):
        return ("numpy", type(value), value.dtype.str, value.tobytes())
    kind = type(value)
    if isinstance(value, dict):
        return (kind, [(exact(key), exact(item)) for key, item in value.items()])
    if kind in (list, tuple):
        return (kind, [exact(item) for item in value])
    if kind in (set, frozenset):
        return (kind, sorted((exact(item) for item in value), key=repr))
    if kind is float:
        return (kind, struct.pack(">d", value))
    if kind is complex:
        return (kind, struct.pack(">dd", value.real, value.imag))
    return (kind, value)


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """The content in row-major order, whatever the strides and lazy bits."""
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    flat.copy_(tensor.detach().reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes()
