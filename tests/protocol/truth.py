"""What was promised so far, and the judge: whether what is in the store keeps it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stillframe.checkpoint import epochs
from stillframe.checkpoint.catalog import Catalog
from stillframe.errors import StillframeError
from stillframe.format import names
from stillframe.format.epochs import Parent, decode_claim, decode_parent
from stillframe.model import SaveId
from stillframe.store.memory import MemoryBackend, MemoryStore
from tests.protocol.objects import MemoryObjects
from tests.protocol.world import Op, Process, World

Blobs = Mapping[str, bytes]


class Broken(BaseException):
    """A promise is broken.  No code takes this for an error of the storage."""


def payload(run: str, step: int, attempt: int, rank: int) -> bytes:
    """What a rank saves: no two saves of any rank have the same."""
    return f"{run}, step {step}, attempt {attempt}, rank {rank};".encode() * 3


def check(is_kept: bool, promise: str) -> None:
    if not is_kept:
        raise Broken(promise)


@dataclass(frozen=True)
class Floor:
    """What the next restore must give, or go on from.  ``epoch``: after a rewind, only what is as new counts."""

    save: SaveId
    epoch: int = 0


class Truth:
    """What the runs were told, in the order of the telling."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.floor: Floor | None = None
        self.maybe: Floor | None = None
        """Of a rewind that has not returned, or another step that was asked for."""
        self.choices: dict[int, SaveId | None] = {}
        """By epoch: what was chosen after it was claimed."""
        self._seen: dict[int, set[SaveId]] = {}
        """By epoch: the checkpoints that were there then."""
        self.failures: set[SaveId] = set()
        self.removers: dict[SaveId, int] = {}
        """The newest epoch that has put a tombstone beside a save."""
        self.reports: list[SaveId] = []
        self.carried_floor: Floor | None = None
        """What a restore from the tier alone must give, or go on from."""
        self._told: set[SaveId] = set()
        self.is_lost = False
        """The root was: what it must give is not all in it."""

    @property
    def version(self) -> tuple[object, ...]:
        return (
            self.floor,
            self.carried_floor,
            self.maybe,
            self.is_lost,
            tuple(self.choices.items()),
            len(self.failures),
            tuple(self.removers.items()),
        )

    def run_of(self, catalog: Catalog, save: SaveId) -> str | None:
        store = catalog.store
        assert isinstance(store, MemoryStore | MemoryObjects)
        claim = store.backend.blobs.get(names.claim(save.epoch))
        return None if claim is None else decode_claim(claim, file="").run

    # --- what is told ----------------------------------------------------------------------

    def chose(self, epoch: int, chosen: SaveId | None, is_asked_for: bool) -> None:
        """After the epoch was claimed.  ``is_asked_for``: it is not the newest, but the one that was wanted."""
        self.choices[epoch] = chosen
        carried = self.carried_floor.save if self.carried_floor else None
        is_same_step = chosen and carried and (chosen.step, chosen.epoch) == (carried.step, carried.epoch)
        if is_same_step and chosen != carried:
            # The tier has another attempt at this step.  If the root is lost now, that one does not count: a restore
            # raises, and names it (docs/FAILURES.md).
            self.carried_floor = None
        catalog = Catalog(self.world.reader(self.world.backend))
        self._seen[epoch] = {save for save in catalog.look().saves if catalog.is_committed(save)}
        if is_asked_for and chosen is not None:
            self.maybe, self.carried_floor = Floor(chosen), None
        elif self.floor is not None and max(self.floor.save.epoch, self.floor.epoch) < epoch:
            allowed = [self.floor, *([self.maybe] if self.maybe else [])]
            is_kept = any(self.is_after(chosen, floor) for floor in allowed)
            check(is_kept, f"a restore chose {chosen}, after {self.floor} was reported")

    def reported(self, save: SaveId) -> None:
        """As committed."""
        self.reports.append(save)
        check(save not in self.failures, f"{save} is reported as committed, and was reported as failed")
        later = min((epoch for epoch in self.choices if epoch > save.epoch), default=None)
        if later is not None:
            chosen = self.choices[later]
            is_seen = save in self._seen[later] or self.is_after(chosen, Floor(save))
            check(is_seen, f"{save} is reported, but epoch {later} chose {chosen} without having seen it")
        elif self.floor is None or not self.is_after(self.floor.save, Floor(save)):
            self.floor, self.maybe = Floor(save), None

    def failed(self, save: SaveId) -> None:
        """By rank 0, which says that it is not committed, and not that it cannot tell."""
        self.failures.add(save)

    def rewound(self, save: SaveId, epoch: int) -> None:
        self.floor, self.maybe, self.carried_floor = Floor(save, epoch), None, None

    def carried(self, save: SaveId) -> None:
        """As committed in the tier."""
        is_news, self._told = save not in self._told, self._told | {save}
        if is_news and (self.carried_floor is None or not self.is_after(self.carried_floor.save, Floor(save))):
            self.carried_floor = Floor(save)

    def lost(self) -> None:
        """The root, with what only it had: the numbers of its epochs and saves, too, may come again."""
        self.floor, self.maybe, self.is_lost = self.carried_floor, None, True
        for known in (self.choices, self._seen, self.failures, self.removers):
            known.clear()

    def noted(self, process: Process, op: Op) -> None:
        """A change of the store."""
        if process.is_tier or process.is_left_behind:
            return
        if op.key.endswith("/parent.json") and (number := process.epoch()) is not None:
            parent = parent_of(self.world.backend.blobs, number)
            if parent is not None and number not in self.choices:
                self.chose(number, parent.parent, is_asked_for=False)
        directory, _, name = op.key.partition("/")
        save = names.parse_step_dir(directory)
        if save is not None and name == names.aside() and op.verb == "put_new":
            self.removers[save] = max(self.removers.get(save, 0), process.epoch() or 0)

    # --- what follows ----------------------------------------------------------------------

    def is_after(self, save: SaveId | None, floor: Floor, blobs: Blobs | None = None) -> bool:
        """Whether training that goes on from this save has not lost the other."""
        at, wanted = save, floor.save
        if at is not None and at != wanted and at.epoch < floor.epoch:
            return False
        seen: set[int] = set()
        while at is not None and at.epoch != wanted.epoch and at.epoch not in seen:
            seen.add(at.epoch)
            at = self._parent(at.epoch, self.world.backend.blobs if blobs is None else blobs)
        return at is not None and at.epoch == wanted.epoch and (at == wanted or at.step > wanted.step)

    def _parent(self, epoch: int, blobs: Blobs) -> SaveId | None:
        found = parent_of(blobs, epoch)
        return found.parent if found is not None else self.choices.get(epoch)


