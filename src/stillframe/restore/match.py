"""Matching a stored tree with the live state: what goes where, and what does not fit.

Nothing is touched here.  The result is a :class:`Match`: tensors to fill, and what to do when they are
filled.  Tensors and plain values in dicts and lists are restored in place; for objects see :mod:`.objects`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from stillframe.checkpoint.stored import Stored
from stillframe.errors import MismatchError
from stillframe.format import values
from stillframe.format.tree import (
    ArrayNode,
    DictNode,
    LeafNode,
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
from stillframe.restore.load import Builder, Later, has_live_parts
from stillframe.restore.objects import Objects
from stillframe.restore.place import Placement, StoredTensor
from stillframe.state.dtypes import is_array
from stillframe.state.train_state import TrainState
from stillframe.state.walk import is_stateful

_MAX_LISTED = 50


@dataclass(slots=True)
class Findings:
    """Paths that do not fit."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)

    @property
    def has_any(self) -> bool:
        return bool(self.missing or self.unexpected or self.mismatched)

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

    def __init__(self, stored: Stored, state: Any) -> None:
        self.findings = Findings()
        self.placement = Placement(stored)
        self._stored = stored
        self.builder = Builder(stored, self.placement)
        self._objects = Objects(self)
        self._apply = self.match(stored.tree, state, (), False)
        self.findings.mismatched += self.placement.conflicts()

    def apply(self) -> None:
        """Put values back into their holders and hand objects their state dicts; after the placement is filled."""
        self._apply()

    def match(self, node: Node, live: Any, path: Path, is_settable: bool) -> Later:
        """What the holder of ``live`` should hold when all is filled; ``live`` itself where it is kept."""
        if isinstance(node, LeafNode):
            return self._set(node, live, path, is_settable)
        if isinstance(live, TrainState):
            return self._objects.train_state(node, live, path)
        if is_stateful(live):
            if isinstance(node, ObjectNode | DictNode):
                return self._objects.object(node.item if isinstance(node, ObjectNode) else node, live, path)
            self.differ(node, live, path)
            return lambda: live
        if isinstance(node, ObjectNode):
            return self.match(node.item, live, path, is_settable)
        if isinstance(node, TensorNode | ShardedNode):
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
            self.differ(node, live, path)
            return lambda: live
        return self._set(node, live, path, is_settable)

    def differ(self, node: Node, live: Any, path: Path) -> None:
        kinds = f"a {_kind(node)} in the checkpoint, a {type(live).__name__} in the state"
        self.findings.mismatched.append(f"{render(path)}: {kinds}")

    def _set(self, node: Node, live: Any, path: Path, is_settable: bool) -> Later:
        """A value that takes the place of ``live``; a list goes into the same list object."""
        later = self.built(node, path)
        is_list = isinstance(node, ListNode) or (
            isinstance(node, ValueNode) and isinstance(self.builder.value(node), list)
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

    def built(self, node: Node, path: Path) -> Later:
        later = self.builder.build(node, path)
        assert later is not None  # only= is not used here
        return later

    def _tensor(self, node: StoredTensor, live: Any, path: Path) -> Later:
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
        later = self.builder.array(node)

        def fill() -> Any:
            live[...] = later()
            return live

        return fill

    def _dict(self, node: DictNode, live: dict[Any, Any], path: Path) -> Later:
        stored = dict(zip(self.builder.keys(node), node.items, strict=True))
        is_plain = not has_live_parts(node) and not _has_live_parts(live)
        items: list[tuple[Any, Later]] = []
        for key, item in stored.items():
            if key in live:
                items.append((key, self.match(item, live[key], (*path, key), True)))
            elif is_plain:
                items.append((key, self.built(item, (*path, key))))
            elif not self.is_partial((*path, key)):
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

    def is_partial(self, path: Path) -> bool:
        """Whether only some ranks have what stands there: then it is for others to take."""
        return self._stored.is_merged and tuple(_key_text(key) for key in path) in self._stored.partial

    def _list(self, node: ListNode, live: list[Any], path: Path) -> Later:
        is_plain = not has_live_parts(node) and not _has_live_parts(live)
        if is_plain and len(live) != len(node.items):
            return self._set(node, live, path, True)
        both = min(len(live), len(node.items))
        self.findings.missing.extend(render((*path, index)) for index in range(both, len(live)))
        self.findings.unexpected.extend(render((*path, index)) for index in range(both, len(node.items)))
        items = [self.match(node.items[index], live[index], (*path, index), True) for index in range(both)]

        def apply() -> Any:
            for index, later in enumerate(items):
                live[index] = later()
            return live

        return apply

    def _tuple(self, node: TupleNode, live: tuple[Any, ...], path: Path, is_settable: bool) -> Later:
        items = [
            self.match(item, part, (*path, index), is_settable)
            for index, (item, part) in enumerate(zip(node.items, live, strict=True))
        ]

        def apply() -> Any:
            parts = tuple(later() for later in items)
            return live if all(new is old for new, old in zip(parts, live, strict=True)) else parts

        return apply


def _key_text(key: Any) -> str:
    return msgspec.json.encode(values.encode(key)).decode()


def _has_live_parts(live: Any) -> bool:
    if isinstance(live, dict):
        return any(map(_has_live_parts, live.values()))
    if isinstance(live, list | tuple):
        return any(map(_has_live_parts, live))
    return isinstance(live, torch.Tensor | TrainState) or is_stateful(live)


def _form(dtype: torch.dtype, shape: Any) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _kind(node: Node) -> str:
    return type(node).__name__.removesuffix("Node").lower()
