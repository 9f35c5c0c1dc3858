"""A training run without a trainer: the real keepers of its ranks, and the messages that a trainer would send them."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import msgspec

from stillframe import errors
from stillframe.checkpoint.catalog import Catalog
from stillframe.errors import IntegrityError, KeeperError, NotFoundError, StorageError
from stillframe.format import limits, names
from stillframe.format.digest import digest
from stillframe.format.records import SealDraft, encode_shards, encode_tree
from stillframe.format.segment import Shard, encode_header
from stillframe.format.tree import DictNode, TensorNode
from stillframe.keeper.commit_loop import CommitLoop, or_die
from stillframe.keeper.main import Keeper
from stillframe.keeper.mover import Mover
from stillframe.keeper.promotion import Promotion
from stillframe.link import messages
from stillframe.link.messages import KeeperConfig
from stillframe.model import SaveId
from stillframe.restoring.sources import Sources
from stillframe.retention import Keep, KeepLast, encode_policy
from stillframe.store.protocol import read_all
from stillframe.tiers import TierConfig
from tests.protocol.truth import Truth, check, payload
from tests.protocol.world import Killed, Process, World

DEADLINE_S = 8.0
_TURNS = 200
_TURN_S = 0.5
TIER = TierConfig("memory:", 1, 0.0, encode_policy(KeepLast(1)), 0.0)


class AtOnce:
    """An executor that does the work while it is submitted."""

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        if work is or_die:
            work, arguments = arguments[0], arguments[1:]
        done: Future[Any] = Future()
        done.set_result(work(*arguments))
        return done


class NoDesk:
    """Nobody asks for anything; the real one looks for that in a thread of its own."""

    def start(self) -> None:
        pass


class InTurns(CommitLoop):
    """Without a thread: one turn when it is asked."""

    def add(self, save: int, commit: Any) -> None:
        self._pending[save] = commit

    def turn(self) -> None:
        for save, commit in list(self._pending.items()):
            self._poll(save, commit, is_news=False)
        self._tidy()

    @property
    def is_idle(self) -> bool:
        return not self._pending


class Rank:
    """One rank's keeper, and what its trainer was told."""

    def __init__(self, world: World, name: str, config: KeeperConfig, is_watched: bool, has_tier: bool) -> None:
        self.process = Process(world, name, is_watched)
        self.tier_process = Process(world, name, is_watched, is_tier=True)
        self.done: dict[int, messages.Done] = {}
        self.claims: dict[int, int] = {}
        self.writers: dict[int, Any] = {}
        self.hear: Callable[[messages.FromKeeper], None] = lambda _message: None
        self.carried: Callable[[SaveId], None] = lambda _save: None
        ours, theirs = socket.socketpair()
        self.keeper = Keeper(config, self.process.store, theirs.detach(), ours.fileno())
        self.keeper._trainer._channel.close()
        ours.close()
        at_once: Any = AtOnce()
        self.keeper._tell = self._hear
        no_desk: Any = NoDesk()
        upkeep = self.keeper._upkeep
        upkeep._desk = no_desk
        self.keeper._writers = self.keeper._finisher = upkeep._clearer = at_once
        self.keeper._arena = memoryview(bytearray(8192))
        keeper = self.keeper
        self.commits = keeper._commits = InTurns(
            keeper._settle, keeper._tell_waiting, upkeep.tidy, lambda: keeper._is_orphan, 1.0
        )
        self.process.epoch = lambda: keeper._epoch.number
        self.movers: list[Mover] = []
        if has_tier:
            self._give_tier(config)

    def _give_tier(self, config: KeeperConfig) -> None:
        keeper, tier = self.keeper, Catalog(self.tier_process.store)
        keeper._epoch._tiers = [tier]
        promotion = keeper._promotion = Promotion(
            [TIER], [tier], keeper._terms, config.rank, True, keeper._epoch, self._hear, lambda _text: None,
            lambda _event: None,
        )  # fmt: skip
        keeper._upkeep._pruner._kept = promotion.kept
        self.movers = promotion._movers
        for mover in self.movers:
            vars(mover)["start"] = lambda: None  # no thread: one turn when it is asked

    @property
    def is_idle(self) -> bool:
        return self.commits.is_idle and not any(mover.kept and not mover._is_over for mover in self.movers)

    def turn(self) -> None:
        self.commits.turn()
        for mover in self.movers:
            if not mover._is_over:
                mover.attempt()

    def _hear(self, message: messages.FromKeeper) -> None:
        self.process.check_alive()
        if isinstance(message, messages.Done):
            self.done[message.request] = message
        elif isinstance(message, messages.Claimed):
            self.claims[message.sequence] = message.epoch
        elif isinstance(message, messages.TierNews) and message.committed is not None:
            self.carried(message.committed)
        self.hear(message)