def parent_of(blobs: Blobs, epoch: int) -> Parent | None:
    data = blobs.get(names.parent(epoch))
    return None if data is None else decode_parent(data, file="")


class Judge:
    """Looks at every state that the store goes through, as a run would that is started there.

    ``count``: how many different ones it has seen.
    """

    def __init__(self, choose: Callable[[Catalog, Truth], SaveId | None], read: Callable[..., None]) -> None:
        self._choose, self._read = choose, read
        self._seen: set[object] = set()
        self._states: set[int] = set()
        self.checks = 0

    @property
    def count(self) -> int:
        return len(self._states)

    def watch(self, world: World, truth: Truth) -> None:
        def changed(process: Process, op: Op) -> None:
            truth.noted(process, op)
            self.judge(world, truth)

        world.on_change = changed

    def judge(self, world: World, truth: Truth) -> None:
        """Raises :class:`Broken`."""
        for backend in (world.backend, world.tier):
            self._look(dict(backend.blobs), backend, truth)
            if backend._late:
                self._look(self._landed(backend, backend.blobs), backend, truth)

    @staticmethod
    def _landed(backend: MemoryBackend, blobs: Blobs) -> dict[str, bytes]:
        """What these blobs become when all that is under way has landed."""
        before, given, late = dict(backend.blobs), dict(blobs), list(backend._late)
        try:
            backend.blobs.clear()
            backend.blobs.update(given)
            backend.land()
            return dict(backend.blobs)
        finally:
            backend._late = late
            backend.blobs.clear()
            backend.blobs.update(before)

    def _look(self, blobs: dict[str, bytes], backend: MemoryBackend, truth: Truth) -> None:
        state = hash(frozenset(blobs.items()))
        is_tier = backend is truth.world.tier
        key = (state, truth.version, len(backend._late), is_tier)
        if key in self._seen:
            return
        self._seen.add(key)
        self._states.add(state)
        self.checks += 1
        copy = MemoryBackend(backend.lands_late)
        copy.blobs = blobs
        self._check_stored(Catalog(truth.world.reader(copy)), blobs, truth, is_tier)
        floors = [truth.carried_floor] if is_tier else [None if truth.is_lost else truth.floor, truth.maybe]
        self._restore(copy, truth, "judge", floors)
        if backend._late:  # it lands after that run has chosen
            copy.blobs = self._landed(backend, copy.blobs)
            self._restore(copy, truth, "second judge", floors)

    def _restore(self, backend: MemoryBackend, truth: Truth, run: str, floors: Sequence[Floor | None]) -> None:
        """A run that is started now sees all that was reported."""
        catalog = Catalog(truth.world.reader(backend))
        try:
            epochs.claim(catalog, run, 1)
            chosen = self._choose(catalog, truth)
        except StillframeError as error:
            raise Broken(f"a run that is started now cannot restore: {error!r}") from error
        allowed = [floor for floor in floors if floor is not None]
        is_kept = floors[0] is None or any(truth.is_after(chosen, floor, backend.blobs) for floor in allowed)
        check(is_kept, f"a run that is started now restores {chosen}; reported was {floors[0]}")

    def _check_stored(self, catalog: Catalog, blobs: Blobs, truth: Truth, is_tier: bool) -> None:
        view = catalog.look()
        published = [save for save in view.saves if catalog.is_committed(save)]
        for save in published:
            check(is_tier or save not in truth.failures, f"{save} is a checkpoint, and was reported as failed")
            try:
                self._read(catalog, truth, save)
            except StillframeError as error:
                raise Broken(f"{save} is published, and is not whole: {error!r}") from error
        for step, saves in view.on_branch.items():
            found = {save.epoch for save in saves if save in published}
            check(len(found) < 2, f"step {step} is twice on the branch: {saves}")
        for epoch, chosen in {} if is_tier or truth.is_lost else truth.choices.items():
            parent = parent_of(blobs, epoch)
            if chosen is not None and parent is not None and parent.parent == chosen:
                is_free = truth.removers.get(chosen, 0) >= epoch
                check(chosen in published or is_free, f"{chosen} is gone by an older hand; epoch {epoch} chose it")
