"""Matching a stored tree with the live state: what goes where, and what does not fit.

Nothing is touched here.  The result is a :class:`Match`: tensors to fill, and what to do when they are
filled.  Tensors and plain values in dicts and lists are restored in place.  A module takes its tensors in
place; an optimizer or any other object gets a state dict through ``load_state_dict``, made of its own
tensors where they fit and of new ones where it has none yet (an optimizer before its first step).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import torch

from stillframe.catalog import Checkpoint
from stillframe.errors import MismatchError
from stillframe.format.tree import (
    ArrayNode,
    DictNode,
    LeafNode,
    ListNode,
    Node,
    ObjectNode,
    TensorNode,
    TupleNode,
    ValueNode,
)
from stillframe.restore.build import Builder, Later, has_live_parts
from stillframe.restore.place import Placement
from stillframe.stage.leaves import is_array
from stillframe.stage.walk import Path, is_stateful, module_state, render

_MAX_LISTED = 50


@dataclass(slots=True)
class Findings:
    """Paths that do not fit."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)

    def raise_if_any(self, step: int) -> None:
        parts = []
        for title, entries in (
            ("in the state but not in the checkpoint", self.missing),
            ("in the checkpoint but not in the state", self.unexpected),
            ("different", self.mismatched),
        ):
            if entries:
                more = [f"… and {len(entries) - _MAX_LISTED} more"] if len(entries) > _MAX_LISTED else []
                parts.append(f"{title}:\n  " + "\n  ".join(entries[:_MAX_LISTED] + more))
        if parts:
            raise MismatchError(
                f"step {step} does not fit the state; nothing was touched. "
                "Pass strict=False to restore what matches.\n" + "\n".join(parts)
            )


