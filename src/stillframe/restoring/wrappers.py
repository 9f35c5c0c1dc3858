"""Restoring tensors that wrap others (:mod:`stillframe.state.wrappers`).

A stored wrapper goes into a live one of the same kind: of the same class, dtype, shape and context, with inner tensors
of the same names and forms.  These are filled in place.  If anything differs, all of the live wrapper stays as it was:
codes without their scales would be other numbers.

Which inner tensor follows the shape of a wrapper, and how, only its class knows.  So what one rank held of a DTensor
of wrappers goes back only where a rank holds the same boxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stillframe.checkpoint.stored import Located
from stillframe.format import tree
from stillframe.format.values import Unencodable
from stillframe.restoring.findings import Findings, form_text, live_text, wrapper_text
from stillframe.restoring.place import Placement
from stillframe.state.boxes import whole_box
from stillframe.state.spread import boxes_of, part_of, spread_of
from stillframe.state.torch_internals import is_dtensor, local_of
from stillframe.state.wrappers import (
    Wrapper,
    holds_its_tensors,
    is_same_context,
    is_wrapper,
    put_together,
    take_apart,
)

_Pairs = list[tuple[Located, torch.Tensor, str]]


class _Differs(Exception):
    """At a path, and why."""

    def __init__(self, path: tree.Path, why: str) -> None:
        super().__init__(why)
        self.path = path


class Wrappers:
    """The part of a match that knows wrappers."""

    def __init__(self, findings: Findings, placement: Placement) -> None:
        self._findings = findings
        self._placement = placement

    def place(self, located: Located, live: Any, path: tree.Path) -> bool:
        """The stored wrapper goes into this live one; ``False`` if it does not fit, which is noted."""
        assert isinstance(located.node, tree.WrapperNode)
        try:
            pairs = self._pairs(located, located.node, live, path)
        except _Differs as differs:
            self._findings.mismatch(differs.path, str(differs))
            return False
        for leaf, tensor, name in pairs:
            self._placement.add(leaf, tensor, name)
        return True

    def make(self, located: Located, like: torch.Tensor | None) -> torch.Tensor | None:
        """A new wrapper to be filled, for the state of the parameter ``like``; ``None`` if none can be made."""
        node = located.node
        assert isinstance(node, tree.WrapperNode)
        if node.part_of is None:
            is_right = not is_dtensor(like) or like is None or tuple(like.shape) != node.shape
        else:
            is_right = _is_spread_alike(node.part_of, like)
        if not is_right:
            return None
        local = self._make(located, node, None if like is None else like.device)
        if local is None or node.part_of is None or like is None:
            return local
        from torch.distributed.tensor import DTensor

        spread: Any = like
        made: torch.Tensor = DTensor.from_local(
            local, spread.device_mesh, spread.placements, run_check=False, shape=spread.shape, stride=spread.stride()
        )
        return made

    def _make(self, located: Located, node: tree.WrapperNode, device: torch.device | None) -> torch.Tensor | None:
        tensors: dict[str, torch.Tensor] = {}
        for name, item in zip(node.names, located.children, strict=True):
            inner = item.node
            if isinstance(inner, tree.WrapperNode):
                made = self._make(item, inner, device)
            else:
                is_off_host = self._placement.device_type(item) != "cpu"
                made = self._placement.fresh(item, device if is_off_host else None)
            if made is None:
                return None
            tensors[name] = made
        return put_together(node.type, node.context, tensors, node.dtype, node.shape)

    def _pairs(self, located: Located, node: tree.WrapperNode, live: Any, path: tree.Path) -> _Pairs:
        """The inner tensors, each with what goes into it.  Raises :class:`_Differs`."""
        local = local_of(live)
        stored = wrapper_text(node)
        differs = _Differs(path, f"{stored} in the checkpoint, {live_text(live)} in the state")
        if not is_wrapper(local):
            raise differs
        try:
            own = take_apart(local)
            boxes = boxes_of(live) if is_dtensor(live) else (whole_box(own.shape),)
        except Unencodable as reason:
            raise _Differs(path, f"{stored} in the checkpoint, {reason} in the state") from None
        if own.kind != node.type:
            raise differs
        if not holds_its_tensors(local, own):
            raise _Differs(path, f"a {own.kind} makes its inner tensors anew when it is asked, and cannot be filled")
        self._check_boxes(node, boxes, tuple(live.shape), path)
        if (own.dtype, own.shape) != (node.dtype, node.shape):
            raise differs
        _check_kind(node, own, path)
        return self._inner(located, node, own, path)

    def _inner(self, located: Located, node: tree.WrapperNode, own: Wrapper, path: tree.Path) -> _Pairs:
        tensors = dict(zip(own.names, own.tensors, strict=True))
        pairs: _Pairs = []
        for name, item in zip(node.names, located.children, strict=True):
            here, tensor, inner = (*path, name), tensors[name], item.node
            if isinstance(inner, tree.WrapperNode):
                pairs += self._pairs(item, inner, tensor, here)
            elif self._placement.fits(item, tensor):
                pairs.append((item, tensor, tree.render(here)))
            else:
                form = form_text(*self._placement.form(item))
                raise _Differs(here, f"{form} in the checkpoint, {live_text(tensor)} in the state")
        return pairs

    def _check_boxes(self, node: tree.WrapperNode, boxes: Any, shape: tuple[int, ...], path: tree.Path) -> None:
        live = sorted((box.offset, box.shape, box.local) for box in boxes)
        whole = whole_box(node.shape)
        part = node.part_of or tree.PartOf(node.shape, [tree.PartBox(whole.offset, whole.shape, whole.local)])
        stored = sorted((box.offset, box.shape, box.local) for box in part.boxes)
        if (part.shape, stored) != (shape, live):
            raise _Differs(
                path,
                f"a {node.type} of shape {list(part.shape)}, of which one rank held {_boxes_text(stored)}, in the "
                f"checkpoint; {list(shape)}, of which this rank holds {_boxes_text(live)}, in the state. Only its "
                "class knows how its inner tensors are divided: it can be restored only into the layout that was saved",
            )


def _check_kind(node: tree.WrapperNode, own: Wrapper, path: tree.Path) -> None:
    if set(own.names) != set(node.names):
        raise _Differs(
            path,
            f"a {node.type} with the inner tensors {', '.join(node.names)} in the checkpoint, with "
            f"{', '.join(own.names)} in the state",
        )
    if not is_same_context(own.context, node.context):
        raise _Differs(
            path,
            f"a {node.type} with the context {node.context} in the checkpoint, with {own.context} in the state",
        )


def _is_spread_alike(part: tree.PartOf, like: Any) -> bool:
    if not is_dtensor(like):
        return False
    try:
        return part_of(spread_of(like)) == part
    except Unencodable:
        return False


def _boxes_text(boxes: Sequence[tuple[tuple[int, ...], ...]]) -> str:
    return ", ".join(f"{list(shape)} at {list(offset)}" for offset, shape, _ in boxes[:3]) or "nothing"
