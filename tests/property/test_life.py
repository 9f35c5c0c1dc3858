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
from stillframe.lineage import Branch, Row, continue_from
from stillframe.model import SaveId
from stillframe.retention import Keep, Known, garbage
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
    """The model: every checkpoint that must be there when all is settled, and the branches that they lie on.

    Epochs are numbered in the order in which they save something; the root's own numbers are greater.
    """

    @initialize(keep=policies)
    def begin(self, keep: Keep | None) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="stillframe-life-"))
        self.catalog = Catalog(self.root)
        self.live = fresh_state()
        self.changes = 0
        self.saved: dict[SaveId, Any] = {}
        self.branch = Branch(None)
        self.lineages: dict[int, tuple[Row, ...]] = {}
        self._open(keep)

    def _open(self, keep: Keep | None) -> None:
        self.keep = keep
        self.checkpointer = Checkpointer(self.root, arena="32MiB", keep=keep)
        self.is_settled = True
        self._at(self._newest())

    def _at(self, parent: SaveId | None) -> None:
        """The next save begins an epoch that goes on from here."""
        self.parent = parent
        self.floor = -1 if parent is None else parent.step
        self.taken: set[int] = set()
        self.has_begun = False

    @property
    def on_branch(self) -> dict[int, SaveId]:
        return {step: found[0] for step, found in self.branch.of(self.saved).items()}

    def _newest(self) -> SaveId | None:
        return self.on_branch[max(self.on_branch)] if self.on_branch else None

    def _find(self, step: int) -> SaveId | None:
        off_branch = [save for save in self.saved if save.step == step and not self.branch.has(save)]
        return self.on_branch.get(step) or max(off_branch, default=None)

    def _settle(self) -> None:
        """Everything saved so far is committed, and retention has done its work."""
        self.checkpointer.wait(timeout_s=60)
        wanted = sorted({save.step for save in self.saved})
        until(lambda: layout.steps_there(self.root) == wanted, f"steps {wanted}")
        self.is_settled = True

    @rule()
    def train(self) -> None:
        self.changes += 1
        self.checkpointer.fence()
        self.live["w"].add_(self.changes)
        self.live["small"].add_(1)
        self.live["n"] += 1
        self.live["log"].append(self.changes)

    @rule(step=steps)
    def save(self, step: int) -> None:
        if step <= max([self.floor, *self.taken]):
            with pytest.raises(ExistsError):
                self.checkpointer.save(step, self.live)
            return
        self.checkpointer.save(step, self.live)
        self.is_settled = False
        self.taken.add(step)
        if not self.has_begun:
            epoch = (self.branch.epoch or 0) + 1
            rows = () if self.parent is None else self.lineages[self.parent.epoch]
            self.lineages[epoch] = continue_from(self.parent, rows)
            self.branch = Branch(epoch, self.lineages[epoch])
            self.has_begun = True
        assert self.branch.epoch is not None
        save = SaveId(step, self.branch.epoch)
        self.saved[save] = exact(self.live)
        self._prune(save)

    def _prune(self, newest: SaveId) -> None:
        """What has just been committed stays, whatever its number."""
        branch = [Known(save) for save in self.on_branch.values()]
        others = [save for save in self.saved if save not in self.on_branch.values()]
        for save in garbage(branch, others, self.keep, {newest}, 0.0):
            del self.saved[save]

    @rule()
    def wait(self) -> None:
        self._settle()

    @rule()
    def restore_the_newest(self) -> None:
        newest = self._newest()
        assert self.checkpointer.restore(self.live).step == (None if newest is None else newest.step)
        if newest is not None:
            assert exact(self.live) == self.saved[newest]
        self._at(newest)
        self._settle()

    @rule(step=steps, is_rewound=st.booleans())
    def go_to_a_step(self, step: int, is_rewound: bool) -> None:
        self._settle()
        before = exact(self.live)
        found = self._find(step)
        if found is None:
            with pytest.raises(NotFoundError):
                self.checkpointer.restore(self.live, step=step)
            with pytest.raises(NotFoundError):
                self.checkpointer.rewind(step)
            assert exact(self.live) == before
            if self.taken:  # it goes on from its own newest save
                self._at(self._newest())
            return
        if is_rewound:
            self.checkpointer.rewind(step)
            epoch = (self.branch.epoch or 0) + 1
            self.lineages[epoch] = continue_from(found, self.lineages[found.epoch])
            self.branch = Branch(epoch, self.lineages[epoch])
            assert self.checkpointer.restore(self.live).step == step
        else:
            assert self.checkpointer.restore(self.live, step=step).step == step
        assert exact(self.live) == self.saved[found]
        self._at(found)

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        self._settle()
        step = data.draw(st.sampled_from(sorted({save.step for save in self.saved})))
        found = self._find(step)
        assert found is not None
        assert exact(stillframe.load(self.root, step)) == self.saved[found]

    @rule(keep=policies, is_new_process=st.booleans())
    def reopen(self, keep: Keep | None, is_new_process: bool) -> None:
        self.checkpointer.close(timeout_s=60)
        assert self.catalog.steps() == sorted(self.on_branch)
        if is_new_process:
            self.live = fresh_state()
        self._open(keep)

    @invariant()
    def what_is_settled_is_what_is_there(self) -> None:
        if self.is_settled:
            assert self.catalog.steps() == sorted(self.on_branch)
            assert self.catalog.latest() == max(self.on_branch, default=None)

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


def test_a_step_that_this_run_has_saved_is_not_saved_again(tmp_path: Path) -> None:
    """Not even when retention has removed it: a run that goes back says so first."""
    state = {"w": torch.ones(100)}
    with Checkpointer(tmp_path, keep=KeepLast(1)) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state).wait(timeout_s=60)
        until(lambda: layout.steps_there(tmp_path) == [2], "pruning")
        with pytest.raises(ExistsError):
            checkpointer.save(1, state)


def test_after_a_restore_that_failed_steps_still_rise(tmp_path: Path) -> None:
    """At once: not first when the keeper finds out."""
    state = {"w": torch.ones(100)}
    with Checkpointer(tmp_path, keep=KeepLast(1)) as checkpointer:
        checkpointer.save(5, state).wait(timeout_s=60)
        with pytest.raises(NotFoundError):
            checkpointer.restore(state, step=4)
        with pytest.raises(NotFoundError):
            checkpointer.rewind(4)
        with pytest.raises(ExistsError):
            checkpointer.save(4, state)
        checkpointer.save(6, state).wait(timeout_s=60)


def test_a_restore_right_after_a_commit_does_not_cost_the_retention(tmp_path: Path) -> None:
    state = {"w": torch.ones(100)}
    with Checkpointer(tmp_path, keep=KeepLast(1)) as checkpointer:
        for step in range(1, 6):
            checkpointer.save(step, state)
            assert checkpointer.restore(state).step == step
            until(lambda: layout.steps_there(tmp_path) == [step], "pruning", timeout_s=5)  # noqa: B023
