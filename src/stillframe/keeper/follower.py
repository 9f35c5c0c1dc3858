"""The mover of every rank but rank 0: carries what rank 0's keeper has chosen (:mod:`.leader`)."""

from __future__ import annotations

import time

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

    def _is_due(self, before: int, step: int) -> bool:
        return not self._config.every_steps or super()._is_due(before, step)  # by time, rank 0 decides

    def _turn_if_known(self) -> bool:
        return self._turn(0)

    def _turn(self, epoch: int) -> bool:
        said = read_target(self._tier)
        if said is None or said.run != self._run_name:  # nothing yet, or the word of an earlier run
            return self._waiting is not None
        self._hear(said)
        target = said.save
        if target is None or target == self._committed:
            return self._waiting is not None
        if self._tier.is_committed(target):
            self._found(target)
            return self._waiting is not None
        try:
            self._carry(target)
        except (IntegrityError, VersionError, NotFoundError) as error:
            if self._tier.store.head(names.key(target, names.seal(self._rank))) is None:
                report_failure(self._tier, Failure(target, self._rank, type(error).__name__, text_of(error)[:10_000]))
        return True

    def _found(self, target: SaveId) -> None:
        """It is committed there; that counts only if no other run had begun by then.  Raises :class:`TakenOver`."""
        self._check_newest(self._tier, target.epoch)
        self._done(target)

    def _hear(self, said: Target) -> None:
        """What rank 0's keeper has decided of what is carried or waits here."""
        with self._changed:
            target, waiting = self._target, self._waiting
        if target is not None and target != said.save and self._tier.is_committed(target):
            self._found(target)
        if waiting is not None and (said.considered is None or waiting > said.considered or waiting == said.waiting):
            waiting = None  # not decided yet
        if waiting is not None and waiting != said.save and self._tier.is_committed(waiting):
            self._found(waiting)
        with self._changed:
            if waiting is not None and waiting == self._waiting:
                self._waiting = None  # it is the target, or was passed over
            if said.save != self._target:
                self._target = None if said.save == self._committed else said.save
                self._since_s = time.monotonic()
            self._stalled, self._has_looked = set(said.stalled), True
            self._left = None, self._left[1] if self._left[1] == said.waiting else None
            self._tell()
        self.on_turn()
