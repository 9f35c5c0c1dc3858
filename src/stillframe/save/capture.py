"""What ``save`` does on the training thread: walk the state, plan where it goes, copy what cannot wait.

The plan is reused as long as the state keeps its structure and its memory.  Nothing here does I/O.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import msgspec

from stillframe.format.records import SealDraft, check_draft
from stillframe.ranks.group import Group
from stillframe.save.device import Device, DeviceTable, Gathered
from stillframe.save.places import Sources
from stillframe.save.plan import Plan, make_plan
from stillframe.save.survey import Survey
from stillframe.save.versions import Versions
from stillframe.state.spread import Seat
from stillframe.state.walk import Walk


@dataclass(slots=True)
class Captured:
    """A state that may change again behind the fence: all that the stager needs to copy it."""

    plan: Plan | None
    """It keeps what it was made of alive, so it is let go of, too."""
    devices: list[Device]
    draft: SealDraft
    memory: dict[Device, Gathered]
    """The bytes that were copied here, because they may change before the next update."""
    marks: list[tuple[Device, Any]]
    """The compute that was queued on each device before ``save``."""
    versions: Versions
    """Of what was not copied here."""
    sources: Sources
    """What of it lies in accelerators' memory."""
    walk: Walk | None
    """Not needed any more.  But what it alone refers to (random states) is freed where it is let go, and torch gives
    the GIL away meanwhile: at the end of ``save()`` the training thread would wait for the stager's."""

    def release(self) -> None:
        """Keep nothing alive any more: every copy is made, or none will be."""
        self.memory.clear()
        self.sources.clear()
        self.plan = self.walk = None
        self.versions.drop()


@dataclass(frozen=True, slots=True)
class Request:
    """A state that can be stored; nothing of it has been copied."""

    plan: Plan
    draft: SealDraft
    walk: Walk
    survey: Survey

    def capture(self, since: Versions | None = None) -> Captured:
        """``since``: versions from when the state had to stand still, if that was before now."""
        versions = self.plan.versions(self.walk, self.survey)
        if since is not None:
            versions.add(since)
        sources = Sources(self.walk.tensors, self.plan.slots, self.survey.storages)
        memory = self.plan.capture(self.walk, self.survey)
        marks = [(device, device.mark()) for device in self.plan.devices]
        return Captured(self.plan, self.plan.devices, self.draft, memory, marks, versions, sources, self.walk)


class Planner:
    """Makes requests, with the plan of the one before where it fits.  Thread: one at a time."""

    def __init__(self, group: Group, is_shared: bool) -> None:
        self._group = group
        self._is_shared = is_shared
        self._devices = DeviceTable()
        self._plan: Plan | None = None
        self.hidden = ""
        """A path of the state whose tensors the header of the segment does not name."""

    def request(self, state: Any, metadata: dict[str, Any], updates: int | None) -> Request:
        """Raises :class:`UnsupportedStateError`, naming what cannot be stored."""
        walk = Walk(state)
        plan = self._plan
        survey = None if plan is None else plan.fit(walk)
        if plan is None or survey is None:
            moved = frozenset[int]() if plan is None else plan.moved(walk)
            plan = self._plan = make_plan(walk, self._devices, self._seat, moved, self.hidden)
            survey = plan.survey(walk)
        draft = SealDraft(
            rank=self._group.rank,
            world_size=self._group.world_size,
            saved_unix_s=round(time.time(), 3),
            shards=plan.shards_json,
            tree=plan.tree_json,
            values=msgspec.Raw(msgspec.json.encode(walk.values)),
            teams=plan.teams,
            metadata=metadata,
            updates=updates,
            layouts=plan.layouts,
            structure=plan.structure,
        )
        check_draft(draft)
        return Request(plan, draft, walk, survey)

    def forget(self) -> None:
        """Let go of the plan, which keeps tensors in host memory alive."""
        self._plan = None

    @property
    def _seat(self) -> Seat:
        """Where this rank stands among those that hold boxes of the same tensors."""
        group = self._group
        knows_ranks = group.world_size > 1 and group.is_global
        return Seat(group.rank, group.world_size, knows_ranks, writes_once=knows_ranks and self._is_shared)
