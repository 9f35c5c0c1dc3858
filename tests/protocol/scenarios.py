"""Lives of runs for the replay: each is told what to do, and whatever happens to its operations happens."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from stillframe.errors import StillframeError
from stillframe.retention import Keep, KeepEvery, KeepLast
from stillframe.store.memory import Fault
from tests.protocol.run import Run, choose, read_whole
from tests.protocol.truth import Judge, Truth
from tests.protocol.world import Event, Killed, Op, World


@dataclass(frozen=True)
class Script:
    """A run of so many ranks, with this policy, and what it does, one thing after the other.

    ``acts``: ``restore`` (the newest), ``restore back`` (the one before it), ``rewind back``, ``save``, ``prune``.
    ``is_replaced``: its node is another one, with an empty root.
    """

    name: str
    acts: str
    world_size: int = 1
    keep: Keep | None = None
    members_first: bool = False
    has_tier: bool = False
    is_replaced: bool = False

    def live(self, world: World, truth: Truth, is_watched: bool = False, claims_late: bool = False) -> None:
        """One that fails at something goes on with the next, unless it could not restore; one that is killed ends."""
        if self.is_replaced:
            world.lose_root()
            truth.lost()
        with contextlib.suppress(Killed, StillframeError):
            run = Run(
                world, truth, self.name, self.world_size, self.keep,
                is_watched=is_watched, claims_late=claims_late, members_first=self.members_first,
                has_tier=self.has_tier,
            )  # fmt: skip
            for act in self.acts.split(", "):
                _act(run, act)
            run.close()


def _act(run: Run, act: str) -> None:
    if act == "restore":
        run.restore()
    elif act in ("restore back", "rewind back"):
        back = run.catalog.steps()[-2:][:1]
        if back:
            (run.rewind if act.startswith("rewind") else run.restore)(back[0])
    elif act == "prune":
        with contextlib.suppress(StillframeError):
            run.prune()
    else:
        assert act == "save", act
        run.save()


@dataclass(frozen=True)
class Scene:
    """``before`` lives undisturbed; something happens to ``watched``; ``after`` comes then, or while that is paused."""

    watched: Script
    after: tuple[Script, ...]
    before: tuple[Script, ...] = ()
    lands_late: bool = False
    has_objects: bool = False

    @property
    def is_long(self) -> bool:
        return self.watched.has_tier or self.has_objects


def play(
    scene: Scene, plan: dict[int, Event], judge: Judge, *, is_after: bool = True, claims_late: bool = False
) -> World:
    """Live it all, and judge every state.  ``plan``: events of the watched run; a pause without a script is filled in.

    Raises :class:`~tests.protocol.truth.Broken`.
    """
    world = World({}, scene.lands_late, scene.has_objects)
    truth = Truth(world)
    judge.watch(world, truth)

    lives = itertools.count(1)

    def others() -> None:
        for script in scene.after:  # no two starts of a run have the same name
            named = replace(script, name=f"{script.name}{next(lives)}")
            named.live(world, truth, claims_late=claims_late)

    world.plan = {
        number: replace(event, pause=others) if event.pause is PAUSE else event for number, event in plan.items()
    }
    with world.clock.installed():
        for script in scene.before:
            script.live(world, truth)
        scene.watched.live(world, truth, is_watched=True, claims_late=claims_late)
        world.land()
        judge.judge(world, truth)
        if is_after:
            others()
            world.land()
            judge.judge(world, truth)
    return world


def PAUSE() -> None:  # stands for the others of a scene
    raise AssertionError("it is to be replaced")


class Chaos:
    """At any operation of any run anything may happen; a paused run lets others live, which may be paused in turn."""

    def __init__(self, seed: int, world: World, truth: Truth, has_tier: bool = False) -> None:
        self._chance = random.Random(seed)
        self._has_tier = has_tier
        self._world, self._truth = world, truth
        self._names = (f"r{number}" for number in range(1000))
        self._lives = 0
        self._rate = self._chance.choice([0.003, 0.01, 0.03])

    def live(self, is_first: bool = True) -> None:
        """One run of some kind; if others have ended before, perhaps on a node that has lost their root."""
        chance = self._chance
        is_replaced = self._has_tier and not is_first and chance.random() < 0.5
        first = ["restore", "restore", "restore back", "rewind back", "save", "prune"]
        if is_replaced or self._truth.is_lost:  # one that does not ask the tier goes on from nothing
            first = ["restore"]
        acts = [chance.choice(first)]
        if acts != ["prune"]:  # by hand
            acts += [chance.choice(["save", "save", "save", "rewind back"]) for _ in range(chance.randrange(1, 5))]
        keep = chance.choice([None, KeepLast(1), KeepLast(1), KeepLast(2), KeepEvery(2)])
        Script(
            next(self._names), ", ".join(acts), chance.choice([1, 1, 2]), keep, chance.random() < 0.3,
            self._has_tier, is_replaced,
        ).live(self._world, self._truth, is_watched=True)  # fmt: skip

    def event(self, op: Op) -> Event:
        chance = self._chance
        if chance.random() > self._rate:
            return Event()
        faults = [None, Fault.REFUSED] + [Fault.REPLY_LOST] * 2 * op.changes
        if self._world.backend.lands_late and op.changes:
            faults += [Fault.LATE] * 2
        kills = chance.choice(["", "", "before", "after"])
        return Event(
            chance.choice([None, self._others, self._others]), chance.choice(faults), kills, chance.random() < 0.7
        )

    def _others(self) -> None:
        if self._lives < 3:
            self._lives += 1
            for _ in range(self._chance.randrange(1, 3)):
                self.live()
            self._lives -= 1
        if self._chance.random() < 0.5:
            self._world.backend.land()


def wreak(seed: int, judge: Judge, has_tier: bool = False) -> World:
    """Some lives to which anything may happen; with a tier, roots are lost, too.

    Raises :class:`~tests.protocol.truth.Broken`.
    """
    world = World({}, lands_late=seed % 2 == 1, has_objects=has_tier and seed % 4 == 3)
    truth = Truth(world)
    judge.watch(world, truth)
    chaos = Chaos(seed, world, truth, has_tier)
    world.at = chaos.event
    with world.clock.installed():
        for number in range(3):
            chaos.live(is_first=number == 0)
        world.backend.land()
        judge.judge(world, truth)
    return world


def new_judge() -> Judge:
    return Judge(choose, read_whole)


def events(op: Op, lands_late: bool, world_size: int) -> Iterator[Event]:
    """What may become of one operation, alone: it fails, or its process ends, or its run."""
    yield Event(kills="before")
    yield Event(fault=Fault.REFUSED)
    if op.changes:
        yield Event(fault=Fault.REPLY_LOST)
        yield Event(fault=Fault.REPLY_LOST, kills="after")
        if lands_late:
            yield Event(fault=Fault.LATE)
            yield Event(fault=Fault.LATE, kills="after")
    if world_size > 1:
        yield Event(kills="before", whole=False)
        if op.changes:
            yield Event(kills="after", whole=False)


def pauses(op: Op, number: int, lands_late: bool) -> Iterator[dict[int, Event]]:
    """It is paused before the operation while others live; then it goes on, fails, or dies after some more."""
    yield {number: Event(PAUSE)}
    for more in (0, 1, 2):
        yield {number: Event(PAUSE), number + more: Event(PAUSE if not more else None, kills="after")}
    if op.changes:
        yield {number: Event(PAUSE, Fault.REPLY_LOST)}
        if lands_late:
            yield {number: Event(PAUSE, Fault.LATE)}


_LAST = KeepLast(1)
_NEXT = Script("b", "restore, save, save", keep=_LAST)
_TWO = Script("b", "restore, save, save", 2, _LAST)
_BACK = Script("back", "rewind back, save", keep=KeepLast(3))
_OLD = Script("old", "restore back, save", keep=KeepEvery(1))
_BY_HAND = Script("hand", "prune", keep=_LAST)
_FIRST = Script("z", "save, save", keep=KeepLast(5))
_A = Script("a", "restore, save, save, save", keep=_LAST)
_A2 = Script("a", "restore, save, save, save", 2, _LAST)

SCENES: dict[str, Scene] = {
    "one rank": Scene(_A, (_NEXT,)),
    "one rank, nothing restored": Scene(replace(_A, acts="save, save, save"), (_NEXT,), (_FIRST,)),
    "two ranks": Scene(_A2, (_TWO,)),
    "two ranks, the members first": Scene(replace(_A2, members_first=True), (_NEXT,)),
    "another size": Scene(_A, (_TWO,), (_FIRST,)),
    "rewound": Scene(replace(_A, acts="restore, save, rewind back, save, save"), (_NEXT,), (_FIRST,)),
    "rewound by two": Scene(replace(_A2, acts="restore, save, rewind back, save"), (_TWO,), (_FIRST,)),
    "goes back": Scene(_A, (_BACK, _NEXT), (_FIRST,)),
    "goes back by hand": Scene(_A, (_OLD, _NEXT), (_FIRST,)),
    "goes back and stays": Scene(_A, (replace(_BACK, keep=KeepLast(9)),), (_FIRST,)),
    "pruned by hand": Scene(_A, (_BY_HAND, _NEXT), (_FIRST,)),
    "prunes by hand": Scene(replace(_BY_HAND, name="a"), (_BACK, _NEXT), (_FIRST,)),
    "leftovers": Scene(_A, (_NEXT, replace(_NEXT, name="c")), (_FIRST, replace(_FIRST, name="y"))),
}
_TIER = replace(_A, has_tier=True)
_TIER2 = replace(_A2, has_tier=True)
_NEXT_TIER = replace(_NEXT, has_tier=True)
_LOST = replace(_NEXT_TIER, is_replaced=True)
SCENES |= {
    "a tier": Scene(_TIER, (_NEXT_TIER,)),
    "a tier, two ranks": Scene(_TIER2, (replace(_TWO, has_tier=True),)),
    "a tier, the root lost": Scene(_TIER, (_LOST, _NEXT_TIER)),
    "a tier, the root lost, two ranks": Scene(_TIER2, (replace(_TWO, has_tier=True, is_replaced=True), _LOST)),
    "a tier, rewound": Scene(replace(_TIER, acts="restore, save, save, rewind back, save"), (_NEXT_TIER,)),
}
_OBJECTS = ["one rank", "two ranks", "rewound", "pruned by hand", "leftovers", "a tier", "a tier, the root lost"]
SCENES |= {f"{name}, landing late": replace(scene, lands_late=True) for name, scene in SCENES.items()}
SCENES |= {f"objects, {name}": replace(SCENES[f"{name}, landing late"], has_objects=True) for name in _OBJECTS}
