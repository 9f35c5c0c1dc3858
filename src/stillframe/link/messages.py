"""Every message between the trainer and the keeper, and the channel that carries them: small, typed, one packet each.

Trainer → keeper: ``Attach`` once (with the arena); per save ``Begin`` (with the draft of the seal in a
memfd), ``Chunk`` …, then ``Staged`` or ``Abandon``; ``Enter`` before a restore, ``Resume`` and ``Restored`` after it;
``Start`` where tickets are issued; ``Complete`` where roots are not shared; ``Uncommitted`` where rank 0 cannot say so
in the root; ``Carry`` of a last step; ``Close`` at the end.
Keeper → trainer: ``Ready`` once; ``Done`` in answer to a request; per save ``Flushed`` …, ``Sealed``,
``AwaitingRanks`` …, and ``Committed`` or ``Failed``; ``Alive`` every few seconds while there is work;
``TierNews`` when something is carried, ``TierFailed`` when it cannot be.

Both processes must have the same messages, but a keeper is started from the package that is on disk by then.  So the
trainer hands over its :func:`build`, and a keeper of another one refuses before it reads anything else.
"""

from __future__ import annotations

import array
import socket
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, Union, get_args

import msgspec

from stillframe import version
from stillframe.format.digest import digest
from stillframe.link.liveness import Pulse
from stillframe.model import Label, SaveId
from stillframe.tiers import TierConfig

_MAX_PACKET = 64 * 1024
_In = TypeVar("_In")
_Out = TypeVar("_Out")

Updates = tuple[tuple[float, float, bool], ...]
"""When each was about to begin (monotonic clock), how long the fence held it back, whether an iteration begins."""


class Telemetry(msgspec.Struct, frozen=True, array_like=True):
    """What the trainer wants in the keeper's journal; no byte of a checkpoint depends on it."""

    returned_s: float | None = None
    """When ``save()`` returned."""
    stage_begin_s: float | None = None
    updates: Updates = ()
    """Since the save before."""


@dataclass(frozen=True, slots=True)
class KeeperConfig:
    """All that a keeper is told at its start."""

    root: str
    run: str
    """Made up when the run starts; the same on every rank."""
    rank: int
    world_size: int
    keep: str = ""
    """The policy, encoded."""
    is_shared: bool = True
    """All ranks see this root; else each commits for itself there."""
    deadline_s: float = 600.0
    """How long rank 0 waits for the seals of the others."""
    has_events: bool = True
    """Tell in ``run/events`` what happens."""
    storage_options: dict[str, Any] | None = field(default=None, repr=False)
    """Of an object store."""
    tiers: tuple[TierConfig, ...] = ()


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class Attach(_Message, frozen=True):
    """The packet carries the arena's memfd."""

    nbytes: int


class Begin(_Message, frozen=True):
    """A save starts; the packet carries a memfd that holds header, then draft."""

    save: int
    step: int
    attempt: int
    requested_s: float
    header_bytes: int
    draft_bytes: int
    data_bytes: int
    layout: str
    """Names the layout: only where it is the same are two saves' bytes comparable."""
    lazy: tuple[tuple[int, int], ...]
    """The byte ranges of the data that were staged lazily."""
    telemetry: Telemetry = Telemetry()
    label: Label | None = None
    """Without its contents."""
    label_bytes: int = 0
    """Of these, encoded: they lie behind the draft."""
    complete_step: int = -1
    """In a root that is not shared: the newest step of this epoch that every rank is known to have sealed."""


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
    attempt: int
    kind: str
    message: str


class Uncommitted(_Message, frozen=True):
    """Rank 0 says, through the trainers, that it will not commit this save.  As an outcome in the root."""

    save: int
    kind: str
    message: str
    files_stay: bool


class Enter(_Message, frozen=True):
    """Saves from now on belong to another epoch of the run.  A request is answered with ``Done`` when it is claimed.

    ``number``: the one that the ranks have agreed on, where each claims the epoch in a root of its own; or the one that
    an earlier keeper has claimed.
    """

    sequence: int
    number: int | None = None
    request: int = 0


class Resume(_Message, frozen=True):
    """The epoch goes on from this checkpoint.  Answered with ``Done`` if ``is_durable``: when that is put down."""

    parent: SaveId | None
    is_durable: bool = False
    request: int = 0
    is_claimed: bool = True
    """The epoch was claimed before this was chosen, so that nothing that was reported by then can have been missed."""


class Start(_Message, frozen=True):
    """Begin the epoch now, not with the first save: other ranks may come first.  Answered with ``Done``."""

    request: int = 0


class Restored(_Message, frozen=True):
    """A restore ended; for the record."""

    step: int | None
    bytes: int
    seconds: float
    passed_over: tuple[int, ...]


class Complete(_Message, frozen=True):
    """In a root that is not shared: every rank has sealed this save."""

    save: SaveId


