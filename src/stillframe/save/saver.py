"""What happens when a save is requested, in order: take the step, plan, capture, hand over."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Mapping
from typing import Any

import torch

from stillframe.errors import ConfigError, StateError, StillframeError, text_of
from stillframe.model import Label, Ticket, check_metadata
from stillframe.save.budget import Budget
from stillframe.save.capture import Planner, Request
from stillframe.save.fence import OptimizerFence, held_streams
from stillframe.save.graphs import check_save
from stillframe.save.job import error_of, say
from stillframe.save.keeper_client import KeeperClient
from stillframe.save.plan import Plan
from stillframe.save.saves import Save, Saves
from stillframe.save.stager import Stager
from stillframe.save.steps import Taken, TakenSteps
from stillframe.save.versions import Versions

logger = logging.getLogger("stillframe")


class Saver:
    """Thread: one at a time."""

    def __init__(
        self,
        steps: TakenSteps,
        saves: Saves,
        planner: Planner,
        stager: Stager,
        keeper: KeeperClient,
        fence: OptimizerFence,
        *,
        is_audited: bool,
        skips_when_busy: bool,
    ) -> None:
        self._steps = steps
        self._saves = saves
        self._planner = planner
        self._stager = stager
        self._keeper = keeper
        self._fence = fence
        self._is_audited = is_audited
        self._skips_when_busy = skips_when_busy
        self._budget = Budget(saves, lambda: stager.arena)
        self._updates: int | None = None
        """How many there had been at the save before."""
        self._sound: object = None
        """Its state is the one that is trained, or is not meant to be."""
        self._bare: list[dict[Any, Any]] = []
        self._bare_updates = 0
        """Optimizer states without content in the save before, and how many updates there had been."""
        self._has_warned = False

    def save(
        self,
        to: int | Ticket,
        state: Any,
        metadata: Mapping[str, Any] | None,
        label: Label | None,
        since: Versions | None = None,
    ) -> Save:
        """``to``: the step that the caller counts on every rank, or the ticket that one rank has issued.

        Blocks while there is no room for another save.
        Raises: :class:`ConfigError`, :class:`ExistsError`, :class:`UnsupportedStateError`; an earlier save's error;
        :class:`BusyError` if earlier saves are stuck.
        """
        began = time.monotonic()
        check_save()
        about = check_metadata(metadata)
        claim: Taken | None = None
        if isinstance(to, Ticket):
            step, attempt, updates = to.step, to.attempt, None
            self._steps.redeem(to)
        else:
            claim = self._steps.claim(to)
            step, attempt, updates = to, claim.attempt, self._fence.updates
        save: Save | None = None
        try:
            if claim is not None:
                self._steps.begin(step, claim)
            if not self._skips_when_busy:  # else a save that would have to wait is skipped, below
                self._budget.wait()
                if self._keeper.is_closed:
                    raise ConfigError("the checkpointer was closed while save() waited: make another")
            with held_streams():
                request = self._planner.request(state, about, updates)
                plan = request.plan
                if self._skips_when_busy and self._stager.is_busy(len(plan.chunks)):
                    self._steps.give_back(step, attempt, has_failed=False)
                    return self._saves.skip(step, began)
                try:
                    captured = request.capture(since)
                    audit = self._stager.begin_audit(step, captured) if self._is_audited else None
                except Exception as error:  # a device without memory, or one that is dead
                    return self._refuse(step, attempt, plan, began, error)
            self._look_for_snapshots(request.walk.bare)
            is_suspect = self._is_suspect(request, updates)
            save = self._saves.make(step, attempt, plan.data_bytes, began)
            save._is_suspect = is_suspect
            self._stager.submit(save, captured, audit, label)
        except BaseException as error:
            is_ours = claim is None or self._steps.has(step, claim)
            if is_ours and (save is None or not self._saves.knows(save)):  # else it is requested, and goes on
                self.give_up(step, attempt, error)
            raise
        self._budget.add(save, plan.captured_bytes)
        self._saves.returned(save, plan.captured_bytes, time.monotonic() - began)
        self._saves.raise_untold(f"; step {step}, requested now, goes on")
        return save

    def _refuse(self, step: int, attempt: int, plan: Plan, began_s: float, problem: Exception) -> Save:
        """It fails here, as it would later: whoever must know is told, and training goes on.  Never blocks."""
        save = self._saves.make(step, attempt, plan.data_bytes, began_s)
        error = error_of(step, problem, "capturing")
        self._saves.returned(save, 0, time.monotonic() - began_s)
        self._saves.tell_failed(self._saves.refuse(save, error))
        self._stager.run_soon(lambda: self._keeper.report_unsaved(save._sequence, step, attempt, error))
        return save

    def _is_suspect(self, request: Request, updates: int | None) -> bool:
        """Whether it should differ from the save before: it holds parameters, and there have been updates since.

        Not if an optimizer's own are among them.  Then it is the state that is trained, even if an update changed
        nothing: the gradients were not finite, or the learning rate is 0.
        """
        before, self._updates = self._updates, updates
        if before is None or updates is None or updates <= before or request.plan.shards is self._sound:
            return False
        walk = request.walk
        modules = (owner for owner in walk.owners if isinstance(owner, torch.nn.Module))
        parameters = itertools.chain(walk.tensors, *(module.parameters() for module in modules))
        if any(each.requires_grad for each in parameters) and not self._fence.has_updated(walk.tensors):
            return True
        self._sound = request.plan.shards  # of one plan only: the same memory need not be looked at again
        return False

    def _look_for_snapshots(self, bare: list[dict[Any, Any]]) -> None:
        """Warn, once, of an optimizer's state dict that was made before the first update, and is saved again and again.

        By the empty dict in it, which is kept until the next save: an optimizer that has no state at all gives another
        one each time.
        """
        before, updates = self._bare, self._fence.updates
        if not self._has_warned and updates > self._bare_updates and any(a is b for a in before for b in bare):
            self._has_warned = True
            say(
                logger.warning,
                "the state holds an optimizer.state_dict() that was made before the first update: it is empty, and "
                "stays so, and a resumed run would begin with a fresh optimizer. Put the optimizer itself into the "
                'state: {"optimizer": optimizer} (said once)',
            )
        self._bare, self._bare_updates = bare, updates

    def give_up(self, step: int, attempt: int, error: BaseException, is_begun: bool = False) -> None:
        """This rank will not save it: the other ranks are told, and need not wait.  Never blocks."""
        self._steps.give_back(step, attempt, has_failed=True)
        told = error if isinstance(error, StillframeError) else StateError(f"{type(error).__name__}: {text_of(error)}")
        sequence = self._saves.sequence  # when this is said, the run may have restored
        self._stager.run_soon(lambda: self._keeper.report_unsaved(sequence, step, attempt, told, is_begun))
