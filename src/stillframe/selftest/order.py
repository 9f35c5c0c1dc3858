"""The order between compute, copy and update on a real device, with controls that must come out wrong.

The device is kept busy by matrix products that the host queues in no time.  Behind them stands the value that a save
must hold and, behind the fence, the next one.  A control leaves out a part of the order; if it, too, gives the right
value, nothing was shown.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import torch

from stillframe.checkpointer import Checkpointer
from stillframe.restoring.load import load
from stillframe.selftest.checks import Check, tell

COUNT = 16 << 20
"""Of four bytes: four chunks."""
_BUSY_S = 0.5
_WAIT_S = 60.0
_TRIES = 3
_SIDE = 1024


class Busy:
    """Work for the current stream that lasts for about half a second."""

    def __init__(self, device: torch.device) -> None:
        self._matrix = torch.full((_SIDE, _SIDE), 1e-3, device=device)
        self._into = torch.empty_like(self._matrix)
        torch.mm(self._matrix, self._matrix, out=self._into)  # what is made once is made now
        torch.accelerator.synchronize(device)
        self._times, began = 1, time.monotonic()
        while (took := self._time(device, began)) < 0.05 and self._times < 1 << 14:
            self._times, began = 2 * self._times, time.monotonic()
        self._times = max(round(self._times * _BUSY_S / max(took, 1e-3)), 1)

    def _time(self, device: torch.device, began: float) -> float:
        self.queue()
        torch.accelerator.synchronize(device)
        return time.monotonic() - began

    def queue(self) -> None:
        for _ in range(self._times):
            torch.mm(self._matrix, self._matrix, out=self._into)


def check_order(root: str, device: torch.device) -> None:
    """Tells every check."""
    weights = torch.zeros(COUNT, device=device)
    busy = Busy(device)
    with Checkpointer(root) as checkpointer:
        state = {"weights": weights}
        checkpointer.save(0, state).wait(timeout_s=_WAIT_S)  # the arena is there now
        tell(_first_shown(lambda: _unmarked(weights, busy, device)))
        step = 0
        for name, stream in (("the default stream", None), ("a stream of its own", torch.Stream(device))):
            step += 1
            found = _saved(root, checkpointer, step, state, busy, stream, checkpointer.fence)
            verdict = "pass" if found == [1.0] else "fail"
            tell(Check(f"order on {name}", verdict, f"saved {found}, must be [1.0]"))  # type: ignore[arg-type]
        steps = itertools.count(step + 1)

        def unfenced() -> Check:
            found = _saved(root, checkpointer, next(steps), state, busy, None, lambda: None)
            said = f"without the fence {found} is saved"
            if 2.0 in found:
                return Check("control: no fence", "pass", said)
            return Check("control: no fence", "note", f"{said}: not shown that the fence is needed")

        tell(_first_shown(unfenced))


def _first_shown(control: Callable[[], Check]) -> Check:
    """What goes wrong without an order goes wrong by chance."""
    for _ in range(_TRIES - 1):
        if (check := control()).verdict == "pass":
            return check
    return control()


def _unmarked(weights: torch.Tensor, busy: Busy, device: torch.device) -> Check:
    """A copy on a stream that waits for nothing sees the value before."""
    side, compute = torch.Stream(device), torch.accelerator.current_stream(device)
    host = torch.full((1024,), -1.0)
    _fill(weights, 0.0, device)
    busy.queue()
    weights.fill_(1.0)
    torch.accelerator.set_stream(side)
    try:
        host.copy_(weights[:1024], non_blocking=True)
        side.synchronize()
    finally:
        torch.accelerator.set_stream(compute)
    torch.accelerator.synchronize(device)
    found = host.unique().tolist()
    said = f"without a wait for the compute {found} is copied"
    if found == [0.0]:
        return Check("control: no mark", "pass", said)
    return Check("control: no mark", "note", f"{said}: not shown that the device runs behind the host")


def _fill(weights: torch.Tensor, value: float, device: torch.device) -> None:
    weights.data.fill_(value)  # not counted: what is left out must not be noticed
    torch.accelerator.synchronize(device)


def _saved(
    root: str,
    checkpointer: Checkpointer,
    step: int,
    state: dict[str, torch.Tensor],
    busy: Busy,
    stream: torch.Stream | None,
    fence: Callable[[], None],
) -> list[float]:
    """The values in a save that was requested while they were still to come, and followed by the next one."""
    weights = state["weights"]
    before = torch.accelerator.current_stream(weights.device)
    _fill(weights, 0.0, weights.device)
    if stream is not None:
        torch.accelerator.set_stream(stream)
    try:
        busy.queue()
        weights.data.fill_(1.0)
        save = checkpointer.save(step, state)
        fence()
        weights.data.fill_(2.0)
    finally:
        torch.accelerator.set_stream(before)
    save.wait(timeout_s=_WAIT_S)
    torch.accelerator.synchronize(weights.device)
    found: list[float] = load(root, step)["weights"].unique().tolist()
    return found
