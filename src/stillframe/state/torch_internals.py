"""Torch's private names: the only module that touches them, so that a new torch can break nothing else.

Each function says why the public API does not do.  Heavy submodules of torch are imported when a function is called.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from types import FrameType
from typing import Any

import torch


def built_for() -> torch.device | None:
    """The accelerator that torch was built for; starts no device.  torch 2.6 raises where later ones say ``None``."""
    try:
        return torch.accelerator.current_accelerator()
    except RuntimeError:
        return None


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


def is_sharded_tensor(value: object) -> bool:
    """FSDP1 still gives them; their class is in a private module, which not every program loads."""
    module = sys.modules.get("torch.distributed._shard.sharded_tensor")
    kind = getattr(module, "ShardedTensor", None)
    return kind is not None and isinstance(value, kind)


def with_shards(sharded: Any, tensors: Iterable[torch.Tensor]) -> Any:
    """The same ShardedTensor with other local tensors: its own constructors want them on the same device, or talk to
    the other ranks."""
    kind: Any = type(sharded)
    metadata = sharded.metadata()
    names = ("dtype", "layout", "requires_grad", "pin_memory")
    properties = {name: getattr(metadata.tensor_properties, name) for name in names}
    made = kind.__new__(kind, sharded.sharding_spec(), metadata.size, **properties)
    shards = sharded.local_shards()
    made._local_shards = [type(shard)(each, shard.metadata) for shard, each in zip(shards, tensors, strict=True)]
    return made


def is_marked_parameter(tensor: Any) -> bool:
    """``Parameter(tensor)`` of a subclass, such as a DTensor, keeps the class and puts this mark on it."""
    return bool(getattr(tensor, "_is_param", False))


def is_pending(tensor: object) -> bool:
    """Whether it is the result of a collective that nobody has waited for yet."""
    module = sys.modules.get("torch.distributed._functional_collectives")
    kind = getattr(module, "AsyncCollectiveTensor", None)
    return kind is not None and isinstance(tensor, kind)


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


def own_rank() -> int:
    """Of this process in its default group; -1 if there is none now."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else -1


def division_of(placement: Any) -> tuple[int | None, int] | None:
    """The dimension that a placement divides (``None``: it replicates) and its split factor, of the kinds that DTensor
    has today; ``None`` of any other.  The strided kind is private.  Other modules may derive kinds of their own."""
    from torch.distributed.tensor import placement_types

    if type(placement) is placement_types.Replicate:
        return None, 1
    if type(placement) is placement_types.Shard:
        return int(placement.dim), 1
    if type(placement) is getattr(placement_types, "_StridedShard", None):
        return int(placement.dim), int(placement.split_factor)
    return None


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


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int | None]:
    """How often each was written to in place, which torch counts for autograd; inference tensors have no count."""
    try:
        return list(map(_version, tensors))
    except RuntimeError:
        return [None if each.is_inference() else each._version for each in tensors]


_version = attrgetter("_version")


def form_check(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A function that says whether as many tensors have the same classes and forms as these, and the same gradients'
    flags; it never says so wrongly.  It says no in another context of dispatch, such as autocast.

    The compiler guards its graphs with it.  The public attributes take ten times as long to read, one by one.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        check: Callable[..., bool] = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    except (ImportError, TypeError, RuntimeError, ValueError):
        return lambda *_: False
    return check


def uncounted_writes() -> Any:
    """A context in which torch does not count what this thread writes: for kernels that run late."""
    return torch._C._AutoDispatchBelowADInplaceOrView()


def outside_of_graphs(function: Callable[..., None]) -> Callable[..., None]:
    """``torch.compiler.disable``, which would load the compiler at once: that takes seconds."""
    from torch._compile import _disable_dynamo

    disabled: Callable[..., None] = _disable_dynamo(function)
    return disabled


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


def flattened(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Their items end to end, in one call.  ``torch.cat`` takes only rows: a call for each would fight for the GIL.

    Without what autograd does for each view in between, which takes as long as the rest.
    """
    with torch._C._AutoDispatchBelowADInplaceOrView():
        row: torch.Tensor = torch._C._nn.flatten_dense_tensors(list(tensors))
    return row


def frame_of_dcp() -> FrameType | None:
    """DCP tells a storage nothing when a save fails elsewhere.  But this frame, of this thread, runs until then."""
    found, frame = None, inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict_saver":
            found = frame
        frame = frame.f_back
    return found


def call_of_load() -> tuple[Any, Any] | None:
    """The file and the ``map_location`` of the ``torch.load`` that this is called in; it tells them to nobody."""
    frame = inspect.currentframe()
    while frame and (frame.f_code.co_name, frame.f_globals.get("__name__")) != ("load", "torch.serialization"):
        frame = frame.f_back
    return (frame.f_locals["f"], frame.f_locals["map_location"]) if frame else None


def has_left(frame: FrameType | None) -> bool:
    """Whether the function of a frame has ended, on whatever thread; if there is none, who knows: it may run.

    What it held is let go then.  To look for the frame in another thread's stack would be no way: that changes under
    the eyes of who looks, and CPython 3.11 has crashed over it.
    """
    try:
        if frame is not None:
            frame.clear()
    except RuntimeError:  # it runs
        return False
    return frame is not None
