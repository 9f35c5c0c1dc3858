"""Whether the tensors of a later walk can be served by the plan of an earlier one.

Most are known by their memory: the plan keeps that alive, so an equal address is the same memory.  A *loose* tensor,
which is captured at every save, may be a new object every time: only its form counts, and which of the other loose
ones it is tied to.

This runs on the training thread for every tensor at every save, so it compares whole lists, attribute by attribute:
the loops are in C (10,000 tensors: 12 ms one by one, 5 ms like this).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch

_FORM: tuple[Callable[[torch.Tensor], Any], ...] = (
    attrgetter("layout"),  # first: a sparse tensor has neither strides nor an address
    attrgetter("dtype"),
    attrgetter("shape"),
    torch.Tensor.stride,
    attrgetter("device"),
    torch.Tensor.is_conj,
    torch.Tensor.is_neg,
)


class Signature:
    """Of the tensors of one walk.  Never changed once made."""

    def __init__(self, tensors: Sequence[torch.Tensor], is_loose: Sequence[bool]) -> None:
        self._forms = [list(map(attribute, tensors)) for attribute in _FORM]
        self._fixed = [index for index, loose in enumerate(is_loose) if not loose]
        self._loose = [index for index, loose in enumerate(is_loose) if loose and tensors[index].numel()]
        addresses = list(map(torch.Tensor.data_ptr, tensors))
        self._addresses = [addresses[index] for index in self._fixed]
        self._ties = self._ties_among(addresses)

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        for attribute, expected in zip(_FORM, self._forms, strict=True):
            if list(map(attribute, tensors)) != expected:
                return False
        addresses = list(map(torch.Tensor.data_ptr, tensors))
        if [addresses[index] for index in self._fixed] != self._addresses:
            return False
        return self._ties_among(addresses) == self._ties

    def _ties_among(self, addresses: list[int]) -> list[int] | None:
        """For each loose tensor the first that is exactly the same; ``None`` if all are different."""
        loose = [addresses[index] for index in self._loose]
        if len(set(loose)) == len(loose):
            return None
        first: dict[object, int] = {}
        return [
            first.setdefault((address, *(form[index] for form in self._forms)), index)
            for index, address in zip(self._loose, loose, strict=True)
        ]
