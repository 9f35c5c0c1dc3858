"""The position in a loader of batches, and the random numbers that go with it, as one object with a state.

``iter(DataLoader)`` draws from the global generator: a seed for the workers, and one for the order of the samples.  So
a position is the generators as they were before that, the number of batches taken, and the generators as they are now.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from stillframe.errors import StateError
from stillframe.state.rng import RNG

logger = logging.getLogger("stillframe")

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

    Restored onto another number of ranks, or with another batch size, a loader with a ``DistributedSampler`` goes on
    after as many samples as all ranks had taken.  If that is in the middle of a batch, it goes on at its beginning, and
    a warning says how many samples come twice.  Without one a warning says that samples come twice or not at all.
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
        begun = self._begun or self._generators()
        return {
            "epoch": self.epoch, "batch": self.batch, "begun": begun, "now": now,
            "share": self._share(), "length": self._length(),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes effect with the next pass: what is drawn until then is drawn in vain."""
        self.epoch, self.batch = state["epoch"], self._batch_in(state)
        self._begun, self._restored = state["begun"], state["now"]
        self._set(state["now"])

    # --- other shares ------------------------------------------------------------------------

    def _share(self) -> dict[str, Any]:
        """How the samples of a pass are divided into batches of ranks."""
        sampler = getattr(self.loader, "sampler", None)
        is_divided = isinstance(sampler, DistributedSampler)
        world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        return {
            "ranks": sampler.num_replicas if isinstance(sampler, DistributedSampler) else world_size,
            "batch_size": getattr(self.loader, "batch_size", None),
            "is_divided": is_divided,
        }

    def _batch_in(self, state: dict[str, Any]) -> int:
        """Which batch of this loader the saved one is, where ranks or batches have another number or size."""
        batch: int = state["batch"]
        then, now = state["share"], self._share()
        if then == now or not batch:
            return batch
        before, after = (f"{each['ranks']} × {each['batch_size']}" for each in (then, now))
        what = f"the samples of a step were {before} (ranks × batch size) when this was saved, and are {after} now"
        length = self._length()
        is_known = then["batch_size"] and now["batch_size"] and then["is_divided"] == now["is_divided"]
        if length is None or not is_known or not (now["is_divided"] or then["ranks"] == now["ranks"] == 1):
            self._warn(
                f"{what}. Every rank goes on after {batch} batches of its own: of this pass some samples come twice, "
                "others not at all. Loaders with a DistributedSampler go on at the right place. To begin the pass "
                "anew, leave this object out (restore(…, exclude=…)) and set its epoch"
            )
            return batch
        if batch == state["length"]:  # the last batch may have been smaller
            return length
        samples: int = batch * then["ranks"] * then["batch_size"]
        whole, again = divmod(samples, int(now["ranks"] * now["batch_size"]))
        if again and whole < length:
            self._warn(f"{what}. Of this pass {samples} samples were taken: the last {again} of them come again")
        return min(whole, length)

    def _length(self) -> int | None:
        try:
            return len(self)
        except (TypeError, NotImplementedError):  # a stream, which workers may divide otherwise
            return None

    def _warn(self, text: str) -> None:
        if not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0:
            logger.warning("Batches: %s", text)

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
