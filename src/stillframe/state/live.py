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
import itertools
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from stillframe.format.tree import Path
from stillframe.state.dtypes import PLAIN_TENSORS
from stillframe.state.forms import FORM
from stillframe.state.forward import scaled_in_forward
from stillframe.state.memory import byte_extent
from stillframe.state.torch_internals import is_sharded_tensor, local_of, own_parameters, with_shards
from stillframe.state.wrappers import is_wrapper

_OWNERS = (torch.nn.Module, torch.optim.Optimizer)
_KEYS = {str, int, float, bool, type(None)}


def mapped(node: Any, leaf: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """The same nesting of dicts, lists and tuples, with what ``leaf`` makes of each other value and its path.

    A dict with other keys than plain ones is a value as a whole.
    """
    kind = type(node)
    if kind in (dict, OrderedDict) and {type(key) for key in node} <= _KEYS:
        return kind((key, mapped(item, leaf, (*path, key))) for key, item in node.items())
    if kind in (list, tuple):
        return kind(mapped(item, leaf, (*path, at)) for at, item in enumerate(node))
    return leaf(path, node)


def path_text(path: Path) -> str:
    """As people read it."""
    return "/".join(map(str, path))


def is_tensor(value: Any) -> bool:
    """One that wraps others is none: it would come back in another form, so whoever stores it decides."""
    return isinstance(value, torch.Tensor) and not is_sharded_tensor(value) and not is_wrapper(local_of(value))


def tensors_in(state: Any) -> dict[Path, torch.Tensor]:
    """Of a state dict, by their paths; those of a ShardedTensor have its path and their number."""
    found: dict[Path, torch.Tensor] = {}

    def note(path: Path, value: Any) -> None:
        if is_sharded_tensor(value):
            found.update({(*path, at): shard.tensor for at, shard in enumerate(value.local_shards())})
        elif is_tensor(value):
            found[path] = value

    mapped(state, note)
    return found


class LiveState:
    """Makes states that stand still until the next update, one after another.

    The copies of one state are reused for the next, so that the plan of a save still fits.  Call :meth:`state` only
    behind a fence, when the state before has been staged (``checkpointer.fence(wait=True)``).

    ``by_optimizers``: parameters that no optimizer has are copied at once, too: averages of weights change at any time.
    """

    def __init__(self, *, by_optimizers: bool = False) -> None:
        self._by_optimizers = by_optimizers
        self._owners: list[weakref.ref[Any]] = []
        self._unowned: set[Path] | None = None
        """Paths of tensors whose owner was not found when all objects were last searched."""
        self._copies: dict[Path, torch.Tensor] = {}

    def state(self, state: Any) -> Any:
        """The same nesting of dicts, lists and tuples, with everything in it safe until the next update."""
        tensors = tensors_in(state)
        unowned = self._without_owner(tensors)
        if self._unowned is None or not unowned <= self._unowned:
            self._owners = [weakref.ref(each) for each in _living(_OWNERS)]
            unowned = self._unowned = self._without_owner(tensors)
        self._copies = self._copied({path: tensors[path] for path in tensors if path in unowned})
        return mapped(state, self._still)

    def _still(self, path: Path, value: Any) -> Any:
        if is_tensor(value):
            return self._copies.get(path, value)
        if is_sharded_tensor(value):
            shards = enumerate(value.local_shards())
            return with_shards(value, (self._copies.get((*path, at), shard.tensor) for at, shard in shards))
        try:
            return copy.deepcopy(value)
        except Exception:
            return value  # nothing that could be stored: who stores it says so, on every rank

    def _copied(self, tensors: Mapping[Path, torch.Tensor]) -> dict[Path, torch.Tensor]:
        """Copy each tensor, into the earlier copy at its path if that fits; tied tensors are copied once."""
        copies: dict[Path, torch.Tensor] = {}
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

    def _without_owner(self, tensors: Mapping[Path, torch.Tensor]) -> set[Path]:
        owned = _Extents(map(local_of, self._owned()))
        scaled = _Extents(scaled_in_forward(reference() for reference in self._owners))
        local = {path: local_of(tensor) for path, tensor in tensors.items() if tensor.numel()}
        return {path for path, each in local.items() if scaled.cover(each) or not owned.cover(each)}

    def _owned(self) -> Iterator[torch.Tensor]:
        for reference in self._owners:
            owner = reference()
            if isinstance(owner, torch.nn.Module):
                if not self._by_optimizers:
                    yield from (each for each in own_parameters(owner) if each.requires_grad)
            elif owner is not None:
                for group in owner.param_groups:
                    yield from group["params"]
                for parameter, state in owner.state.items():
                    each_state = state.values() if isinstance(state, dict) else ()
                    yield from (each for each in (parameter, *each_state) if isinstance(each, torch.Tensor))


class _Extents:
    """The memory of some tensors.  What it covers, one of them contains.

    A tensor that has gaps between its items (``x[::2]``) is left out: items of others may lie there.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        found: dict[torch.device, set[tuple[int, int]]] = defaultdict(set)
        for tensor in tensors:
            if tensor.layout is torch.strided and tensor.numel():
                start, end = _addresses(tensor)
                if end - start == tensor.nbytes:
                    found[tensor.device].add((start, end))
        self._starts: dict[torch.device, list[int]] = {}
        self._reach: dict[torch.device, list[int]] = {}
        """For each extent, the greatest end of it and of all that start before it."""
        for device, extents in found.items():
            starts, ends = zip(*sorted(extents), strict=True)
            self._starts[device], self._reach[device] = list(starts), list(itertools.accumulate(ends, max))

    def cover(self, tensor: torch.Tensor) -> bool:
        starts = self._starts.get(tensor.device)
        if starts is None or tensor.layout is not torch.strided or not tensor.numel():
            return False
        start, end = _addresses(tensor)
        at = bisect.bisect_right(starts, start)
        return at > 0 and end <= self._reach[tensor.device][at - 1]


def _addresses(tensor: torch.Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    if tensor.is_contiguous():  # the usual case, many times for each save
        return start, start + tensor.nbytes
    first, end = byte_extent(tensor)
    return start, start + end - first


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


def _identity(tensor: torch.Tensor) -> Any:
    """Equal for tensors of the same memory and form; a tensor of an unusual kind equals only itself."""
    if tensor.layout is not torch.strided or type(tensor) not in PLAIN_TENSORS:
        return id(tensor)
    return tensor.data_ptr(), *(attribute(tensor) for attribute in FORM)


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    is_plain = type(tensor) in PLAIN_TENSORS
    return tensor.detach().to("cpu", copy=True) if is_plain else tensor.detach().clone()


def _is_alike(copy: torch.Tensor, tensor: torch.Tensor) -> bool:
    return (
        type(copy) is type(tensor.detach())
        and copy.layout is tensor.layout is torch.strided
        and (copy.shape, copy.dtype) == (tensor.shape, tensor.dtype)
        and getattr(copy, "placements", None) == getattr(tensor, "placements", None)
        and getattr(copy, "device_mesh", None) == getattr(tensor, "device_mesh", None)
    )
