"""Which tensors and torch values a state may hold, and under what names they are stored."""

from __future__ import annotations

import re
import sys
from typing import Any

import torch

from stillframe.errors import UnsupportedStateError
from stillframe.format import limits, values
from stillframe.format.values import Unencodable

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip
for _dtype, _name in (("float8_e8m0fnu", "F8_E8M0"), ("float4_e2m1fn_x2", "F4")):
    if isinstance(getattr(torch, _dtype, None), torch.dtype):  # not in every torch
        DTYPE_NAMES[getattr(torch, _dtype)] = _name
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_LIKE_A_DTYPE = re.compile(r"[a-z]+\d[a-z0-9_]*", re.ASCII)
_ALL_DTYPES = {name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
PLAIN_TENSORS = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}


def check_tensor(tensor: torch.Tensor) -> None:
    """Raises :class:`Unencodable` with the reason if the tensor cannot be stored."""
    if type(tensor) not in PLAIN_TENSORS:
        raise Unencodable(
            f"a tensor of class {type(tensor).__module__}.{type(tensor).__qualname__}; give a plain tensor"
        )
    if tensor.is_nested:
        raise Unencodable("a nested tensor; give its values() and offsets()")
    if tensor.is_quantized:
        raise Unencodable("a quantized tensor; give its int_repr(), q_scale() and q_zero_point(), or dequantize() it")
    if tensor.layout is not torch.strided:
        raise Unencodable(f"a tensor of layout {tensor.layout}; convert it with .to_dense()")
    if tensor.device.type == "meta":
        raise Unencodable("a tensor on the meta device, which has no data")
    if tensor.dim() > limits.MAX_DIMENSIONS:
        raise Unencodable(f"a tensor of {tensor.dim()} dimensions; the format allows {limits.MAX_DIMENSIONS}")
    if tensor.dtype not in DTYPE_NAMES:
        raise Unencodable(f"a tensor of dtype {tensor.dtype}, which safetensors cannot hold; convert it before saving")


def refusal(reason: Unencodable, name: str | None = None) -> str:
    """``name``: the path to what is refused, as text; ``None``: it is the state itself."""
    where = "the state" if name is None else f"state[{name!r}]"
    return (
        f"{where} is {reason}: stillframe cannot store it exactly, and does not pickle. Leave it out, "
        "convert it to plain values and tensors, or teach stillframe with register_leaf(type, name, encode, decode)"
    )


def array_as_tensor(array: Any) -> torch.Tensor:
    """A numpy array's memory as a tensor; raises :class:`Unencodable`."""
    numpy = sys.modules["numpy"]
    if type(array) is not numpy.ndarray:
        raise Unencodable(f"a numpy array of class {type(array).__qualname__}; give a plain ndarray")
    if not array.dtype.isnative:
        raise Unencodable(f"a numpy array of dtype {array.dtype!r}, which is not in this machine's byte order")
    # torch takes only writable memory with strides that are whole, positive numbers of items; else a copy will do,
    # since the bytes are captured at once in any case.
    is_odd = any(stride < 0 or stride % max(array.itemsize, 1) for stride in array.strides)
    try:
        return torch.from_numpy(array if array.flags.writeable and not is_odd else array.copy(order="C"))
    except (TypeError, ValueError):
        raise Unencodable(f"a numpy array of dtype {array.dtype}; convert it to numbers or bytes") from None


def is_array(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _dtype_from(data: dict[str, Any]) -> torch.dtype:
    name = data["name"]
    if name not in _ALL_DTYPES and _LIKE_A_DTYPE.fullmatch(name):
        raise UnsupportedStateError(
            f"a value is torch.{name}, a dtype that torch {torch.__version__} does not have: use a newer torch"
        )
    return _ALL_DTYPES[name]  # only looked up: an attribute of torch may import something


def _size_from(data: dict[str, Any]) -> torch.Size:
    if not all(type(each) is int and 0 <= each < 1 << 63 for each in data["items"]):
        raise ValueError(data["items"])
    return torch.Size(data["items"])


values.register_value(
    torch.dtype, "torch.dtype", lambda value: {"name": str(value).removeprefix("torch.")}, _dtype_from
)
values.register_value(
    torch.device, "torch.device", lambda value: {"name": str(value)}, lambda data: torch.device(data["name"])
)
values.register_value(torch.Size, "torch.Size", lambda value: {"items": list(value)}, _size_from)
