"""Strategies: random states of everything stillframe stores, and a checkpointer to send them through."""

from __future__ import annotations

import enum
import math
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

import stillframe
from stillframe import Checkpointer, KeepLast
from stillframe.state.dtypes import DTYPE_NAMES

DTYPES = list(DTYPE_NAMES)
NUMPY_DTYPES = ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?", "c8"]


def examples(count: int) -> settings:
    """Disk and processes take part, so no deadline."""
    return settings(max_examples=count, deadline=None, suppress_health_check=[HealthCheck.too_slow])


class Color(enum.Enum):
    RED = "r"
    BLUE = ("b", 2)


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class RoundTrip:
    """One checkpointer for many states: each takes the next step."""

    def __init__(self, root: Path, checkpointer: Checkpointer) -> None:
        self.root = root
        self.checkpointer = checkpointer
        self.step = 0

    def save(self, state: Any) -> int:
        self.step += 1
        self.checkpointer.save(self.step, state).wait(timeout_s=60)
        return self.step

    def load(self, state: Any) -> Any:
        return stillframe.load(self.root, self.save(state))


@contextmanager
def round_trips(root: Path) -> Iterator[RoundTrip]:
    with Checkpointer(root, arena="48MiB", keep=KeepLast(2)) as checkpointer:
        yield RoundTrip(root, checkpointer)


# --- leaves --------------------------------------------------------------------------------

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple) | st.tuples(st.integers(1, 200))


def filled(dtype: torch.dtype, count: int, pattern: bytes) -> torch.Tensor:
    """So many items, their bytes a repeated pattern."""
    size = count * dtype.itemsize
    data = bytearray((pattern * (size // len(pattern) + 1))[:size])
    if dtype is torch.bool:
        data = bytearray(byte & 1 for byte in data)
    return torch.frombuffer(data, dtype=dtype).clone() if size else torch.empty(0, dtype=dtype)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(shapes)
    pattern = draw(st.binary(min_size=1, max_size=17))
    return filled(draw(st.sampled_from(DTYPES)), math.prod(shape), pattern).reshape(shape)


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    shape = draw(shapes)
    dtype = np.dtype(draw(st.sampled_from(NUMPY_DTYPES)))
    pattern = draw(st.binary(min_size=1, max_size=17))
    size = math.prod(shape) * dtype.itemsize
    data = (pattern * (size // len(pattern) + 1))[:size]
    if dtype == np.bool_:
        data = bytes(byte & 1 for byte in data)
    array: Any = np.frombuffer(data, dtype).reshape(shape)
    form = draw(st.sampled_from(["read-only", "plain", "transposed", "reversed", "fortran"]))
    if form == "transposed":
        return array.copy().T
    if form == "reversed":
        return array.copy()[::-1] if array.ndim else array.copy()
    if form == "fortran":
        return np.asfortranarray(array)
    return array if form == "read-only" else array.copy()


def plain_scalars(allow_nan: bool) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.none(), st.booleans(), st.integers(), st.integers(-(2**200), 2**200), st.floats(allow_nan=allow_nan),
        st.complex_numbers(allow_nan=allow_nan), st.text(max_size=8), st.binary(max_size=8),
        st.sampled_from([Color.RED, Color.BLUE, Level.LOW, Level.HIGH]),
    )  # fmt: skip


scalars = plain_scalars(allow_nan=True)
rare = st.one_of(
    st.binary(max_size=8).map(bytearray),
    st.builds(range, st.integers(-5, 5), st.integers(-5, 5), st.integers(1, 3)),
    st.sampled_from([torch.float32, torch.uint16, torch.Size([1, 2]), torch.device("cpu"), Path("/a/b"), Path("c")]),
    st.sampled_from([np.float32(0.1), np.int64(-7), np.uint8(255), np.bool_(True), np.complex64(1 - 2j)]),
    st.sets(scalars, max_size=3),
    st.frozensets(scalars, max_size=3),
)
values = scalars | rare


def plain_keys(scalars: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.text(max_size=6), st.integers(-3, 12), scalars, st.tuples(scalars, scalars))


keys = plain_keys(scalars)
findable_keys = plain_keys(plain_scalars(allow_nan=False))

# --- nestings ------------------------------------------------------------------------------


def containers(inner: st.SearchStrategy[Any], keys: st.SearchStrategy[Any] = keys) -> st.SearchStrategy[Any]:
    dicts = st.dictionaries(keys, inner, max_size=4)
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        dicts,
        dicts.map(OrderedDict),
        st.dictionaries(st.text(max_size=3), inner, max_size=4),
    )


states = st.recursive(tensors() | values | arrays(), containers, max_leaves=14)
