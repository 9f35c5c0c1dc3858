"""Whether the tensors of a later walk can be served by the plan of an earlier one.

Most are known by their memory.  In host memory the plan keeps that alive, so an equal address is the same memory.  Of
an accelerator it keeps nothing: there another tensor of the same form may lie at the address, and is as good, since
copies are made of what lies there at each save.  A *loose* tensor, which is captured at every save, may be a new object
every time: only its form counts, and which of the other loose ones it is tied to.

This runs on the training thread for every tensor at every save.  So torch compares the forms of many tensors at once,
in C++; if it finds a difference, or cannot do it, whole lists are compared, attribute by attribute.  (384 tensors:
20 µs, and 170 µs.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import itemgetter
from typing import Any

import torch

from stillframe.save.survey import BLOCK, Survey, form_checks
from stillframe.state.forms import FORM, Forms


class Signature:
    """Of the tensors of one walk, which are not kept alive here.

    ``is_volatile``: which are expected to change in forward; of their aliases only exact equals count.
    ``held``: the indexes of those whose storages a save holds.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        forms: Forms,
        is_loose: Sequence[bool],
        is_volatile: Sequence[bool],
        held: Collection[int],
    ) -> None:
        self._checks = form_checks(tensors)
        self._is_held = [index in held for index in range(len(tensors))] if held else []
        self._forms = forms.columns
        self._all_addresses = forms.addresses
        self._take_fixed = _taker([index for index, loose in enumerate(is_loose) if not loose])
        self._addresses = self._take_fixed(forms.addresses)
        self._loose = [index for index, loose in enumerate(is_loose) if loose and forms.nbytes[index]]
        self._take_loose = _taker(self._loose)
        self._ties = self._ties_among(forms.addresses)
        self._apart = [index for index in self._loose if not is_volatile[index]]
        self._places = sorted((address, index) for index, address in enumerate(forms.addresses) if forms.nbytes[index])

    def survey(self, tensors: Sequence[torch.Tensor]) -> Survey:
        """Of tensors that may be these.  Raises :class:`RuntimeError` if one became sparse."""
        return Survey(tensors, self._is_held, self._checks)

    def fit(self, tensors: Sequence[torch.Tensor]) -> Survey | None:
        """Their survey, if the plan can serve them."""
        try:
            survey = self.survey(tensors)
        except RuntimeError:
            return None
        return survey if self._fits(tensors, survey) else None

    def _fits(self, tensors: Sequence[torch.Tensor], survey: Survey) -> bool:
        addresses = survey.addresses
        is_unmoved = addresses == self._all_addresses
        if not is_unmoved and self._take_fixed(addresses) != self._addresses:
            return False
        if not survey.have_same_forms:
            if not _all_equal(tensors, self._forms):
                return False
            self._checks = form_checks(tensors)  # they differ in what is not stored: one was frozen
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
        for start in range(0, len(tensors), BLOCK):
            end = start + BLOCK
            if list(map(attribute, tensors[start:end])) != column[start:end]:
                return False
    return True
