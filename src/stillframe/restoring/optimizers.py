"""What tells one optimizer's state from another's: its groups, its settings, and what it holds for a parameter.

``Optimizer.load_state_dict`` asks only for groups of the same sizes: it takes AdamW's state for SGD's, and the next
update fails, or goes wrong.  So settings (the keys of the groups) and state are compared first:

- A state that was saved by the same class, or by a class that it derives from, always fits.  Other versions of torch
  have other settings for the same optimizer; what the checkpoint lacks stays as it is.
- Of another class, or of one that is not known (a plain state dict), it does not fit if each side has settings, or
  state, that the other lacks.  If it is known to be another class, settings that only one side has are enough.
- Settings that only choose an implementation, and those that learning rate schedulers put down, tell nothing.
- Most optimizers hold tensors of the shape of their parameter: then state of another shape is of another parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from stillframe.checkpoint.stored import Located
from stillframe.format import tree
from stillframe.restoring.load import Builder

_TELL_NOTHING = {
    "params", "param_names",
    "foreach", "fused", "capturable", "differentiable", "maximize",
    "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr",
}  # fmt: skip
_MAX_NAMED = 8


@dataclass(frozen=True, slots=True)
class Saved:
    """The state of an optimizer in a checkpoint."""

    type: str
    """Its class; empty if it was saved as a plain dict."""
    groups: list[list[Any]]
    """The parameters of each group, by number or name."""
    settings: set[str]
    held: set[str]
    """What it holds for its parameters; empty before its first step."""


def saved_optimizer(located: Located, builder: Builder) -> Saved | None:
    """``None`` if it is no state of an optimizer with torch's own layout."""
    content = located.content
    groups, states = item_of(content, "param_groups"), item_of(content, "state")
    if groups is None or not isinstance(groups.node, tree.ListNode):
        return None
    found: list[list[Any]] = []
    settings: set[str] = set()
    for group in groups.children:
        params = item_of(group, "params")
        value = builder.value(params) if params is not None and isinstance(params.node, tree.ValueNode) else None
        if not isinstance(value, list):
            return None
        found.append(value)
        settings.update(str(key) for key, _ in builder.items(group))
    held: set[str] = set()
    for each in states.children if states is not None else ():
        if isinstance(each.node, tree.DictNode):
            held.update(str(key) for key, _ in builder.items(each))
    kind = located.node.type if isinstance(located.node, tree.ObjectNode) else ""
    return Saved(kind, found, settings, held)


def has_state_shaped_alike(live: torch.optim.Optimizer) -> bool:
    """Whether all that it holds for a parameter has the parameter's shape, but for scalars.

    So it is with torch's own, but for two: one keeps rows and columns, one vectors of all parameters together.  Of
    others nothing is known: some project, or keep blocks.
    """
    kind = type(live)
    return kind.__module__.startswith("torch.optim.") and kind.__name__ not in ("Adafactor", "LBFGS")


def groups_of(current: dict[str, Any]) -> list[list[Any]]:
    """The parameters of each group of a live state dict."""
    return [list(group["params"]) for group in current["param_groups"]]


def differing_kinds(
    saved: Saved, live: torch.optim.Optimizer, current: dict[str, Any], *, has_settings: bool, has_state: bool
) -> str:
    """Why the state is of another kind of optimizer; empty if it is not.

    ``current``: the live state dict.  ``has_settings``, ``has_state``: whether these are to be restored.
    """
    classes = [each for each in type(live).__mro__ if each not in (torch.optim.Optimizer, object)]
    if saved.type in {f"{each.__module__}.{each.__qualname__}" for each in classes}:
        return ""
    settings = {str(key) for group in current["param_groups"] for key in group}
    held = {str(key) for state in current["state"].values() if isinstance(state, dict) for key in state}
    only_saved, only_live = (saved.settings - settings) - _TELL_NOTHING, (settings - saved.settings) - _TELL_NOTHING
    is_known = bool(saved.type) and saved.type.rpartition(".")[2] not in {each.__name__ for each in classes}
    differs = bool(only_saved or only_live) if is_known else bool(only_saved and only_live)
    if not (differs and has_settings):
        only_saved, only_live = set(), set()
    if has_state and saved.held - held and held - saved.held:
        only_saved, only_live = only_saved | (saved.held - held), only_live | (held - saved.held)
    if not only_saved and not only_live:
        return ""
    by = saved.type.rpartition(".")[2] or "an optimizer"
    return (
        f"saved by {by} with {_listed(only_saved)}; this {type(live).__name__} has {_listed(only_live)} "
        "(strict=False keeps it as it is)"
    )


def completed(groups: list[dict[str, Any]], current: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Saved groups with the settings that only the live ones have: another version of torch knows more of them."""
    return [
        {**saved, **{key: own[key] for key in own if key not in saved}}
        for saved, own in zip(groups, current, strict=True)
    ]


def _listed(names: set[str]) -> str:
    found = sorted(names)
    return ", ".join(found[:_MAX_NAMED]) + (", …" if len(found) > _MAX_NAMED else "") if found else "nothing else"


def item_of(located: Located, key: str) -> Located | None:
    node = located.node
    if not isinstance(node, tree.DictNode) or key not in node.keys:
        return None
    return located.children[node.keys.index(key)]


def differing_sizes(saved: Saved | None, live: list[list[Any]]) -> str:
    """Why ``load_state_dict`` would refuse these groups; empty if it takes them.

    It is found here because ``load_state_dict`` would refuse them only after other things had been touched.
    """
    sizes = None if saved is None else [len(each) for each in saved.groups]
    if sizes == [len(each) for each in live]:
        return ""
    has = "no state of an optimizer" if sizes is None else f"parameter groups of {sizes} parameters"
    return f"{has} in the checkpoint, groups of {[len(each) for each in live]} in the state"


def differing_names(saved: Saved | None, live: list[list[str]]) -> str:
    """The same for groups whose parameters have names."""
    if saved is None:
        return differing_sizes(saved, live)
    if [sorted(map(str, each)) for each in saved.groups] == [sorted(each) for each in live]:
        return ""
    names = [name for each in saved.groups for name in each]
    if all(isinstance(name, int) for name in names):
        return (
            "the checkpoint numbers its parameters (it was saved from an optimizer, not a TrainState), the state "
            "names them: restore it into the same form"
        )
    strange = sorted(set(map(str, names)) ^ {name for each in live for name in each})
    differ = f"; only one of them has {', '.join(strange[:5])}" if strange else ""
    return f"other parameter groups in the checkpoint than in the state{differ}"
