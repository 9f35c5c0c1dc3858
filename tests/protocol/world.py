"""A root in memory, the processes that write to it, and what happens to their operations.

Everything is deterministic and in one thread: the clock is made up, and a process that is paused in an operation is one
that lets others live before this operation goes on.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar
from unittest import mock

from stillframe.latch import Answer
from stillframe.store.memory import Fault, MemoryBackend, MemoryStore
from tests.protocol.objects import MemoryObjects, token_hexes

_T = TypeVar("_T")
READS = ("read", "head", "list")


class Killed(BaseException):
    """The process is gone.  No code that tidies up after an ``Exception`` runs in a process that is killed."""


@dataclass(frozen=True)
class Event:
    """What happens at an operation.

    ``pause``: before it, these others live.  ``fault``: what becomes of it.  ``kills``: the process ends, before
    (``"before"``) or after it; ``whole``: with all ranks of its run.
    """

    pause: Callable[[], None] | None = None
    fault: Fault | None = None
    kills: str = ""
    whole: bool = True


@dataclass(frozen=True)
class Op:
    """An operation that was asked for; a number of its own in the order of all that were."""

    who: str
    verb: str
    key: str

    @property
    def changes(self) -> bool:
        return self.verb not in READS


class Clock:
    """Made up: each look costs a millisecond, and sleeping costs nothing."""

    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def look(self) -> float:
        self.now_s += 0.001
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        with (
            mock.patch.object(time, "time", self.look),
            mock.patch.object(time, "monotonic", self.look),
            mock.patch.object(time, "sleep", self.sleep),
            mock.patch("stillframe.checkpoint.read.READERS", 1),
            mock.patch("stillframe.store.objects._AT_ONCE", 1),
            mock.patch("stillframe.store.objects.secrets.token_hex", token_hexes()),
            mock.patch("stillframe.restoring.sources.later", _now),
            mock.patch("stillframe.checkpoint.epochs.later", _now),
        ):
            yield


def _now(work: Callable[[], _T]) -> Answer[_T]:
    """In place of :func:`stillframe.latch.later`: in this thread."""
    answer: Answer[_T] = Answer()
    try:
        answer.give(work())
    except Exception as error:
        answer.fail(error)
    return answer


class World:
    """``plan``: what happens at which operation of the processes that are watched, counted from 0."""

    def __init__(
        self, plan: Mapping[int, Event] | None = None, lands_late: bool = False, has_objects: bool = False
    ) -> None:
        self.has_objects = has_objects
        """The root and the tier are object stores: every request is an operation."""
        self.backend = MemoryBackend(lands_late)
        self.tier = MemoryBackend(lands_late)
        """Behind the root, of runs that have one."""
        self.clock = Clock()
        self.ops: list[Op] = []
        """Of the watched processes."""
        self.all_ops: list[Op] = []
        self.on_change: Callable[[Process, Op], None] = lambda _process, _op: None
        self.plan = dict(plan or {})
        self.at: Callable[[Op], Event] = lambda _op: Event()
        """What happens at an operation that is not in the plan."""

    def lose_root(self) -> None:
        """The nodes are gone with their disks: who starts now has an empty root, who lives on sees the old one."""
        self.backend = MemoryBackend(self.backend.lands_late)

    def reader(self, backend: MemoryBackend) -> MemoryStore | MemoryObjects:
        """Somebody to whom nothing happens."""
        return MemoryObjects(backend) if self.has_objects else MemoryStore(backend)

    def land(self) -> None:
        self.backend.land()
        self.tier.land()

    def perform(self, process: Process, verb: str, key: str, work: Callable[[], _T]) -> _T:
        process.check_alive()
        op = Op(process.name, verb, key)
        event = Event()
        if process.is_watched:
            event = self.plan.get(len(self.ops)) or self.at(op)
            self.ops.append(op)
        if event.pause is not None:
            event.pause()
        if event.kills == "before":
            process.kill(event.whole)
        self.all_ops.append(op)
        try:
            return process.backend.perform(work, event.fault, f"{verb} of memory:{key}")
        finally:
            if op.changes:
                self.on_change(process, op)
            if event.kills == "after":
                process.kill(event.whole)


class Process:
    """A process, as one store sees it: the root, or the tier, if it is told so."""

    def __init__(self, world: World, name: str, is_watched: bool, is_tier: bool = False) -> None:
        self.backend = world.tier if is_tier else world.backend
        self.is_tier = is_tier
        self.world = world
        self.name = name
        self.is_watched = is_watched
        self.is_dead = False
        self.store = _ObjectClient(self) if world.has_objects else _Client(self)
        self.own: list[Process] = [self]
        """The same process, as each of the stores sees it."""
        self.kin: list[Process] = [self]
        """The processes of the same run."""
        self.epoch: Callable[[], int | None] = lambda: None

    @property
    def is_left_behind(self) -> bool:
        """Its root is lost."""
        return self.backend not in (self.world.backend, self.world.tier)

    def perform(self, verb: str, key: str, work: Callable[[], _T]) -> _T:
        return self.world.perform(self, verb, key, work)

    def kill(self, whole: bool) -> None:
        for each in self.kin if whole else self.own:
            each.is_dead = True
        self.check_alive()

    def check_alive(self) -> None:
        if self.is_dead:
            raise Killed(self.name)


class _Client(MemoryStore):
    def __init__(self, process: Process) -> None:
        super().__init__(process.backend)
        self._process = process

    def where(self, key: str = "") -> str:
        return f"{'tier' if self._process.is_tier else 'memory'}:{key}"

    def perform(self, verb: str, key: str, work: Callable[[], _T]) -> _T:
        return self._process.perform(verb, key, work)

    def list(self, directory: str = "") -> Iterator[str]:
        """In the same order every time."""
        return iter(sorted(super().list(directory)))


class _ObjectClient(MemoryObjects):
    def __init__(self, process: Process) -> None:
        super().__init__(process.backend, process.perform)
        self._url = "tier:" if process.is_tier else "memory:"
