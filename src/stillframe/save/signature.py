"""Whether the tensors of a later walk can be served by the plan of an earlier one.

Most are known by their memory: the plan keeps that alive, so an equal address is the same memory.  A *loose* tensor,
which is captured at every save, may be a new object every time: only its form counts, and which of the other loose
ones it is tied to.

This runs on the training thread for every tensor at every save, so it compares whole lists, attribute by attribute:
the loops are in C (10,000 tensors: 12 ms one by one, 5 ms like this),
and of a tensor that is the very same object it looks only at what can have changed in place.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch

_Attribute = Callable[[torch.Tensor], Any]
_FORM: tuple[_Attribute, ...] = (
    attrgetter("layout"),  # first: a sparse tensor has neither strides nor an address
    attrgetter("dtype"),
    attrgetter("shape"),
    torch.Tensor.stride,
    attrgetter("device"),
    torch.Tensor.is_conj,
    torch.Tensor.is_neg,
)
_CHANGEABLE: tuple[_Attribute, ...] = (
    attrgetter("dtype"),
    attrgetter("shape"),
    torch.Tensor.stride,
    torch.Tensor.is_neg,
)
"""What of the form can differ for the very same object at the same address (``t_()``, ``.data =``).  A conjugate view
differs in nothing else, but only complex tensors have one."""


class Signature:
    """Of the tensors of one walk; ``kept`` are those that the plan holds on to, ``None`` for the others."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], is_loose: Sequence[bool], kept: Sequence[torch.Tensor | None]
    ) -> None:
        self._forms = _lists(_FORM, tensors)
        self._fixed = [index for index, loose in enumerate(is_loose) if not loose]
        self._loose = [index for index, loose in enumerate(is_loose) if loose and tensors[index].numel()]
        addresses = list(map(torch.Tensor.data_ptr, tensors))
        self._all_addresses = addresses
        self._addresses = [addresses[index] for index in self._fixed]
        self._ties = self._ties_among(addresses)
        held = [(index, each) for index, each in enumerate(kept) if each is not None and not each.is_complex()]
        self._kept_indexes = [index for index, _ in held]
        self._kept_tensors = [each for _, each in held]
        self._kept_forms = _lists(_CHANGEABLE, self._kept_tensors)
        self._kept_addresses = list(map(torch.Tensor.data_ptr, self._kept_tensors))
        self._others = sorted(set(range(len(tensors))) - set(self._kept_indexes))
        self._other_forms = _lists(_FORM, [tensors[index] for index in self._others])

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        try:
            addresses = list(map(torch.Tensor.data_ptr, tensors))
        except RuntimeError:
            return False  # one became sparse
        is_unmoved = addresses == self._all_addresses
        if not is_unmoved and [addresses[index] for index in self._fixed] != self._addresses:
            return False
        if not self._same_forms(tensors, addresses, is_unmoved):
            return False
        return is_unmoved or self._ties_among(addresses) == self._ties

    def _same_forms(self, tensors: Sequence[torch.Tensor], addresses: list[int], is_unmoved: bool) -> bool:
        kept = [tensors[index] for index in self._kept_indexes] if self._others else tensors
        is_kept = all(map(operator.is_, kept, self._kept_tensors)) and (
            is_unmoved or [addresses[index] for index in self._kept_indexes] == self._kept_addresses
        )
        if not is_kept:
            return _all_equal(_FORM, tensors, self._forms)
        others = [tensors[index] for index in self._others]
        return _all_equal(_CHANGEABLE, kept, self._kept_forms) and _all_equal(_FORM, others, self._other_forms)

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


def _lists(attributes: Sequence[_Attribute], tensors: Sequence[torch.Tensor]) -> list[list[Any]]:
    return [list(map(attribute, tensors)) for attribute in attributes]


def _all_equal(attributes: Sequence[_Attribute], tensors: Sequence[torch.Tensor], expected: list[list[Any]]) -> bool:
    """Stops at the first attribute that differs: later ones may not even exist then."""
    return all(list(map(attribute, tensors)) == each for attribute, each in zip(attributes, expected, strict=True))
