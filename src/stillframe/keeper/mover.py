"""Promotion: what is committed in the root is carried on to one tier, by every rank's keeper at once.

Rank 0's keeper chooses one save at a time, and puts its name into the tier (:mod:`.leader`); every keeper carries its
own part of that one.  (Ranks that choose alone never complete a step.)  It is carried to its end before another is
chosen, then the newest that is due; those between are skipped.  The target and the one that waits are kept in the
root meanwhile.

Nothing here holds up a save: a tier has a thread of its own.  A tier that fails is tried again with growing pauses.
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from stillframe.checkpoint import epochs
from stillframe.checkpoint.catalog import Catalog, Checkpoint
from stillframe.checkpoint.promote import Pace, carry_part
from stillframe.checkpoint.removal import superseded
from stillframe.errors import (
    BusyError,
    ExistsError,
    IntegrityError,
    NotFoundError,
    StillframeError,
    StorageError,
    VersionError,
    text_of,
    to_record,
)
from stillframe.format import events, names
from stillframe.keeper.commit_loop import or_die
from stillframe.keeper.leaving import Leaving
from stillframe.keeper.progress import Sign
from stillframe.keeper.terms import COORDINATOR
from stillframe.link.messages import TierFailed, TierNews
from stillframe.model import SaveId
from stillframe.tiers import TierConfig

_FIRST_S, _LONGEST_S, _SLOWER = 0.05, 2.0, 1.5
"""Pauses between two looks at what the other ranks have carried."""
_RETRY_S, _LONGEST_RETRY_S = 1.0, 60.0
_IDLE_S = 10.0
"""Between two looks when nothing is known to be carried."""
_NEWS_S = 0.5
_LOOK_S = 0.05
_AGAIN_S = 30.0
"""Between two attempts at parts of ranks that do not get on, if this keeper cannot read them."""


class TakenOver(BusyError):
    """Another run carries on."""


class Mover(ABC):
    """Of one tier.  Thread: :meth:`committed`, :attr:`kept`, :meth:`finish` from any; the rest on its own.

    ``source``: the root, with whatever parts it has; ``others``: the other tiers.  ``epoch``: of this keeper, if it is
    known.  ``tell``: the trainer; ``notice``: a person; ``record``: the journal.
    """

    def __init__(
        self,
        number: int,
        config: TierConfig,
        source: Catalog,
        tier: Catalog,
        rank: int,
        world_size: int,
        run: str,
        epoch: Callable[[], int | None],
        tell: Callable[[TierNews | TierFailed], None],
        notice: Callable[[str], None],
        record: Callable[[events.Event], None],
        others: Sequence[Catalog] = (),
    ) -> None:
        self._number = number
        self._config = config
        self._source = source
        self._tier = tier
        self._others = others
        self._rank = rank
        self._world_size = world_size
        self._run_name = run
        self._epoch = epoch
        self._tell_trainer = tell
        self._notice = notice
        self._record = record
        self._pace = Pace(config.bytes_per_s)
        self._changed = threading.Condition(threading.RLock())
        self._considered: SaveId | None = None
        self._asked: int | None = None  # a step that is carried whether it is due or not
        self._waiting: SaveId | None = None
        self._target: SaveId | None = None
        self._left: tuple[SaveId | None, SaveId | None] = None, None
        """What an earlier keeper was carrying and had waiting, until it is known what has become of it."""
        self.on_turn: Callable[[], None] = lambda: None
        """Called when :attr:`pinned` may have changed, before anything else is done.  Blocks."""
        self._since_s = 0.0
        """When the target was first seen."""
        self._moved_s = 0.0
        """When something was last carried."""
        self._moves = 0
        self._committed: SaveId | None = None
        self._has_looked = False
        """What is left to be carried is known."""
        self._carried_bytes = self._total_bytes = self._sent_bytes = 0
        self._sign = Sign(tier.store)
        self._stalled: set[int] = set()
        """Ranks whose parts of the target this keeper carries, too, if it has them."""
        self._again_s = 0.0
        """Until then it does not try that again."""
        self._failures = 0
        self._trouble = ""
        self._troubled_s = 0.0
        """Since when."""
        self._is_over = False
        self._leaving = Leaving(config.bytes_per_s)
        self._told_s = 0.0
        self._thread: threading.Thread | None = None

    # --- from other threads ----------------------------------------------------------------

    def start(self) -> None:
        """May be called again."""
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=or_die, args=(self._run,), name=f"stillframe-tier-{self._number}", daemon=True
                )
                self._thread.start()

    def committed(self, save: SaveId, parent: SaveId | None) -> None:
        """A save is whole in the root.  ``parent``: what its epoch goes on from.  No I/O."""
        with self._changed:
            last = self._considered
            if last is not None and last.epoch == save.epoch:
                before = last.step
            else:
                before = -1 if parent is None else parent.step
            self._considered = save
            if not self._is_over and (self._is_due(before, save.step) or self._is_asked(save)):
                self._waiting = save
            self._changed.notify_all()
            self._tell()  # each one is told of: who waits for a save wants to know whether it is carried
        self.start()

    def ask_for(self, step: int | None) -> None:
        """Carry this step, due or not, once it is whole in the root; it may be by now.  ``None``: none.  No I/O."""
        with self._changed:
            self._asked, last = step, self._considered
            if self._is_asked(last) and last not in (self._committed, self._target) and not self._is_over:
                self._waiting = last
            self._changed.notify_all()
            self._tell()

    def _is_asked(self, save: SaveId | None) -> bool:
        return save is not None and save.step == self._asked

    def _is_due(self, before: int, step: int) -> bool:
        return bool(self._config.every_steps) and self._config.is_due(before, step)

    @property
    def tier_root(self) -> str:
        return self._tier.root

    @property
    def pinned(self) -> tuple[SaveId | None, SaveId | None]:
        """What is being carried, and what comes next; of an earlier keeper as long as nothing else is known."""
        with self._changed:
            return self._target or self._left[0], self._waiting or self._left[1]

    @property
    def kept(self) -> set[SaveId]:
        """What must stay until it is carried, or given up."""
        return {save for save in self.pinned if save is not None}

    def inherit(self, target: SaveId | None, waiting: SaveId | None) -> None:
        """An earlier keeper was at these.  Before :meth:`start`."""
        with self._changed:
            self._left = target, waiting

    def wake(self) -> None:
        """Something may be known now that was not."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Carry what is due, as long as that gets on; then no more.  Does not wait.  May be repeated."""
        with self._changed:
            self._leaving.begin()
            self._changed.notify_all()

    def finish(self) -> None:
        """:meth:`close`, and wait for it.  If its thread hangs in the storage, that is left there."""
        self.close()
        thread = self._thread
        while thread is not None and thread.is_alive() and not self._leaving.hangs(max(self._since_s, self._moved_s)):
            thread.join(_LOOK_S)

    # --- on its own thread -----------------------------------------------------------------

    def _run(self) -> None:
        pause_s = _FIRST_S
        while True:
            could_leave = self._leaving.has_begun  # asked first: what was there before it, this attempt has seen
            is_busy = self.attempt()
            self._leaving.attempted()
            self.on_turn()
            if self._is_over:
                return
            if self._failures:
                pause_s = min(_RETRY_S * 2 ** min(self._failures - 1, 10), _LONGEST_RETRY_S)
            else:
                pause_s = min(pause_s * _SLOWER, _LONGEST_S) if is_busy else _FIRST_S
            with self._changed:
                if could_leave and self._may_leave(is_busy):
                    return
                if self._leaving.has_begun:
                    pause_s = min(pause_s, _LONGEST_S) if could_leave else 0.0
                self._changed.wait(pause_s if is_busy or self.kept or self._leaving.has_begun else _IDLE_S)

    def attempt(self) -> bool:
        """One turn: whether something is under way.  Whatever it meets is trouble with this tier, and nothing else."""
        try:
            is_busy = self._turn_if_known()
        except (ExistsError, TakenOver) as error:  # it is another run's: no second attempt changes that
            self._end(error)
            return False
        except Exception as error:  # also a bug: no save may fail because of a tier
            if not isinstance(error, StillframeError):
                traceback.print_exc()
            self._failed(_as_trouble(error))
            return True
        self._succeeded()
        return is_busy

    def _may_leave(self, is_busy: bool) -> bool:
        if not is_busy and (not self.kept or self._known_epoch is None):
            return True
        return self._leaving.is_time(max(self._since_s, self._moved_s), self._troubled_s if self._trouble else None)

    def _turn_if_known(self) -> bool:
        return (epoch := self._known_epoch) is not None and self._turn(epoch)

    @property
    def _known_epoch(self) -> int | None:
        """Nothing is carried before it is known."""
        return self._epoch()

    @abstractmethod
    def _turn(self, epoch: int) -> bool:
        """Whether something is under way.  Raises."""

    def _carry(self, target: SaveId) -> None:
        """The parts that are this keeper's to carry, and not there; from another tier if the root lacks one.

        Raises, if none has it, what the root raises; but what it cannot carry of ranks that do not get on, is theirs.
        """
        try:
            self._carry_from_any(target)
        except (IntegrityError, VersionError, NotFoundError):
            if not self._is_through(target):
                raise
            self._again_s = time.monotonic() + _AGAIN_S

    def _carry_from_any(self, target: SaveId) -> None:
        try:
            self._carry_from(self._source, target)
        except (IntegrityError, VersionError, NotFoundError):
            other = next((each for each in self._others if self._has(each, target)), None)
            if other is None:
                raise
            self._carry_from(other, target)

    def _is_through(self, target: SaveId) -> bool:
        """Whether what was tried in vain is to be carried by other ranks, and our own part is there."""
        others = bool(self._stalled) and all(rank % self._world_size != self._rank for rank in self._stalled)
        return others and self._tier.store.head(names.key(target, names.seal(self._rank))) is not None

    def _has(self, other: Catalog, target: SaveId) -> bool:
        """Whether another tier has this save, and not one of another run that is called the same."""
        with contextlib.suppress(StorageError):
            claims = [epochs.read_claim(each.store, target.epoch) for each in (self._tier, other)]
            return claims[0] is not None and claims[0] == claims[1] and other.is_committed(target)
        return False

    def _carry_from(self, source: Catalog, target: SaveId) -> None:
        own_seal = names.key(target, names.seal(self._rank))
        stalled = self._stalled if time.monotonic() >= self._again_s else set()
        # Often asked: one small request, where a listing of a thousand ranks would be three.
        if self._world_size > 1 and not stalled and self._tier.store.head(own_seal) is not None:
            return
        listed = map(names.parse_rank_file, self._tier.store.list(names.step_dir(target)))
        there = {file.rank for file in listed if file is not None and file.kind == "seal" and not file.is_partial}
        with source.open_save(target) as checkpoint:
            own = [rank for rank in checkpoint.ranks if rank % self._world_size == self._rank or rank in stalled]
            sizes = {entry.rank: entry.segment_bytes for entry in checkpoint.manifest.ranks}
            if self._rank < checkpoint.world_size and self._rank not in [*own, *there]:
                raise NotFoundError(f"the part of rank {self._rank} is not in {source.root}")
            with self._changed:  # what is there is no news: nothing has moved
                self._carried_bytes = sum(sizes[rank] for rank in own if rank in there)
                self._total_bytes = sum(sizes[rank] for rank in own)
            for rank in own:
                if rank not in there:
                    self._sent_bytes += self._carry_part(checkpoint, rank)

    def _carry_part(self, checkpoint: Checkpoint, rank: int) -> int:
        self._sign.begin(checkpoint.save, rank)
        try:
            return carry_part(checkpoint, self._tier, rank, self._pace, self._count)
        finally:
            self._sign.end()

    def _count(self, nbytes: int) -> None:
        self._sign.count(nbytes)
        with self._changed:
            self._carried_bytes += nbytes
            self._moved_s = time.monotonic()
            if self._moved_s - self._told_s >= _NEWS_S:
                self._tell()

    def _done(self, target: SaveId) -> None:
        """It is committed in the tier."""
        self._succeeded()
        if self._rank == COORDINATOR or self._sent_bytes:  # another may only have found it there
            took_s = time.monotonic() - self._since_s
            self._record(events.Carried(time.time(), self._tier.root, target.step, self._sent_bytes, took_s))
        self._sent_bytes = 0
        with self._changed:
            self._committed, self._target = target, None
            if self._waiting == target:
                self._waiting = None
            self._tell()

    def _check_newest(self, catalog: Catalog, epoch: int) -> None:
        """Raises :class:`TakenOver` if another run has begun there."""
        later = [] if epochs.is_newest(catalog, epoch) else [each for each in catalog.epochs() if each > epoch]
        if not all(epochs.is_harmless(catalog, each, self._run_name) for each in later):
            raise TakenOver(str(superseded(catalog, epoch)))

    def _failed(self, error: StillframeError) -> None:
        with self._changed:
            is_first = not self._trouble
            self._troubled_s = time.monotonic() if is_first else self._troubled_s
            self._failures += 1
            self._trouble = text_of(error)[:2000]
            self._tell()
        if is_first:
            self._record(events.TierTrouble(time.time(), self._tier.root, text_of(error)[:2000]))
            self._complain(f"nothing can be carried to {self._tier.root} for now (it is tried again)", error)

    def _succeeded(self) -> None:
        with self._changed:
            had_trouble, self._failures, self._trouble = bool(self._trouble), 0, ""
            if had_trouble:
                self._tell()
        if had_trouble:
            self._record(events.TierTrouble(time.time(), self._tier.root))
            self._notice(f"{self._tier.root} can be written again")

    def _end(self, error: StillframeError) -> None:
        with self._changed:
            self._is_over, self._trouble = True, text_of(error)[:2000]
            self._target = self._waiting = None
            self._left = None, None
            self._tell()
        self._record(events.TierTrouble(time.time(), self._tier.root, text_of(error)[:2000], is_over=True))
        self._complain(f"nothing more is carried to {self._tier.root}", error)

    def _complain(self, what: str, error: StillframeError) -> None:
        """To the job: once for each trouble."""
        kind, why = to_record(error)
        self._tell_trainer(TierFailed(kind, f"{what}: {why}"))

    @property
    def _next(self) -> SaveId | None:
        """What comes next, as far as is known by now."""
        return self._waiting or self._left[0] or self._left[1]

    def _tell(self) -> None:
        """The trainer; under the lock, so that its last word is the newest."""
        self._told_s = time.monotonic()
        self._tell_trainer(
            TierNews(
                self._number, self._committed, self._considered, self._target, self._next, self._carried_bytes,
                self._total_bytes, self._failures, self._trouble, self._is_over, self._moves, self._asked,
                self._has_looked,
            )
        )  # fmt: skip


def _as_trouble(error: Exception) -> StillframeError:
    if isinstance(error, StillframeError):
        return error
    return StorageError(f"unexpected {type(error).__name__}: {text_of(error)}")
