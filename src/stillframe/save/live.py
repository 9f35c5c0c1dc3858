"""A state dict that stands still until the next update: live memory where that is safe, copies where it is not.

A state dict does not say which of its tensors are buffers, which may change in forward.  So a tensor is used in place
only if its memory belongs to a live optimizer, or to a live parameter that requires gradients: such memory changes in
the update, which the fence holds back.  Everything else is copied to the host at once, also frozen parameters, because
some models change them in forward, and the weights of embeddings with ``max_norm``, which do so themselves.
"""

from __future__ import annotations

import bisect
import copy
import gc
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from stillframe.save.versions import Versions
from stillframe.state.forward import scaled_in_forward
from stillframe.state.torch_internals import is_sharded_tensor, local_of, own_parameters, with_shards
from stillframe.state.wrappers import is_wrapper

_Path = tuple[Any, ...]
_OWNERS = (torch.nn.Module, torch.optim.Optimizer)


class LiveState:
    """Makes states that stand still until the next update, one after another.

    For loops that hand over dicts of tensors, live ones and others, in the place of the objects that own them.
    The copies of one state are reused for the next, so that the plan of a save still fits.  Call :meth:`state` only
    behind a fence, when the state before has been staged (``checkpointer.fence(wait=True)``).
    """

    def __init__(self) -> None:
        self._owners: list[weakref.ref[Any]] = []
        self._unowned: set[_Path] | None = None
        """Paths of tensors whose owner was not found when all objects were last searched."""
        self._copies: dict[_Path, torch.Tensor] = {}

    def state(self, state: Any, encode: Callable[[_Path, Any], Any] | None = None) -> Any:
        """The same nesting of dicts, lists and tuples, with everything in it safe until the next update.

        ``encode`` is given every other value with its path, and returns what is to be stored for it; by default a copy.
        """
        tensors = dict(_tensors(state, ()))
        unowned = self._without_owner(tensors)
        if self._unowned is None or not unowned <= self._unowned:
            self._owners = [weakref.ref(each) for each in _living(_OWNERS)]
            unowned = self._unowned = self._without_owner(tensors)
        self._copies = self._copied({path: tensors[path] for path in tensors if path in unowned})
        return _rebuilt(state, (), self._copies, encode or _deep_copy)

    def _copied(self, tensors: dict[_Path, torch.Tensor]) -> dict[_Path, torch.Tensor]:
        """Copy each tensor, into the earlier copy at its path if that fits; tied tensors are copied once."""
        copies: dict[_Path, torch.Tensor] = {}
        tied: dict[Any, torch.Tensor] = {}
        taken: set[int] = set()
        with torch.no_grad():
            for path, tensor in tensors.items():
                key = _identity(tensor)
                if key not in tied:
                    into = self._copies.get(path)
                    is_fit = into is not None and id(into) not in taken and _is_alike(into, tensor)
                    tied[key] = into.copy_(tensor) if is_fit and into is not None else _copy_of(tensor)
                    taken.add(id(tied[key]))
                copies[path] = tied[key]
        return copies

    def _without_owner(self, tensors: dict[_Path, torch.Tensor]) -> set[_Path]:
        owned = _Owned(self._owned())
        scaled = _Owned(scaled_in_forward(reference() for reference in self._owners))
        return {
            path
            for path, tensor in tensors.items()
            if tensor.numel() and (scaled.covers(tensor) or not owned.covers(tensor))
        }

    def _owned(self) -> Iterator[torch.Tensor]:
        for reference in self._owners:
            owner = reference()
            if isinstance(owner, torch.nn.Module):
                yield from (each for each in own_parameters(owner) if each.requires_grad)
            elif owner is not None:
                for group in owner.param_groups:
                    yield from group["params"]
                for parameter, state in owner.state.items():
                    each_state = state.values() if isinstance(state, dict) else ()
                    yield from (each for each in (parameter, *each_state) if isinstance(each, torch.Tensor))


def versions_of(state: Any) -> Versions:
    """Of all tensors of a state, copies too; a DTensor and its local tensor count apart."""
    found = dict(_tensors(state, ()))
    names = ["/".join(map(str, path)) for path in found]
    return Versions([*found.values(), *map(local_of, found.values())], names * 2)


