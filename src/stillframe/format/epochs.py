"""What a root says of a run: the epochs claimed, what each goes on from, how saves ended, what was set aside."""

from __future__ import annotations

import itertools
from typing import Literal

import msgspec

from stillframe.errors import FormatError
from stillframe.format import limits
from stillframe.format.envelope import Record, unwrap, wrap
from stillframe.format.records import check_id, naming
from stillframe.lineage import Row
from stillframe.model import SaveId

Reason = Literal["pruned", "removed", "left over", "quarantined"]


class Claim(Record, frozen=True):
    """An epoch is one life of a run: from its start, or a restore, to its end or the next restore."""

    epoch: int
    run: str
    """Made up when the run starts; the same on every rank."""
    sequence: int
    """How many epochs of the same run came before."""


class Parent(Record, frozen=True):
    """What an epoch goes on from.  It is there before anything that the epoch saves."""

    epoch: int
    run: str
    sequence: int
    is_shared: bool
    """All ranks see this root.  If not, it holds seals and no manifest."""
    parent: SaveId | None
    lineage: list[Row] = msgspec.field(default_factory=list)
    """The epochs before, the newest first, and how far each counts."""


class Outcome(Record, frozen=True):
    """How a save ended; ``error`` is empty if it is committed."""

    save: SaveId
    error: str = ""
    message: str = ""
    files_stay: bool = False
    """Its manifest may be there: nobody can tell, or another run has taken over."""


class Outcomes(Record, frozen=True):
    """Rank 0's word to the others.  A hint: it may be lost, or be old."""

    epoch: int
    ended: list[Outcome]


class Aside(Record, frozen=True):
    """A tombstone: the save beside it is no checkpoint, whatever else is there."""

    reason: Reason
    was_committed: bool
    epoch: int
    """That set it aside."""
    unix_s: float
    message: str = ""


class Request(Record, frozen=True):
    """What somebody asks of a living run: to remove saves, or what a policy does not keep."""

    ticket: str
    unix_s: float
    saves: list[SaveId]
    policy: str = ""
    """As :func:`stillframe.retention.encode_policy` writes it; empty: there is none."""


class Gone(Record, frozen=True):
    """A save that is removed, or would be."""

    save: SaveId
    why: str
    bytes: int


class Stays(Record, frozen=True):
    """A save that somebody wants to be removed, or the policy does not keep, and which stays all the same."""

    save: SaveId
    why: str


class Answer(Record, frozen=True):
    """What has come of a request, or has come of it so far.  ``error``: it was not carried out to its end."""

    ticket: str
    is_done: bool
    gone: list[Gone]
    stays: list[Stays]
    error: str = ""
    message: str = ""


def encode_claim(claim: Claim) -> bytes:
    return wrap("claim", claim)[0]


def encode_parent(parent: Parent) -> bytes:
    return wrap("parent", parent)[0]


def encode_outcomes(outcomes: Outcomes) -> bytes:
    return wrap("outcomes", outcomes)[0]


def encode_aside(aside: Aside) -> bytes:
    return wrap("aside", aside)[0]


def encode_request(request: Request) -> bytes:
    return wrap("request", request)[0]


def encode_answer(answer: Answer) -> bytes:
    return wrap("answer", answer)[0]


def decode_claim(data: bytes, *, file: str) -> Claim:
    """This and what follows raise :class:`FormatError` or :class:`VersionError`, naming ``file``."""
    return unwrap("claim", data, Claim, file)[0]


def decode_parent(data: bytes, *, file: str) -> Parent:
    found = unwrap("parent", data, Parent, file)[0]
    with naming(file):
        if found.parent is not None:
            check_id(found.parent)
        if len(found.lineage) > limits.MAX_LINEAGE_ROWS:
            raise FormatError(f"{len(found.lineage)} epochs are more than the format allows")
        first = None if found.parent is None else Row(found.parent.epoch, found.parent.step)
        if first != next(iter(found.lineage), None):
            raise FormatError("the lineage does not begin with the parent")
        known = [found.epoch, *(row.epoch for row in found.lineage)]
        if known[-1] < 1 or any(later <= earlier for later, earlier in itertools.pairwise(known)):
            raise FormatError("the epochs of the lineage do not go back")
    return found


def decode_outcomes(data: bytes, *, file: str) -> Outcomes:
    return unwrap("outcomes", data, Outcomes, file)[0]


def decode_aside(data: bytes, *, file: str) -> Aside:
    return unwrap("aside", data, Aside, file)[0]


def decode_request(data: bytes, *, file: str) -> Request:
    found = unwrap("request", data, Request, file)[0]
    with naming(file):
        for save in found.saves:
            check_id(save)
    return found


def decode_answer(data: bytes, *, file: str) -> Answer:
    return unwrap("answer", data, Answer, file)[0]
