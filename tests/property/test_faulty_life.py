"""The life of a root with faults in it: keepers that are killed or stopped, interrupts, reads that fail, going back.

The model knows the promises: what was reported as committed is there, bit for bit, until the run goes back behind it;
what failed or was lost may be there or not, whole; nothing else is ever restored; every call returns.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import stillframe
from stillframe import Catalog, Checkpointer, ExistsError, KeeperError, KeepLast, StateError, StorageError, spi
from stillframe.store.calls import Calls
from tests.property.exact import exact

WAIT_S = 60.0


def fresh_state() -> dict[str, Any]:
    return {"w": torch.zeros(40, 10), "n": 0}


class FaultyLife(RuleBasedStateMachine):
    @initialize(keeps=st.sampled_from([None, 3]))
    def begin(self, keeps: int | None) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="stillframe-faults-"))
        self.keep = None if keeps is None else KeepLast(keeps)
        self.live = fresh_state()
        self.step = 0
        self.requested: dict[int, list[Any]] = {}
        """What was ever saved under each step of the branch."""
        self.committed = -1
        """The newest step that was reported as committed on the branch."""
        self.in_flight: list[stillframe.Save] = []
        self._open()

    def _open(self) -> None:
        self.checkpointer = Checkpointer(self.root, arena="32MiB", keep=self.keep, on_error="warn")
        self.is_stopped = False

    def _note(self) -> None:
        for save in self.in_flight:
            if save.phase == "committed":
                self.committed = max(self.committed, save.step)

    def _continue(self) -> None:
        if self.is_stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.stopped, signal.SIGCONT)
            self.is_stopped = False

    def _train(self) -> None:
        self.checkpointer.fence()
        self.live["w"].add_(1.5)
        self.live["n"] += 1

    def _save(self) -> None:
        self.step += 1
        self.requested.setdefault(self.step, []).append(exact(self.live))
        self.in_flight.append(self.checkpointer.save(self.step, self.live))

    # --- what happens ----------------------------------------------------------------------

    @rule()
    def save(self) -> None:
        self._save()
        if not self.is_stopped:
            self._train()

    @rule()
    def save_twice(self) -> None:
        self._save()
        with pytest.raises(ExistsError):
            self.checkpointer.save(self.step, self.live)

    @rule(line=st.integers(0, 150))
    def interrupt_a_save(self, line: int) -> None:
        """Ctrl-C at some line of it: it was requested or not, and the caller cannot tell."""
        package, count = str(Path(stillframe.__file__).parent), 0

        def trace(frame: Any, event: str, argument: Any) -> Any:
            nonlocal count
            if not frame.f_code.co_filename.startswith(package):
                return None
            count += event == "line"
            if count > line:
                raise KeyboardInterrupt
            return trace

        self.step += 1
        self.requested.setdefault(self.step, []).append(exact(self.live))
        sys.settrace(trace)
        try:
            self.in_flight.append(self.checkpointer.save(self.step, self.live))
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)

    @rule()
    def kill_the_keeper(self) -> None:
        keeper = spi.keeper_pid(self.checkpointer)
        if keeper is not None:
            self._note()
            with contextlib.suppress(ProcessLookupError):
                os.kill(keeper, signal.SIGKILL)
            self.is_stopped = False

    @precondition(lambda self: not self.is_stopped)
    @rule()
    def stop_the_keeper(self) -> None:
        keeper = spi.keeper_pid(self.checkpointer)
        if keeper is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(keeper, signal.SIGSTOP)
                self.is_stopped, self.stopped = True, keeper

    @rule()
    def fail_a_save(self) -> None:
        """Something that cannot be stored; the next one works."""
        self.step += 1
        with pytest.raises(stillframe.UnsupportedStateError):
            self.checkpointer.save(self.step, {**self.live, "strange": object()})

    @rule()
    def wait(self) -> None:
        self._continue()
        self.checkpointer.wait(timeout_s=WAIT_S)
        self._note()
        for save in self.in_flight:
            assert save.phase in ("committed", "failed")
            assert save.phase == "committed" or isinstance(save.error, KeeperError | StorageError | StateError)
        self.in_flight = []

    @rule(code=st.sampled_from([errno.EIO, errno.ESTALE, errno.EACCES]))
    def reads_fail_for_a_while(self, code: int) -> None:
        """An error that says so: no older step, and no fresh start."""
        self.wait()
        if self.committed < 0:
            return
        before = exact(self.live)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Calls, "pread", _failing(code))
            with pytest.raises(StorageError):
                stillframe.restore(self.root, self.live)
        assert exact(self.live) == before

    @rule()
    def read_beside(self) -> None:
        self._note()
        committed = self.committed
        if committed >= 0:
            found = fresh_state()
            report = stillframe.restore(self.root, found)
            assert report.step is not None
            assert report.step >= committed
            assert exact(found) in self.requested[report.step]

    @rule(is_killed=st.booleans())
    def restart(self, is_killed: bool) -> None:
        """Another run restores what the one before has left."""
        self._continue()
        if is_killed:
            self.kill_the_keeper()
        with contextlib.suppress(stillframe.StillframeError):
            self.checkpointer.close(timeout_s=WAIT_S)
        self._note()
        self.in_flight = []
        self.live = fresh_state()
        self._open()
        self._restored(self.checkpointer.restore(self.live).step)

    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        self.wait()
        steps = Catalog(self.root).steps()
        if not steps:
            return
        step = steps[data.draw(st.integers(0, 99)) % len(steps)]  # which are there depends on the time
        self.checkpointer.rewind(step)
        self.committed = step
        self._restored(self.checkpointer.restore(self.live).step)
        assert self.step == step

    def _restored(self, step: int | None) -> None:
        assert step is not None or self.committed < 0
        if step is None:
            self.step = 0
            self.requested = {}
            return
        assert step >= self.committed
        assert exact(self.live) in self.requested[step]
        self.requested = {each: states for each, states in self.requested.items() if each <= step}
        self.step = self.committed = step

    def teardown(self) -> None:
        if hasattr(self, "checkpointer"):
            self.restart(is_killed=False)
            self.checkpointer.close(timeout_s=WAIT_S)
            shutil.rmtree(self.root)


def _failing(code: int) -> Any:
    def pread(self: Calls, fd: int, into: Any, at: int) -> int:
        raise OSError(code, os.strerror(code))

    return pread


TestFaultyLife = FaultyLife.TestCase
TestFaultyLife.settings = settings(
    max_examples=10, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
)
