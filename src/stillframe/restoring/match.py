"""Matching a stored tree with the live state: what goes where, and what does not fit.

Nothing is touched here.  The result is a :class:`Match`: tensors to fill, and what to do after they were filled.
Tensors and plain values in dicts and lists are restored in place.  Objects are matched by :mod:`.match_objects`.
"""

from __future__ import annotations

from typing import Any

import torch

from stillframe.checkpoint.stored import Located, Stored
from stillframe.format import tree
from stillframe.restoring.findings import Findings, form_text, kind_text
from stillframe.restoring.load import Builder, Later, has_live_parts
from stillframe.restoring.match_objects import Objects
from stillframe.restoring.place import Placement
from stillframe.restoring.selection import Selection
from stillframe.restoring.state_dicts import StateDicts
from stillframe.restoring.wrappers import Wrappers
from stillframe.state.dtypes import is_array
from stillframe.state.train_state import TrainState
from stillframe.state.walk import is_stateful


class Match:
    """Thread: the caller's."""

    def __init__(self, stored: Stored, state: Any, selection: Selection) -> None:
        self.findings = Findings()
        self.placement = Placement(stored)
        self._selection = selection
        self._builder = Builder(stored, self.placement)
        self._wrappers = Wrappers(self.findings, self.placement)
        self._state_dicts = StateDicts(self.findings, self.placement, self._builder, self._wrappers, selection)
        self._objects = Objects(self.findings, self._builder, self._state_dicts, selection, self._match)
        self._apply = self._match(stored.tree, state, (), False)
        self.findings.mismatched += self.placement.conflicts()

    def apply(self) -> None:
        """Put values back into their containers and give objects their state dicts; after the placement is filled."""
        self._apply()

    def _match(self, located: Located, live: Any, path: tree.Path, is_settable: bool) -> Later:
        """What the container of ``live`` should hold after the restore; ``live`` itself if it is kept.

        ``is_settable``: its container can be given another value.
        """
        node = located.node
        if self._selection.of_stored(located, path) == "none":
            return lambda: live
        if isinstance(node, tree.LeafNode):
            return self._set(located, live, path, is_settable)
        if isinstance(live, TrainState):
            return self._objects.train_state(located, live, path)
        if is_stateful(live):
            return self._objects.object(located, live, path)
        if isinstance(node, tree.ObjectNode):
            return self._match(located.content, live, path, is_settable)
        if isinstance(node, tree.WrapperNode):
            self._wrappers.place(located, live, path)
            return lambda: live
        if located.is_tensor:
            return self._tensor(located, live, path)
        if isinstance(node, tree.ArrayNode):
            return self._array(located, live, path, is_settable)
        if isinstance(node, tree.DictNode) and isinstance(live, dict):
            return self._dict(located, live, path)
        if isinstance(node, tree.ListNode) and isinstance(live, list):
            return self._list(located, live, path)
        if isinstance(node, tree.TupleNode) and isinstance(live, tuple) and len(live) == len(node.items):
            return self._tuple(located, live, path, is_settable)
        if _is_plain(node, live):
            return self._set(located, live, path, is_settable)
        self.findings.differ(path, kind_text(node), live)
        return lambda: live

    def _is_chosen(self, live: Any, path: tree.Path) -> bool:
        """Whether anything is chosen of what the state has here, and the checkpoint does not."""
        return self._selection.of_live(live, path) != "none"

    def _set(self, located: Located, live: Any, path: tree.Path, is_settable: bool) -> Later:
        """A value that takes the place of ``live``; a list is put into the same list object."""
        is_whole = self._selection.of_stored(located, path) == "all"
        later = self._builder.whole(located, path) if is_whole else self._state_dicts.make(located, live, path)
        node = located.node
        is_list = isinstance(node, tree.ListNode) or (
            isinstance(node, tree.ValueNode) and isinstance(self._builder.value(located), list)
        )
        if isinstance(live, list) and is_list:

            def fill() -> Any:
                live[:] = later()
                return live

            return fill
        if not is_settable:
            self.findings.mismatch(
                path,
                "a plain value that is held by nothing a value can be put back into; hold it in a dict or a list",
            )
        return later

    def _tensor(self, leaf: Located, live: Any, path: tree.Path) -> Later:
        if self.placement.fits(leaf, live):
            self.placement.add(leaf, live, tree.render(path))
        else:
            self.findings.differ(path, form_text(*self.placement.form(leaf)), live)
        return lambda: live

    def _array(self, leaf: Located, live: Any, path: tree.Path, is_settable: bool) -> Later:
        assert isinstance(leaf.node, tree.ArrayNode)
        _, shape = self.placement.form(leaf)
        fits = is_array(live) and live.dtype.str == leaf.node.dtype and live.shape == shape and live.flags.writeable
        if not fits:
            return self._set(leaf, live, path, is_settable)
        later = self._builder.array(leaf)

        def fill() -> Any:
            live[...] = later()
            return live

        return fill

    def _dict(self, located: Located, live: dict[Any, Any], path: tree.Path) -> Later:
        stored = dict(self._builder.items(located))
        gone = [key for key in live if key not in stored and self._is_chosen(live[key], (*path, key))]
        is_plain = _is_plain(located.node, live)
        if not is_plain:
            self.findings.miss(path, gone)
        items: list[tuple[Any, Later]] = []
        for key, item in stored.items():
            here = (*path, key)
            if key in live:
                items.append((key, self._match(item, live[key], here, True)))
            elif self._selection.of_stored(item, here) == "none":
                continue
            elif is_plain:
                items.append((key, self._state_dicts.make(item, None, here)))
            elif not item.is_partial:  # else it is for other ranks to restore
                self.findings.not_expect(path, [key])

        def apply() -> Any:
            for key in gone if is_plain else ():
                del live[key]
            for key, later in items:
                live[key] = later()
            return live

        return apply

    def _list(self, located: Located, live: list[Any], path: tree.Path) -> Later:
        children = located.children
        if len(live) != len(children) and _is_plain(located.node, live):
            return self._set(located, live, path, True)
        both = min(len(live), len(children))
        self.findings.miss(
            path, [index for index in range(both, len(live)) if self._is_chosen(live[index], (*path, index))]
        )
        self.findings.not_expect(
            path,
            [
                index
                for index in range(both, len(children))
                if self._selection.of_stored(children[index], (*path, index)) != "none"
            ],
        )
        items = [self._match(children[index], live[index], (*path, index), True) for index in range(both)]

        def apply() -> Any:
            for index, later in enumerate(items):
                live[index] = later()
            return live

        return apply

    def _tuple(self, located: Located, live: tuple[Any, ...], path: tree.Path, is_settable: bool) -> Later:
        items = [
            self._match(item, part, (*path, index), is_settable)
            for index, (item, part) in enumerate(zip(located.children, live, strict=True))
        ]

        def apply() -> Any:
            parts = tuple(later() for later in items)
            return live if all(new is old for new, old in zip(parts, live, strict=True)) else parts

        return apply


def _is_plain(node: tree.Node, live: Any) -> bool:
    """Whether neither holds a tensor or an object; then the stored value replaces the live one as a whole."""
    return not has_live_parts(node) and not _has_live_parts(live)


def _has_live_parts(live: Any) -> bool:
    if isinstance(live, dict):
        return any(map(_has_live_parts, live.values()))
    if isinstance(live, list | tuple):
        return any(map(_has_live_parts, live))
    return isinstance(live, torch.Tensor | TrainState) or is_stateful(live)
