"""One pass over a state: its tensors, its plain values, and its structure as a flat list of tokens.

The pass runs on the training thread at every save, so it does little per leaf: it appends.  Two
states have the same structure if and only if their tokens are equal; then the plan of the save
before is reused, and neither tree nor paths are built.

It also decides what may change before the next update and must be captured by ``save`` itself:
tensors of a module that are not its parameters (buffers change in forward), tensors of an optimizer
with a ``state_dict`` of its own that are not its state, and all tensors of objects that are neither
(a data loader moves on in forward).  Parameters, optimizer state, and tensors that stand in the
state by themselves are staged lazily, but for a few that :mod:`stillframe.state.forward` knows of.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import msgspec
import torch

from stillframe.errors import UnsupportedStateError
from stillframe.format import limits, values
from stillframe.format.tree import render
from stillframe.format.values import Unencodable
from stillframe.state.boxes import TensorBox
from stillframe.state.codecs import codec_of
from stillframe.state.dtypes import PLAIN_TENSORS, array_as_tensor, check_tensor, is_array, refusal
from stillframe.state.outline import (
    ARRAY,
    DICT,
    ELSEWHERE_TOKEN,
    LEAF,
    LIST,
    OBJECT,
    ORDERED,
    SHARDED,
    TENSOR_TOKEN,
    TUPLE,
    VALUE_TOKEN,
    WRAPPER,
)
from stillframe.state.owners import ModuleOwner, Owner, optimizer_owner, optimizers_in
from stillframe.state.torch_internals import dtensor_class, local_tensor
from stillframe.state.train_state import TrainState
from stillframe.state.wrappers import is_wrapper, kind_of, take_apart

_OPTIMIZER_KEYS = "state", "param_groups"
_STR_KEYS = {str}
_INT_KEYS = {int}
_PARAMETERS = {torch.nn.Parameter}
_DICTS = {dict}


class Walk:
    """What one pass found.  ``tensors[i]`` may change before the next update where ``is_volatile[i]``."""

    def __init__(self, state: Any) -> None:
        self.tokens: list[tuple[Any, ...]] = []
        self.tensors: list[torch.Tensor] = []
        self.is_volatile: list[bool] = []
        self.values: list[Any] = []
        self.dtensors: dict[int, Any] = {}
        """Those of the tensors that are the local tensor of a DTensor."""
        self.boxes: dict[int, TensorBox] = {}
        """Those of the tensors that were given as a box of one."""
        self.wrapped: list[tuple[int, Any]] = []
        """The DTensors whose local tensor is a wrapper, each with the index of the first tensor in it."""
        self.outer: dict[int, tuple[Any, ...]] = {}
        """Of tensors that lie in a DTensor or a wrapper: all of these, in any order."""
        self.owners: list[torch.nn.Module | torch.optim.Optimizer] = []
        """The modules and optimizers met: they know which tensors other ranks hold, too."""
        self.bare: list[dict[Any, Any]] = []
        """What is empty under ``state`` in dicts that look like an ``optimizer.state_dict()`` before the first update.

        Not the dicts themselves: their ``param_groups`` may hold tensors, which must not be kept.
        """
        self._dtensor = dtensor_class()
        self._is_volatile = False
        self._owner: Owner | None = None
        """Of the object at hand, if not all of its tensors are alike."""
        self._depth = 0
        self._is_in_leaf = False
        try:
            self._visit(state)
        except Unencodable as reason:
            raise UnsupportedStateError(refusal(reason)) from None
        except _Refusal as refused:
            raise UnsupportedStateError(refusal(refused.reason, render(tuple(reversed(refused.path))))) from None

    def _visit(self, node: Any) -> None:
        kind = type(node)
        if kind in PLAIN_TENSORS:
            self._tensor(node)
        elif kind is self._dtensor:
            self._sharded(node)
        elif kind is dict or kind is OrderedDict:
            self._dict(node, is_ordered=kind is OrderedDict)
        elif kind is list:
            self._list(node)
        elif kind is tuple:
            self.tokens.append((TUPLE, len(node)))
            self._items(enumerate(node))
        elif values.is_value(kind):
            self.tokens.append(ELSEWHERE_TOKEN if kind is values.Elsewhere else VALUE_TOKEN)
            self.values.append(_encode(node))
        else:
            self._other(node, kind)

    def _tensor(self, tensor: torch.Tensor) -> None:
        self.tokens.append(TENSOR_TOKEN)
        self.tensors.append(tensor)
        is_volatile = self._is_volatile if self._owner is None else not self._owner.has(tensor)
        self.is_volatile.append(is_volatile)

    def _append(self, tensors: Collection[torch.Tensor]) -> None:
        self.tensors.extend(tensors)
        self.is_volatile.extend([self._owner is None and self._is_volatile] * len(tensors))

    def _sharded(self, tensor: Any) -> None:
        """A DTensor stands for its local tensor; mesh, placements and global shape belong to the structure."""
        local = local_tensor(tensor)
        if is_wrapper(local):
            self._wrapped_part(tensor, local)
            return
        is_volatile = self._is_volatile if self._owner is None else not self._owner.has_sharded(tensor, local)
        self.dtensors[len(self.tensors)] = tensor
        self.outer[len(self.tensors)] = (tensor,)
        self.tokens.append((SHARDED, tensor.device_mesh, tensor.placements, tensor.shape))
        self.tensors.append(local)
        self.is_volatile.append(is_volatile)

    def _wrapped_part(self, dtensor: Any, local: torch.Tensor) -> None:
        """A DTensor whose local tensor is a wrapper: stored as what this rank holds."""
        owner, first = self._owner, len(self.tensors)
        self.wrapped.append((first, dtensor))
        layout = dtensor.device_mesh, dtensor.placements, dtensor.shape
        if owner is None:
            self._wrapper(local, layout)
        else:
            before = self._is_volatile
            self._owner, self._is_volatile = None, not owner.has_sharded(dtensor, local)
            self._wrapper(local, layout)
            self._owner, self._is_volatile = owner, before
        for index in range(first, len(self.tensors)):
            self.outer[index] = (*self.outer[index], dtensor)

    def _wrapper(self, tensor: torch.Tensor, layout: object = None) -> None:
        """A wrapper stands for its inner tensors.  ``layout``: if it is the local tensor of a DTensor, which one."""
        if self._is_in_leaf:
            raise Unencodable(f"a {kind_of(tensor)} within a registered leaf; encode it as its inner tensors")
        found = take_apart(tensor)
        exact = msgspec.json.encode(found.context)  # beside it: True and 1 are equal, and as text they are not
        form = found.names, found.kind, found.dtype, found.shape, found.context, exact
        self.tokens.append((WRAPPER, *form, layout))
        first = len(self.tensors)
        self._deeper()
        for name, inner in zip(found.names, found.tensors, strict=True):
            self._at(name, partial(self._inner, tensor, inner))
        self._depth -= 1
        for index in range(first, len(self.tensors)):
            self.outer[index] = (*self.outer.get(index, ()), tensor)

    def _inner(self, wrapper: torch.Tensor, tensor: torch.Tensor) -> None:
        if is_wrapper(tensor):
            self._wrapper(tensor)
        elif type(tensor) is self._dtensor:
            self._sharded(tensor)
        else:
            check_tensor(tensor)
            self.tokens.append(TENSOR_TOKEN)
            self.tensors.append(tensor)
            owner = self._owner
            self.is_volatile.append(self._is_volatile if owner is None else not owner.has_wrapper(wrapper, tensor))

    def _box(self, box: TensorBox) -> None:
        self.boxes[len(self.tensors)] = box
        self.tokens.append((SHARDED, box.shape, box.offset, box.boxes))
        self.tensors.append(box.tensor)
        self.is_volatile.append(self._is_volatile)

    def _dict(self, node: dict[Any, Any], *, is_ordered: bool) -> None:
        kinds = set(map(type, node))
        keys = tuple(node)
        exact: Any = None
        if kinds - _STR_KEYS:
            # 1, True and 1.0 are equal as keys but not as types: compare what is stored.
            exact = "ints" if kinds == _INT_KEYS else tuple(repr(_encode(key)) for key in keys)
        self.tokens.append((ORDERED if is_ordered else DICT, keys, exact))
        if keys == _OPTIMIZER_KEYS and self._owner is None and not self._is_volatile:
            inner = node["state"]
            if isinstance(inner, dict) and not inner:  # it may be anything, also a tensor
                self.bare.append(inner)
        kinds = set(map(type, node.values()))
        if kinds == _DICTS and self._are_alike(node.values()):
            return
        if self._are_leaves(kinds, self._depth + 1):
            self.tokens.extend([TENSOR_TOKEN] * len(keys))
            self._append(node.values())
        else:
            self._items(node.items())

    def _are_alike(self, dicts: Collection[dict[Any, Any]]) -> bool:
        """Take dicts of tensors with the same keys all at once, if they are such: an optimizer's state is."""
        tensors = list(itertools.chain.from_iterable(map(dict.values, dicts)))
        if not self._are_leaves(set(map(type, tensors)), self._depth + 2):
            return False
        first, *others = set(map(tuple, dicts))
        if others or set(map(type, itertools.chain.from_iterable(dicts))) - _STR_KEYS:
            return False
        self.tokens.extend([(DICT, first, None), *[TENSOR_TOKEN] * len(first)] * len(dicts))
        self._append(tensors)
        return True

    def _are_leaves(self, kinds: set[type], depth: int) -> bool:
        """Whether values of these types, so deep, are tensors that need no look at each: a module's own parameters are
        never volatile, its other tensors may be."""
        allowed = PLAIN_TENSORS if self._owner is None else _PARAMETERS
        return kinds <= allowed and depth <= limits.MAX_DEPTH

    def _list(self, node: list[Any]) -> None:
        if values.is_plain_list(node):
            self.tokens.append(VALUE_TOKEN)
            self.values.append(list(node))
        else:
            self.tokens.append((LIST, len(node)))
            self._items(enumerate(node))

    def _items(self, items: Any) -> None:
        self._deeper()
        key: Any = None
        try:
            for key, item in items:  # noqa: B007 - read by the handlers below
                kind = type(item)
                if kind is torch.nn.Parameter or (kind is torch.Tensor and self._owner is None):
                    # The commonest leaves, without a call: a parameter is never volatile in its module.
                    self.tokens.append(TENSOR_TOKEN)
                    self.tensors.append(item)
                    self.is_volatile.append(self._owner is None and self._is_volatile)
                elif kind is dict:
                    self._dict(item, is_ordered=False)
                elif kind is self._dtensor:
                    self._sharded(item)
                else:
                    self._visit(item)
        except _Refusal as refused:
            refused.path.append(key)
            raise
        except Unencodable as reason:
            raise _Refusal(reason, key) from None
        self._depth -= 1

    def _deeper(self) -> None:
        self._depth += 1
        if self._depth > limits.MAX_DEPTH:
            raise Unencodable(f"nested deeper than {limits.MAX_DEPTH} levels; does it contain itself?")

    def _other(self, node: Any, kind: type) -> None:
        codec = codec_of(kind)
        if codec is not None:
            self.tokens.append((LEAF, codec.name))
            was_in_leaf, self._is_in_leaf = self._is_in_leaf, True
            self._within(codec.encode(node), is_volatile=True)
            self._is_in_leaf = was_in_leaf
        elif is_wrapper(node):
            self._wrapper(node)
        elif isinstance(node, torch.Tensor):
            check_tensor(node)
            raise Unencodable(f"a tensor of class {kind.__qualname__}")
        elif is_array(node):
            tensor = array_as_tensor(node)
            self.tokens.append((ARRAY, node.dtype.str))
            self.tensors.append(tensor)
            self.is_volatile.append(True)
        elif kind is TrainState:
            self._train_state(node)
        elif kind is TensorBox:
            self._box(node)
        elif is_stateful(node):
            self._object(node, kind)
        else:
            raise Unencodable(_refuse(kind))

    def _object(self, node: Any, kind: type) -> None:
        self.tokens.append((OBJECT, f"{kind.__module__}.{kind.__qualname__}"))
        if isinstance(node, torch.nn.Module):
            self.owners.append(node)
            self._within(module_state(node), owner=ModuleOwner(node))
        elif isinstance(node, torch.optim.Optimizer):
            self.owners.extend(optimizers_in(node))
            self._within(plain_dict(node.state_dict()), owner=optimizer_owner(node))
        else:
            self._within(plain_dict(node.state_dict()), is_volatile=True)

    def _train_state(self, node: TrainState) -> None:
        has_optimizer = node.optimizer is not None
        self.tokens.append((OBJECT, "stillframe.TrainState", type(node.model)))
        self.tokens.append((DICT, ("model", *(("optimizer",) if has_optimizer else ()), *node.more), None))
        self.owners.append(node.model)
        self._at("model", lambda: self._within(node.model_state(), owner=ModuleOwner(node.module)))
        if node.optimizer is not None:
            kind = type(node.optimizer)
            self.owners.append(node.optimizer)
            self.tokens.append((OBJECT, f"{kind.__module__}.{kind.__qualname__}"))
            owner = optimizer_owner(node.optimizer)
            self._at("optimizer", lambda: self._within(node.optimizer_state(), owner=owner))
        self._items(node.more.items())

    def _at(self, key: str, visit: Callable[[], None]) -> None:
        """Visit what stands under a key that is no dict's."""
        try:
            visit()
        except _Refusal as refused:
            refused.path.append(key)
            raise
        except Unencodable as reason:
            raise _Refusal(reason, key) from None

    def _within(self, node: Any, *, is_volatile: bool = False, owner: Owner | None = None) -> None:
        before = self._is_volatile, self._owner
        self._is_volatile, self._owner = is_volatile, owner
        self._deeper()
        self._visit(node)
        self._depth -= 1
        self._is_volatile, self._owner = before


