"""Raises at one line after the other of what saves and waits, and sees to it that nothing hangs afterwards.

``python -m tests.faults.every_line WHERE MODE PART PARTS ROOT``, where WHERE is

  stage, receive   the threads of a checkpointer: a bug, a dead device, anything, at that line
  arrive           the one that waits for the copies of an accelerator, likewise
  keeper           every thread of the keeper: a bug there, in the first keeper or in each
  save, fence, wait, restore, close    what the training thread calls: Ctrl-C at that line

and MODE is ``once`` or ``always`` (each time that the line is reached).  Prints how many lines were tried.
"""

from __future__ import annotations

import faulthandler
import logging
import shutil
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import stillframe
from stillframe import Checkpointer
from stillframe.save import keeper_process
from stillframe.testing.emulated import EmulatedDevice
from tests.faults.held import bootstrap

HERE = Path(stillframe.__file__).parent
WATCHED = ("save", "ranks", "restoring", "link", "latch.py", "checkpointer.py")
CASE_S = 60
STATE_ITEMS = 3_000_000
ARRIVE = "stillframe-arrive"
PLAIN = keeper_process._BOOTSTRAP


class Tracer:
    """Counts the lines that are reached for the first time, and raises at one of them."""

    def __init__(self, wanted: int, is_always: bool, error: Callable[[], BaseException], thread: str) -> None:
        self.wanted = wanted
        self.is_always = is_always
        self.error = error
        self.thread = thread
        self.seen: dict[tuple[str, int], int] = {}
        self.raised = 0
        self.is_on = True

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(str(HERE)) or not name[len(str(HERE)) + 1 :].startswith(WATCHED):
            return None
        if event == "line" and self.is_on and threading.current_thread().name == self.thread:
            number = self.seen.setdefault((name, frame.f_lineno), len(self.seen))
            if number == self.wanted and (self.is_always or not self.raised):
                self.raised += 1
                raise self.error()
        return self


def train_on(checkpointer: Checkpointer, state: dict[str, torch.Tensor], step: int) -> None:
    """What a loop does next, whatever has just happened; every call returns."""
    for work in (
        checkpointer.fence,
        lambda: checkpointer.save(step, state),
        checkpointer.fence,
        lambda: checkpointer.wait(timeout_s=CASE_S / 2),
    ):
        try:
            work()
        except stillframe.DeadlineError:
            raise
        except stillframe.StillframeError:
            pass  # told: that is what it should be


def in_thread(root: Path, wanted: int, is_always: bool, thread: str) -> bool:
    """Whether there is such a line."""
    tracer = Tracer(wanted, is_always, lambda: RuntimeError("on purpose"), thread)
    with EmulatedDevice() as device:
        weights = torch.zeros(STATE_ITEMS)
        return _in_thread(root, tracer, {"weights": device.place(weights) if thread == ARRIVE else weights})


def _in_thread(root: Path, tracer: Tracer, state: dict[str, torch.Tensor]) -> bool:
    thread, wanted, is_always = tracer.thread, tracer.wanted, tracer.is_always
    threading.settrace(tracer)
    try:
        checkpointer = Checkpointer(root / f"{thread}-{wanted}-{is_always}", arena="48MiB", keep=stillframe.KeepLast(1))
    finally:
        if thread != ARRIVE:  # that one is started when there is something to wait for
            threading.settrace(None)
    try:
        for step in (1, 3):
            train_on(checkpointer, state, step)
        tracer.is_on = False
        if not is_always:
            train_on(checkpointer, state, 5)  # it works again
            checkpointer.save(7, state).wait(timeout_s=CASE_S / 2)
    finally:
        tracer.is_on = False
        threading.settrace(None)
        try:
            checkpointer.close(CASE_S / 2)
        except stillframe.StillframeError:
            pass
    return tracer.raised > 0


