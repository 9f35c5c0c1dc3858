"""Torch's private names: the only module that touches them, so that a new torch can break nothing else.

Each function says why the public API does not do.  Heavy submodules of torch are imported when a function is called.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch


def dtensor_class() -> type | None:
    """``DTensor``, if anything has loaded it: importing it takes a while."""
    module = sys.modules.get("torch.distributed.tensor")
    return getattr(module, "DTensor", None)


def is_dtensor(value: object) -> bool:
    kind = dtensor_class()
    return kind is not None and isinstance(value, kind)


def local_tensor(dtensor: Any) -> torch.Tensor:
    """``to_local`` makes a new tensor each time where gradients are recorded, and takes five times as long."""
    local: torch.Tensor = dtensor._local_tensor
    return local


def local_of(tensor: Any) -> torch.Tensor:
    """What this rank holds of a DTensor, sharing memory; a plain tensor as it is."""
    return local_tensor(tensor) if is_dtensor(tensor) else tensor


def is_dtensor_parameter(dtensor: Any) -> bool:
    """``state_dict(keep_vars=True)`` gives DTensors that are no ``Parameter`` but carry this mark."""
    return bool(getattr(dtensor, "_is_param", False))


def local_shape_and_offset(
    shape: Sequence[int], mesh: Any, placements: Sequence[Any]
) -> tuple[Sequence[int], Sequence[int]]:
    """Where this rank's box of a DTensor lies; torch has no public function for it."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)
    return sizes, offsets


def split_as(placement: Any, indexes: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Split a list of indexes as a (strided) shard splits a tensor: the public functions need collectives."""
    factor = getattr(placement, "split_factor", None)
    flat = type(placement)(0) if factor is None else type(placement)(0, split_factor=factor)
    found: list[torch.Tensor]
    found, _ = flat._split_tensor(indexes, count, with_padding=False, contiguous=False)
    return found


def communication_hooks(module: torch.nn.parallel.DistributedDataParallel) -> list[Any]:
    """The hooks of ``register_comm_hook``, which has no getter."""
    return [hook for hook, _ in getattr(module, "_comm_hooks", [])]


def compiled_module(module: torch.nn.Module) -> torch.nn.Module | None:
    """What ``torch.compile`` wrapped; its wrapper hands every public attribute through."""
    return module._modules.get("_orig_mod")


def own_parameters(module: torch.nn.Module) -> Iterable[torch.nn.Parameter]:
    """Only the module's own, duplicates included: ``parameters(recurse=False)`` builds a set for each module."""
    return (each for each in module._parameters.values() if each is not None)


def default_store() -> Any:
    """The store of the default process group, which ``init_process_group`` does not give back."""
    return torch.distributed.distributed_c10d._get_default_store()


def storage_identity(tensor: torch.Tensor) -> int:
    """Tells storages without data apart: they have no address."""
    return int(tensor.untyped_storage()._cdata)


def fake_tensors() -> Any:
    """A context in which tensors are made without data; loading this takes half a second."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def flatten_state_dict(state: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """A state dict under DCP's flat names, with the path of each: what its own planners use."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    return flatten_state_dict(state)


def set_element(state: dict[str, Any], path: Any, value: Any) -> None:
    """Put a value at the path that :func:`flatten_state_dict` gave."""
    from torch.distributed.checkpoint._traverse import set_element

    set_element(state, path, value)


def load_everything_planner() -> Any:
    """DCP's planner class that reads a checkpoint without a state to read it into."""
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner

    return _EmptyStateDictLoadPlanner


def load_without_ranks(state: dict[str, Any], reader: Any, planner: Any) -> None:
    """``dcp.load`` fills only the keys that the state has already; here it is empty."""
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    _load_state_dict(state, storage_reader=reader, planner=planner, no_dist=True)