class Run:
    """A run of some ranks.  ``keep``: its policy.  ``claims_late``: breaks the order that all rests on, for a test."""

    def __init__(
        self,
        world: World,
        truth: Truth,
        name: str,
        world_size: int = 1,
        keep: Keep | None = None,
        *,
        is_watched: bool = False,
        claims_late: bool = False,
        members_first: bool = False,
        has_tier: bool = False,
    ) -> None:
        self._has_tier = has_tier
        self.world, self.truth, self.name, self.world_size = world, truth, name, world_size
        self._keep, self._is_watched, self._claims_late = keep, is_watched, claims_late
        self._members_first = members_first
        self._numbers = itertools.count(1)
        self._entered: messages.Enter | None = None
        self._claims: dict[int, int] = {}
        """What the trainer of rank 0 remembers for its next keeper: the epochs claimed, by sequence."""
        self._resumed: messages.Resume | None = None
        self._unclaimed: StorageError | None = None
        self._failures: dict[tuple[int, int], int] = {}
        """By rank and step."""
        self._good: set[tuple[int, int]] = set()
        """By rank and number: the saves that are committed, as far as the trainer was told."""
        self._step: int | None = None
        self._catalog_process = Process(world, f"{name}.trainer", is_watched)
        self._tier_process = Process(world, f"{name}.trainer", is_watched, is_tier=True)
        self.catalog = Catalog(self._catalog_process.store)
        self.ranks: list[Rank | None] = [None] * world_size
        for rank in range(world_size):
            self._start(rank)

    def _told_again(self, rank: int) -> messages.Enter | None:
        sequence = self._entered.sequence if self._entered is not None else 0
        number = self._claims.get(sequence) if rank == 0 else None
        return self._entered if number is None else messages.Enter(sequence, number)

    def _start(self, rank: int) -> None:
        config = KeeperConfig(
            "memory:", self.name, rank, self.world_size, keep=encode_policy(self._keep), deadline_s=DEADLINE_S
        )
        started = Rank(self.world, f"{self.name}.{rank}", config, self._is_watched, self._has_tier)
        started.carried = self.truth.carried
        self.ranks[rank] = started
        started.claims = self._claims
        living = [each for each in self.ranks if each is not None]
        own = [[self._catalog_process, self._tier_process], *([each.process, each.tier_process] for each in living)]
        for processes in own:
            for process in processes:
                process.own, process.kin = processes, [each for processes in own for each in processes]
        with self._surviving(rank):
            started.keeper._take_root()
            for message in (self._told_again(rank), self._resumed):
                if message is not None:
                    started.keeper._take(message, None)

    @contextlib.contextmanager
    def _surviving(self, rank: int) -> Iterator[None]:
        """A keeper that dies alone does not take the others along."""
        try:
            yield
        except Killed:
            found = self.ranks[rank]
            if self._catalog_process.is_dead or found is None or not found.process.is_dead:
                raise
            self.ranks[rank] = None

    def _living(self) -> list[tuple[int, Rank]]:
        found = [(rank, each) for rank, each in enumerate(self.ranks) if each is not None]
        return found[1:] + found[:1] if self._members_first else found

    # --- epochs ----------------------------------------------------------------------------

    def _ask(self, message: messages.Enter | messages.Resume) -> None:
        """Of rank 0's keeper; raises what it answers.  The others are told."""
        number = next(self._numbers)
        for rank, each in self._living():
            with self._surviving(rank):
                each.keeper._take(msgspec.structs.replace(message, request=number if rank == 0 else 0), None)
        first = self.ranks[0]
        done = None if first is None else first.done.get(number)
        if done is None:
            raise KeeperError("rank 0's keeper is gone")
        if done.kind:
            raise errors.from_record(done.kind, done.message)

    def _enter(self) -> None:
        self._revive()
        self._entered = messages.Enter((self._entered.sequence if self._entered else 0) + 1)
        self._resumed = None
        self._unclaimed = None
        try:
            self._ask(self._entered)
        except StorageError as error:  # a root that cannot be written can still be restored from
            self._unclaimed = error

    def restore(self, step: int | None = None) -> SaveId | None:
        """Claim, then choose and read: as ``Checkpointer.restore`` does.  Raises :class:`StillframeError`."""
        if not self._claims_late:
            self._enter()
        chosen = self._choose(step)
        if self._claims_late:
            self._enter()
        self._resume(chosen, is_asked_for=step is not None)
        return chosen

    def rewind(self, step: int) -> SaveId:
        """Raises :class:`StillframeError`."""
        self._enter()
        if self._unclaimed is not None:
            raise self._unclaimed
        save = self.catalog.find(step)
        self._resume(save, is_asked_for=True)
        self._ask(messages.Resume(save, is_durable=True))
        first = self.ranks[0]
        epoch = None if first is None else first.keeper._epoch.number
        assert epoch is not None, "it answered"
        self.truth.rewound(save, epoch)
        return save

    def _resume(self, chosen: SaveId | None, is_asked_for: bool) -> None:
        self._resumed = messages.Resume(chosen, is_claimed=self._unclaimed is None)
        for rank, each in self._living():
            with self._surviving(rank):
                each.keeper._take(self._resumed, None)
        self._failures, self._step = {}, 0 if chosen is None else chosen.step
        first = self.ranks[0]
        epoch = None if first is None else first.keeper._epoch.number
        is_left = self._catalog_process.is_left_behind
        if epoch is not None and self._unclaimed is None and not is_left:  # else the choice binds nobody
            self.truth.chose(epoch, chosen, is_asked_for)

    def _choose(self, step: int | None) -> SaveId | None:
        if not self._has_tier:
            return choose(self.catalog, self.truth, step)
        sources = Sources(self.catalog, [Catalog(self._tier_process.store)], self.world_size)
        passed_over: list[SaveId] = []
        while True:
            chosen = next(sources.seen(step, passed_over), None)
            if chosen is None:
                if sources.trouble:
                    raise StorageError(sources.trouble)
                if step is not None:
                    raise NotFoundError(f"step {step} is gone")
                return None
            sources.hold(chosen, self._claim_in)
            try:
                read_whole(sources.nearest(chosen), self.truth, chosen)
                return chosen
            except (NotFoundError, IntegrityError):
                passed_over.append(chosen)

    def _claim_in(self, tier: Catalog) -> None:
        assert self._entered is not None
        number = self._claims.get(self._entered.sequence)
        with contextlib.suppress(StorageError):
            key = names.claim(number or 0)
            tier.store.put_new(key, read_all(self.catalog.store, key, limits.MAX_NOTE_BYTES))

    # --- saves -----------------------------------------------------------------------------

    def _revive(self) -> None:
        """The trainer of a rank whose keeper has died starts another."""
        for rank, each in enumerate(self.ranks):
            if each is None:
                self._start(rank)

    def save(self, tries: int = 2) -> bool:
        """The next step; says whether it is committed on all ranks.  A rank that is told of a failure tries again.

        Raises :class:`StillframeError`.
        """
        if self._step is None:
            newest = self.catalog.newest()
            self._step = 0 if newest is None else newest.step
        self._step += 1
        waiting = set(range(self.world_size))
        for _ in range(tries):
            waiting = self._save_once(self._step, waiting)
        return not waiting

    def _save_once(self, step: int, ranks: set[int]) -> set[int]:
        """Returns those for whom it failed."""
        if not ranks:
            return ranks
        self._revive()
        number = next(self._numbers)
        for rank, each in self._living():
            if rank in ranks:
                with self._surviving(rank):
                    self._send(rank, each, number, step, 1 + self._failures.get((rank, step), 0))
        for _ in range(_TURNS):
            for rank, each in self._living():
                with self._surviving(rank):
                    each.turn()
            if all(each.is_idle for _, each in self._living()):
                break
            self.world.clock.sleep(_TURN_S)
        good = {rank for rank, save in self._good if save == number}  # also one whose keeper has died since
        for rank in ranks - good:
            self._failures[rank, step] = 1 + self._failures.get((rank, step), 0)
        return ranks - good

    def _send(self, rank: int, each: Rank, number: int, step: int, attempt: int) -> None:
        data = payload(self.name, step, attempt, rank)
        shard = Shard("t", "U8", (len(data),), 0, len(data))
        header = encode_header([shard], {})
        tree = DictNode(["t"], [TensorNode(0)])
        draft = SealDraft(rank, self.world_size, 0.0, encode_shards([shard]), encode_tree(tree), msgspec.Raw(b"[]"))
        text = msgspec.json.encode(draft)
        fd = os.memfd_create("draft")
        os.write(fd, header + text)
        begin = messages.Begin(number, step, attempt, 0.0, len(header), len(text), len(data), "", ())
        keeper = each.keeper
        each.hear = lambda message: self._told(rank, each, message)
        keeper._take(begin, fd)
        each.writers[number] = keeper._saves[number]
        assert keeper._arena is not None
        keeper._arena[: len(data)] = data
        keeper._take(messages.Chunk(number, 0, 0, len(data)), None)
        keeper._take(messages.Staged(number, 0.0), None)

    def _told(self, rank: int, each: Rank, message: messages.FromKeeper) -> None:
        if each.process.is_left_behind:
            return
        if isinstance(message, messages.Committed):
            self._good.add((rank, message.save))
            self.truth.reported(each.writers[message.save].id)
        elif isinstance(message, messages.Failed):
            writer = each.writers[message.save]
            if writer.id is not None and not writer.is_promised and each is self.ranks[0]:
                self.truth.failed(writer.id)
            if each is self.ranks[0]:
                self._pass_on(message)

    def _pass_on(self, failed: messages.Failed) -> None:
        """As the trainers do: the root may be unable to tell the other ranks."""
        word = messages.Uncommitted(failed.save, failed.kind, failed.message, failed.files_stay)
        for other in filter(None, self.ranks[1:]):
            other.keeper._take(word, None)

    def close(self) -> None:
        """The trainer ends; its keepers finish."""
        for rank, each in self._living():
            with self._surviving(rank):
                each.turn()

    def prune(self) -> None:
        """By hand, or once more: what the policy lets go.  Raises :class:`StillframeError`."""
        self._revive()
        first = self.ranks[0]
        if first is not None:
            with self._surviving(0):
                first.keeper._epoch.current()  # nothing goes before the epoch has begun
                first.keeper._upkeep._pruner.prune()


