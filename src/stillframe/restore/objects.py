"""Matching what stands in a checkpoint with live objects: modules, optimizers, :class:`TrainState`, and others.

A module takes its tensors in place; an optimizer or any other object gets a state dict through
``load_state_dict``, made of its own tensors where they fit and of new ones where it has none yet (an optimizer
before its first step).  New state of a parameter that is a DTensor is spread as the parameter is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from stillframe.format.tree import (
    DictNode,
    ListNode,
    Node,
    ObjectNode,
    Path,
    ShardedNode,
    TensorNode,
    TupleNode,
    ValueNode,
    render,
)
from stillframe.restore.load import Later
from stillframe.state.train_state import TrainState, clean
from stillframe.state.walk import module_state

if TYPE_CHECKING:
    from stillframe.restore.match import Match


class Objects:
    """The part of a :class:`Match` that knows objects."""

    def __init__(self, match: Match) -> None:
        self._match = match
        self._findings = match.findings
        self._placement = match.placement
        self._builder = match.builder

    def object(self, node: Node, live: Any, path: Path) -> Later:
        if isinstance(live, torch.nn.Module):
            return self._module(node, live, path, is_clean=False)
        current = live.state_dict()
        if not isinstance(live, torch.optim.Optimizer):
            adopted = self._adopt(node, current, path, None)

            def apply() -> Any:
                live.load_state_dict(adopted())
                return live

            return apply
        parameters = [each for group in live.param_groups for each in group["params"]]
        return self._optimizer(node, live, current, dict(enumerate(parameters)), live.load_state_dict, path)

    def _module(self, node: Node, live: torch.nn.Module, path: Path, *, is_clean: bool) -> Later:
        """``is_clean``: it was saved under names without what wrappers put into them."""
        own = module_state(live)
        names = {clean(name) if is_clean else name: name for name in own}
        state = {name: own[names[name]] for name in names}
        later = self._match.match(node, state, path, False)

        def apply() -> Any:
            # The tensors in it are the module's own, filled already: copying one onto itself costs nothing.
            # Still called, for extra state and load hooks.
            later()
            full = {names[name]: value for name, value in state.items()}
            if type(live).load_state_dict is torch.nn.Module.load_state_dict:
                live.load_state_dict(full, strict=False)
            else:
                live.load_state_dict(full)
            return live

        return apply

    def train_state(self, node: Node, live: TrainState, path: Path) -> Later:
        item = node.item if isinstance(node, ObjectNode) else node
        if not isinstance(item, DictNode):
            self._match.differ(node, live, path)
            return lambda: live
        parts: dict[Any, Any] = {"model": live.model, **live.more}
        stored = dict(zip(self._builder.keys(item), item.items, strict=True))
        found: list[tuple[str, Later]] = []
        if live.optimizer is not None:
            parts["optimizer"] = live.optimizer
        self._findings.missing.extend(render((*path, key)) for key in parts if key not in stored)
        for key, each in stored.items():
            here = (*path, key)
            if key not in parts:
                self._findings.unexpected.append(render(here))
            elif key == "model":
                inner = each.item if isinstance(each, ObjectNode) else each
                found.append((key, self._module(inner, live.module, here, is_clean=True)))
            elif key == "optimizer":
                inner = each.item if isinstance(each, ObjectNode) else each
                later = self._optimizer(
                    inner, parts[key], live.optimizer_state(), live.parameters(), live.load_optimizer_state, here
                )
                found.append((key, later))
            else:
                found.append((key, self._match.match(each, parts[key], here, True)))

        def apply() -> Any:
            for key, later in found:
                value = later()
                if key in live.more:
                    live.more[key] = value
            return live

        return apply

    def _optimizer(
        self,
        node: Node,
        live: torch.optim.Optimizer,
        current: dict[str, Any],
        parameters: dict[Any, torch.Tensor],
        put: Callable[[dict[str, Any]], Any],
        path: Path,
    ) -> Later:
        """``parameters`` by the keys of the state, ``put`` gives the optimizer a state with such keys."""
        is_named = any(isinstance(key, str) for key in parameters)
        if not self._fits_optimizer(node, current, path, is_named):
            return lambda: live
        assert isinstance(node, DictNode)
        rows: list[tuple[Any, Later]] = []
        for key, item in zip(self._builder.keys(node), node.items, strict=True):
            if key == "state" and isinstance(item, DictNode):
                rows.append((key, self._optimizer_state(item, current["state"], parameters, (*path, key))))
            else:
                rows.append((key, self._adopt(item, current.get(key), (*path, key), None)))

        def apply() -> Any:
            state = {key: later() for key, later in rows}
            own = put(state)
            _keep_dtypes(live, own if is_named else state)
            return live

        return apply

    def _optimizer_state(
        self, node: DictNode, current: dict[Any, Any], parameters: dict[Any, torch.Tensor], path: Path
    ) -> Later:
        items = [
            (key, self._adopt(item, current.get(key), (*path, key), parameters.get(key)))
            for key, item in zip(self._builder.keys(node), node.items, strict=True)
            if key in parameters or not self._match.is_partial((*path, key))
        ]
        return lambda: {key: later() for key, later in items}

    def _fits_optimizer(self, node: Node, current: dict[str, Any], path: Path, is_named: bool) -> bool:
        """``load_state_dict`` would refuse these, but only after other things had been touched."""
        stored = self._groups(node)
        live = [list(group["params"]) for group in current.get("param_groups", [])]
        if stored is not None and is_named:
            if [sorted(map(str, each)) for each in stored] == [sorted(each) for each in live]:
                return True
            if all(isinstance(name, int) for each in stored for name in each):
                self._findings.mismatched.append(
                    f"{render(path)}: the checkpoint numbers its parameters (it was saved from an optimizer, not a "
                    "TrainState), the state names them: restore it into the same form"
                )
                return False
            strange = sorted({str(name) for each in stored for name in each} ^ {name for each in live for name in each})
            differ = f"; only one of them has {', '.join(strange[:5])}" if strange else ""
            self._findings.mismatched.append(
                f"{render(path)}: other parameter groups in the checkpoint than in the state{differ}"
            )
            return False
        sizes = None if stored is None else [len(each) for each in stored]
        if sizes == [len(each) for each in live]:
            return True
        has = "no state of an optimizer" if sizes is None else f"parameter groups of {sizes} parameters"
        self._findings.mismatched.append(
            f"{render(path)}: {has} in the checkpoint, groups of {[len(each) for each in live]} in the state"
        )
        return False

    def _groups(self, node: Node) -> list[list[Any]] | None:
        if not isinstance(node, DictNode) or "param_groups" not in node.keys:
            return None
        groups = node.items[node.keys.index("param_groups")]
        if not isinstance(groups, ListNode):
            return None
        found = []
        for group in groups.items:
            if not isinstance(group, DictNode) or "params" not in group.keys:
                return None
            params = group.items[group.keys.index("params")]
            value = self._builder.value(params) if isinstance(params, ValueNode) else None
            if not isinstance(value, list):
                return None
            found.append(value)
        return found

    def _adopt(self, node: Node, current: Any, path: Path, like: torch.Tensor | None) -> Later:
        """A state dict as stored, made of the object's own tensors where they fit and of new ones elsewhere.

        ``like``: the parameter that a state belongs to; new tensors of its shape are spread as it is.
        """
        if isinstance(node, TensorNode | ShardedNode):
            dtype, shape = self._placement.form(node)
            if isinstance(current, torch.Tensor) and current.dtype == dtype and tuple(current.shape) == shape:
                self._placement.add(node, current, render(path))
                return lambda: current
            is_alike = like is not None and shape != () and tuple(like.shape) == shape
            is_off_host = like is not None and self._placement.device_type(node) != "cpu"
            tensor = self._placement.fresh(
                node, like.device if like is not None and is_off_host else None, like if is_alike else None
            )
            return lambda: tensor
        if isinstance(node, DictNode) and isinstance(current, dict):
            keys = self._builder.keys(node)
            items = [
                (key, self._adopt(item, current.get(key), (*path, key), like))
                for key, item in zip(keys, node.items, strict=True)
            ]
            kind = OrderedDict if node.is_ordered else dict
            return lambda: kind((key, later()) for key, later in items)
        if isinstance(node, DictNode):
            return self._adopt(node, {}, path, like)
        if isinstance(node, ListNode | TupleNode):
            parts = (
                current
                if isinstance(current, list | tuple) and len(current) == len(node.items)
                else [None] * len(node.items)
            )
            rows = [
                self._adopt(item, part, (*path, at), like)
                for at, (item, part) in enumerate(zip(node.items, parts, strict=True))
            ]
            made = tuple if isinstance(node, TupleNode) else list
            return lambda: made(row() for row in rows)
        return self._match.built(node, path)


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