class Match:
    """Thread: the caller's."""

    def __init__(self, checkpoint: Checkpoint, state: Any) -> None:
        self.findings = Findings()
        self.placement = Placement(checkpoint)
        self._builder = Builder(checkpoint, self.placement)
        self._apply = self._match(checkpoint.seal.tree, state, (), False)
        self.findings.mismatched += self.placement.conflicts()

    def apply(self) -> None:
        """Put values back into their holders and hand objects their state dicts; after the placement is filled."""
        self._apply()

    def _match(self, node: Node, live: Any, path: Path, is_settable: bool) -> Later:
        """What the holder of ``live`` should hold when all is filled; ``live`` itself where it is kept."""
        if isinstance(node, LeafNode):
            return self._set(node, live, path, is_settable)
        if is_stateful(live):
            if isinstance(node, ObjectNode | DictNode):
                return self._object(node.item if isinstance(node, ObjectNode) else node, live, path)
            self._differ(node, live, path)
            return lambda: live
        if isinstance(node, ObjectNode):
            return self._match(node.item, live, path, is_settable)
        if isinstance(node, TensorNode):
            return self._tensor(node, live, path)
        if isinstance(node, ArrayNode):
            return self._array(node, live, path, is_settable)
        if isinstance(live, torch.Tensor):
            self.findings.mismatched.append(f"{render(path)}: a plain value in the checkpoint, a tensor in the state")
            return lambda: live
        if isinstance(node, DictNode) and isinstance(live, dict):
            return self._dict(node, live, path)
        if isinstance(node, ListNode) and isinstance(live, list):
            return self._list(node, live, path)
        if isinstance(node, TupleNode) and isinstance(live, tuple) and len(live) == len(node.items):
            return self._tuple(node, live, path, is_settable)
        if has_live_parts(node) or _has_live_parts(live):
            self._differ(node, live, path)
            return lambda: live
        return self._set(node, live, path, is_settable)

    def _differ(self, node: Node, live: Any, path: Path) -> None:
        kinds = f"a {_kind(node)} in the checkpoint, a {type(live).__name__} in the state"
        self.findings.mismatched.append(f"{render(path)}: {kinds}")

    def _set(self, node: Node, live: Any, path: Path, is_settable: bool) -> Later:
        """A value that takes the place of ``live``; a list goes into the same list object."""
        later = self._built(node, path)
        is_list = isinstance(node, ListNode) or (
            isinstance(node, ValueNode) and isinstance(self._builder.value(node), list)
        )
        if isinstance(live, list) and is_list:

            def fill() -> Any:
                live[:] = later()
                return live

            return fill
        if not is_settable:
            self.findings.mismatched.append(
                f"{render(path) or 'the state'}: a plain value that is held by nothing a value can be put back into; "
                "hold it in a dict or a list"
            )
        return later

    def _built(self, node: Node, path: Path) -> Later:
        later = self._builder.build(node, path)
        assert later is not None  # only= is not used here
        return later

    def _tensor(self, node: TensorNode, live: Any, path: Path) -> Later:
        dtype, shape = self.placement.form(node)
        if isinstance(live, torch.Tensor) and live.dtype == dtype and tuple(live.shape) == shape:
            self.placement.add(node, live, render(path))
        else:
            has = _form(live.dtype, live.shape) if isinstance(live, torch.Tensor) else f"a {type(live).__name__}"
            self.findings.mismatched.append(
                f"{render(path)}: {_form(dtype, shape)} in the checkpoint, {has} in the state"
            )
        return lambda: live

    def _array(self, node: ArrayNode, live: Any, path: Path, is_settable: bool) -> Later:
        _, shape = self.placement.form(TensorNode(node.shard))
        fits = is_array(live) and live.dtype.str == node.dtype and live.shape == shape and live.flags.writeable
        if not fits:
            return self._set(node, live, path, is_settable)
        later = self._builder.array(node)

        def fill() -> Any:
            live[...] = later()
            return live

        return fill

    def _dict(self, node: DictNode, live: dict[Any, Any], path: Path) -> Later:
        stored = dict(zip(self._builder.keys(node), node.items, strict=True))
        is_plain = not has_live_parts(node) and not _has_live_parts(live)
        items: list[tuple[Any, Later]] = []
        for key, item in stored.items():
            if key in live:
                items.append((key, self._match(item, live[key], (*path, key), True)))
            elif is_plain:
                items.append((key, self._built(item, (*path, key))))
            else:
                self.findings.unexpected.append(render((*path, key)))
        gone = [key for key in live if key not in stored]
        if not is_plain:
            self.findings.missing.extend(render((*path, key)) for key in gone)

        def apply() -> Any:
            for key in gone if is_plain else ():
                del live[key]
            for key, later in items:
                live[key] = later()
            return live

        return apply

    def _list(self, node: ListNode, live: list[Any], path: Path) -> Later:
        is_plain = not has_live_parts(node) and not _has_live_parts(live)
        if is_plain and len(live) != len(node.items):
            return self._set(node, live, path, True)
        both = min(len(live), len(node.items))
        self.findings.missing.extend(render((*path, index)) for index in range(both, len(live)))
        self.findings.unexpected.extend(render((*path, index)) for index in range(both, len(node.items)))
        items = [self._match(node.items[index], live[index], (*path, index), True) for index in range(both)]

        def apply() -> Any:
            for index, later in enumerate(items):
                live[index] = later()
            return live

        return apply

    def _tuple(self, node: TupleNode, live: tuple[Any, ...], path: Path, is_settable: bool) -> Later:
        items = [
            self._match(item, part, (*path, index), is_settable)
            for index, (item, part) in enumerate(zip(node.items, live, strict=True))
        ]

        def apply() -> Any:
            parts = tuple(later() for later in items)
            return live if all(new is old for new, old in zip(parts, live, strict=True)) else parts

        return apply

    # --- objects ---------------------------------------------------------------------------

    def _object(self, node: Node, live: Any, path: Path) -> Later:
        if isinstance(live, torch.nn.Module):
            return self._module(node, live, path)
        current = live.state_dict()
        if isinstance(live, torch.optim.Optimizer) and not self._fits_optimizer(node, current, path):
            return lambda: live
        adopted = self._adopt(node, current, path, _state_device(live))

        def apply() -> Any:
            state = adopted()
            live.load_state_dict(state)
            if isinstance(live, torch.optim.Optimizer):
                _keep_dtypes(live, state)
            return live

        return apply

    def _module(self, node: Node, live: torch.nn.Module, path: Path) -> Later:
        state = module_state(live)
        later = self._match(node, state, path, False)

        def apply() -> Any:
            # The tensors in it are the module's own, filled already: copying one onto itself costs nothing.
            # Still called, for extra state and load hooks.
            later()
            if type(live).load_state_dict is torch.nn.Module.load_state_dict:
                live.load_state_dict(state, strict=False)
            else:
                live.load_state_dict(state)
            return live

        return apply

    def _fits_optimizer(self, node: Node, current: dict[str, Any], path: Path) -> bool:
        """``load_state_dict`` would refuse these, but only after other things had been touched."""
        stored = self._groups(node)
        live = [len(group["params"]) for group in current.get("param_groups", [])]
        if stored == live:
            return True
        has = "no state of an optimizer" if stored is None else f"parameter groups of {stored} parameters"
        self.findings.mismatched.append(f"{render(path)}: {has} in the checkpoint, groups of {live} in the state")
        return False

    def _groups(self, node: Node) -> list[int] | None:
        if not isinstance(node, DictNode) or "param_groups" not in node.keys:
            return None
        groups = node.items[node.keys.index("param_groups")]
        if not isinstance(groups, ListNode):
            return None
        counts = []
        for group in groups.items:
            if not isinstance(group, DictNode) or "params" not in group.keys:
                return None
            params = group.items[group.keys.index("params")]
            value = self._builder.value(params) if isinstance(params, ValueNode) else None
            if not isinstance(value, list):
                return None
            counts.append(len(value))
        return counts

    def _adopt(self, node: Node, current: Any, path: Path, device: torch.device | None) -> Later:
        """A state dict as stored, made of the object's own tensors where they fit and of new ones elsewhere."""
        if isinstance(node, TensorNode):
            dtype, shape = self.placement.form(node)
            if isinstance(current, torch.Tensor) and current.dtype == dtype and tuple(current.shape) == shape:
                self.placement.add(node, current, render(path))
                return lambda: current
            is_off_host = device is not None and self.placement.device_type(node) != "cpu"
            tensor = self.placement.fresh(node, device if is_off_host else None)
            return lambda: tensor
        if isinstance(node, DictNode) and isinstance(current, dict):
            keys = self._builder.keys(node)
            items = [
                (key, self._adopt(item, current.get(key), (*path, key), device))
                for key, item in zip(keys, node.items, strict=True)
            ]
            kind = OrderedDict if node.is_ordered else dict
            return lambda: kind((key, later()) for key, later in items)
        if isinstance(node, DictNode):
            return self._adopt(node, {}, path, device)
        if isinstance(node, ListNode | TupleNode):
            parts = (
                current
                if isinstance(current, list | tuple) and len(current) == len(node.items)
                else [None] * len(node.items)
            )
            rows = [
                self._adopt(item, part, (*path, at), device)
                for at, (item, part) in enumerate(zip(node.items, parts, strict=True))
            ]
            made = tuple if isinstance(node, TupleNode) else list
            return lambda: made(row() for row in rows)
        return self._built(node, path)


def _keep_dtypes(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Undo the cast of ``Optimizer.load_state_dict``, which gives floating-point state the dtype of its parameter:
    a master copy in fp32 of a bf16 parameter was saved as fp32, and comes back as that."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        now = optimizer.state.get(parameter, {})
        for name, saved in state["state"].get(number, {}).items():
            cast = now.get(name)
            if isinstance(saved, torch.Tensor) and isinstance(cast, torch.Tensor) and cast.dtype != saved.dtype:
                now[name] = saved.to(cast.device)


def _state_device(live: Any) -> torch.device | None:
    """Where an optimizer keeps its state: with its parameters."""
    if isinstance(live, torch.optim.Optimizer):
        for group in live.param_groups:
            for parameter in group["params"]:
                return torch.device(parameter.device)
    return None


def _has_live_parts(live: Any) -> bool:
    if isinstance(live, dict):
        return any(map(_has_live_parts, live.values()))
    if isinstance(live, list | tuple):
        return any(map(_has_live_parts, live))
    return isinstance(live, torch.Tensor) or is_stateful(live)


def _form(dtype: torch.dtype, shape: Any) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _kind(node: Node) -> str:
    return type(node).__name__.removesuffix("Node").lower()
