"""The automatic fence: every optimizer in the process waits, before its update, for what is not copied yet.

One global pre-hook of ``torch.optim`` covers foreach, fused and plain optimizers, several of them, and
gradient accumulation (it runs once per ``step()``, not per backward).  It is idempotent and costs well
under a microsecond when nothing is pending.  Not covered, because torch calls no hook there: updates
written by hand, and ``load_state_dict``; ``Checkpointer.fence()`` is for those.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook


class OptimizerFence:
    """Calls ``fence`` before every optimizer step until removed."""

    def __init__(self, fence: Callable[[], None]) -> None:
        self._fence = fence
        self._handle = register_optimizer_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._fence()

    def remove(self) -> None:
        """May be called again."""
        self._handle.remove()


class Fence:
    """What ``Checkpointer.fence`` returns, so that an update can stand inside ``with``; the wait is over."""

    def __enter__(self) -> Fence:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass
