"""What does not fit between a stored tree and the live state, and how it is told."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stillframe.errors import MismatchError
from stillframe.format import tree
from stillframe.model import RestoreReport
from stillframe.state.dtypes import PLAIN_TENSORS
from stillframe.state.torch_internals import local_of
from stillframe.state.wrappers import kind_of

_MAX_LISTED = 50
_MAX_NAMED = 3


@dataclass(slots=True)
class Findings:
    """Rendered paths that do not fit; those of ``mismatched`` are followed by what differs."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)

    @property
    def has_any(self) -> bool:
        return bool(self.missing or self.unexpected or self.mismatched)

    def miss(self, path: tree.Path, keys: Iterable[Any]) -> None:
        """The state has these below the path, the checkpoint does not."""
        self.missing.extend(tree.render((*path, key)) for key in keys)

    def not_expect(self, path: tree.Path, keys: Iterable[Any]) -> None:
        """The checkpoint has these below the path, the state does not."""
        self.unexpected.extend(tree.render((*path, key)) for key in keys)

    def mismatch(self, path: tree.Path, why: str) -> None:
        self.mismatched.append(f"{tree.render(path) or 'the state'}: {why}")

    def differ(self, path: tree.Path, stored: str, live: Any) -> None:
        """``stored``: what the checkpoint has in place of ``live``."""
        self.mismatch(path, f"{stored} in the checkpoint, {live_text(live)} in the state")

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
                'exclude="path/*" leaves these parts as they are; strict=False restores whatever matches.\n'
                + "\n".join(parts)
            )


def warn_of_rest(report: RestoreReport) -> None:
    """One warning, at the caller of the function that calls this, if not everything was restored.

    Comes last: where warnings are errors, the restore itself is complete.
    """
    parts = [
        f"{len(names)} {title} ({', '.join(names[:_MAX_NAMED])}{', …' if len(names) > _MAX_NAMED else ''})"
        for title, names in (
            ("in the state but not in the checkpoint", report.missing),
            ("in the checkpoint but not in the state", report.unexpected),
            ("different", [line.partition(": ")[0] for line in report.mismatched]),
        )
        if names
    ]
    if parts:
        warnings.warn(
            f"step {report.step} was restored in part; the rest of the state is as it was: {'; '.join(parts)}. The "
            "report that restore() returns lists everything",
            RuntimeWarning, stacklevel=3,
        )  # fmt: skip


def form_text(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def live_text(live: Any) -> str:
    """What a state has, for a person to read: the class of a tensor is told if it is not torch's own."""
    if not isinstance(live, torch.Tensor):
        return f"a {type(live).__name__}"
    local = local_of(live)
    form = form_text(live.dtype, live.shape)
    return form if type(local) in PLAIN_TENSORS else f"a {kind_of(local)} {form}"


def kind_text(node: tree.Node) -> str:
    """A container or value, for a person to read."""
    if isinstance(node, tree.WrapperNode):
        return wrapper_text(node)
    return f"a {type(node).__name__.removesuffix('Node').lower()}"


def wrapper_text(node: tree.WrapperNode) -> str:
    return f"a {node.type} {node.dtype}{list(node.shape)}"
