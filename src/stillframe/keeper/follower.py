"""The mover of every rank but rank 0: carries what rank 0's keeper has chosen (:mod:`.leader`)."""

from __future__ import annotations

import time

from stillframe.checkpoint.epochs import read_claim
from stillframe.checkpoint.notes import read_target
from stillframe.errors import IntegrityError, NotFoundError, VersionError, text_of
from stillframe.format import names
from stillframe.format.epochs import Target
from stillframe.format.records import Failure
from stillframe.keeper.mover import Mover
from stillframe.keeper.segment import report_failure
from stillframe.model import SaveId


class Follower(Mover):
    """Every rank's but rank 0's: carries what rank 0's keeper has chosen."""

    _own_epoch = 0
    """The newest of this run that was seen in the tier."""

    def _is_due(self, before: int, step: int) -> bool:
        return not self._config.every_steps or super()._is_due(before, step)  # by time, rank 0 decides

    @property
    def _known_epoch(self) -> int:
        return 0  # it goes by what rank 0's keeper says

    def _turn(self, epoch: int) -> bool:
        said = read_target(self._tier)
        if said is None or said.run != self._run_name:  # nothing yet, or the word of an earlier run
            return self._waiting is not None
        self._hear(said)
        target = said.save
        if target is None or target == self._committed:
            return self._waiting is not None
        if self._tier.is_committed(target):
            return not self._found(target) or self._waiting is not None
        try:
            self._carry(target)
        except (IntegrityError, VersionError, NotFoundError) as error:
            if self._tier.store.head(names.key(target, names.seal(self._rank))) is None:
                report_failure(self._tier, Failure(target, self._rank, type(error).__name__, text_of(error)[:10_000]))
        return True

    def _found(self, target: SaveId) -> bool:
        """It is committed there; that counts only if no other run had begun by then.  Raises :class:`TakenOver`.

        Asked of our own epoch: between that of the target and ours others may have begun, and ended.  Rank 0's keeper
        puts it there before it names a target; returns whether it is seen by now, otherwise nothing can be told.
        """
        later = sorted((each for each in self._tier.epochs() if each > self._own_epoch), reverse=True)
        self._own_epoch = next(filter(self._is_own, later), self._own_epoch)
        if not self._own_epoch:
            return False
        self._check_newest(self._tier, self._own_epoch)
        self._done(target)
        return True

    def _is_own(self, epoch: int) -> bool:
        claim = read_claim(self._tier.store, epoch)
        return claim is not None and claim.run == self._run_name

    def _hear(self, said: Target) -> None:
        """What rank 0's keeper has decided of what is carried or waits here."""
        with self._changed:
            target, waiting = self._target, self._waiting
        if not self._is_settled(target, said):
            return
        if waiting is not None and (said.considered is None or waiting > said.considered or waiting == said.waiting):
            waiting = None  # not decided yet
        elif waiting is not None and self._is_asked(waiting) and waiting != said.save:
            # Rank 0's keeper may have decided before it was asked for it.
            waiting = waiting if self._tier.is_committed(waiting) else None
        if not self._is_settled(waiting, said):
            return
        with self._changed:
            if waiting is not None and waiting == self._waiting:
                self._waiting = None  # it is the target, or was skipped
            if said.save != self._target:
                self._target = None if said.save == self._committed else said.save
                self._since_s, self._again_s = time.monotonic(), 0.0
            self._stalled, self._has_looked = set(said.stalled), True
            self._left = None, self._left[1] if self._left[1] == said.waiting else None
        self.on_turn()  # noted first, then told
        with self._changed:
            self._tell()

    def _is_settled(self, save: SaveId | None, said: Target) -> bool:
        """Whether nothing is to be found out about a save that rank 0's keeper is through with."""
        return save is None or save == said.save or not self._tier.is_committed(save) or self._found(save)
