"""What a root says of a run: the epochs claimed, what each goes on from, how saves ended, what was set aside."""

from __future__ import annotations

import itertools
from typing import Literal

import msgspec

from stillframe.errors import FormatError
from stillframe.format import limits
from stillframe.format.envelope import Record, unwrap, wrap
from stillframe.format.records import check_id, naming
from stillframe.lineage import Branch, Row
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
    is_by_hand: bool = False
    """Somebody has removed saves, and nothing was saved: the branch is that of the epoch before, whose row comes first.
    All of that one counts, also what comes later.  ``parent`` is its parent."""
    is_carried: bool = False
    """The epoch is another root's, and its saves are carried here, part by part."""

    @property
    def branch(self) -> Branch:
        return Branch(self.epoch, tuple(self.lineage), self.parent)


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


class Target(Record, frozen=True):
    """Rank 0's word to the others, in a tier: what is being carried there.  A hint: it may be old."""

    run: str
    """That carries it."""
    save: SaveId | None
    """``None``: nothing, for now."""
    waiting: SaveId | None = None
    """What comes next."""
    considered: SaveId | None = None
    """The newest save of which it was known by then whether it is carried."""
    stalled: tuple[int, ...] = ()
    """Ranks whose parts nobody gets on with: whoever has one of them carries it."""


class TierNote(Record, frozen=True):
    """A tier as people may know of it: nothing that is secret."""

    root: str
    every: str
    """``100 steps``, or ``600 s``."""
    keep: str
    """As :func:`stillframe.retention.encode_policy` writes it."""
    limit: float
    """In bytes a second, of each rank; 0: there is none."""


class TierNotes(Record, frozen=True):
    """Where else the run that has this root carries its checkpoints.  A hint: it may be lost, or be old."""

    run: str
    tiers: list[TierNote]


class Carried(Record, frozen=True):
    """What must stay in a root for one tier."""

    root: str
    """Of the tier."""
    save: SaveId | None
    """What is being carried there."""
    waiting: SaveId | None
    """What comes next."""


class Carrying(Record, frozen=True):
    """What a keeper carries from its root: for the next one, which may save before it has reached the tiers."""

    tiers: list[Carried]


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


def encode_target(target: Target) -> bytes:
    return wrap("target", target)[0]


def encode_tiers(tiers: TierNotes) -> bytes:
    return wrap("tiers", tiers)[0]


def encode_carrying(carrying: Carrying) -> bytes:
    return wrap("carrying", carrying)[0]


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
        rows = found.lineage[1:] if found.is_by_hand else found.lineage
        if first != next(iter(rows), None):
            raise FormatError("the lineage does not begin with the parent")
        known = [found.epoch, *(row.epoch for row in found.lineage)]
        if known[-1] < 1 or any(later <= earlier for later, earlier in itertools.pairwise(known)):
            raise FormatError("the epochs of the lineage do not go back")
    return found


def decode_outcomes(data: bytes, *, file: str) -> Outcomes:
    return unwrap("outcomes", data, Outcomes, file)[0]


def decode_target(data: bytes, *, file: str) -> Target:
    found = unwrap("target", data, Target, file)[0]
    with naming(file):
        for save in (found.save, found.waiting, found.considered):
            if save is not None:
                check_id(save)
    return found


def decode_tiers(data: bytes, *, file: str) -> TierNotes:
    found = unwrap("tiers", data, TierNotes, file)[0]
    with naming(file):
        if len(found.tiers) > limits.MAX_TIERS:
            raise FormatError(f"{len(found.tiers)} tiers are more than the format allows")
    return found


def decode_carrying(data: bytes, *, file: str) -> Carrying:
    found = unwrap("carrying", data, Carrying, file)[0]
    with naming(file):
        if len(found.tiers) > limits.MAX_TIERS:
            raise FormatError(f"{len(found.tiers)} tiers are more than the format allows")
        for save in itertools.chain.from_iterable((each.save, each.waiting) for each in found.tiers):
            if save is not None:
                check_id(save)
    return found


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
