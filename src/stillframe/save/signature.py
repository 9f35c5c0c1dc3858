"""Whether the tensors of a later walk can be served by the plan of an earlier one.

Most are known by their memory.  In host memory the plan keeps that alive, so an equal address is the same memory.  Of
an accelerator it keeps nothing: there another tensor of the same form may lie at the address, and is as good, since
copies are made of what lies there at each save.  A *loose* tensor, which is captured at every save, may be a new object
every time: only its form counts, and which of the other loose ones it is tied to.

This runs on the training thread for every tensor at every save.  So torch compares the forms of all tensors at once,
in C++; if it finds a difference, or cannot do it, whole lists are compared, attribute by attribute.  (384 tensors:
20 µs, and 170 µs.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any

import torch

from stillframe.state.forms import FORM, Forms
from stillframe.state.torch_internals import form_check

_BLOCK = 512
"""How many tensors are compared at once: below the threshold at which so many new shapes start garbage collection."""


class Signature:
    """Of the tensors of one walk, which are not kept alive here.

    ``is_volatile``: which are expected to change in forward; of their aliases only exact equals count.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], forms: Forms, is_loose: Sequence[bool], is_volatile: Sequence[bool]
    ) -> None:
        self._have_same_forms = form_check(tensors)
        self._forms = forms.columns
        self._all_addresses = forms.addresses
        self._take_fixed = _taker([index for index, loose in enumerate(is_loose) if not loose])
        self._addresses = self._take_fixed(forms.addresses)
        self._loose = [index for index, loose in enumerate(is_loose) if loose and forms.nbytes[index]]
        self._take_loose = _taker(self._loose)
        self._ties = self._ties_among(forms.addresses)
        self._apart = [index for index in self._loose if not is_volatile[index]]
        self._places = sorted((address, index) for index, address in enumerate(forms.addresses) if forms.nbytes[index])

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        try:
            addresses = list(map(torch.Tensor.data_ptr, tensors))
        except RuntimeError:
            return False  # one became sparse
        is_unmoved = addresses == self._all_addresses
        if not is_unmoved and self._take_fixed(addresses) != self._addresses:
            return False
        if not self._have_same_forms(*tensors):
            if not _all_equal(tensors, self._forms):
                return False
            self._have_same_forms = form_check(tensors)  # they differ in what is not stored: one was frozen
        return is_unmoved or (self._ties_among(addresses) == self._ties and self._are_apart(tensors, addresses))

    def moved(self, tensors: Sequence[torch.Tensor], among: Iterable[int]) -> list[int]:
        """Which of these are other tensors than those that the plan was made of."""
        return [index for index in among if tensors[index].data_ptr() != self._all_addresses[index]]

    def _are_apart(self, tensors: Sequence[torch.Tensor], addresses: list[int]) -> bool:
        """Whether those of the loose tensors that have moved are views of nothing else that is stored."""
        moved = {index for index in self._apart if addresses[index] != self._all_addresses[index]}
        address_in: dict[int, int] = {}
        for index in moved:
            storage = tensors[index].untyped_storage()
            start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
            if address_in.setdefault(start, addresses[index]) != addresses[index]:
                return False  # two views of one storage
            for _, other in self._places[bisect_left(self._places, (start, 0)) : bisect_left(self._places, (end, 0))]:
                if other not in moved:
                    return False
        return True

    def _ties_among(self, addresses: list[int]) -> list[int] | None:
        """For each loose tensor the first that is exactly the same; ``None`` if all are different."""
        loose = self._take_loose(addresses)
        if len(set(loose)) == len(loose):
            return None
        first: dict[object, int] = {}
        return [
            first.setdefault((address, *(form[index] for form in self._forms)), index)
            for index, address in zip(self._loose, loose, strict=True)
        ]


def _taker(indexes: Sequence[int]) -> Callable[[Sequence[Any]], list[Any]]:
    """Takes the items at these indexes."""
    if len(indexes) < 2:  # then itemgetter gives no tuple
        return lambda column: [column[index] for index in indexes]
    take = itemgetter(*indexes)
    return lambda column: list(take(column))


def _all_equal(tensors: Sequence[torch.Tensor], forms: Sequence[list[Any]]) -> bool:
    """Stops at the first attribute that differs: later ones may not even exist then."""
    for attribute, column in zip(FORM, forms, strict=True):
        for start in range(0, len(tensors), _BLOCK):
            end = start + _BLOCK
            if list(map(attribute, tensors[start:end])) != column[start:end]:
                return False
    return True