def storable(value: Any) -> bool:
    """Whether a value comes back as it was, without a live object to put it into."""
    try:
        walk = Walk(value)
    except UnsupportedStateError:
        return False
    return not walk.boxes and all(token[0] not in (OBJECT, WRAPPER) for token in walk.tokens)


def is_stateful(node: object) -> bool:
    """Whether it is an object (not a class) with a state of its own."""
    if isinstance(node, type):
        return False
    return callable(getattr(node, "state_dict", None)) and callable(getattr(node, "load_state_dict", None))


def module_state(module: torch.nn.Module) -> dict[str, Any]:
    """The module's state dict holding its live parameters themselves where possible."""
    if type(module).state_dict is torch.nn.Module.state_dict:
        return dict(module.state_dict(keep_vars=True))
    return dict(module.state_dict())


def plain_dict(state: Any) -> Any:
    """An object's own state dict may be ordered; that is no part of its content."""
    return dict(state) if type(state) is OrderedDict else state


def _encode(value: Any) -> Any:
    return values.encode(value)


def _refuse(kind: type) -> str:
    name = f"{kind.__module__}.{kind.__qualname__}"
    if issubclass(kind, dict | list | tuple):
        base = next(base for base in (dict, list, tuple) if issubclass(kind, base))
        return f"a {name}, which would come back as a plain {base.__name__}; convert it with {base.__name__}(…)"
    if issubclass(kind, torch.utils.data.DataLoader):
        return f"a {name}; put stillframe.Batches(loader) into the state in its place, and iterate over that"
    return f"an object of type {name}"


class _Refusal(Exception):
    """An :class:`Unencodable` on its way up, collecting the keys that lead to it, innermost first."""

    def __init__(self, reason: Unencodable, *keys: Any) -> None:
        super().__init__()
        self.reason = reason
        self.path: list[Any] = list(keys)
