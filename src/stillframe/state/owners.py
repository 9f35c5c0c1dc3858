"""Whose memory a tensor of a state dict lies in.

A module's parameters and an optimizer's state change only in the update, so they are staged lazily.  Everything else in
the state dict of a module, or of an optimizer that makes its own, may change before: buffers, averages, counters.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from stillframe.state.memory import byte_extent
from stillframe.state.torch_internals import is_dtensor, is_marked_parameter
from stillframe.state.wrappers import is_wrapper, plain_tensors

_OF_PARAMETERS = {"state", "param_groups"}
"""Attributes of an optimizer that are long and hold no other optimizer."""


class Owner:
    """The memory of these tensors; looked at when it is first asked for."""

    def __init__(self, tensors: Iterable[Any]) -> None:
        self._tensors = tensors
        self._extents: dict[int, list[tuple[int, int]]] | None = None

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies within the memory of one of these."""
        if is_wrapper(tensor):
            return all(map(self.has, plain_tensors(tensor)))
        if tensor.layout is not torch.strided or not tensor.numel():
            return False
        if self._extents is None:
            self._extents = {}
            for each in itertools.chain.from_iterable(map(plain_tensors, self._tensors)):
                if each.layout is torch.strided and each.numel():
                    self._extents.setdefault(each.untyped_storage().data_ptr(), []).append(byte_extent(each))
        start, end = byte_extent(tensor)
        extents = self._extents.get(tensor.untyped_storage().data_ptr(), ())
        return any(first <= start and end <= last for first, last in extents)

    def has_wrapper(self, wrapper: torch.Tensor, inner: torch.Tensor) -> bool:
        """The same for an inner tensor of a wrapper."""
        return self.has(inner)

    def has_sharded(self, dtensor: Any, local: torch.Tensor) -> bool:
        """The same for a DTensor; all ranks must get the same answer, also one that holds nothing of it."""
        raise NotImplementedError


class ModuleOwner(Owner):
    """The parameters of a module."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module.parameters())
        self._module = module

    def has_wrapper(self, wrapper: torch.Tensor, inner: torch.Tensor) -> bool:
        return is_marked_parameter(wrapper) or self.has(inner)

    def has_sharded(self, dtensor: Any, local: torch.Tensor) -> bool:
        if is_marked_parameter(dtensor):  # one that is a parameter says so itself
            return True
        return self.has(local) if local.numel() else not any(map(is_dtensor, self._module.buffers()))


class OptimizerOwner(Owner):
    """What an optimizer, and those in it, hold for their parameters, and the parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._own = [each for one in optimizers_in(optimizer) for each in _tensors(_parts_of(one))]
        super().__init__(self._own)

    def has_sharded(self, dtensor: Any, local: torch.Tensor) -> bool:
        return self.has(local) if local.numel() else any(each is dtensor for each in self._own)


def _parts_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """A wrapper may have neither of the two: what it wraps has."""
    return [getattr(optimizer, name, None) for name in sorted(_OF_PARAMETERS)]


def optimizer_owner(optimizer: torch.optim.Optimizer) -> Owner | None:
    """``None`` if everything in its state dict is its own: that is torch's own ``state_dict``."""
    is_plain = type(optimizer).state_dict is torch.optim.Optimizer.state_dict
    return None if is_plain else OptimizerOwner(optimizer)


def has_own_layout(state: Any) -> bool:
    """Whether what ``state_dict`` of an optimizer gave is laid out in another way than torch's own."""
    if not isinstance(state, dict) or not isinstance(state.get("state"), dict):
        return True
    groups = state.get("param_groups")
    return not isinstance(groups, list) or not all(isinstance(each, dict) and "params" in each for each in groups)


def optimizers_in(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizer, and those that it wraps: in its attributes, or in a list or dict there."""
    found: dict[int, torch.optim.Optimizer] = {id(optimizer): optimizer}
    waiting = [optimizer]
    while waiting:
        attributes = {name: value for name, value in vars(waiting.pop()).items() if name not in _OF_PARAMETERS}
        for value in attributes.values():
            items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            for each in items:
                if isinstance(each, torch.optim.Optimizer) and id(each) not in found:
                    found[id(each)] = each
                    waiting.append(each)
    return list(found.values())


def step_counts(owners: Iterable[object]) -> Iterator[torch.Tensor]:
    """How often each parameter was updated, as torch's own optimizers count it: they write that in the update only.

    Of other classes nobody knows what they write when.  No code of theirs, or of what they hold, is run here.
    """
    for owner in owners:
        if isinstance(owner, torch.optim.Optimizer) and type(owner).__module__.startswith("torch.optim."):
            held = vars(owner).get("state")
            for parameter, each in dict.items(held) if isinstance(held, dict) else ():
                is_known = isinstance(parameter, torch.Tensor) and isinstance(each, dict)
                count = dict.get(each, "step") if is_known else None
                if isinstance(count, torch.Tensor):
                    yield count


def _tensors(node: Any) -> Iterator[torch.Tensor]:
    if isinstance(node, torch.Tensor):
        yield node
    elif isinstance(node, dict | list | tuple):
        for each in node.values() if isinstance(node, dict) else node:
            yield from _tensors(each)
