"""The life of a root: saves, waits, restores, retention and new runs, against a model in memory."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import stillframe
from stillframe import Catalog, Checkpointer, ExistsError, KeepEvery, KeepLast, NotFoundError
from stillframe.retention import Keep
from tests import layout
from tests.layout import leftovers
from tests.property.exact import exact
from tests.support import until

steps = st.integers(0, 20)
policies = st.sampled_from([None, KeepLast(1), KeepLast(3), KeepEvery(5), KeepLast(2) | KeepEvery(4)])


def fresh_state() -> dict[str, Any]:
    weight = torch.zeros(40, 10)
    return {"w": weight, "tied": weight.t(), "small": torch.zeros(()), "n": 0, "log": []}


class Life(RuleBasedStateMachine):
    """``committed`` is what must exist when all is settled; ``refused`` is what may still exist until then."""

    @initialize(keep=policies)
    def begin(self, keep: Keep | None) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="stillframe-life-"))
        self.catalog = Catalog(self.root)
        self.live = fresh_state()
        self.changes = 0
        self.committed: dict[int, Any] = {}
        self._open(keep)

    def _open(self, keep: Keep | None) -> None:
        self.keep = keep
        self.checkpointer = Checkpointer(self.root, arena="32MiB", keep=keep)
        self.refused = set(self.committed)
        self.is_settled = True

    def _settle(self) -> None:
        """Everything saved so far is committed, and retention has done its work."""
        self.checkpointer.wait(timeout_s=60)
        until(
            lambda: layout.steps_there(self.catalog.root) == sorted(self.committed), f"steps {sorted(self.committed)}"
        )
        self.refused = set(self.committed)
        self.is_settled = True

    @rule()
    def train(self) -> None:
        self.changes += 1
        with self.checkpointer.fence():
            self.live["w"].add_(self.changes)
            self.live["small"].add_(1)
        self.live["n"] += 1
        self.live["log"].append(self.changes)

    @rule(step=steps)
    def save(self, step: int) -> None:
        if step in self.committed:
            with pytest.raises(ExistsError):
                self.checkpointer.save(step, self.live)
        elif step not in self.refused:
            self.checkpointer.save(step, self.live)
            self.is_settled = False
            self.refused.add(step)
            self.committed[step] = exact(self.live)
            # What has just been committed stays, whatever its number.
            kept = self.keep.keeps(self.committed) | {step} if self.keep else set(self.committed)
            self.committed = {each: content for each, content in self.committed.items() if each in kept}

    @rule()
    def wait(self) -> None:
        self._settle()

    @rule()
    def restore_the_newest(self) -> None:
        newest = max(self.committed, default=None)
        assert self.checkpointer.restore(self.live) == newest
        if newest is not None:
            assert exact(self.live) == self.committed[newest]
        self._settle()

    @rule(step=steps)
    def restore_a_step(self, step: int) -> None:
        self._settle()
        before = exact(self.live)
        if step in self.committed:
            assert self.checkpointer.restore(self.live, step=step) == step
            assert exact(self.live) == self.committed[step]
        else:
            with pytest.raises(NotFoundError):
                self.checkpointer.restore(self.live, step=step)
            assert exact(self.live) == before

    @precondition(lambda self: self.committed)
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        self._settle()
        step = data.draw(st.sampled_from(sorted(self.committed)))
        assert exact(stillframe.load(self.root, step)) == self.committed[step]

    @rule(keep=policies, is_new_process=st.booleans())
    def reopen(self, keep: Keep | None, is_new_process: bool) -> None:
        self.checkpointer.close(timeout_s=60)
        assert self.catalog.steps() == sorted(self.committed)
        if is_new_process:
            self.live = fresh_state()
        self._open(keep)

    @invariant()
    def what_is_settled_is_what_is_there(self) -> None:
        if self.is_settled:
            assert self.catalog.steps() == sorted(self.committed)
            assert self.catalog.latest() == max(self.committed, default=None)

    @invariant()
    def the_tie_holds(self) -> None:
        assert exact(self.live["tied"]) == exact(self.live["w"].t())

    def teardown(self) -> None:
        if hasattr(self, "checkpointer"):
            self.checkpointer.close(timeout_s=60)
            assert self.checkpointer.stats().failed == 0
            assert leftovers(self.root) == []
            shutil.rmtree(self.root)


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=12, stateful_step_count=20, deadline=None)


def test_a_step_that_retention_has_removed_can_be_saved_again(tmp_path: Path) -> None:
    state = {"w": torch.ones(100)}
    with Checkpointer(tmp_path, keep=KeepLast(1)) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state).wait(timeout_s=60)
        until(lambda: layout.steps_there(tmp_path) == [2], "pruning")
        checkpointer.save(1, state).wait(timeout_s=60)
