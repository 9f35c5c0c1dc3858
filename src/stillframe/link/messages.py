"""Every message between the trainer and the keeper; small, typed, one packet each.

Trainer → keeper: ``Attach`` once (with the arena); per save ``Begin`` (with the draft of the seal in a
memfd), ``Chunk`` …, then ``Staged`` or ``Abandon``; ``Restored`` after a restore; ``Close`` at the end.
Keeper → trainer: ``Ready`` once; per save ``Flushed`` …, ``Sealed``, ``Waiting`` … for other ranks, and
``Committed`` or ``Failed``.
"""

from __future__ import annotations

from typing import Union

import msgspec

from stillframe.model import Label


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class Attach(_Message, frozen=True):
    """The packet carries the arena's memfd."""

    nbytes: int


class Begin(_Message, frozen=True):
    """A save starts; the packet carries a memfd that holds header, then draft."""

    save: int
    step: int
    requested_s: float
    header_bytes: int
    draft_bytes: int
    data_bytes: int
    layout: str
    """Names the layout: only where it is the same are two saves' bytes comparable."""
    lazy: tuple[tuple[int, int], ...]
    """The byte ranges of the data that were staged lazily."""
    returned_s: float | None = None
    """When ``save()`` returned."""
    stage_begin_s: float | None = None
    updates: tuple[tuple[float, float], ...] = ()
    """Since the save before: when each update was about to begin, and how long its fence waited."""
    label: Label | None = None
    complete_step: int = -1
    """In a root that is not shared: the newest step that every rank is known to have sealed."""


class Chunk(_Message, frozen=True):
    """A chunk lies in a span of the arena; the keeper gives the span back with ``Flushed``."""

    save: int
    index: int
    span: int
    nbytes: int


class Staged(_Message, frozen=True):
    """Every chunk has been sent: from now on the keeper can finish alone."""

    save: int
    staged_s: float


class Abandon(_Message, frozen=True):
    """The trainer could not stage it, and says why: remove what there is, and let other ranks know."""

    save: int
    step: int
    kind: str
    message: str


class Restored(_Message, frozen=True):
    """A restore ended; for the record."""

    step: int | None
    bytes: int
    seconds: float
    passed_over: tuple[int, ...]


class Close(_Message, frozen=True):
    """No more saves: finish and go."""

    updates: tuple[tuple[float, float], ...] = ()


class Ready(_Message, frozen=True):
    """The keeper holds the root's lock (or says why not), and leftovers are gone."""

    warning: str = ""


class Flushed(_Message, frozen=True):
    save: int
    span: int
    nbytes: int
    begun_s: float


class Sealed(_Message, frozen=True):
    save: int
    at_s: float
    is_unchanged: bool


class Waiting(_Message, frozen=True):
    """A sealed save waits for other ranks; said now and then, so that silence still means a keeper that hangs."""

    save: int
    ranks: tuple[int, ...]


class Committed(_Message, frozen=True):
    save: int
    at_s: float


class Failed(_Message, frozen=True):
    save: int
    kind: str
    message: str


class Notice(_Message, frozen=True):
    """Something a person should know that fails no save."""

    message: str


class Refused(_Message, frozen=True):
    """The keeper cannot serve this root at all; it leaves."""

    kind: str
    message: str


FromTrainer = Union[Attach, Begin, Chunk, Staged, Abandon, Restored, Close]  # noqa: UP007
FromKeeper = Union[Ready, Flushed, Sealed, Waiting, Committed, Failed, Notice, Refused]  # noqa: UP007
