"""How the golden checkpoint in ``v1`` was made::

    python -c "from tests.golden import make; make.write(make.ROOT)"

Refuses to run where it exists: what was written once must stay readable for ever.  Imported, not run as a
script, so that its classes are stored under the name they can be found by.
"""

from __future__ import annotations

import enum
import math
import shutil
import struct
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stillframe import Checkpointer, register_leaf

ROOT = Path(__file__).parent / "v1"
STEP = 1234
METADATA = {"loss": 0.25, "phase": "warm-up", "best": True, "note": None}


class Color(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Point:
    def __init__(self, name: str, at: torch.Tensor) -> None:
        self.name = name
        self.at = at


register_leaf(Point, "tests.golden.Point", lambda point: (point.name, point.at), lambda parts: Point(*parts))


class Loader:
    """An object with a state dict: comes back from ``load`` as that dict."""

    def state_dict(self) -> dict[str, Any]:
        return {"position": 17, "order": torch.arange(30)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def pattern(dtype: torch.dtype, count: int) -> torch.Tensor:
    """Bytes 0, 1, 2, … seen as this dtype."""
    data = bytearray(index % 251 for index in range(count * dtype.itemsize))
    if dtype is torch.bool:
        data = bytearray(byte & 1 for byte in data)
    return torch.frombuffer(data, dtype=dtype)


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
]  # fmt: skip

NAN = struct.unpack(">d", bytes.fromhex("7ff8deadbeef0001"))[0]

VALUES: dict[Any, Any] = {
    "none": None, "true": True, "int": -5, "large": 2**100, "float": 0.1, "zero": -0.0, "tiny": 5e-324, "inf": math.inf,
    "nan": NAN, "text": "emoji 🎉 \x00 \"", "bytes": b"\x00\xff", "bytearray": bytearray(b"ab"),
    "complex": complex(1, -0.0),
    "list": [1, 2.5, "x", None], "mixed": [1, [2, (3, {"deep": [()]})]], "set": {1, "a", (2, 3)},
    "frozenset": frozenset({b"x"}), "path": Path("/a/é"), "range": range(1, 10, 3),
    "enum": Color.RED, "level": Level.HIGH,
    "numpy": np.float32(0.1), "when": np.datetime64("2024-02-29", "s"), "dtype": torch.bfloat16,
    "size": torch.Size([2, 3]), "device": torch.device("cuda", 1),
}  # fmt: skip

KEYS: dict[Any, Any] = {
    0: "int", "0": "text", -1: "negative", 2.5: "float", None: "none", b"k": "bytes", (1, ("a",)): "tuple",
    True: "bool", Color.RED: "enum",
}  # fmt: skip


def make_state(loader: Any) -> dict[str, Any]:
    weight = pattern(torch.float32, 60).reshape(6, 10)
    memory = pattern(torch.int32, 50)
    return {
        "dtypes": {str(dtype): pattern(dtype, 20) for dtype in DTYPES},
        "shapes": [torch.tensor(7), torch.zeros(3, 0, 2), pattern(torch.int16, 24).reshape(2, 3, 4)],
        "tied": OrderedDict(weight=weight, again=weight, transposed=weight.t(), part=weight[2:4]),
        "overlapping": (memory[:30], memory[20:]),
        "strided": pattern(torch.int16, 100)[::3],
        "conjugate": pattern(torch.complex64, 10).conj(),
        "array": np.arange(12, dtype=np.uint16).reshape(3, 4),
        "leaf": Point("origin", torch.zeros(3)),
        "loader": loader,
        "values": VALUES,
        "keys": KEYS,
        "names": {"a/b": pattern(torch.uint8, 3), "a": {"b": pattern(torch.uint8, 4)}, "~": pattern(torch.uint8, 5)},
    }


def saved_state() -> dict[str, Any]:
    return make_state(Loader())


def loaded_state() -> dict[str, Any]:
    return make_state(Loader().state_dict())


def write(root: Path) -> None:
    """Save the state as a checkpoint in this root, which must not exist."""
    with tempfile.TemporaryDirectory() as scratch:
        with Checkpointer(scratch) as checkpointer:
            checkpointer.save(STEP, saved_state(), metadata=METADATA)
        root.mkdir()
        for kept in ("step-*", "run/e0*"):
            (found,) = Path(scratch).glob(kept)
            shutil.copytree(found, root / found.relative_to(scratch))
