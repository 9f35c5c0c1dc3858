"""Compiled updates: the fence as an operator, which the compiler takes into its graph and runs there at every step.

The operator claims to change every tensor of the optimizer, so no update is moved before it.  What a graph changes is
counted before the graph runs, thus before the fence.  So torch's count tells nothing about the tensors of such an
optimizer, and is not asked (:mod:`stillframe.save.versions`).
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch

from stillframe.state.torch_internals import local_of

_known: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""The optimizers whose compiled steps have the fence inside, by their ``id``, which stands in the graph."""
_run: list[Callable[[Any], None]] = []


def on_fence(run: Callable[[Any], None]) -> None:
    """``run`` is called with the optimizer whenever the operator runs."""
    _run.append(run)


def fence_in_graph(optimizer: Any) -> bool:
    """Within what the compiler traces: put the operator there.  False if this optimizer's tensors do not allow it.

    torch's own optimizers break the graph at this point anyway; tensors of other classes (DTensors) have operators of
    their own only.
    """
    if type(optimizer).__module__.startswith("torch.optim"):
        return False
    tensors = [each for group in optimizer.param_groups for each in group["params"]]
    for state in optimizer.state.values():
        tensors += [each for each in state.values() if isinstance(each, torch.Tensor)]
    if not tensors or not all(type(each) in (torch.Tensor, torch.nn.Parameter) for each in tensors):
        return False
    with torch.no_grad():
        torch.ops.stillframe.fence(tensors, id(optimizer))
    return True


def memory_of_compiled() -> set[int]:
    """Where the tensors lie that compiled updates change."""
    found = set()
    for optimizer in list(_known.values()):
        found |= {local_of(each).data_ptr() for group in optimizer.param_groups for each in group["params"]}
        for state in list(optimizer.state.values()):
            found |= {local_of(each).data_ptr() for each in state.values() if isinstance(each, torch.Tensor)}
    return found - {0}


def _optimizer(number: int) -> Any:
    """A guard of the compiler's sees to it that it lives while the graph is run."""
    found = _known.get(number)
    if found is None:
        # By identity first: asking an object of its class can run its code.
        found = next(each for each in gc.get_objects() if id(each) == number)
        assert issubclass(type(found), torch.optim.Optimizer)
        _known[number] = found
    return found


def _fence(tensors: list[torch.Tensor], number: int) -> None:  # noqa: ARG001
    optimizer = _optimizer(number)
    for run in _run:
        run(optimizer)


def _trace(tensors: list[torch.Tensor], number: int) -> None:  # noqa: ARG001
    """Called when a graph is made: from now on its optimizer is known, before the graph is run."""
    _optimizer(number)


_operators = torch.library.Library("stillframe", "FRAGMENT")
_operators.define(
    "fence(Tensor(a!)[] tensors, int number) -> ()",
    tags=(torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else (),
)
_operators.impl("fence", _fence, "CompositeExplicitAutograd")
torch.library.register_fake("stillframe::fence", _trace, lib=_operators)
