"""Whatever a run lives through, "the newest checkpoint" is the newest state that training, as it is now, came from.

The model knows no epochs' files.  It follows training itself: which epoch computed each step.  A checkpoint counts if
and only if training came through the very state that it holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stillframe.checkpoint import epochs
from stillframe.checkpoint.catalog import Catalog
from stillframe.format import names
from stillframe.format.digest import digest
from stillframe.format.epochs import Aside, encode_aside
from stillframe.format.records import Manifest, RankEntry, encode_manifest
from stillframe.lineage import Branch
from stillframe.model import SaveId
from stillframe.store.memory import MemoryStore
from tests.property.states import examples

Past = tuple[int, ...]
"""Which epoch computed each step, from step 0 on: the identity of a state."""
NOBODY = digest(b"")


@dataclass
class Life:
    """An epoch, as training knows it: where it began, and how far it has come."""

    epoch: int
    parent: SaveId | None
    past: Past
    """Of the state that it began with."""
    step: int
    failures: dict[int, int] = field(default_factory=dict)

    def past_of(self, step: int) -> Past:
        return (*self.past[: step + 1], *(self.epoch for _ in range(step + 1 - len(self.past))))


class Run(RuleBasedStateMachine):
    """One root, the life of training that goes on, and the writers of lives before, which may still commit."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore()
        self.catalog = Catalog(self.store)
        self.lives: dict[int, Life] = {}
        """Those that have saved, or said what they go on from."""
        self.now: Life | None = None
        self.before: list[Life] = []
        self.committed: dict[SaveId, Past] = {}
        self.removed: set[SaveId] = set()

    # --- the model -------------------------------------------------------------------------

    def counts(self, save: SaveId) -> bool:
        """Whether training came through the state that this checkpoint holds."""
        newest = self.lives[max(self.lives)]
        past = self.committed[save]
        return newest.past_of(save.step) == past

    def model(self) -> list[SaveId]:
        return sorted(save for save in self.committed if save not in self.removed and self.counts(save))

    # --- what happens ----------------------------------------------------------------------

    def begin(self, parent: SaveId | None, is_told: bool) -> None:
        """A new life; ``is_told``: it says at once what it goes on from, as a rewind does."""
        self.before += [self.now] if self.now is not None else []
        epoch = epochs.claim(self.catalog, f"{len(self.before):08x}", 0)
        past = self.committed[parent] if parent is not None else ()
        self.now = Life(epoch, parent, past, parent.step if parent is not None else -1)
        if is_told:
            self.tell(self.now)

    def tell(self, life: Life) -> None:
        epochs.begin(self.catalog, life.epoch, f"{life.epoch:08x}", 0, life.parent, is_shared=True)
        self.lives[life.epoch] = life

    def commit(self, life: Life, step: int) -> None:
        attempt = 1 + life.failures.get(step, 0)
        save = SaveId(step, life.epoch, attempt)
        manifest = Manifest(save, life.parent, 1, float(step), {}, [RankEntry(0, 4096, NOBODY)])
        if self.store.put_new(names.key(save, names.MANIFEST), encode_manifest(manifest)):
            self.committed.setdefault(save, life.past_of(step))

    @rule(is_restored=st.booleans())
    def start(self, is_restored: bool) -> None:
        """A run starts, or is started again after a crash, and restores the newest checkpoint; or nothing at all."""
        self.begin(self.catalog.newest() if is_restored else None, is_told=False)

    @precondition(lambda self: self.now is not None)
    @rule(ahead=st.integers(1, 3), fails=st.booleans())
    def save(self, ahead: int, fails: bool) -> None:
        assert self.now is not None
        if self.now.epoch not in self.lives:
            self.tell(self.now)
        step = self.now.step + ahead
        if fails:
            self.now.failures[step] = self.now.failures.get(step, 0) + 1
        else:
            self.now.step = step
            self.commit(self.now, step)

    @precondition(lambda self: self.now is not None and self.has_checkpoints())
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        """To any step that is there, also to one that was left behind."""
        step = data.draw(st.sampled_from(sorted({save.step for save in self.committed} - self.gone_steps())))
        found = self.catalog.find(step)
        on_branch = [save for save in self.model() if save.step == step]
        assert found in on_branch or not on_branch
        self.begin(found, is_told=True)

    @precondition(lambda self: bool(self.before))
    @rule(data=st.data(), ahead=st.integers(0, 6))
    def late(self, data: st.DataObject, ahead: int) -> None:
        """A keeper of an earlier life wakes up, and saves: its very first step, or one more."""
        life = data.draw(st.sampled_from(self.before))
        if life.epoch not in self.lives:
            self.tell(life)
        self.commit(life, len(life.past) + ahead)

    @precondition(lambda self: self.has_checkpoints())
    @rule(data=st.data())
    def set_aside(self, data: st.DataObject) -> None:
        """One of them goes, or is found damaged and set aside: but not one that a life begins with."""
        parents = {life.parent for life in [*self.lives.values(), *self.before, *([self.now] if self.now else [])]}
        free = sorted(save for save in self.committed if save not in self.removed and save not in parents)
        if free:
            save = data.draw(st.sampled_from(free))
            self.store.put(names.key(save, names.aside()), encode_aside(Aside("removed", True, 1, 0.0)))
            self.removed.add(save)

    def has_checkpoints(self) -> bool:
        return bool(self.lives) and any(save not in self.removed for save in self.committed)

    def gone_steps(self) -> set[int]:
        there = {save.step for save in self.committed if save not in self.removed}
        return {save.step for save in self.committed} - there

    # --- what must hold --------------------------------------------------------------------

    @invariant()
    def the_branch_is_what_training_came_through(self) -> None:
        if self.lives:
            assert sorted(self.catalog.committed()) == self.model()
            assert self.catalog.newest() == max(self.model(), default=None)
            assert self.catalog.steps() == [save.step for save in self.model()]

    @invariant()
    def a_step_counts_once(self) -> None:
        """But for attempts at it of one epoch."""
        for saves in self.catalog.look().on_branch.values():
            assert len({save.epoch for save in saves}) == 1

    @invariant()
    def a_lineage_has_no_more_rows_than_there_were_epochs(self) -> None:
        for epoch in self.lives:
            parent = self.catalog.parent(epoch)
            assert parent is not None
            assert len(parent.lineage) < epoch
            assert len({row.epoch for row in parent.lineage}) == len(parent.lineage)

    @invariant()
    def manifests_alone_give_the_same_branch(self) -> None:
        """If somebody copies the steps and not ``run/``: whenever every epoch of the chain has a checkpoint."""
        if not self.lives:
            return
        there = {save.epoch for save in self.committed if save not in self.removed}
        newest = max(self.lives)
        chain = {newest, *(row.epoch for row in self.told(newest).lineage)}
        if chain <= there and newest == max(there):
            copied = MemoryStore()
            copied.backend.blobs.update(
                {key: data for key, data in self.store.backend.blobs.items() if key.startswith("step-")}
            )
            view = Catalog(copied).look()
            assert view.branch == self.told(newest)
            assert list(Catalog(copied).committed()) == list(self.catalog.committed())

    def told(self, epoch: int) -> Branch:
        parent = self.catalog.parent(epoch)
        assert parent is not None
        return Branch(epoch, tuple(parent.lineage), parent.parent)


TestRun = Run.TestCase
TestRun.settings = examples(60)


def test_the_model_sees_a_branch_that_wins_wrongly() -> None:
    """The model itself must be able to fail: a lineage that forgets its cut is found out."""
    run = Run()
    run.start(is_restored=False)
    for _ in range(3):
        run.save(ahead=1, fails=False)
    run.begin(SaveId(0, 1), is_told=True)
    assert run.model() == [SaveId(0, 1)]
    run.the_branch_is_what_training_came_through()
    key = names.parent(2)
    forged = msgspec.json.decode(run.store.backend.blobs[key])
    forged["body"]["parent"]["step"] = forged["body"]["lineage"][0][1] = 2
    body = msgspec.json.encode(forged["body"])
    run.store.backend.blobs[key] = msgspec.json.encode({**forged, "xxh3_128": digest(body), "body": msgspec.Raw(body)})
    assert run.catalog.newest() == SaveId(2, 1)
