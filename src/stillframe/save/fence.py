"""The fence: before its update, every optimizer in the process waits for what is not copied yet.

One global pre-hook of ``torch.optim`` covers foreach, fused and plain optimizers, several of them, and
gradient accumulation (it runs once per ``step()``, not per backward).  It is idempotent and costs
one to two microseconds when nothing is pending.  Not covered, because torch calls no hook there: updates
written by hand, ``load_state_dict``, and replays of captured graphs (:mod:`stillframe.save.graphs`);
``Checkpointer.fence()`` is for those, and :mod:`stillframe.save.versions` finds most that lack it.

Where ``step`` is given a closure, forward and backward are in it, as always under Lightning.  torch's own optimizers
call it before they change anything: so there the fence is behind the closure's first call.  Other optimizers may change
parameters before they call it: there the fence comes first.

A compiled step has the fence in its graph (:mod:`stillframe.save.compiled`), or between two graphs.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stillframe.latch import Latch
from stillframe.link import messages
from stillframe.save import compiled
from stillframe.save.streams import Streams
from stillframe.state.torch_internals import outside_of_graphs
from stillframe.state.wrappers import plain_tensors

logger = logging.getLogger("stillframe")

_TELL_S = 10.0
"""After so long, a wait for a hold is mentioned."""
_MAX_UPDATES = 256
"""Between two saves; they go in one packet."""


def _nobody() -> None:
    return None


class OptimizerFence:
    """Calls ``fence`` before every optimizer step until removed.  Thread: any may make and remove one.

    ``fence`` is told whether another iteration begins: of several optimizers that take turns, one step counts.

    All share one hook of torch, which goes through its hooks while they run: another thread may open a checkpointer
    while an update waits in one.
    """

    def __init__(self, fence: Callable[[bool], None]) -> None:
        self._fence = fence
        self._made: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._leader: Callable[[], Any] = _nobody
        """The optimizer that made most updates, weakly.  Kept: there may be one optimizer for each parameter."""
        hook.add(self)

    def before_step(self, optimizer: Any) -> None:
        made = self._made.get(optimizer, 0) + 1
        begins = made > self.updates
        self._fence(begins)
        self._made[optimizer] = made
        if begins:
            self._leader = weakref.ref(optimizer)

    @property
    def updates(self) -> int:
        """How many updates there have been: those of the optimizer that made most, as several may take turns."""
        leader = self._leader()
        if leader is None and self._made:  # it is gone, or there was none
            leader = max(list(self._made), key=lambda optimizer: self._made.get(optimizer, 0), default=None)
            self._leader = _nobody if leader is None else weakref.ref(leader)
        return 0 if leader is None else self._made.get(leader, 0)

    def has_updated(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether one of these is, by its memory, a parameter of an optimizer that has made an update.

        True if that cannot be determined: it is asked for a warning, which must cost no save.
        """
        try:
            groups = [group for optimizer in list(self._made) for group in optimizer.param_groups]
            parameters = (parameter for group in groups for parameter in group["params"])
            known = {each.data_ptr() for parameter in parameters for each in plain_tensors(parameter)} - {0}
            return any(tensor.data_ptr() in known for tensor in tensors)
        except Exception:  # an optimizer of an unusual kind, a parameter without memory
            return True

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
                self._handle = register_optimizer_step_pre_hook(_before_step)

    def remove(self, fence: OptimizerFence) -> None:
        with self._changing:
            self.fences = tuple(each for each in self.fences if each is not fence)
            if not self.fences and self._handle is not None:
                self._handle.remove()
                self._handle = None


hook = _Hook()


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """What torch calls; what it compiles, too.  Returns other arguments for the step, or ``None``."""
    if not torch.compiler.is_compiling():
        if _calls_closure_first(optimizer):
            if len(args) > 1 and callable(args[1]):
                return (args[0], _fenced(optimizer, args[1]), *args[2:]), kwargs
            if callable(kwargs.get("closure")):
                return args, {**kwargs, "closure": _fenced(optimizer, kwargs["closure"])}
        _fence(optimizer)
    elif not compiled.fence_in_graph(optimizer):
        _fence_between_graphs(optimizer)
    return None


def _calls_closure_first(optimizer: Any) -> bool:
    """Whether its ``step`` is one of torch's own; a subclass may have inherited it."""
    return str(type(optimizer).step.__module__).startswith("torch.optim.")


def _fenced(optimizer: Any, closure: Callable[[], Any]) -> Callable[[], Any]:
    """A closure behind whose first call the fence is: those that follow are of the same update."""
    is_fenced = False

    def call() -> Any:
        nonlocal is_fenced
        loss = closure()
        if not is_fenced:
            _fence(optimizer)
            is_fenced = True
        return loss

    return call


def _fence(optimizer: Any) -> None:
    for each in hook.fences:
        each.before_step(optimizer)


_fence_between_graphs = outside_of_graphs(_fence)
compiled.on_fence(_fence)


class Holds:
    """What ``spi.UpdateGate`` waits for, until every hold is released.  Thread: safe from any."""

    def __init__(self) -> None:
        self._hints: dict[Latch, str] = {}

    def add(self, hint: str) -> Callable[[], None]:
        """Hold from now on, until the function returned is called."""
        released = Latch()
        _held[released] = threading.get_ident(), Streams()
        self._hints[released] = hint

        def release() -> None:
            self._hints.pop(released, None)
            _held.pop(released, None)
            released.unlock()

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


_held: dict[Latch, tuple[int, Streams]] = {}
"""Every hold of the process that is not released: which thread made it, and the streams it computes on."""


def held_streams() -> contextlib.AbstractContextManager[None]:
    """For a save that this thread requests behind a hold of another's: within, it computes on the streams of that one.

    Of several the oldest counts, as saves are requested in the order of their holds.
    """
    for thread, streams in _held.copy().values():
        if thread != threading.get_ident():
            return streams.taken()
    return contextlib.nullcontext()


class UpdateLog:
    """When updates were about to begin, and how long the fence held them back: for the keeper's journal.

    Bounded: of very many updates the newest are kept, those that waited apart from those that did not.
    """

    def __init__(self) -> None:
        self._passed: deque[tuple[float, float, bool]] = deque(maxlen=_MAX_UPDATES)
        self._waited: deque[tuple[float, float, bool]] = deque(maxlen=_MAX_UPDATES)

    def add(self, began_s: float, waited_s: float, has_waited: bool, begins: bool) -> None:
        (self._waited if has_waited else self._passed).append((began_s, waited_s, begins))

    def take(self) -> messages.Updates:
        """Those since this was last asked, in order."""
        updates: list[tuple[float, float, bool]] = []
        for each in (self._waited, self._passed):
            with contextlib.suppress(IndexError):  # the training thread may add meanwhile
                while True:
                    updates.append(each.popleft())
        return tuple(sorted(updates))
