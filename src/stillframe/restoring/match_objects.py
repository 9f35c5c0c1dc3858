"""Matching a stored tree with live objects: modules, optimizers, :class:`TrainState`, and others.

A module is restored in place.  An optimizer, or any other object, is given a state dict through ``load_state_dict``.
That state dict (:mod:`.state_dicts`) is made of the object's own tensors where they fit, and of new ones where it has
none yet, such as an optimizer before its first step.  New state of a parameter that is a DTensor is spread as the
parameter is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from stillframe.checkpoint.stored import Located
from stillframe.errors import StateError, text_of
from stillframe.format import tree
from stillframe.restoring.findings import Findings, kind_text
from stillframe.restoring.load import Builder, Later
from stillframe.restoring.optimizers import (
    Saved,
    completed,
    differing_kinds,
    differing_names,
    differing_sizes,
    groups_of,
    has_state_shaped_alike,
    saved_optimizer,
)
from stillframe.restoring.selection import Selection
from stillframe.restoring.state_dicts import StateDicts
from stillframe.state.live import tensors_in
from stillframe.state.owners import has_own_layout, optimizers_in
from stillframe.state.torch_internals import local_of
from stillframe.state.train_state import TrainState, clean
from stillframe.state.walk import module_state
from stillframe.state.wrappers import is_wrapper

MatchBelow = Callable[[Located, Any, tree.Path, bool], Later]
"""Matches what an object holds: (stored, live, path, whether the container of ``live`` can be given another value)."""


class Objects:
    """The part of a match that knows objects."""

    def __init__(
        self, findings: Findings, builder: Builder, state_dicts: StateDicts, selection: Selection, match: MatchBelow
    ) -> None:
        self._findings = findings
        self._builder = builder
        self._state_dicts = state_dicts
        self._selection = selection
        self._match = match

    def object(self, located: Located, live: Any, path: tree.Path) -> Later:
        """Any object with ``state_dict`` and ``load_state_dict``."""
        if not isinstance(located.node, tree.ObjectNode | tree.DictNode):
            self._findings.differ(path, kind_text(located.node), live)
            return lambda: live
        content = located.content
        if isinstance(live, torch.nn.Module):
            return self._module(content, live, path, is_clean=False)
        current = live.state_dict()
        if isinstance(live, torch.optim.Optimizer):
            if not has_own_layout(current):
                return self._plain_optimizer(located, live, current, path)
            if saved_optimizer(located, self._builder) is not None:
                self._findings.mismatch(
                    path,
                    f"the checkpoint has the state of an optimizer in torch's own layout; this {type(live).__name__} "
                    "has a layout of its own (strict=False keeps it as it is)",
                )
                return lambda: live
        later = self._state_dicts.make(content, current, path)

        def apply() -> Any:
            state = later()
            held = _held(live, state) if isinstance(live, torch.optim.Optimizer) else []
            with _loading(live, path):
                live.load_state_dict(state)
            _keep_held(held)
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
        for key in parts:
            if key not in stored and self._selection.of_live(parts[key], (*path, key)) != "none":
                self._findings.miss(path, [key])
        found: list[tuple[str, Later]] = []
        for key, item in stored.items():
            here = (*path, key)
            if self._selection.of_stored(item, here) == "none":
                continue
            if key not in parts:
                self._findings.not_expect(path, [key])
            elif key == "model":
                found.append((key, self._module(item.content, live.module, here, is_clean=True)))
            elif key == "optimizer" and live.optimizer is not None:
                found.append((key, self._named_optimizer(item, live, live.optimizer, here)))
            else:
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
            with _loading(live, path):
                if type(live).load_state_dict is torch.nn.Module.load_state_dict:
                    # Of a wrapper it does cost: copying may quantise anew, or not be there at all.
                    plain = {name: value for name, value in full.items() if not is_wrapper(local_of(value))}
                    live.load_state_dict(plain, strict=False)
                else:
                    live.load_state_dict(full)
            return live

        return apply

    # --- optimizers ------------------------------------------------------------------------

    def _plain_optimizer(
        self, located: Located, live: torch.optim.Optimizer, current: dict[str, Any], path: tree.Path
    ) -> Later:
        """Its state is stored by the numbers of its parameters."""
        saved = saved_optimizer(located, self._builder)
        problem = differing_sizes(saved, groups_of(current))
        if not self._fits(problem, saved, live, current, path):
            return lambda: live
        parameters = [each for group in live.param_groups for each in group["params"]]
        later = self._optimizer_state(located.content, live, current, dict(enumerate(parameters)), path)

        def apply() -> Any:
            state = later()
            with _loading(live, path):
                live.load_state_dict(state)
                _keep_dtypes(live, state)
            return live

        return apply

    def _named_optimizer(
        self, located: Located, train_state: TrainState, live: torch.optim.Optimizer, path: tree.Path
    ) -> Later:
        """Its state is stored by the names of its parameters in the model."""
        current = train_state.optimizer_state()
        saved = saved_optimizer(located, self._builder)
        problem = differing_names(saved, groups_of(current))
        if not self._fits(problem, saved, live, current, path):
            return lambda: live
        later = self._optimizer_state(located.content, live, current, train_state.parameters(), path)

        def apply() -> Any:
            with _loading(live, path):
                numbered = train_state.load_optimizer_state(later())
                _keep_dtypes(live, numbered)
            return live

        return apply

    def _fits(
        self, problem: str, saved: Saved | None, live: torch.optim.Optimizer, current: dict[str, Any], path: tree.Path
    ) -> bool:
        """``problem``: what is known to be wrong already."""
        if not problem and saved is not None:
            groups, states = (self._selection.of_live(current[key], (*path, key)) for key in ("param_groups", "state"))
            problem = differing_kinds(saved, live, current, has_settings=groups != "none", has_state=states != "none")
        if problem:
            self._findings.mismatch(path, problem)
        return not problem

    def _optimizer_state(
        self,
        content: Located,
        live: torch.optim.Optimizer,
        current: dict[str, Any],
        parameters: dict[Any, torch.Tensor],
        path: tree.Path,
    ) -> Later:
        """The state dict to load; ``parameters`` by the keys of its ``state``."""
        rows: dict[Any, Later] = {}
        for key, item in self._builder.items(content):
            here = (*path, key)
            if key == "state" and isinstance(item.node, tree.DictNode):
                rows[key] = self._state_dicts.make_by_parameter(
                    item, current["state"], here, parameters, is_shaped_alike=has_state_shaped_alike(live)
                )
            else:
                rows[key] = self._state_dicts.make(item, current.get(key), here)

        def make() -> dict[str, Any]:
            state = {key: later() for key, later in rows.items()}
            return {**state, "param_groups": completed(state["param_groups"], current["param_groups"])}

        return make


@contextlib.contextmanager
def _loading(live: Any, path: tree.Path) -> Iterator[None]:
    """An error of the object says which one it is."""
    try:
        yield
    except Exception as error:
        where = tree.render(path) or "the state"
        raise StateError(
            f"{where}: load_state_dict of {type(live).__name__} raised {type(error).__name__}: {text_of(error)}"
        ) from error


_Held = tuple[torch.optim.Optimizer, Any, str, torch.Tensor]


def _held(optimizer: torch.optim.Optimizer, state: Any) -> list[_Held]:
    """The tensors of a state dict that it, or one that it wraps, holds for a parameter."""
    given = {id(value) for value in tensors_in(state).values()}
    return [
        (one, parameter, name, value)
        for one in optimizers_in(optimizer)
        for parameter, own in one.state.items()
        if isinstance(own, dict)
        for name, value in own.items()
        if id(value) in given
    ]


def _keep_held(held: list[_Held]) -> None:
    """The same as :func:`_keep_dtypes`, of an optimizer with a layout of its own: what was filled is held again."""
    for optimizer, parameter, name, value in held:
        now = optimizer.state.get(parameter, {}).get(name)
        if isinstance(now, torch.Tensor) and now.dtype != value.dtype:
            optimizer.state[parameter][name] = value


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
