"""The fence: before its update, every optimizer in the process waits for what is not copied yet.

One global pre-hook of ``torch.optim`` covers foreach, fused and plain optimizers, several of them, and
gradient accumulation (it runs once per ``step()``, not per backward).  It is idempotent and costs
one to two microseconds when nothing is pending.  Not covered, because torch calls no hook there: updates
written by hand, and ``load_state_dict``; ``Checkpointer.fence()`` is for those.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from stillframe.link import messages

logger = logging.getLogger("stillframe")

_TELL_S = 10.0
"""After so long, a wait for a hold is mentioned."""
_MAX_UPDATES = 256
"""Between two saves; they go in one packet."""


class OptimizerFence:
    """Calls ``fence`` before every optimizer step until removed.  Thread: any may make and remove one.

    All share one hook of torch, which goes through its hooks while they run: another thread may open a checkpointer
    while an update waits in one.
    """

    def __init__(self, fence: Callable[[], None]) -> None:
        self._fence = fence
        self._made: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        hook.add(self)

    def before_step(self, optimizer: Any) -> None:
        self._fence()
        self._made[optimizer] = self._made.get(optimizer, 0) + 1

    @property
    def updates(self) -> int:
        """How many updates there have been: those of the optimizer that made most, as several may take turns."""
        return max(self._made.values(), default=0)

    def remove(self) -> None:
        """May be called again."""
        hook.remove(self)


class _Hook:
    """There while there are fences."""

    def __init__(self) -> None:
        self._changing = threading.RLock()
        self.fences: tuple[OptimizerFence, ...] = ()
        self._handle: Any = None

    def add(self, fence: OptimizerFence) -> None:
        with self._changing:
            self.fences += (fence,)
            if self._handle is None:
                self._handle = register_optimizer_step_pre_hook(self._before_step)

    def remove(self, fence: OptimizerFence) -> None:
        with self._changing:
            self.fences = tuple(each for each in self.fences if each is not fence)
            if not self.fences and self._handle is not None:
                self._handle.remove()
                self._handle = None

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for each in self.fences:
            each.before_step(optimizer)


hook = _Hook()


class Fence:
    """What ``Checkpointer.fence`` returns, so that an update can stand inside ``with``; the wait is over."""

    def __enter__(self) -> Fence:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class Holds:
    """What ``Checkpointer.hold`` asked for: fences wait until every hold is released.  Thread: safe from any."""

    def __init__(self) -> None:
        self._hints: dict[threading.Event, str] = {}

    def add(self, hint: str) -> Callable[[], None]:
        """Hold from now on, until the function returned is called."""
        released = threading.Event()
        self._hints[released] = hint

        def release() -> None:
            self._hints.pop(released, None)
            released.set()

        return release

    def wait(self) -> bool:
        """Block until all are released; tells whether there were any."""
        holds = self._hints.copy()
        for released, hint in holds.items():
            if not released.wait(_TELL_S):
                why = f": {hint}" if hint else ""
                logger.warning("an update has waited %g s for a save that is not requested yet%s", _TELL_S, why)
                released.wait()
        return bool(holds)


class UpdateLog:
    """When updates were about to begin, and how long the fence held them back: for the keeper's journal.

    Bounded: of very many updates the newest are kept, those that waited apart from those that did not.
    """

    def __init__(self) -> None:
        self._passed: deque[tuple[float, float]] = deque(maxlen=_MAX_UPDATES)
        self._waited: deque[tuple[float, float]] = deque(maxlen=_MAX_UPDATES)

    def add(self, began_s: float, waited_s: float, has_waited: bool) -> None:
        (self._waited if has_waited else self._passed).append((began_s, waited_s))

    def take(self) -> messages.Updates:
        """Those since this was last asked, in order."""
        updates: list[tuple[float, float]] = []
        for each in (self._waited, self._passed):
            with contextlib.suppress(IndexError):  # the training thread may add meanwhile
                while True:
                    updates.append(each.popleft())
        return tuple(sorted(updates))
