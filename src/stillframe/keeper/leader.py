"""Rank 0's mover: chooses what is carried to a tier, commits it there when every part has come, and prunes there."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from stillframe.checkpoint.epochs import is_harmless
from stillframe.checkpoint.notes import read_target
from stillframe.checkpoint.promote import introduce, publish, sweep
from stillframe.checkpoint.removal import remove_all, set_aside
from stillframe.errors import BusyError, IntegrityError, NotFoundError, StillframeError, VersionError, text_of
from stillframe.format import names
from stillframe.format.epochs import Target, encode_target
from stillframe.keeper.mover import Mover
from stillframe.keeper.progress import Signs
from stillframe.keeper.retention import Pruner
from stillframe.model import CHUNK_BYTES, SaveId
from stillframe.retention import decode_policy

_PATIENCE_S = 30.0
"""So long a part of which no sign comes is left to the keeper whose rank it is; then whoever has it carries it."""
_GIVE_UP_S = 120.0
"""So long a part that nobody gets on with is waited for: another may turn out to have it."""
_CHUNKS = 3
"""A limit may be so low that the time for so many chunks is longer."""


class Leader(Mover):
    """``is_whole``: whether every rank has its part of a save that was found in the root.

    ``agreed``: what the ranks have restored together, as far as that is known.
    """

    def __init__(
        self, *arguments: Any, is_whole: Callable[[SaveId], bool], agreed: Callable[[], SaveId | None] = lambda: None
    ) -> None:
        super().__init__(*arguments)
        self._is_whole = is_whole
        self._agreed = agreed
        keep = decode_policy(self._config.keep)
        self._pruner = Pruner(self._tier, keep, 0, True, self._epoch_there, lambda: self.kept, is_tier=True)
        self._introduced: set[int] = set()
        self._due_s = 0.0
        """The unix time of the last save that was due by time."""
        self._missing: list[int] = []
        self._given_up: set[SaveId] = set()
        """What was carried of these may be there still."""
        self._signs = Signs(self._tier.store)
        slowest_s = _CHUNKS * CHUNK_BYTES / self._config.bytes_per_s if self._config.bytes_per_s else 0.0
        self._patience_s, self._give_up_s = max(_PATIENCE_S, slowest_s), max(_GIVE_UP_S, 4 * slowest_s)
        self._said: Target | None = None

    def _is_due(self, before: int, step: int) -> bool:
        if self._config.every_steps:
            return super()._is_due(before, step)
        since_s = time.time() - self._due_s
        if 0 <= since_s < self._config.every_s:
            return False
        self._due_s = time.time()  # also if the last one comes from a clock that was ahead: it says nothing
        return True

    def _is_asked(self, save: SaveId | None) -> bool:
        """Not what was gone back from, which may have the same number."""
        if save is None or not super()._is_asked(save):
            return False
        return self._agreed() in (None, save) or save.epoch >= (self._epoch() or 0)

    def _turn(self, epoch: int) -> bool:
        if not self._has_looked:
            self._look(epoch)
        self._introduce_newest(epoch)
        if self._target is None and not self._choose(epoch):
            self._say()
            return False
        self._say()
        target = self._target
        assert target is not None
        try:
            self._introduce(target.epoch)
            self._carry(target)
            missing = publish(self._tier, target)
        except (IntegrityError, VersionError, NotFoundError, BusyError) as error:
            self._give_up(target, error)
            return True
        if missing:
            self._wait_for(target, missing)
            return True
        self._check_newest(self._tier, epoch)  # put first, then looked: as with a manifest of the root
        self._done(target)
        self._say()
        self._tidy(target)
        return self._waiting is not None

    def _look(self, epoch: int) -> None:
        """What an earlier keeper, or run, has left to be done."""
        view, there = self._source.look(), self._tier.look()
        branch = there.branch if view.branch.epoch is None else view.branch  # the root may be lost
        ours = [save for save in there.saves if branch.has(save)]
        self._committed = next((save for save in sorted(ours, reverse=True) if self._tier.is_committed(save)), None)
        said = read_target(self._tier)
        target, waiting = self._left
        left = target or (said.save if said is not None else None)
        # What was being carried, every rank had.
        whole = [save for save in self._source.committed(view) if save in self._left or self._is_whole(save)]
        half = self._half_carried(epoch)
        if half is not None and half not in whole:
            left, whole = half, sorted([*whole, half], reverse=True)
        newest_there = -1 if self._committed is None else self._committed.step
        steps = [newest_there, *(save.step for save in whole)]
        later = [save for save in whole if save.step > newest_there]
        is_due = super()._is_due
        wanted = [save for save in later if save in (left, waiting) or self._is_asked(save)]
        due = [save for save in later if save in wanted or is_due(_before(steps, save.step), save.step)]
        newer = [save for save in due if save != left]
        due_s = self._last_due_s()
        with self._changed:  # no I/O in here: who reports a commit waits for this lock
            self._left = left if left in due else None, None  # it is carried to its end, then the newest
            if 0 <= self._due_s - due_s < self._config.every_s:  # it was judged before this was known
                self._waiting, self._due_s = self._waiting if self._is_asked(self._waiting) else None, due_s
            if newer and not self._is_over and (self._waiting is None or self._waiting < newer[0]):
                self._waiting = newer[0]
            if self._considered is None and whole:
                self._considered = whole[0]
            self._due_s = self._due_s or due_s
            self._has_looked = True
            self._tell()

    def _half_carried(self, epoch: int) -> SaveId | None:
        """What the run goes on from, if our part is in the tier: the root may have lost it, and the others not."""
        begun = self._source.parent(epoch)
        save = self._agreed() if begun is None else begun.parent
        if save is None or self._tier.store.head(names.key(save, names.seal(self._rank))) is None:
            return None
        return None if self._tier.is_committed(save) else save

    def _last_due_s(self) -> float:
        """When the newest one there was saved, for a tier that goes by time; 0 if that cannot be determined."""
        if self._config.every_s and self._committed is not None:
            with contextlib.suppress(IntegrityError, VersionError, NotFoundError):
                return self._tier.manifest(self._committed).saved_unix_s
        return 0.0

    def _choose(self, epoch: int) -> bool:
        with self._changed:
            chosen = self._left[0] or self._waiting
        if chosen is None:
            return False
        self.on_turn()  # before anybody hears of it: it may have come in the middle of this turn
        for each in {epoch, chosen.epoch}:
            if self._tier.store.head(names.parent(each)) is None:  # somebody has emptied the tier
                self._introduced.discard(each)
            self._introduce(each)
        self._check_newest(self._source, epoch)
        with self._changed:
            if self._waiting == chosen:
                self._waiting = None
            self._left = None, None
            self._target, self._missing, self._stalled, self._again_s = chosen, [], set(), 0.0
            self._signs.begin()
            self._since_s = self._moved_s = time.monotonic()
        self.on_turn()  # noted first, then told
        with self._changed:
            self._tell()
        return True

    def _say(self) -> None:
        """Tell the other ranks, unless they have been told.  By time, they learn from this alone what is due."""
        with self._changed:
            word = Target(self._run_name, self._target, self._waiting, self._considered, tuple(sorted(self._stalled)))
        said = self._said
        is_news = (
            said is None
            or (word.save, word.stalled) != (said.save, said.stalled)
            or (self._config.every_s and word.considered != said.considered)
        )
        if self._world_size > 1 and is_news:
            self._tier.store.put(names.TARGET, encode_target(word), durable=False)
            self._said = word

    def _introduce_newest(self, epoch: int) -> None:
        """If the root is lost now, what was gone back from must not count in the tier, either.

        Of the present epoch nobody knows what it goes on from before it has saved: then the one before tells.
        """
        if epoch in self._introduced:
            return
        earlier = sorted((each for each in self._source.epochs() if each <= epoch), reverse=True)
        begun = next(filter(None, map(self._source.parent, earlier)), None)
        if begun is not None and begun.run == self._run_name:
            self._introduce(begun.epoch)

    def _introduce(self, epoch: int) -> None:
        """Again, until what the epoch goes on from is known, and is put there."""
        if epoch not in self._introduced and introduce(self._source, self._tier, epoch):
            self._introduced.add(epoch)

    def _epoch_there(self) -> int | None:
        """In whose name saves are removed in the tier: after a removal by hand, in the name of that."""
        own = self._epoch()
        if own is None:
            return None
        later = sorted((each for each in self._tier.epochs() if each > own), reverse=True)
        return later[0] if later and all(is_harmless(self._tier, each, self._run_name) for each in later) else own

    def _wait_for(self, target: SaveId, missing: list[int]) -> None:
        """Other ranks carry still.  Give up a target whose part nobody gets on with, unless nothing else waits."""
        if missing != self._missing:
            self._missing, self._moved_s = missing, time.monotonic()
        listed = [file for file in map(names.parse_rank_file, self._tier.store.list(names.step_dir(target))) if file]
        self._signs.look(target, missing, {file.rank for file in listed if file.kind == "progress"})
        if self._signs.last_s(missing) > self._moved_s:
            with self._changed:
                self._moved_s, self._moves = self._signs.last_s(missing), self._moves + 1
                self._tell()
        failed = {file.rank for file in listed if file.kind == "failure"} & set(missing)
        if failed and time.monotonic() - max(self._since_s, self._signs.last_s(failed)) > self._give_up_s:
            self._give_up(target, NotFoundError(f"rank {min(failed)} does not have its part any more"))
        elif time.monotonic() - self._moved_s > self._give_up_s and self._waiting is not None:
            self._give_up(target, NotFoundError(f"the part of rank {missing[0]} has not come"))
        else:
            self._stalled = set(self._signs.stalled(missing, self._since_s, self._patience_s))

    def _give_up(self, target: SaveId, why: StillframeError) -> None:
        """No other attempt would help."""
        with self._changed:
            self._target, self._sent_bytes, self._stalled = None, 0, set()
            self._tell()
        self._given_up.add(target)
        self._complain(f"{target} is not carried to {self._tier.root}", why)
        self._say()
        self._remove_given_up()

    def _remove_given_up(self) -> None:
        """What was carried of saves that were given up.  Raises: then the rest goes next time."""
        if not self._given_up:
            return
        epoch, there = self._epoch(), self._epoch_there()
        if epoch is None or there is None:
            return
        for save in sorted(self._given_up - self.kept):
            if self._tier.is_committed(save):
                self._given_up.discard(save)
            elif not self._is_needed(save, epoch):
                if not set_aside(self._tier, save, "left over", there):
                    remove_all(self._tier, save)
                self._given_up.discard(save)

    def _is_needed(self, save: SaveId, epoch: int) -> bool:
        """Whether training may go on from it: where roots are not shared, a part may be nowhere but in the tier.

        So it is with what an earlier epoch has left, and with the newest one, until a later one is complete there.
        """
        last = self._committed
        if last is not None and (last.epoch, last.step) > (save.epoch, save.step):
            return False
        return save.epoch < epoch or save == self._source.newest()

    def _tidy(self, target: SaveId) -> None:
        sweep(self._tier, target)
        try:
            self._remove_given_up()
            self._pruner.prune()
        except StillframeError as error:
            self._notice(f"old checkpoints in {self._tier.root} could not be removed: {text_of(error)}")


def _before(steps: list[int], step: int) -> int:
    return max((each for each in steps if each < step), default=-1)
