"""Making the state dict that an object is given: of its own tensors where they fit, else of new ones.

What is not chosen (:class:`Selection`) is taken from the state dict that the object has now.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stillframe.checkpoint.stored import Located
from stillframe.errors import MismatchError
from stillframe.format import tree
from stillframe.restoring.findings import Findings, wrapper_text
from stillframe.restoring.load import Builder, Later
from stillframe.restoring.place import Placement
from stillframe.restoring.selection import Selection
from stillframe.restoring.wrappers import Wrappers

_PARTLY = "only a part of it is chosen, and it has another length or form in the state: choose all of it, or nothing"


class StateDicts:
    """The part of a match that makes state dicts."""

    def __init__(
        self, findings: Findings, placement: Placement, builder: Builder, wrappers: Wrappers, selection: Selection
    ) -> None:
        self._findings = findings
        self._placement = placement
        self._builder = builder
        self._wrappers = wrappers
        self._selection = selection

    def make(self, located: Located, current: Any, path: tree.Path, like: torch.Tensor | None = None) -> Later:
        """``current``: the object's present state dict, or what stands in it at this place; ``None`` if nothing does.

        ``like``: the parameter that the state belongs to; new tensors of its shape are spread as it is.
        """
        share = self._selection.of_stored(located, path)
        if share == "all":
            self._adopt(located, current, path, like)
            return self._builder.whole(located, path)
        if share == "none":
            return lambda: current
        return self._mix(located.content, current, path, like)

    def make_by_parameter(
        self,
        located: Located,
        current: dict[Any, Any],
        path: tree.Path,
        parameters: dict[Any, torch.Tensor],
        *,
        is_shaped_alike: bool,
    ) -> Later:
        """As :meth:`make`, of a dict that holds the state of each parameter, under the parameter's key.

        ``is_shaped_alike``: what is held for a parameter has its shape, but for scalars.  What has another one is a
        mismatch, and the state of that parameter stays as it is.
        """
        stored = [
            (key, item)
            for key, item in self._builder.items(located)
            if key in parameters or not item.is_partial  # else it is for other ranks to restore
        ]
        strange = self._other_shapes(stored, path, parameters) if is_shaped_alike else set()
        kept = {key: current[key] for key in strange if key in current}
        later = self._dict(
            [(key, item) for key, item in stored if key not in strange],
            {key: own for key, own in current.items() if key not in strange},
            path,
            parameters.get,
        )
        return lambda: {**later(), **kept}

    def _other_shapes(
        self, stored: list[tuple[Any, Located]], path: tree.Path, parameters: dict[Any, torch.Tensor]
    ) -> set[Any]:
        """The parameters for which the checkpoint holds state of another shape; each tensor is noted."""
        found = set()
        for key, item in stored:
            if key not in parameters or not isinstance(item.node, tree.DictNode):
                continue
            live = tuple(parameters[key].shape)
            for name, leaf in self._builder.items(item):
                here = (*path, key, name)
                if not leaf.is_tensor or self._selection.of_stored(leaf, here) == "none":
                    continue
                _, shape = self._placement.form(leaf)
                if shape not in ((), live):
                    why = f"shape {list(shape)} in the checkpoint, for a parameter of shape {list(live)} in the state"
                    self._findings.mismatch(here, why)
                    found.add(key)
        return found

    def _dict(
        self,
        stored: list[tuple[Any, Located]],
        own: dict[Any, Any],
        path: tree.Path,
        like: Callable[[Any], torch.Tensor | None],
    ) -> Later:
        rows: dict[Any, Later] = {}
        for key, item in stored:
            here = (*path, key)
            if key in own or self._selection.of_stored(item, here) != "none":
                rows[key] = self.make(item, own.get(key), here, like(key))
        known = {key for key, _ in stored}
        others = {key: value for key, value in own.items() if key not in known}
        kept = {key: value for key, value in others.items() if self._selection.of_live(value, (*path, key)) != "all"}
        return lambda: {**{key: later() for key, later in rows.items()}, **kept}

    def _mix(self, located: Located, current: Any, path: tree.Path, like: torch.Tensor | None) -> Later:
        """Of a container of which only some is chosen."""
        node = located.node
        if isinstance(node, tree.DictNode) and isinstance(current, dict | None):
            return self._dict(self._builder.items(located), current or {}, path, lambda _key: like)
        kind = list if isinstance(node, tree.ListNode) else tuple
        if isinstance(current, kind) and len(current) == len(located.children):
            rows = [
                self.make(item, own, (*path, index), like)
                for index, (item, own) in enumerate(zip(located.children, current, strict=True))
            ]
            return lambda: kind(row() for row in rows)
        self._findings.mismatch(path, _PARTLY)
        return lambda: current

    def _adopt(self, located: Located, current: Any, path: tree.Path, like: torch.Tensor | None) -> None:
        """Decide for every tensor of a stored state dict whether it goes into one that the object has, or a new one."""
        node = located.node
        if located.is_tensor:
            self._adopt_tensor(located, current, path, like)
        elif isinstance(node, tree.WrapperNode):
            self._adopt_wrapper(located, node, current, path, like)
        elif isinstance(node, tree.DictNode):
            own = current if isinstance(current, dict) else {}
            for key, item in self._builder.items(located):
                self._adopt(item, own.get(key), (*path, key), like)
        elif isinstance(node, tree.ListNode | tree.TupleNode):
            is_alike = isinstance(current, list | tuple) and len(current) == len(node.items)
            for index, item in enumerate(located.children):
                self._adopt(item, current[index] if is_alike else None, (*path, index), like)

    def _adopt_wrapper(
        self, located: Located, node: tree.WrapperNode, current: Any, path: tree.Path, like: torch.Tensor | None
    ) -> None:
        if current is None:
            current = self._wrappers.make(located, like)
            if current is None:
                raise MismatchError(
                    f"{tree.render(path)}: the checkpoint holds {wrapper_text(node)}, the state has nothing there that "
                    "it could be put into, and none can be made: import its class, or let the optimizer make one step "
                    "before restore(). Nothing was touched"
                )
        else:
            self._wrappers.place(located, current, path)
        self._builder.given[path] = current

    def _adopt_tensor(self, leaf: Located, current: Any, path: tree.Path, like: torch.Tensor | None) -> None:
        if self._placement.fits(leaf, current):
            self._placement.add(leaf, current, tree.render(path))
            self._builder.given[path] = current
        elif like is not None:
            _, shape = self._placement.form(leaf)
            is_off_host = self._placement.device_type(leaf) != "cpu"
            is_spread = shape != () and tuple(like.shape) == shape
            self._placement.fresh(leaf, like.device if is_off_host else None, like if is_spread else None)
