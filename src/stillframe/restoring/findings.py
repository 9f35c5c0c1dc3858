"""What does not fit between a stored tree and the live state, and how it is told."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stillframe.errors import MismatchError
from stillframe.format import tree

_MAX_LISTED = 50


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
        is_tensor = isinstance(live, torch.Tensor)
        has = form_text(live.dtype, live.shape) if is_tensor else f"a {type(live).__name__}"
        self.mismatch(path, f"{stored} in the checkpoint, {has} in the state")

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


def form_text(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def kind_text(node: tree.Node) -> str:
    """A container or value, for a person to read."""
    return f"a {type(node).__name__.removesuffix('Node').lower()}"
