"""What happened in a run: typed events, one JSON object a line, one file for each rank and start of the run.

    <root>/run/events/rank-00000-<run>.jsonl

Written by the keeper, beside its work: a line for each save when it is over, one for the updates since the save
before, one a second while bytes are on their way, one when a step is whole in a tier.  Times are seconds of the Unix
epoch by the writer's clock.

Promise: events tell about checkpoints and decide nothing.  They are not made durable, a line that cannot be written
is lost, and one that cannot be read is skipped.  At ``MAX_BYTES`` a file is rotated to
``.1``; the previous ``.1`` is deleted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Union

import msgspec


class _Event(msgspec.Struct, frozen=True, tag_field="kind", tag=str.lower):
    at_s: float
    """When it was written."""


class KeeperStarted(_Event, frozen=True, tag="run"):
    """A keeper began to work."""

    rank: int
    world_size: int
    run: str
    host: str
    pid: int
    version: str
    keep: str = ""
    """The policy; empty if everything is kept."""


class Save(_Event, frozen=True):
    """A save is over."""

    step: int
    outcome: str
    """``committed`` or ``failed``."""
    bytes: int
    requested_s: float
    returned_s: float | None = None
    stage_begin_s: float | None = None
    staged_s: float | None = None
    flush_begin_s: float | None = None
    sealed_s: float | None = None
    committed_s: float | None = None
    error: str = ""


class Update(msgspec.Struct, frozen=True, array_like=True):
    """An update of the state: when it was about to begin, and how long the fence held it back."""

    at_s: float
    waited_s: float
    begins: bool = True
    """Another iteration: the step of an optimizer, and not ``fence()`` called by hand or a second optimizer's step."""


class Updates(_Event, frozen=True):
    """The updates since the last such event, or the newest of them if they were very many."""

    updates: list[Update]


class Restore(_Event, frozen=True):
    """A restore ended."""

    step: int | None
    bytes: int
    seconds: float
    passed_over: list[int] = []
    """Damaged steps."""


class Carried(_Event, frozen=True):
    """A step is committed in a tier, and this rank had a part in that."""

    root: str
    """Of the tier."""
    step: int
    bytes: int
    """That this rank has sent; what was there already is not counted."""
    seconds: float
    """Since it was chosen, or this rank heard of it."""


class TierTrouble(_Event, frozen=True, tag="tier"):
    """A tier begins to fail, or is well again."""

    root: str
    error: str = ""
    """Empty: it is well again."""
    is_over: bool = False
    """Nothing more is carried there by this run."""


class InFlight(msgspec.Struct, frozen=True):
    """A save on its way."""

    step: int
    phase: str
    """``staging``, ``flushing`` or ``sealed``."""
    requested_s: float
    total_bytes: int
    staged_bytes: int
    flushed_bytes: int


class SavesInFlight(_Event, frozen=True, tag="progress"):
    """How far the saves in flight have come."""

    saves: list[InFlight]
    arena_bytes: int
    arena_used_bytes: int


class End(_Event, frozen=True):
    """The keeper has finished and goes."""

    is_closed: bool
    """The trainer said so; else it was gone."""


Event = Union[KeeperStarted, Save, Updates, Restore, Carried, TierTrouble, SavesInFlight, End]  # noqa: UP007
_decoder = msgspec.json.Decoder(Event)


def decode_lines(data: bytes) -> Iterator[Event]:
    """Lines that are cut off, or of kinds that this version does not know, are skipped."""
    for line in data.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            yield _decoder.decode(line)
