"""The position in a loader of batches, and the random numbers that go with it, as one object with a state.

``iter(DataLoader)`` draws from the global generator: a seed for the workers, and one for the order of the samples.  So
a position is the generators as they were before that, the number of batches taken, and the generators as they are now.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch

from stillframe.errors import StateError
from stillframe.state.rng import RNG

_T = TypeVar("_T")


class Batches(Generic[_T]):
    """Iterate over ``batches = stillframe.Batches(loader)``, not over the loader, and put ``batches`` into the state::

        for epoch in range(batches.epoch, epochs):
            for batch in batches:
                ...

    A resumed run then gets the same batches, in the same order, and draws the same random numbers as the first run
    would have (it includes :class:`RNG`): with ``shuffle=True``, several workers, and random numbers drawn by dataset,
    workers and model.

    The first pass after a restore loads the batches that were taken before once more, and drops them.  Saved are the
    generators that :class:`RNG` saves, the loader's own, and its sampler's.  Not saved: random numbers of workers that
    are kept from pass to pass (``persistent_workers=True``).
    """

    def __init__(self, loader: Iterable[_T]) -> None:
        self.loader = loader
        self.epoch = 0
        """How many passes are complete."""
        self.batch = 0
        """How many batches of the present pass have been taken."""
        self._begun: dict[str, Any] | None = None
        """The generators when the present pass began."""
        self._restored: dict[str, Any] | None = None
        """The generators to go on with, until that is done."""

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[_T]:
        restored, self._restored = self._restored, None
        if restored is not None and self.batch:  # also if none is left: samplers draw when they end
            assert self._begun is not None
            self._set(self._begun)
            iterator = iter(self.loader)
            for taken in range(self.batch):
                if next(iterator, self) is self:
                    raise StateError(
                        f"the loader has {taken} batches, of which {self.batch} were taken before: other data?"
                    )
            self._set(restored)
            yield from self._rest(iterator)
        else:
            if restored is not None:
                self._set(restored)
            self.batch, self._begun = 0, self._generators()
            yield from self._rest(iter(self.loader))
        self.epoch, self.batch, self._begun = self.epoch + 1, 0, None

    def _rest(self, iterator: Iterator[_T]) -> Iterator[_T]:
        for batch in iterator:
            self.batch += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        now = self._restored or self._generators()
        return {"epoch": self.epoch, "batch": self.batch, "begun": self._begun or self._generators(), "now": now}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes effect with the next pass: what is drawn until then is drawn in vain."""
        self.epoch, self.batch = state["epoch"], state["batch"]
        self._begun, self._restored = state["begun"], state["now"]
        self._set(state["now"])

    # --- generators --------------------------------------------------------------------------

    def _own(self) -> list[torch.Generator]:
        sampler = getattr(self.loader, "sampler", None)
        inner = getattr(getattr(self.loader, "batch_sampler", None), "sampler", None)
        found = (getattr(each, "generator", None) for each in (self.loader, sampler, inner))
        return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())

    def _generators(self) -> dict[str, Any]:
        return {"rng": RNG().state_dict(), "own": [each.get_state() for each in self._own()]}

    def _set(self, state: dict[str, Any]) -> None:
        RNG().load_state_dict(state["rng"])
        own = self._own()
        if len(own) != len(state["own"]):
            raise StateError(f"the loader has {len(own)} generators of its own, and had {len(state['own'])}")
        for each, saved in zip(own, state["own"], strict=True):
            each.set_state(saved.cpu())