def choose(catalog: Catalog, truth: Truth, step: int | None = None) -> SaveId | None:
    """What a restore chooses: the newest that is whole, every byte read; one that is gone meanwhile is passed over.

    Raises: :class:`StillframeError`; fails if a checkpoint is damaged: nothing here damages any.
    """
    while True:
        chosen = catalog.newest() if step is None else catalog.find(step)
        if chosen is None:
            return None
        try:
            read_whole(catalog, truth, chosen)
            return chosen
        except NotFoundError:
            if step is not None:
                raise
        except IntegrityError:
            check(not catalog.is_committed(chosen), f"{chosen} is published, and damaged")


def read_whole(catalog: Catalog, truth: Truth, save: SaveId) -> None:
    """Every byte of every rank, against checksums and against what was saved.  Raises as a restore does."""
    with catalog.open_save(save) as checkpoint:
        run = truth.run_of(catalog, save)
        for rank in range(checkpoint.world_size):
            part = checkpoint.of(rank)
            segment = part.seal.segment
            assert checkpoint.manifest.save == part.seal.save == save
            found = bytearray(segment.data_bytes)
            assert part.read(segment.data_start, memoryview(found)) == len(found)
            if [digest(bytes(found))] != segment.chunks:
                raise IntegrityError(f"{save}: a chunk of rank {rank}")
            wanted = payload(run, save.step, save.attempt, rank) if run is not None else bytes(found)
            check(bytes(found) == wanted, f"{save}, rank {rank}: other bytes than were saved")
