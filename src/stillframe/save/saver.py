"""What happens when a save is requested, in order: take the step, plan, capture, hand over."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from stillframe.errors import KeeperError, StateError, StillframeError
from stillframe.model import Label, Ticket, check_metadata
from stillframe.save.capture import Planner
from stillframe.save.fence import OptimizerFence
from stillframe.save.keeper_client import KeeperClient
from stillframe.save.saves import Save, Saves
from stillframe.save.stager import Stager
from stillframe.save.steps import TakenSteps


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

    def save(self, to: int | Ticket, state: Any, metadata: Mapping[str, Any] | None, label: Label | None) -> Save:
        """``to``: the step that the caller counts on every rank, or the ticket that one rank has issued.

        Raises: :class:`ConfigError`, :class:`ExistsError`, :class:`UnsupportedStateError`; an earlier save's error.
        """
        began = time.monotonic()
        about = check_metadata(metadata)
        if isinstance(to, Ticket):
            step, attempt, updates = to.step, to.attempt, None
            self._steps.redeem(to)
        else:
            step, attempt, updates = to, self._steps.begin(to), self._fence.updates
        try:
            self._saves.raise_untold()
            request = self._planner.request(state, about, updates)
            plan = request.plan
            if self._skips_when_busy and self._stager.is_busy(len(plan.chunks)):
                self._steps.give_back(step, attempt, has_failed=False)
                return self._saves.skip(step, began)
            captured = request.capture()
            audit = self._stager.begin_audit(step, captured) if self._is_audited else None
            save = self._saves.begin(step, attempt, plan.data_bytes, began)
        except BaseException as error:
            self.give_up(step, attempt, error)
            raise
        try:
            self._saves.returned(save, plan.captured_bytes, time.monotonic() - began)
            self._stager.submit(save, captured, audit, label)  # last: from here on the stager competes for the GIL
        except BaseException as error:  # Ctrl-C just here: a save that nobody stages must not be waited for
            self._saves.fail(save.number, KeeperError(f"it was interrupted: {error!r}"))
            raise
        return save

    def give_up(self, step: int, attempt: int, error: BaseException) -> None:
        """This rank will not save it: the other ranks are told, and need not wait."""
        self._steps.give_back(step, attempt, has_failed=True)
        told = error if isinstance(error, StillframeError) else StateError(f"{type(error).__name__}: {error}")
        self._keeper.report_unsaved(step, attempt, told)
