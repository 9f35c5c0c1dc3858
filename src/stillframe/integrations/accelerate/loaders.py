"""Where a prepared loader is, and which random numbers belong to that: what makes a resumed pass the same pass.

An iterator of a loader draws from the generators when it is made (a seed for its workers), and its sampler when the
first batch is asked for (the order).  Accelerate's loaders then fetch one batch more than they have given away.  So
three moments are kept: the generators before the iterator was made, before the newest fetch, and at the save.  In the
pass that continues, each is put back where it was: before the iterator is made, when the order has been drawn, and
when the first batch has been fetched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset

import stillframe

logger = logging.getLogger("stillframe")


class Numbers:
    """The global generators, as an object with a state.  Shared by all loaders of an accelerator."""

    def __init__(self) -> None:
        self._restored: dict[str, Any] | None = None
        self.is_due = False
        """No pass has begun since they were restored: what was drawn meanwhile was drawn in vain."""

    def put_back(self) -> None:
        if self._restored is not None:
            stillframe.RNG().load_state_dict(self._restored)
        self.is_due = False

    def state_dict(self) -> dict[str, Any]:
        return self._restored if self.is_due and self._restored is not None else stillframe.RNG().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._restored = state
        self.put_back()
        self.is_due = True


class Order(BatchSampler):
    """A loader's batch sampler that says when its order has been drawn; all else is the sampler's own."""

    def __init__(self, sampler: Any, drawn: Callable[[], None]) -> None:
        self.__dict__.update(own=sampler, drawn=drawn)

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self.own):
            if number == 0:
                self.drawn()
            yield batch

    def __len__(self) -> int:
        return len(self.own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["own"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["own"], name, value)


class Position:
    """Of one prepared loader, as an object with a state.  Thread: the training thread's.

    Which batches a resumed run skips, the program says, as with Accelerate alone (``skip_first_batches``), unless the
    loader is a stateful one.  A pass over the loader itself is a new pass.
    """

    def __init__(self, loader: Any, numbers: Numbers, process_index: int) -> None:
        self.loader = loader
        self._numbers = numbers
        is_dispatched = hasattr(loader, "split_batches")
        self._fetches_per_batch = loader.state.num_processes if is_dispatched and not loader.split_batches else 1
        self._fetches_nothing = is_dispatched and process_index > 0
        self.is_stateful = bool(getattr(loader, "use_stateful_dataloader", False))
        self._iteration = 0
        self._taken = 0
        self._is_over = True
        self._begun: dict[str, Any] | None = None
        """The generators before the iterator of the newest pass was made."""
        self._ahead: dict[str, Any] | None = None
        """The global ones before the newest fetch."""
        self._continued: dict[str, Any] | None = None
        """The state of the pass that is to be continued, or is until its first batch has come."""
        base = loader.base_dataloader
        if self.is_stateful:
            base.load_state_dict({})  # it has an iterator already, made before anybody looked
        name = "sampler" if isinstance(base.sampler, BatchSampler) else "batch_sampler"
        self._has_order = getattr(base, name) is not None and not isinstance(base.dataset, IterableDataset)
        if self._has_order:
            object.__setattr__(base, name, Order(getattr(base, name), self._order_is_drawn))  # a plain one is refused
        self.watch(loader, 0, 0)

    def watch(self, loader: Any, skipped: int, dropped: int) -> None:
        """A pass over this loader is one over ours.  It begins after so many batches, or drops so many itself."""
        base = loader.base_dataloader
        make = type(base).__iter__

        def begin() -> Iterator[Any]:
            return self._begin(loader, lambda: make(base), skipped + dropped, dropped)

        base.__iter__ = begin  # that is what Accelerate's loaders call

    # --- a pass ------------------------------------------------------------------------------

    def _begin(self, loader: Any, make: Callable[[], Iterator[Any]], skipped: int, dropped: int) -> Iterator[Any]:
        saved, self._continued = self._continued, None
        is_first = self._numbers.is_due
        if saved is not None and saved["begun"] is not None and (skipped or self.is_stateful):
            self._continued = saved
            self._numbers.is_due = is_first = False
            if saved["taken"] and skipped not in (0, saved["taken"]):
                logger.warning("%d batches of this pass are skipped, and %d were taken", skipped, saved["taken"])
            self._set(saved["begun"])
        else:
            if saved is not None and self.is_stateful and saved["loader"] is not None:
                before = self._generators()
                make()  # the loader takes its state, finds that this pass had ended, and draws for both
                self._set(before)
            if is_first:
                self._numbers.put_back()
        self._begun = begun = self._generators()
        self._iteration, self._is_over = loader.iteration, False
        iterator = make()
        if self._fetches_nothing:
            self._first_has_come()
        start = self._continued["taken"] if self._continued is not None and self.is_stateful else skipped - dropped
        undone = begun if is_first else None
        return self._fetch(loader, iterator, start, dropped * self._fetches_per_batch, undone)

    def _fetch(
        self, loader: Any, iterator: Iterator[Any], start: int, dropped: int, undone: dict[str, Any] | None
    ) -> Iterator[Any]:
        count = 0
        while True:
            if count == dropped and (dropped or not self._has_order):  # else the sampler says it, within the fetch
                self._order_is_drawn()
            if count % self._fetches_per_batch == 0:
                self._ahead = stillframe.RNG().state_dict()
            batch = next(iterator, self)
            if batch is self:
                break
            count += 1
            if count == dropped + self._fetches_per_batch:
                self._first_has_come()
            self._taken = start + count // self._fetches_per_batch - 1
            yield batch
        self._is_over = True
        self._first_has_come()
        if count <= dropped and undone is not None:  # all batches had been taken before: there was no such pass
            self._set(undone)
            self._begun = None
        elif loader is not self.loader:
            self.loader.iteration = loader.iteration + 1

    def _order_is_drawn(self) -> None:
        """What follows are the numbers that the dataset draws.  A sampler's own generator goes on where it is."""
        if self._continued is not None:
            stillframe.RNG().load_state_dict(self._continued["ahead"])

    def _first_has_come(self) -> None:
        if self._continued is not None:
            self._set_own(self._continued["now"])
            self._continued = None
            self._numbers.put_back()

    # --- state -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        saved, loader = self._continued, self.loader
        if saved is not None:
            return saved
        is_within = not self._is_over
        iteration = self._iteration if is_within else max(loader.iteration, self._iteration + (self._begun is not None))
        return {
            "iteration": iteration, "taken": self._taken if is_within else 0,
            "seed": getattr(loader.get_sampler(), "initial_seed", None),
            "begun": self._begun if is_within else None, "ahead": self._ahead if is_within else None,
            "now": self._own_states(),
            "loader": loader.state_dict() if self.is_stateful and self._begun is not None else None,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes effect with the next pass."""
        self._continued, self._begun, self._is_over = state, None, True
        self._iteration = state["iteration"]
        self.loader.set_epoch(state["iteration"])
        if state["seed"] is not None:
            self.loader.get_sampler().initial_seed = state["seed"]
        elif len(state["now"]) != len(self._own()):  # Accelerate gives a sampler one on several ranks, and none on one
            logger.warning(
                "a loader was saved with %d generators and has %d (on another number of ranks?): its samples come in "
                "another order than they would have; use_seedable_sampler=True keeps the order",
                len(state["now"]),
                len(self._own()),
            )
        self._set_own(state["now"])
        if self.is_stateful:
            self.loader.load_state_dict(state["loader"] or {})

    def forget(self) -> None:
        """Nothing that was restored is to be continued."""
        self._continued = None

    # --- generators --------------------------------------------------------------------------

    def _own(self) -> list[torch.Generator]:
        """Of the loader, and of its sampler."""
        loader = self.loader
        found = (
            loader.generator,
            getattr(loader.get_sampler(), "generator", None),
            getattr(loader, "synchronized_generator", None),
        )
        return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())

    def _own_states(self) -> list[torch.Tensor]:
        return [each.get_state() for each in self._own()]

    def _set_own(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._own(), states, strict=False):
            generator.set_state(state.cpu())

    def _generators(self) -> dict[str, Any]:
        return {"rng": stillframe.RNG().state_dict(), "own": self._own_states()}

    def _set(self, generators: dict[str, Any]) -> None:
        stillframe.RNG().load_state_dict(generators["rng"])
        self._set_own(generators["own"])
