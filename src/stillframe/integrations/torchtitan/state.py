"""What of torchtitan's objects is saved in another way than they give it: weights, random numbers, data loaders."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torchtitan.components.checkpointer.utils import canonical_fqn

import stillframe
from stillframe.errors import ConfigError


class Weights(torch.nn.Module):
    """The parameters and persistent buffers of all parts of a model, by their names in the whole model.

    The live tensors, not what ``state_dict()`` gives: hooks of torchtitan's models take fused weights apart there, into
    copies that are gathered from all ranks.  Fused weights are saved under their own names.
    """

    def __init__(self, parts: list[torch.nn.Module]) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList(parts)
        self._persistent = {name for part in parts for name in part.state_dict()}
        """What a state dict has, and is not a parameter: buffers.  Learned once, since it gathers."""
        for name in self._persistent:
            if name.rpartition(".")[2] == "_extra_state":
                raise ConfigError(f"{name}: stillframe does not save the extra state of modules under torchtitan")

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]
        found: dict[str, Any] = {}
        for part in self.parts:
            found |= {canonical_fqn(name): parameter for name, parameter in part.named_parameters()}
            buffers = {canonical_fqn(name): buffer for name, buffer in part.named_buffers()}
            found |= {name: buffer for name, buffer in buffers.items() if name in self._persistent}
        return found

    def load_state_dict(self, *_: Any, **__: Any) -> Any:
        """Nothing is left to do: restoring fills the tensors that :meth:`state_dict` gives, where they are."""


class Numbers(stillframe.RNG):
    """The random numbers of training: what is drawn between a save and the next batch does not count.

    Validation draws there, and in a resumed run the new iterator of the loader does.  So they are put back.
    """

    def __init__(self) -> None:
        super().__init__()
        self._due: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        self._due = super().state_dict()
        return self._due

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._due = state

    def put_back(self) -> None:
        if self._due is not None:
            super().load_state_dict(self._due)
            self._due = None


def watch(dataloader: Any, numbers: Numbers) -> None:
    """From now on the loader puts the numbers back before it fetches a batch.

    It gets a class of its own for that: torchtitan iterates over the very object that it gives to a manager.
    """
    kind = type(dataloader)

    def iterate(self: Any) -> Iterator[Any]:
        batches = kind.__iter__(self)
        while True:
            numbers.put_back()
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch

    more = {"__iter__": iterate, "__module__": kind.__module__, "__doc__": kind.__doc__}
    dataloader.__class__ = type(kind.__name__, (kind,), more)


def positions(dataloader: Any) -> dict[str, Any]:
    """The loader, under a name that says of which data-parallel rank it is, and of how many.

    So a rank that comes back in another place finds the position of its new one among those of all ranks.
    """
    if dataloader is None:
        return {}
    rank, degree = getattr(dataloader, "dp_rank", 0), getattr(dataloader, "dp_world_size", 1)
    return {f"{rank} of {degree}": dataloader}