class _Owned:
    """The memory of some tensors."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        found: dict[torch.device, set[tuple[int, int]]] = defaultdict(set)
        for tensor in tensors:
            device, start, end = _memory(tensor)
            if end - start == local_of(tensor).nbytes:  # else others' items may lie in between
                found[device].add((start, end))
        self._extents = {device: sorted(extents) for device, extents in found.items()}
        self._reach: dict[torch.device, list[int]] = {}
        """For each extent, the greatest end of it and of all that start before it."""
        for device, extents in self._extents.items():
            reach = 0
            self._reach[device] = [reach := max(reach, end) for _, end in extents]

    def covers(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of one of them contains that of ``tensor``."""
        device, start, end = _memory(tensor)
        at = bisect.bisect_right(self._extents.get(device, []), start, key=lambda extent: extent[0])
        return at > 0 and end <= self._reach[device][at - 1]


def _living(kinds: tuple[type, ...]) -> list[Any]:
    """Every live object of these kinds.  Looks at types only, so that no object's own code runs."""
    known: dict[type, bool] = {}
    found = []
    for each in gc.get_objects():
        kind = type(each)
        is_one = known.get(kind)
        if is_one is None:
            is_one = known[kind] = issubclass(kind, kinds)
        if is_one:
            found.append(each)
    return found


def _memory(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """Device, first address and end; of a DTensor those of this rank's box."""
    local = local_of(tensor)
    if local.layout is not torch.strided or not local.numel():
        return local.device, 0, 0
    start = local.data_ptr()
    items = 1 + sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True))
    return local.device, start, start + items * local.element_size()


def _identity(tensor: torch.Tensor) -> Any:
    """Equal for tensors of the same memory, shape, stride and dtype; a tensor of an unusual kind equals only itself."""
    if tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return id(tensor)
    form = tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()
    return (*_memory(tensor), *form)


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return tensor.detach().to("cpu", copy=True) if is_plain else tensor.detach().clone()


def _is_alike(copy: torch.Tensor, tensor: torch.Tensor) -> bool:
    return (
        type(copy) is type(tensor.detach())
        and copy.layout is tensor.layout is torch.strided
        and (copy.shape, copy.dtype) == (tensor.shape, tensor.dtype)
        and getattr(copy, "placements", None) == getattr(tensor, "placements", None)
        and getattr(copy, "device_mesh", None) == getattr(tensor, "device_mesh", None)
    )


def _deep_copy(_path: _Path, value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:
        return value  # nothing that could be stored: who stores it says so, on every rank


def _is_tensor(node: Any) -> bool:
    """One that wraps others is none: it would come back in another form, so whoever stores it decides."""
    return isinstance(node, torch.Tensor) and not is_sharded_tensor(node) and not is_wrapper(local_of(node))


def _tensors(node: Any, path: _Path) -> Iterator[tuple[_Path, torch.Tensor]]:
    if _is_tensor(node):
        yield path, node
    else:
        for key, item in _items(node):
            yield from _tensors(item, (*path, key))


def _rebuilt(node: Any, path: _Path, copies: dict[_Path, torch.Tensor], encode: Callable[[_Path, Any], Any]) -> Any:
    if _is_tensor(node):
        return copies.get(path, node)
    if is_sharded_tensor(node) or _is_container(node):
        items = [(key, _rebuilt(item, (*path, key), copies, encode)) for key, item in _items(node)]
        if is_sharded_tensor(node):
            return with_shards(node, (tensor for _, tensor in items))
        return type(node)(items) if isinstance(node, dict) else type(node)(item for _, item in items)
    return encode(path, node)


def _items(node: Any) -> Iterable[tuple[Any, Any]]:
    if is_sharded_tensor(node):
        return enumerate(shard.tensor for shard in node.local_shards())
    if not _is_container(node):
        return ()
    return node.items() if isinstance(node, dict) else enumerate(node)


def _is_container(node: Any) -> bool:
    """A plain container with plain keys; any other is passed to ``encode`` as a whole."""
    if type(node) in (dict, OrderedDict):
        return {type(key) for key in node} <= {str, int, float, bool, type(None)}
    return type(node) in (list, tuple)
