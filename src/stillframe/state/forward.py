"""Which of a state's tensors change in forward although they look as if they changed only in the update.

- The weight of an embedding with ``max_norm``: its own forward scales rows of it down.  It is a parameter.  Whatever
  shares its memory (a tied output layer) changes with it; the optimizer's state of it does not.
- The running statistics of batch normalisation in a plain ``state_dict()``, which does not tell buffers from
  parameters.  torch writes to them without counting it (``_version``), so nothing else would notice.

A weight that is a DTensor stays as it is: in forward FSDP2 scales down a gathered copy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch

from stillframe.state.memory import byte_extent
from stillframe.state.torch_internals import is_dtensor
from stillframe.state.wrappers import plain_tensors

_EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)
_STATISTICS = ("running_mean", "running_var")


def scaled_in_forward(modules: Iterable[object]) -> list[torch.Tensor]:
    """Those parameters of these modules, without their children, that their own forward changes."""
    return [
        tensor
        for each in modules
        if isinstance(each, _EMBEDDINGS) and each.max_norm is not None and not is_dtensor(each.weight)
        for tensor in plain_tensors(each.weight)
    ]


def buffers_of(owners: Iterable[object]) -> list[torch.Tensor]:
    """Also those that are no part of the state."""
    modules = (owner for owner in owners if isinstance(owner, torch.nn.Module))
    buffers = (each for module in modules for buffer in module.buffers() for each in plain_tensors(buffer))
    return [each for each in buffers if each.layout is torch.strided]


def changes_in_forward(
    tensors: Sequence[torch.Tensor], names: Sequence[str | None], owners: Iterable[object]
) -> list[bool]:
    """For each tensor of a walk, whether it is one of these.  ``owners``: the modules of the state."""
    found = [name is not None and name.endswith(_STATISTICS) for name in names]
    modules = (each for owner in owners if isinstance(owner, torch.nn.Module) for each in owner.modules())
    extents: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for weight in scaled_in_forward(modules):
        if weight.numel():
            extents[weight.untyped_storage().data_ptr()].append(byte_extent(weight))
    if extents:
        for index, tensor in enumerate(tensors):
            if tensor.numel():
                start, end = byte_extent(tensor)
                in_storage = extents.get(tensor.untyped_storage().data_ptr(), ())
                found[index] |= any(start < last and first < end for first, last in in_storage)
    return found