_IN_KEEPER = """
import os, sys, threading
def tracing():
    seen, here = {{}}, {here!r}
    def trace(frame, event, argument):
        name = frame.f_code.co_filename
        if not name.startswith(here) or not name[len(here) + 1 :].startswith({watched!r}):
            return None
        if event == "line":
            number = seen.setdefault((name, frame.f_lineno), len(seen))
            if number == {wanted} and ({is_always} or not os.path.exists({told!r})):
                os.close(os.open({told!r}, os.O_CREAT | os.O_WRONLY))
                raise RuntimeError("on purpose")
        return trace
    threading.settrace(trace)
    sys.settrace(trace)
tracing()
"""
IN_KEEPER = ("keeper", "checkpoint", "store", "link")


def in_keeper(root: Path, wanted: int, is_always: bool) -> bool:
    """Whether there is such a line.  What is committed is what was saved, whatever became of the keeper."""
    place, told = root / f"keeper-{wanted}-{is_always}", root / f"told-{wanted}-{is_always}"
    keeper_process._BOOTSTRAP = bootstrap(
        more=_IN_KEEPER.format(here=str(HERE), watched=IN_KEEPER, wanted=wanted, is_always=is_always, told=str(told))
    )
    try:
        state = {"weights": torch.zeros(STATE_ITEMS)}
        try:
            checkpointer = Checkpointer(place, arena="48MiB", keep=stillframe.KeepLast(1))
        except stillframe.StillframeError:
            return told.exists()
        try:
            for step in (1, 3, 5):
                checkpointer.fence()
                state["weights"].fill_(step)
                train_on(checkpointer, state, step)
            if not is_always:
                state["weights"].fill_(7)
                checkpointer.save(7, state).wait(timeout_s=CASE_S / 2)  # it works again
        finally:
            try:
                checkpointer.close(CASE_S / 2)
            except stillframe.StillframeError:
                pass
    finally:
        keeper_process._BOOTSTRAP = PLAIN
    for step in stillframe.Catalog(place).steps():
        assert bool((stillframe.load(place, step)["weights"] == step).all()), step
    shutil.rmtree(place, ignore_errors=True)  # thousands of them
    return told.exists()


def in_call(root: Path, wanted: int, what: str) -> bool:
    """Ctrl-C at this line of one call.  Whether there is such a line."""
    state = {"weights": torch.zeros(1000)}
    tracer = Tracer(wanted, False, KeyboardInterrupt, "MainThread")
    place = root / f"{what}-{wanted if what in ('restore', 'close') else 0}"
    checkpointer = open_ones.get(place) or Checkpointer(place, arena="32MiB", keep=stillframe.KeepLast(2))
    if what not in ("restore", "close"):
        open_ones[place] = checkpointer
    step = 10 * wanted + 1
    try:
        checkpointer.save(step, state)
    except stillframe.StillframeError:
        pass
    if what == "restore":
        checkpointer.wait()
    call: Callable[[], object] = {
        "save": lambda: checkpointer.save(step + 1, state),
        "fence": lambda: checkpointer.fence(),
        "wait": checkpointer.wait,
        "restore": lambda: checkpointer.restore(state),
        "close": checkpointer.close,
    }[what]
    sys.settrace(tracer)
    try:
        call()
    except (KeyboardInterrupt, stillframe.StillframeError):
        pass
    finally:
        sys.settrace(None)
    if what != "close":
        train_on(checkpointer, state, step + 3)
        try:
            last = checkpointer.save(step + 5, state)
        except stillframe.ExistsError:
            raise
        last.wait(timeout_s=CASE_S / 2)
    if what in ("restore", "close"):
        checkpointer.close(CASE_S / 2)
    return tracer.raised > 0


open_ones: dict[Path, Checkpointer] = {}


def main(where: str, mode: str, part: str, parts: str, root: str) -> None:
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    threading.excepthook = lambda _arguments: None  # threads end on purpose
    tried = 0
    number = int(part)
    while True:
        faulthandler.dump_traceback_later(CASE_S, exit=True)
        if where in ("stage", "receive", "arrive"):
            is_line = in_thread(Path(root), number, mode == "always", f"stillframe-{where}")
        elif where == "keeper":
            is_line = in_keeper(Path(root), number, mode == "always")
        else:
            is_line = in_call(Path(root), number, where)
        if not is_line:
            break
        tried += 1
        number += int(parts)
    for each in open_ones.values():
        each.close(CASE_S / 2)
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.write(f"{tried} lines\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
