"""The form of a tensor: all that tells it from another tensor at the same address.

Forms are read for thousands of tensors at once, on the training thread.  So they are lists, one for each attribute:
the loops over them are in C.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeAlias

import torch

from stillframe.errors import UnsupportedStateError
from stillframe.format import limits
from stillframe.format.values import Unencodable
from stillframe.state.dtypes import DTYPE_NAMES, PLAIN_TENSORS, check_tensor, refusal

Attribute: TypeAlias = Callable[[torch.Tensor], Any]
FORM: tuple[Attribute, ...] = (
    attrgetter("layout"),  # first: a sparse tensor has neither strides nor an address
    attrgetter("dtype"),
    attrgetter("shape"),
    torch.Tensor.stride,
    attrgetter("device"),
    torch.Tensor.is_conj,
    torch.Tensor.is_neg,
)
"""In the order of the first fields of :class:`Forms`."""


@dataclass(frozen=True, slots=True)
class Forms:
    """Of many tensors, in their order."""

    layouts: list[torch.layout]
    dtypes: list[torch.dtype]
    shapes: list[torch.Size]
    strides: list[tuple[int, ...]]
    devices: list[torch.device]
    is_conj: list[bool]
    is_neg: list[bool]
    addresses: list[int]
    nbytes: list[int]
    is_contiguous: list[bool]

    @property
    def columns(self) -> tuple[list[Any], ...]:
        """As :data:`FORM` reads them."""
        return self.layouts, self.dtypes, self.shapes, self.strides, self.devices, self.is_conj, self.is_neg

    def key(self, index: int) -> tuple[object, ...]:
        """Equal for tensors that are one: same address, same form."""
        return (self.addresses[index], *(column[index] for column in self.columns))

    def is_plain(self, index: int) -> bool:
        """Whether the tensor's memory is its content: contiguous, no lazy conjugation or negation."""
        return self.is_contiguous[index] and not self.is_conj[index] and not self.is_neg[index]


def forms_of(tensors: Sequence[torch.Tensor], names: Sequence[str | None]) -> Forms:
    """Raises :class:`UnsupportedStateError`, naming the first tensor that cannot be stored."""
    if any(map(attrgetter("is_nested"), tensors)):  # one has no shape
        _refuse(tensors, names)
    layouts, dtypes, shapes, devices = (
        list(map(attrgetter(name), tensors)) for name in ("layout", "dtype", "shape", "device")
    )
    are_storable = (
        set(map(type, tensors)) <= PLAIN_TENSORS
        and set(layouts) <= {torch.strided}
        and set(dtypes) <= DTYPE_NAMES.keys()  # no quantized one is among these
        and all(device.type != "meta" for device in set(devices))
        and max(map(len, shapes), default=0) <= limits.MAX_DIMENSIONS
    )
    if not are_storable:
        _refuse(tensors, names)
    return Forms(
        layouts,
        dtypes,
        shapes,
        list(map(torch.Tensor.stride, tensors)),
        devices,
        list(map(torch.Tensor.is_conj, tensors)),
        list(map(torch.Tensor.is_neg, tensors)),
        list(map(torch.Tensor.data_ptr, tensors)),
        list(map(attrgetter("nbytes"), tensors)),
        list(map(torch.Tensor.is_contiguous, tensors)),
    )


def _refuse(tensors: Sequence[torch.Tensor], names: Sequence[str | None]) -> None:
    for tensor, name in zip(tensors, names, strict=True):
        try:
            check_tensor(tensor)
        except Unencodable as reason:
            raise UnsupportedStateError(refusal(reason, name)) from None
