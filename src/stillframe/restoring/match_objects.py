"""Matching a stored tree with live objects: modules, optimizers, :class:`TrainState`, and others.

A module is restored in place.  An optimizer, or any other object, is given a state dict through ``load_state_dict``.
That state dict is made of the object's own tensors where they fit, and of new ones where it has none yet, such as an
optimizer before its first step.  New state of a parameter that is a DTensor is spread as the parameter is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stillframe.checkpoint.stored import Located
from stillframe.format import tree
from stillframe.restoring.findings import Findings, kind_text
from stillframe.restoring.load import Builder, Later
from stillframe.restoring.place import Placement
from stillframe.state.train_state import TrainState, clean
from stillframe.state.walk import module_state

MatchBelow = Callable[[Located, Any, tree.Path, bool], Later]
"""Matches what an object holds: (stored, live, path, whether the container of ``live`` can be given another value)."""


class Objects:
    """The part of a match that knows objects."""

    def __init__(self, findings: Findings, placement: Placement, builder: Builder, match: MatchBelow) -> None:
        self._findings = findings
        self._placement = placement
        self._builder = builder
        self._match = match

    def object(self, located: Located, live: Any, path: tree.Path) -> Later:
        """Any object with ``state_dict`` and ``load_state_dict``."""
        if not isinstance(located.node, tree.ObjectNode | tree.DictNode):
            self._findings.differ(path, kind_text(located.node), live)
            return lambda: live
        content = located.content
        if isinstance(live, torch.nn.Module):
            return self._module(content, live, path, is_clean=False)
        if isinstance(live, torch.optim.Optimizer):
            return self._plain_optimizer(content, live, path)
        self._adopt(content, live.state_dict(), path, None)
        later = self._builder.whole(content, path)

        def apply() -> Any:
            live.load_state_dict(later())
            return live

        return apply

    def train_state(self, located: Located, live: TrainState, path: tree.Path) -> Later:
        content = located.content
        if not isinstance(content.node, tree.DictNode):
            self._findings.differ(path, kind_text(located.node), live)
            return lambda: live
        parts: dict[Any, Any] = {"model": live.model, **live.more}
        if live.optimizer is not None:
            parts["optimizer"] = live.optimizer
        stored = dict(self._builder.items(content))
        self._findings.miss(path, [key for key in parts if key not in stored])
        self._findings.not_expect(path, [key for key in stored if key not in parts])
        found: list[tuple[str, Later]] = []
        for key, item in stored.items():
            here = (*path, key)
            if key == "model":
                found.append((key, self._module(item.content, live.module, here, is_clean=True)))
            elif key == "optimizer" and live.optimizer is not None:
                found.append((key, self._named_optimizer(item.content, live, live.optimizer, here)))
            elif key in parts:
                found.append((key, self._match(item, parts[key], here, True)))

        def apply() -> Any:
            for key, later in found:
                value = later()
                if key in live.more:
                    live.more[key] = value
            return live

        return apply

    def _module(self, content: Located, live: torch.nn.Module, path: tree.Path, *, is_clean: bool) -> Later:
        """``is_clean``: it was saved under names without the prefixes of wrappers."""
        own = module_state(live)
        names = {clean(name) if is_clean else name: name for name in own}
        state = {name: own[names[name]] for name in names}
        later = self._match(content, state, path, False)

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

    # --- optimizers ------------------------------------------------------------------------

    def _plain_optimizer(self, content: Located, live: torch.optim.Optimizer, path: tree.Path) -> Later:
        """Its state is stored by the numbers of its parameters."""
        current = live.state_dict()
        problem = _differing_sizes(self._groups(content), _live_groups(current))
        if problem:
            self._findings.mismatch(path, problem)
            return lambda: live
        parameters = [each for group in live.param_groups for each in group["params"]]
        later = self._optimizer_state(content, current, dict(enumerate(parameters)), path)

        def apply() -> Any:
            state = later()
            live.load_state_dict(state)
            _keep_dtypes(live, state)
            return live

        return apply

    def _named_optimizer(
        self, content: Located, train_state: TrainState, live: torch.optim.Optimizer, path: tree.Path
    ) -> Later:
        """Its state is stored by the names of its parameters in the model."""
        current = train_state.optimizer_state()
        problem = _differing_names(self._groups(content), _live_groups(current))
        if problem:
            self._findings.mismatch(path, problem)
            return lambda: live
        later = self._optimizer_state(content, current, train_state.parameters(), path)

        def apply() -> Any:
            numbered = train_state.load_optimizer_state(later())
            _keep_dtypes(live, numbered)
            return live

        return apply

    def _optimizer_state(
        self, content: Located, current: dict[str, Any], parameters: dict[Any, torch.Tensor], path: tree.Path
    ) -> Later:
        """The state dict to load; ``parameters`` by the keys of its ``state``."""
        rows: dict[Any, Later] = {}
        for key, item in self._builder.items(content):
            here = (*path, key)
            if key == "state" and isinstance(item.node, tree.DictNode):
                rows[key] = self._parameter_states(item, current["state"], parameters, here)
            else:
                self._adopt(item, current.get(key), here, None)
                rows[key] = self._builder.whole(item, here)
        return lambda: {key: later() for key, later in rows.items()}

    def _parameter_states(
        self, located: Located, current: dict[Any, Any], parameters: dict[Any, torch.Tensor], path: tree.Path
    ) -> Later:
        rows: dict[Any, Later] = {}
        for key, item in self._builder.items(located):
            if key in parameters or not item.is_partial:  # else it is for other ranks to restore
                self._adopt(item, current.get(key), (*path, key), parameters.get(key))
                rows[key] = self._builder.whole(item, (*path, key))
        return lambda: {key: later() for key, later in rows.items()}

    def _groups(self, content: Located) -> list[list[Any]] | None:
        """The parameters of each stored group, by number or name; ``None`` if it is no state of an optimizer."""
        groups = _item(content, "param_groups")
        if groups is None or not isinstance(groups.node, tree.ListNode):
            return None
        found = []
        for group in groups.children:
            params = _item(group, "params")
            if params is None or not isinstance(params.node, tree.ValueNode):
                return None
            value = self._builder.value(params)
            if not isinstance(value, list):
                return None
            found.append(value)
        return found

    # --- state dicts -----------------------------------------------------------------------

    def _adopt(self, located: Located, current: Any, path: tree.Path, like: torch.Tensor | None) -> None:
        """Decide for every tensor of a stored state dict whether it goes into one that the object has, or a new one.

        ``current``: the object's present state dict, or what stands in it at this place.
        ``like``: the parameter that the state belongs to; new tensors of its shape are spread as it is.
        """
        node = located.node
        if located.is_tensor:
            self._adopt_tensor(located, current, path, like)
        elif isinstance(node, tree.DictNode):
            own = current if isinstance(current, dict) else {}
            for key, item in self._builder.items(located):
                self._adopt(item, own.get(key), (*path, key), like)
        elif isinstance(node, tree.ListNode | tree.TupleNode):
            is_alike = isinstance(current, list | tuple) and len(current) == len(node.items)
            for index, item in enumerate(located.children):
                self._adopt(item, current[index] if is_alike else None, (*path, index), like)

    def _adopt_tensor(self, leaf: Located, current: Any, path: tree.Path, like: torch.Tensor | None) -> None:
        if self._placement.fits(leaf, current):
            self._placement.add(leaf, current, tree.render(path))
            self._builder.given[path] = current
        elif like is not None:
            _, shape = self._placement.form(leaf)
            is_off_host = self._placement.device_type(leaf) != "cpu"
            is_spread = shape != () and tuple(like.shape) == shape
            self._placement.fresh(leaf, like.device if is_off_host else None, like if is_spread else None)


def _item(located: Located, key: str) -> Located | None:
    node = located.node
    if not isinstance(node, tree.DictNode) or key not in node.keys:
        return None
    return located.children[node.keys.index(key)]


def _live_groups(current: dict[str, Any]) -> list[list[Any]]:
    return [list(group["params"]) for group in current.get("param_groups", [])]


def _differing_sizes(stored: list[list[Any]] | None, live: list[list[Any]]) -> str:
    """Why ``load_state_dict`` would refuse these groups; empty if it takes them.

    It is found here because ``load_state_dict`` would refuse them only after other things had been touched.
    """
    sizes = None if stored is None else [len(each) for each in stored]
    if sizes == [len(each) for each in live]:
        return ""
    has = "no state of an optimizer" if sizes is None else f"parameter groups of {sizes} parameters"
    return f"{has} in the checkpoint, groups of {[len(each) for each in live]} in the state"


def _differing_names(stored: list[list[Any]] | None, live: list[list[str]]) -> str:
    """The same for groups whose parameters have names."""
    if stored is None:
        return _differing_sizes(stored, live)
    if [sorted(map(str, each)) for each in stored] == [sorted(each) for each in live]:
        return ""
    saved = [name for each in stored for name in each]
    if all(isinstance(name, int) for name in saved):
        return (
            "the checkpoint numbers its parameters (it was saved from an optimizer, not a TrainState), the state "
            "names them: restore it into the same form"
        )
    strange = sorted(set(map(str, saved)) ^ {name for each in live for name in each})
    differ = f"; only one of them has {', '.join(strange[:5])}" if strange else ""
    return f"other parameter groups in the checkpoint than in the state{differ}"


def _keep_dtypes(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Undo the cast of ``Optimizer.load_state_dict``, which gives floating-point state the dtype of its parameter.

    A master copy in fp32 of a bf16 parameter was saved as fp32, and is restored as fp32.
    """
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        now = optimizer.state.get(parameter, {})
        for name, saved in state["state"].get(number, {}).items():
            cast = now.get(name)
            if isinstance(saved, torch.Tensor) and isinstance(cast, torch.Tensor) and cast.dtype != saved.dtype:
                now[name] = saved.to(cast.device)
