"""The trainer's keeper, whichever process it is: what its messages and its death do to the saves, and the next one.

There is at most one current keeper; before the next one starts, the saves that a dead one had begun have failed and its
spans are free.  Saves that it had not begun go to the next one.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

import msgspec

from stillframe import errors
from stillframe.errors import DeadlineError, KeeperError, StillframeError, StorageError
from stillframe.latch import LOOK_S, Answer, Latch
from stillframe.link import messages
from stillframe.link.arena import Arena
from stillframe.link.messages import FromKeeper, FromTrainer, KeeperConfig
from stillframe.model import RestoreReport, SaveId
from stillframe.save.job import say
from stillframe.save.keeper_process import KeeperProcess
from stillframe.save.saves import Save, Saves
from stillframe.save.seal_count import SealCount
from stillframe.save.tier_book import TierBook

logger = logging.getLogger("stillframe")

TIDY_S = 30.0
"""So long :meth:`KeeperClient.close` waits for a keeper that has nothing of ours to write any more."""
_NEXT_S, _YOUNG_S = 2.0, 1.0  # so long a keeper that cannot be talked to may take to end; so soon none is replaced
_Question: TypeAlias = "messages.Enter | messages.Resume | messages.Start"  # each can be asked again


class KeeperClient:
    """The current keeper, and what its messages and its death do to the saves.  Thread: safe from any.

    ``others``: in a root that is not shared, how the other ranks learn what this one has sealed; ``epoch``: there, the
    number that they have agreed on.
    """

    def __init__(
        self, config: KeeperConfig, saves: Saves, others: SealCount | None = None, epoch: int | None = None
    ) -> None:
        self._config = config
        self._saves = saves
        self.tiers = TierBook(config.tiers, saves, self.start)
        self._others = others
        self._entered = messages.Enter(0, epoch)
        self._resumed: messages.Resume | None = None
        self._unclaimed: StorageError | None = None
        """Why the present epoch was not claimed when it was entered."""
        self._started: int | None = None
        self._requests = itertools.count(1)
        self._answers: dict[int, Answer[messages.Done]] = {}
        self._arena: Arena | None = None
        self._lock = threading.RLock()
        self._current: KeeperProcess | None = None
        self._lost: list[Save] = []
        self._refusal: StillframeError | None = None
        self._unready: StillframeError | None = None
        """Why the last keeper ended before it was ready."""
        self._answered = Latch()
        self.on_unsaved: Callable[[int, int, int, StillframeError], None] = lambda *_: None
        """Called with sequence, step, attempt and error of what is reported and may be in no book; must not block."""
        self.is_closed = False

    @property
    def pid(self) -> int | None:
        with self._lock:
            return self._current.pid if self._current else None

    def start(self) -> KeeperProcess:
        """The running keeper, started if there is none.  Raises :class:`KeeperError`."""
        with self._lock:
            if self._current is None:
                if self.is_closed:
                    raise KeeperError("the checkpointer is closed")
                self._answered = Latch()
                self._refusal = self._unready = None
                keeper = KeeperProcess(self._config, self._hear, self._on_exit, self._owes_news, self._is_awaited)
                try:
                    keeper.start()
                    self._brief(keeper)
                    self._saves.keeper_started()
                    self._current = keeper
                except BaseException:  # interrupted: one that does not know which epoch it saves in must not save
                    if self._current is None and keeper.pid:
                        keeper.end()
                    raise
            return self._current

    def talk(self, tell: Callable[[KeeperProcess], None]) -> KeeperProcess:
        """Say something to the keeper; if it turns out to be dead, to the next one.  Returns which has heard it.

        A death is noticed by another thread: for a moment the dead one is still the one to talk to.
        """
        keeper = self.start()
        try:
            tell(keeper)
        except KeeperError:
            if self.is_closed or not keeper.wait_ended(_NEXT_S):
                raise
            keeper = self.start()
            tell(keeper)
        return keeper

    def _brief(self, keeper: KeeperProcess) -> None:
        """Tell a new keeper which epoch it saves in, and, for the other ranks, which saves died with an earlier one.

        Its lock is held again, so that they no longer notice the death by themselves.
        """
        with contextlib.suppress(KeeperError):  # it is gone, too: then its lock tells
            if self._entered.sequence or self._entered.number is not None:
                keeper.send(self._entered)
            if self._resumed is not None:
                keeper.send(self._resumed)
            if self.tiers.asked is not None:
                keeper.send(messages.Carry(self.tiers.asked))
            for save in self._lost:
                if save.error is not None and save._sequence == self._entered.sequence:
                    keeper.send(messages.Abandon(save.number, save.step, save.attempt, *errors.to_record(save.error)))
            self._lost = []

    def report_unsaved(
        self, sequence: int, step: int, attempt: int, error: StillframeError, is_begun: bool = False
    ) -> None:
        """Tell the other ranks that this one does not save a step that they may be saving, nor commits it if sealed."""
        sealed = (each.number for each in self._saves.in_flight if (each.step, each.phase) == (step, "sealed"))
        number = next(sealed, None) if is_begun else -1  # of no save
        if self._others is not None and not is_begun and sequence == self._entered.sequence:
            self._others.failed(step, attempt, str(error))  # not if it has restored since: the step is another save's
        elif self._others is None and self._config.world_size > 1 and number is not None:
            if not is_begun:
                self.on_unsaved(sequence, step, attempt, error)
            with contextlib.suppress(StillframeError):
                told = messages.Abandon(number, step, attempt, *errors.to_record(error))
                self.talk(lambda keeper: keeper.send(told) if sequence == self._entered.sequence else None)

    # --- epochs ----------------------------------------------------------------------------

    @property
    def agreed_epoch(self) -> int:
        """The number that the ranks have agreed on last; 0 where they do not."""
        return self._entered.number or 0

    def leave_epoch(self) -> None:
        """Nothing more is saved in it.  Where every rank has a root of its own, the others are told: one that waits for
        a seal of ours need not wait for its deadline.  Blocks until what was saved is sealed, or has failed."""
        if self._others is not None:
            self._saves.wait_all("sealed", None)
            self._others.leave()

    def stay_in_epoch(self) -> None:
        """There is no other epoch: the opposite of :meth:`leave_epoch`."""
        if self._others is not None:
            self._others.stay()

    def note_epoch(self, sequence: int, number: int | None) -> None:
        """Another epoch begins, and is claimed with its first save."""
        with self._lock:
            self._entered = messages.Enter(sequence, number)
            self._resumed = self._unclaimed = self.tiers.asked = None
            if self._others is not None:
                self._others.enter(number or 0)
        self._mention(self._entered)

    def enter(self, sequence: int, number: int | None) -> None:
        """Another epoch begins: what is saved from now on belongs to it.  Blocks until it is claimed.

        A root that cannot be written can still be restored from: then it is claimed at the next save.
        Raises: :class:`BusyError`, :class:`KeeperError`, :class:`DeadlineError`.
        """
        self.wait_ready()
        self.note_epoch(sequence, number)
        try:
            self._ask(self._entered)
        except StorageError as error:
            self._unclaimed = error
            logger.info("nothing can be saved for now: %s", error)  # Ready has said so

    def resume(self, parent: SaveId | None, is_new: bool = True) -> None:
        """What the epoch goes on from.  Never blocks: it is put down with the first save."""
        with self._lock:
            self._resumed = messages.Resume(parent, is_claimed=is_new and self._unclaimed is None)
        self._mention(self._resumed)

    def rewind(self, parent: SaveId) -> None:
        """As :meth:`resume`, durably.  Blocks; raises."""
        if self._unclaimed is not None:
            raise self._unclaimed
        self.resume(parent)
        self._ask(messages.Resume(parent, is_durable=True))

    def start_epoch(self) -> None:
        """The epoch is begun, so that ranks can save in it before this one does.  Blocks, once in an epoch; raises."""
        sequence = self._entered.sequence
        if self._started != sequence:
            self._ask(messages.Start())
            self._started = sequence

    def carry(self, step: int) -> None:
        """Every tier gets this step of the present epoch, due there or not.  May be told before it is saved."""
        with self._lock:  # a keeper that is being started is told, too
            self.tiers.asked = step
            self._mention(messages.Carry(step))

    def _mention(self, message: FromTrainer) -> None:
        """Tell the keeper, if there is one: what the next one must know, it is told when it starts."""
        if (current := self._current) is not None:
            with contextlib.suppress(KeeperError):
                current.send(message)

    def _ask(self, message: _Question) -> None:
        """Blocks until the keeper, or the next one if it dies, has done it; raises what kept it from that."""
        self.talk(lambda keeper: self._ask_one(keeper, message))

    def _ask_one(self, keeper: KeeperProcess, message: _Question) -> None:
        request = next(self._requests)
        answer: Answer[messages.Done] = Answer()
        self._answers[request] = answer
        try:
            keeper.send(msgspec.structs.replace(message, request=request))
            keeper.look_now()
            turn = keeper.waited_for()
            while not answer.is_given and keeper.is_listened_to:  # one that hangs is given up by who listens to it
                with contextlib.suppress(DeadlineError):
                    answer.get(LOOK_S)
                turn()
            answer.fail(KeeperError(f"the connection to the keeper (pid {keeper.pid}) is closed"))
            done = answer.get()
        finally:
            self._answers.pop(request, None)
        if done.kind:
            raise errors.from_record(done.kind, done.message)

    def attach(self, keeper: KeeperProcess, arena: Arena) -> None:
        """Give this keeper the arena, unless it has it."""
        self._arena = arena
        arena.on_wait = self.look_now
        if not keeper.has_arena:
            keeper.send(messages.Attach(arena.nbytes), arena.fd)
            keeper.has_arena = True

    def wait_ready(self) -> None:
        """Until the root is ours: as long as the keeper lives, and that of the run before gets on.

        Raises: :class:`BusyError` if another run has the root; :class:`KeeperError` if the keeper is given up.
        """
        keeper = self.start()
        turn = keeper.waited_for()  # one that hangs is given up by who listens
        while not self._answered.wait(LOOK_S) and keeper.is_listened_to:
            turn()
        if self._unready is not None:
            raise self._unready

    def report_restore(self, report: RestoreReport) -> None:
        """For the journal of the keeper, if there is one."""
        if report or report.skipped:
            passed_over = tuple(each.step for each in report.skipped)
            self._mention(messages.Restored(report.step, report.bytes, report.seconds, passed_over))

    def close(self, timeout_s: float | None, updates: messages.Updates = ()) -> None:
        """Let the keeper finish and go.  Blocks until it has, for at most ``timeout_s`` and at most :data:`TIDY_S`.

        What it has not removed by then it removes later, by itself.
        """
        with self._lock:
            self.is_closed = True
            if (current := self._current) is None:
                return
            current.expect_exit()
        with contextlib.suppress(KeeperError):  # gone already; joining tells
            current.send(messages.Close(updates))
        current.wait_ended(TIDY_S if timeout_s is None else min(timeout_s, TIDY_S))
        if not current.is_gone and (timeout_s is None or timeout_s > TIDY_S):
            doing = f" (it is {current.doing})" if current.doing else ""
            logger.warning("the keeper (pid %d) continues to clean up in the background%s", current.pid, doing)

    def look_now(self) -> None:
        """Somebody waits: news is taken at once from here on."""
        if (current := self._current) is not None:
            current.look_now()

    def look_after(self) -> None:
        """Deal with a keeper whose end nobody has noticed, because the thread that listens to it died."""
        for save in self._saves.in_flight:
            keeper = save.job.keeper
            if keeper is not None and not keeper.is_listened_to:
                keeper.end()
                self._on_exit(keeper, KeeperError(f"the connection to the keeper (pid {keeper.pid}) is closed"))

    def hang_up(self) -> None:
        """Take no more from the keeper and send it nothing more; it finishes what it has."""
        if (current := self._current) is not None:
            current.hang_up()

    # --- on the receiving thread -----------------------------------------------------------

    def _hear(self, keeper: KeeperProcess, message: FromKeeper) -> None:
        if isinstance(message, messages.Flushed):
            self._saves.flushed(message.save, message.nbytes, message.begun_s)
            if self._arena is not None:
                self._arena.give_back(message.span, keeper)
        elif isinstance(message, messages.Sealed):
            self._sealed(message)
        elif isinstance(message, messages.AwaitingRanks):
            self._saves.awaiting_ranks(message.save, message.ranks, self._config.deadline_s)
        elif isinstance(message, messages.Committed):
            self._saves.committed(message.save, message.at_s)
        elif isinstance(message, messages.Failed):
            error = errors.from_record(message.kind, message.message)
            self._saves.tell_failed(self._saves.fail(message.save, error, message.files_stay))
        elif isinstance(message, messages.Claimed):
            with self._lock:
                if message.sequence == self._entered.sequence:
                    self._entered = messages.Enter(message.sequence, message.epoch)
        elif isinstance(message, messages.Done):
            if (answer := self._answers.pop(message.request, None)) is not None:
                answer.give(message)
        elif isinstance(message, messages.TierNews):
            self.tiers.hear(message)
        elif isinstance(message, messages.TierFailed):
            self._saves.telling.troubled(errors.from_record(message.kind, message.message))
        elif isinstance(message, messages.Notice):
            say(logger.warning, "%s", message.message)
        elif isinstance(message, messages.Ready):
            if message.warning:
                say(logger.warning, "%s", message.warning)
            self._answered.unlock()
        elif isinstance(message, messages.Refused):
            self._refusal = errors.from_record(message.kind, message.message)

    def _sealed(self, message: messages.Sealed) -> None:
        save = next((each for each in self._saves.in_flight if each.number == message.save), None)
        if save is not None and self._others is not None:
            identity = SaveId(save.step, message.epoch, save.attempt)
            self._others.sealed(identity)
            self._saves.sealed(message.save, message.at_s, message.is_unchanged, message.epoch)
            self._others.watch(identity, save, self._saves, lambda: self._mention(messages.Complete(identity)))
        else:
            self._saves.sealed(message.save, message.at_s, message.is_unchanged, message.epoch)

    def _owes_news(self) -> bool:
        """Whether somebody waits for the keeper, or will."""
        is_asked = not self._answered.is_open or bool(self._answers)
        return is_asked or self._saves.owes_news(until_sealed=self._others is not None)

    def _is_awaited(self) -> bool:
        is_room_awaited = self._arena is not None and self._arena.is_awaited
        return self._saves.is_awaited or bool(self._answers) or is_room_awaited

    def _on_exit(self, process: KeeperProcess, error: KeeperError | None) -> None:
        """Fail what it had begun, take back what it was lent, let others start: all of it, whatever fails."""
        failed: list[Save] = []
        with self._lock, contextlib.ExitStack() as last_first:
            # All of this before another keeper can be started: its saves and spans are not these.
            reason = self._refusal or error or KeeperError(f"the keeper (pid {process.pid}) left with saves in flight")
            last_first.callback(self._replace, process)
            last_first.callback(self._no_longer_ready, error)
            last_first.callback(self._forget, process)
            last_first.callback(self._fail_answers, reason)
            for save in self._saves.in_flight:
                # In a root of its own it had nothing more to do for what is sealed.
                if save.job.keeper is process and (self._others is None or save.phase != "sealed"):
                    last_first.callback(self._saves.fail, save.number, reason)
                    failed.append(save)
            self._lost += failed
        self._saves.tell_failed(failed)

    def _no_longer_ready(self, error: KeeperError | None) -> None:
        if not self._answered.is_open:
            self._unready = self._refusal or error
            self._answered.unlock()

    def _fail_answers(self, reason: StillframeError) -> None:
        for answer in list(self._answers.values()):
            answer.fail(reason)
        self._answers.clear()

    def _forget(self, process: KeeperProcess) -> None:
        if self._arena is not None:
            self._arena.give_back_all(process)
        if self._current is process:
            self._current = None

    def _replace(self, process: KeeperProcess) -> None:
        """Of several ranks, start another at once: a rank without a keeper looks to the others as if it had ended.

        Not if it died young: then the next one would, too.
        """
        is_young = time.monotonic() - process.started_s < _YOUNG_S
        if self._config.world_size > 1 and not self.is_closed and not is_young and self._refusal is None:
            with contextlib.suppress(KeeperError):
                self.start()