class Carry(_Message, frozen=True):
    """Every tier gets this step when it is committed, due there or not: nothing may come after it."""

    step: int


class Close(_Message, frozen=True):
    """No more saves: finish and go."""

    updates: Updates = ()


class Ready(_Message, frozen=True):
    """The keeper holds the root's lock (or says why not), and leftovers are gone."""

    warning: str = ""


class Done(_Message, frozen=True):
    """The answer to a request; ``kind`` is empty if it succeeded."""

    request: int
    kind: str = ""
    message: str = ""


class Claimed(_Message, frozen=True):
    """An epoch has this number.  The trainer tells the next keeper, which must not claim another for it."""

    sequence: int
    epoch: int


class Flushed(_Message, frozen=True):
    save: int
    span: int
    nbytes: int
    begun_s: float


class Sealed(_Message, frozen=True):
    save: int
    epoch: int
    at_s: float
    is_unchanged: bool


class AwaitingRanks(_Message, frozen=True):
    """A save waits for other ranks: sealed, or for rank 0 to begin the epoch.  Said now and then."""

    save: int
    ranks: tuple[int, ...]


class Committed(_Message, frozen=True):
    save: int
    at_s: float


class Failed(_Message, frozen=True):
    """``files_stay``: it may be, or become, part of a checkpoint; else this keeper will never commit it."""

    save: int
    kind: str
    message: str
    files_stay: bool


class Alive(_Message, frozen=True):
    """The keeper listens, and has work; said whatever its storage does."""

    pulse: Pulse


class TierNews(_Message, frozen=True):
    """How a tier stands (:class:`stillframe.model.TierStats`).  Saves, not steps: after a rewind a step comes again."""

    tier: int
    committed: SaveId | None
    considered: SaveId | None
    target: SaveId | None
    waiting: SaveId | None
    carried_bytes: int
    total_bytes: int
    failures: int
    trouble: str
    is_over: bool
    moves: int = 0
    """How often other ranks were seen to get on with what is carried, when this one has nothing to do."""
    asked: int | None = None
    """The step of the last ``Carry`` that was received."""
    is_known: bool = False
    """Whether what earlier keepers have left to be carried is known by now."""


class TierFailed(_Message, frozen=True):
    """Something cannot be carried to a tier: once for each trouble, not for each attempt.  No save fails by it."""

    kind: str
    message: str


class Notice(_Message, frozen=True):
    """Something a person should know that fails no save."""

    message: str


class Refused(_Message, frozen=True):
    """The keeper cannot serve this root at all; it leaves."""

    kind: str
    message: str


FromTrainer = Union[  # noqa: UP007
    Attach, Begin, Chunk, Staged, Abandon, Uncommitted, Enter, Resume, Start, Restored, Complete, Carry, Close
]
FromKeeper = Union[  # noqa: UP007
    Ready,
    Done,
    Claimed,
    Flushed,
    Sealed,
    AwaitingRanks,
    Committed,
    Failed,
    Alive,
    TierNews,
    TierFailed,
    Notice,
    Refused,
]


def build() -> str:
    """Names the version of the package, and the shape of everything that the two processes tell one another."""
    kinds = (KeeperConfig, Telemetry, Label, SaveId, Pulse, *get_args(FromTrainer), *get_args(FromKeeper))
    shape = repr([(kind.__name__, kind.__annotations__) for kind in kinds])
    return f"{version.VERSION} (messages {digest(shape.encode())[:8]})"


class Channel(Generic[_In, _Out]):
    """One end of the SEQPACKET socket: whole messages, in order, each optionally with a file descriptor.

    Thread: any may send; one may receive.
    """

    def __init__(self, end: socket.socket, incoming: object) -> None:
        self.socket = end
        self._decoder = msgspec.msgpack.Decoder(incoming)

    def send(self, message: _Out, fd: int | None = None, *, flags: int = 0) -> None:
        """Blocks while the other side's queue is full.  Raises ``OSError`` when it is gone."""
        data = msgspec.msgpack.encode(message)
        assert len(data) <= _MAX_PACKET, "messages are small; large things travel in a memfd"
        ancillary = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        self.socket.sendmsg([data], ancillary, flags | socket.MSG_NOSIGNAL)

    def receive(self, *, flags: int = 0) -> tuple[_In, int | None] | None:
        """The next message and the descriptor that came with it; ``None`` when the other side is gone."""
        data, ancillary, _, _ = self.socket.recvmsg(_MAX_PACKET, socket.CMSG_SPACE(4), flags | socket.MSG_CMSG_CLOEXEC)
        if not data:
            return None
        fds = array.array("i")
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
        message: _In = self._decoder.decode(data)
        return message, fds[0] if fds else None

    def close(self) -> None:
        self.socket.close()
