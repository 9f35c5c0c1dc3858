"""One pass over a state: its tensors, its plain values, and its structure as a flat list of tokens.

The pass runs on the training thread at every save, so it does little per leaf: it appends.  Two
states have the same structure if and only if their tokens are equal; then the plan of the save
before is reused, and neither tree nor paths are built.

It also decides what may change before the next update and must be captured by ``save`` itself:
tensors of a module that are not its parameters (buffers change in forward), and all tensors of
objects that are neither modules nor optimizers (a data loader moves on in forward).  Parameters,
optimizer state, and tensors that stand in the state by themselves are staged lazily.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Any

import torch

from stillframe.errors import UnsupportedStateError
from stillframe.format import limits, values
from stillframe.format.tree import render
from stillframe.format.values import Unencodable
from stillframe.state.boxes import TensorBox
from stillframe.state.codecs import codec_of
from stillframe.state.dtypes import PLAIN_TENSORS, array_as_tensor, check_tensor, is_array, refusal
from stillframe.state.memory import byte_extent
from stillframe.state.outline import (
    ARRAY,
    DICT,
    LEAF,
    LIST,
    OBJECT,
    ORDERED,
    SHARDED,
    TENSOR_TOKEN,
    TUPLE,
    VALUE_TOKEN,
)
from stillframe.state.torch_internals import dtensor_class, is_dtensor_parameter, local_of, local_tensor
from stillframe.state.train_state import TrainState

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
        self.owners: list[torch.nn.Module | torch.optim.Optimizer] = []
        """The modules and optimizers met: they know which tensors other ranks hold, too."""
        self._dtensor = dtensor_class()
        self._is_volatile = False
        self._module: torch.nn.Module | None = None
        self._parameters: dict[int, list[tuple[int, int]]] | None = None
        self._depth = 0
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
            self.tokens.append(VALUE_TOKEN)
            self.values.append(_encode(node))
        else:
            self._other(node, kind)

    def _tensor(self, tensor: torch.Tensor) -> None:
        self.tokens.append(TENSOR_TOKEN)
        self.tensors.append(tensor)
        is_volatile = self._is_volatile if self._module is None else not self._is_parameter(tensor)
        self.is_volatile.append(is_volatile)

    def _append(self, tensors: Collection[torch.Tensor]) -> None:
        self.tensors.extend(tensors)
        self.is_volatile.extend([self._module is None and self._is_volatile] * len(tensors))

    def _sharded(self, tensor: Any) -> None:
        """A DTensor stands for its local tensor; mesh, placements and global shape belong to the structure."""
        local = local_tensor(tensor)
        if self._module is None:
            is_volatile = self._is_volatile
        else:  # a parameter that is a DTensor says so itself
            is_volatile = not (is_dtensor_parameter(tensor) or self._is_local_parameter(local))
        self.dtensors[len(self.tensors)] = tensor
        self.tokens.append((SHARDED, tensor.device_mesh, tensor.placements, tensor.shape))
        self.tensors.append(local)
        self.is_volatile.append(is_volatile)

    def _box(self, box: TensorBox) -> None:
        self.boxes[len(self.tensors)] = box
        self.tokens.append((SHARDED, box.shape, box.offset))
        self.tensors.append(box.tensor)
        self.is_volatile.append(self._is_volatile)

    def _is_local_parameter(self, local: torch.Tensor) -> bool:
        """The same for a DTensor's local tensor; all ranks must get the same answer, also one that holds nothing."""
        if local.numel() or self._module is None or self._dtensor is None:
            return self._is_parameter(local)
        return not any(isinstance(each, self._dtensor) for each in self._module.buffers())

    def _is_parameter(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of the module at hand lies within the memory of one of its parameters."""
        assert self._module is not None
        if tensor.layout is not torch.strided or not tensor.numel():
            return False
        if self._parameters is None:
            self._parameters = {}
            for each in map(local_of, self._module.parameters()):
                if each.layout is torch.strided and each.numel():
                    self._parameters.setdefault(each.untyped_storage().data_ptr(), []).append(byte_extent(each))
        start, end = byte_extent(tensor)
        extents = self._parameters.get(tensor.untyped_storage().data_ptr(), ())
        return any(first <= start and end <= last for first, last in extents)

    def _dict(self, node: dict[Any, Any], *, is_ordered: bool) -> None:
        kinds = set(map(type, node))
        keys = tuple(node)
        exact: Any = None
        if kinds - _STR_KEYS:
            # 1, True and 1.0 are equal as keys but not as types: compare what is stored.
            exact = "ints" if kinds == _INT_KEYS else tuple(repr(_encode(key)) for key in keys)
        self.tokens.append((ORDERED if is_ordered else DICT, keys, exact))
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
        allowed = PLAIN_TENSORS if self._module is None else _PARAMETERS
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
                if kind is torch.nn.Parameter or (kind is torch.Tensor and self._module is None):
                    # The commonest leaves, without a call: a parameter is never volatile in its module.
                    self.tokens.append(TENSOR_TOKEN)
                    self.tensors.append(item)
                    self.is_volatile.append(self._module is None and self._is_volatile)
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
            self._within(codec.encode(node), is_volatile=True)
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
            self._within(module_state(node), module=node)
        else:
            if isinstance(node, torch.optim.Optimizer):
                self.owners.append(node)
            self._within(plain_dict(node.state_dict()), is_volatile=not isinstance(node, torch.optim.Optimizer))

    def _train_state(self, node: TrainState) -> None:
        has_optimizer = node.optimizer is not None
        self.tokens.append((OBJECT, "stillframe.TrainState", type(node.model)))
        self.tokens.append((DICT, ("model", *(("optimizer",) if has_optimizer else ()), *node.more), None))
        self.owners.append(node.model)
        self._at("model", lambda: self._within(node.model_state(), module=node.module))
        if node.optimizer is not None:
            self.owners.append(node.optimizer)
            self._at("optimizer", lambda: self._within(node.optimizer_state()))
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

    def _within(self, node: Any, *, is_volatile: bool = False, module: torch.nn.Module | None = None) -> None:
        before = self._is_volatile, self._module, self._parameters
        self._is_volatile, self._module, self._parameters = is_volatile, module, None
        self._deeper()
        self._visit(node)
        self._depth -= 1
        self._is_volatile, self._module, self._parameters = before


def storable(value: Any) -> bool:
    """Whether a value comes back as it was, without a live object to put it into."""
    try:
        walk = Walk(value)
    except UnsupportedStateError:
        return False
    return not walk.boxes and all(token[0] != OBJECT for token in walk.tokens)


def is_stateful(node: object) -> bool:
    """Whether it is an object (not a class) with a state of its own."""
    if isinstance(node, type):
        return False
    return callable(getattr(node, "state_dict", None)) and callable(getattr(node, "load_state_dict", None))


def module_state(module: torch.nn.Module) -> dict[str, Any]:
    """The module's state dict holding its live parameters themselves where that can be had."""
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
    return f"an object of type {name}"


class _Refusal(Exception):
    """An :class:`Unencodable` on its way up, collecting the keys that lead to it, innermost first."""

    def __init__(self, reason: Unencodable, *keys: Any) -> None:
        super().__init__()
        self.reason = reason
        self.path: list[Any] = list(keys)
