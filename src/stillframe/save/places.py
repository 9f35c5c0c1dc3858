"""Where in an accelerator's memory a source lies, without keeping that memory alive.

A plan has places.  The job of one save holds the storages in which they lie, from ``save()`` until the copies are made;
:class:`Sources` takes each place there.  What the tensors themselves do meanwhile (``parameter.data = …``) makes no
difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import torch

from stillframe.errors import StateError
from stillframe.state.memory import as_row, is_plain, row_slices
from stillframe.state.torch_internals import flattened


def is_kept(source: torch.Tensor) -> bool:
    """Whether a plan keeps it: what is not an accelerator's, and the rare lazy conjugations and negations."""
    return source.device.type == "cpu" or source.is_conj() or source.is_neg()


@dataclass(frozen=True, slots=True)
class Place:
    """Some bytes of a tensor, in row-major order."""

    index: int
    """Of a tensor of the walk in the same storage."""
    address: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    is_plain: bool
    start: int
    nbytes: int
    is_whole: bool
    """A plain tensor with no other bytes."""

    @staticmethod
    def of(index: int, source: torch.Tensor) -> Place:
        """All of it."""
        form = source.data_ptr(), source.dtype, tuple(source.shape), source.stride()
        return Place(index, *form, is_plain(source), 0, source.nbytes, is_plain(source))

    def part(self, start: int, nbytes: int) -> Place:
        """So many of its bytes."""
        return replace(self, start=start, nbytes=nbytes, is_whole=False)

    def tensor(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The whole tensor, as it was."""
        offset, rest = divmod(self.address - storage.data_ptr(), self.dtype.itemsize)
        spanned = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        if rest or offset < 0 or (offset + spanned) * self.dtype.itemsize > storage.nbytes():
            raise StateError("a tensor has moved to another storage since the plan was made")  # set_ would resize it
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(storage, offset, self.shape, self.stride)

    def row(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Its bytes; a copy only if they do not lie end to end."""
        tensor, item_bytes = self.tensor(storage), self.dtype.itemsize
        if self.is_plain:
            row = as_row(tensor)
            return row if self.nbytes == row.numel() else row[self.start : self.start + self.nbytes]
        rows = [as_row(each) for each in row_slices(tensor, self.start // item_bytes, self.nbytes // item_bytes)]
        return rows[0] if len(rows) == 1 else torch.cat(rows)


class Sources:
    """Of one save: the tensors of the walk, by their indexes, and the storages that they had at ``save()``."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], slots: Mapping[int, int], storages: list[torch.UntypedStorage]
    ) -> None:
        """``slots``: the indexes of those that lie in accelerators' memory, each with its rank in ``storages``."""
        self._tensors = list(tensors) if slots else []
        self._slots = slots
        self._storages = storages
        self._last: tuple[int, torch.Tensor] | None = None

    def clear(self) -> None:
        """The copies are made: nothing is kept any more."""
        self._tensors, self._storages, self._last = [], [], None

    def rows(self, sources: Sequence[torch.Tensor | Place]) -> list[torch.Tensor]:
        """The bytes of all, end to end.  On the stream that copies them, as it may compute."""
        if isinstance(sources[0], torch.Tensor):
            return sources  # type: ignore[return-value]  # all are of one device
        places: list[Place] = sources  # type: ignore[assignment]
        if len(places) == 1:
            return [self._row(places[0])]
        with torch.no_grad():
            return [row for run in _runs(places) for row in self._run(run)]

    def _row(self, place: Place) -> torch.Tensor:
        """A large plain tensor goes chunk by chunk: its row is made once."""
        if place.is_plain and not place.is_whole:
            if self._last is None or self._last[0] != place.address:
                self._last = place.address, as_row(place.tensor(self._storage(place)))
            return self._last[1][place.start : place.start + place.nbytes]
        return place.row(self._storage(place))

    def _storage(self, place: Place) -> torch.UntypedStorage:
        return self._storages[self._slots[place.index]]

    def _run(self, places: list[Place]) -> list[torch.Tensor]:
        """Many small tensors in one call, if they still are where they were; asked after it: they may move any time."""
        tensors = [self._tensors[place.index] for place in places]
        if len(places) > 1 and all(place.is_whole for place in places):
            try:
                row = as_row(flattened(tensors))
                if _are_at(tensors, places):
                    return [row]
            except RuntimeError:  # one is on another device by now
                pass
        return [self._row(place) for place in places]


def _are_at(tensors: list[torch.Tensor], places: list[Place]) -> bool:
    """Compared as whole lists: the loops are in C."""
    return (
        list(map(torch.Tensor.data_ptr, tensors)) == [place.address for place in places]
        and list(map(attrgetter("nbytes"), tensors)) == [place.nbytes for place in places]
        and {tensor.dtype for tensor in tensors} == {places[0].dtype}
        and all(map(torch.Tensor.is_contiguous, tensors))
    )


def _runs(places: list[Place]) -> list[list[Place]]:
    """Places that follow one another, divided by dtype."""
    runs: list[list[Place]] = []
    for place in places:
        if runs and runs[-1][-1].dtype is place.dtype:
            runs[-1].append(place)
        else:
            runs.append([place])
    return runs
