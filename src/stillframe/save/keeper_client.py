"""The trainer's keeper, whichever process it is: what its messages and its death do to the saves, and the next one.

There is at most one current keeper; before the next one starts, the saves of a dead one have failed and its spans are
free.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from concurrent.futures import Future

import msgspec

from stillframe import errors
from stillframe.errors import BusyError, DeadlineError, KeeperError, StillframeError, StorageError
from stillframe.link import messages
from stillframe.link.arena import Arena
from stillframe.link.messages import FromKeeper, KeeperConfig
from stillframe.model import RestoreReport, SaveId
from stillframe.save.keeper_process import KeeperProcess
from stillframe.save.saves import Save, Saves
from stillframe.save.seal_count import SealCount
from stillframe.units import format_ranks

logger = logging.getLogger("stillframe")

READY_S = 300.0
"""How long to wait for the root: the keeper of the run before may still be finishing."""
_YOUNG_S = 1.0
_NO_SAVE = -1


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
        self._others = others
        self._entered = messages.Enter(0, epoch)
        self._resumed: messages.Resume | None = None
        self._unclaimed: StorageError | None = None
        """Why the present epoch was not claimed when it was entered."""
        self._started: int | None = None
        self._requests = itertools.count(1)
        self._answers: dict[int, Future[messages.Done]] = {}
        self._arena: Arena | None = None
        self._lock = threading.RLock()
        self._current: KeeperProcess | None = None
        self._lost: list[Save] = []
        self._refusal: StillframeError | None = None
        self._answered = threading.Event()
        self._has_warned_unchanged = False
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
                self._answered.clear()
                self._refusal = None
                self._current = KeeperProcess(
                    self._config, self._hear, self._on_exit, self._owes_news, self._is_awaited
                )
                self._saves.keeper_started()
                self._brief(self._current)
            return self._current

    def _brief(self, keeper: KeeperProcess) -> None:
        """Tell a new keeper which epoch it saves in, and, for the other ranks, which saves died with an earlier one.

        Its lock is held again, so that they no longer notice the death by themselves.
        """
        lost, self._lost = self._lost, []
        with contextlib.suppress(KeeperError):  # it is gone, too: then its lock tells
            if self._entered.sequence or self._entered.number is not None:
                keeper.send(self._entered)
            if self._resumed is not None:
                keeper.send(self._resumed)
            for save in lost:
                if save.error is not None:
                    why = errors.to_record(save.error)
                    keeper.send(messages.Abandon(save.number, save.step, save.attempt, *why))

    def report_unsaved(self, step: int, attempt: int, error: StillframeError) -> None:
        """Tell the other ranks that this one does not save a step that they may be saving."""
        if self._others is not None:
            self._others.failed(self._entered.sequence, step, attempt, str(error))
        elif self._config.world_size > 1:
            with contextlib.suppress(KeeperError):
                self.start().send(messages.Abandon(_NO_SAVE, step, attempt, *errors.to_record(error)))

    # --- epochs ----------------------------------------------------------------------------

    @property
    def agreed_epoch(self) -> int:
        """The number that the ranks have agreed on last; 0 where they do not."""
        return self._entered.number or 0

    def note_epoch(self, sequence: int, number: int | None) -> None:
        """Another epoch begins, and is claimed with its first save."""
        with self._lock:
            self._entered = messages.Enter(sequence, number)
            self._resumed = None
            self._unclaimed = None
            if self._others is not None:
                self._others.enter(sequence)
            current = self._current
        if current is not None:
            with contextlib.suppress(KeeperError):  # the next one is told
                current.send(self._entered)

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
            current = self._current
        if current is not None:
            with contextlib.suppress(KeeperError):  # the next one is told
                current.send(self._resumed)

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

    def _ask(self, message: messages.Enter | messages.Resume | messages.Start) -> None:
        """Blocks until the keeper has done it; raises what kept it from that."""
        request = next(self._requests)
        answer: Future[messages.Done] = Future()
        keeper = self.start()
        with self._lock:
            self._answers[request] = answer
        try:
            keeper.send(msgspec.structs.replace(message, request=request))
            done = answer.result(READY_S)
        except TimeoutError:
            raise DeadlineError(f"the keeper did not answer within {READY_S:g} s: does the storage hang?") from None
        finally:
            with self._lock:
                self._answers.pop(request, None)
        if done.kind:
            raise errors.from_record(done.kind, done.message)

    def attach(self, keeper: KeeperProcess, arena: Arena) -> None:
        """Give this keeper the arena, unless it has it."""
        self._arena = arena
        if not keeper.has_arena:
            keeper.send(messages.Attach(arena.nbytes), arena.fd)
            keeper.has_arena = True

    def wait_ready(self) -> None:
        """Until the root is ours.  Raises :class:`BusyError` if another run has it."""
        self.start()
        if not self._answered.wait(READY_S):
            raise DeadlineError(f"the keeper did not get hold of {self._config.root} within {READY_S:g} s")
        if isinstance(self._refusal, BusyError):
            raise self._refusal

    def report_restore(self, report: RestoreReport | None) -> None:
        """For the journal of the keeper, if there is one."""
        with self._lock:
            current = self._current
        if current is not None and report is not None and (report.step is not None or report.skipped):
            passed_over = tuple(each.step for each in report.skipped)
            with contextlib.suppress(KeeperError):
                current.send(messages.Restored(report.step, report.bytes, report.seconds, passed_over))

    def close(self, timeout_s: float | None, updates: messages.Updates = ()) -> None:
        """Let the keeper finish and go.  Blocks until it has, for at most ``timeout_s``."""
        with self._lock:
            self.is_closed = True
            current = self._current
            if current is None:
                return
            current.expect_exit()
        with contextlib.suppress(KeeperError):  # gone already; joining tells
            current.send(messages.Close(updates))
        current.join(timeout_s)

    def hang_up(self) -> None:
        """Take no more from the keeper and send it nothing more; it finishes what it has."""
        with self._lock:
            current = self._current
        if current is not None:
            current.hang_up()

    # --- on the receiving thread -----------------------------------------------------------

    def _hear(self, message: FromKeeper) -> None:
        if isinstance(message, messages.Flushed):
            self._saves.flushed(message.save, message.nbytes, message.begun_s)
            if self._arena is not None:
                self._arena.give_back(message.span)
        elif isinstance(message, messages.Sealed):
            save = self._saves.sealed(message.save, message.at_s, message.is_unchanged)
            if save is not None and self._others is not None:
                self._others.sealed(self._entered.sequence, save, self._saves)
            if message.is_unchanged:
                self._warn_unchanged()
        elif isinstance(message, messages.AwaitingRanks):
            step = self._saves.awaiting_ranks(message.save, message.ranks)
            if step is not None:
                logger.warning(
                    "step %d is sealed here and waits for %s (up to %g s)",
                    step, format_ranks(message.ranks), self._config.deadline_s,
                )  # fmt: skip
        elif isinstance(message, messages.Committed):
            self._saves.committed(message.save, message.at_s)
        elif isinstance(message, messages.Failed):
            error = errors.from_record(message.kind, message.message)
            failed = self._saves.fail(message.save, error)
            self._tell_others(failed)
            self._saves.tell_failed(failed)
        elif isinstance(message, messages.Claimed):
            with self._lock:
                if message.sequence == self._entered.sequence:
                    self._entered = messages.Enter(message.sequence, message.epoch)
        elif isinstance(message, messages.Done):
            with self._lock:
                answer = self._answers.pop(message.request, None)
            if answer is not None:
                answer.set_result(message)
        elif isinstance(message, messages.Notice):
            logger.warning("%s", message.message)
        elif isinstance(message, messages.Ready):
            if message.warning:
                logger.warning("%s", message.warning)
            self._answered.set()
        else:
            self._refusal = errors.from_record(message.kind, message.message)

    def _owes_news(self) -> bool:
        return self._saves.owes_news(until_sealed=self._others is not None)

    def _is_awaited(self) -> bool:
        is_room_awaited = self._arena is not None and self._arena.is_awaited
        return self._saves.is_awaited or bool(self._answers) or is_room_awaited

    def _on_exit(self, process: KeeperProcess, error: KeeperError | None) -> None:
        with self._lock:
            # All of this before another keeper can be started: its saves and spans are not these.
            reason = self._refusal or error or KeeperError(f"the keeper (pid {process.pid}) left with saves in flight")
            failed = self._saves.fail_all(reason)
            self._tell_others(failed)
            self._lost += failed
            for answer in self._answers.values():
                answer.set_exception(reason)
            self._answers.clear()
            if self._arena is not None:
                self._arena.give_back_all()
            if self._current is process:
                self._current = None
            self._answered.set()
            self._replace(process)
        self._saves.tell_failed(failed)

    def _tell_others(self, failed: list[Save]) -> None:
        if self._others is not None:
            for save in failed:
                self._others.failed(self._entered.sequence, save.step, save.attempt, str(save.error))

    def _replace(self, process: KeeperProcess) -> None:
        """Of several ranks, start another at once: a rank without a keeper looks to the others as if it had ended.

        Not if it died young: then the next one would, too.
        """
        is_young = time.monotonic() - process.started_s < _YOUNG_S
        if self._config.world_size > 1 and not self.is_closed and not is_young and self._refusal is None:
            with contextlib.suppress(KeeperError):
                self.start()

    def _warn_unchanged(self) -> None:
        if not self._has_warned_unchanged:
            self._has_warned_unchanged = True
            logger.warning(
                "two successive saves hold exactly the same bytes in every lazily staged tensor. "
                "Is the state you save the one that is being trained? (said once)"
            )
