"""The keeper's main loop: messages in, work out to threads, news back; then finish and go.

The main thread only listens, and touches no storage: so it always notices the trainer's death, and always answers.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from stillframe import errors
from stillframe.checkpoint import labels
from stillframe.checkpoint.catalog import Catalog
from stillframe.checkpoint.lock import Note, RootLock
from stillframe.errors import StillframeError, StorageError
from stillframe.keeper.commit import Coordinator, Member, UpdateCounts
from stillframe.keeper.commit_loop import CommitLoop, longest_pause_s, or_die
from stillframe.keeper.epochs import CurrentEpoch
from stillframe.keeper.heartbeat import Heartbeat
from stillframe.keeper.journal import Journal
from stillframe.keeper.promotion import Promotion
from stillframe.keeper.reporting import Reporting
from stillframe.keeper.segment import Fingerprint, SegmentWriter, State, read_draft
from stillframe.keeper.taking import Taking
from stillframe.keeper.terms import COORDINATOR, Terms
from stillframe.keeper.trainer import Trainer
from stillframe.keeper.upkeep import Upkeep
from stillframe.link import liveness, messages
from stillframe.link.messages import FromTrainer, KeeperConfig
from stillframe.model import CHUNK_BYTES, SaveId
from stillframe.retention import decode_policy
from stillframe.store import hastily
from stillframe.store.activity import Activity
from stillframe.store.posix import PosixStore
from stillframe.store.protocol import Store

_WRITERS = 4
"""Threads that hash and write: more than one so that the disk never waits for a hash."""
_POLL_MS = 50
_MAX_TOLD = 100  # ranks named in one message


class Keeper:
    """``activity``: what its store is in."""

    def __init__(
        self, config: KeeperConfig, store: Store, sock: int, trainer: int, activity: Activity | None = None
    ) -> None:
        self._terms = terms = Terms(store, config.run, config.world_size, config.deadline_s)
        self._rank = rank = config.rank
        self._catalog = Catalog(store, None if config.is_shared else rank)
        keep = decode_policy(config.keep)
        tiers = [Catalog(each.root, storage_options=each.storage_options) for each in config.tiers]
        self._lock = RootLock(terms.store, rank, terms.run, self._says, self._notice, os.getppid())
        self._root = Taking(terms.store, self._lock, self._taken)
        self._epoch = CurrentEpoch(
            self._catalog, terms, rank, lambda sequence, epoch: self._tell(messages.Claimed(sequence, epoch)), tiers
        )
        self._reporting = Reporting(self._catalog, self._epoch, rank, self._is_alone)
        self._updates = UpdateCounts()
        self._trainer = Trainer(sock, trainer)
        self._tell = self._trainer.tell
        self._heartbeat = Heartbeat(activity or Activity(), self._in_flight, self._trainer.tell_alive)
        self._asked: set[int] = set()
        self._is_closing = False
        self._arena: memoryview | None = None
        self._saves: dict[int, SegmentWriter] = {}
        self._begun = 0
        self._journal = Journal(terms, rank, keep, self._in_flight, config.has_events)
        self._previous: Fingerprint | None = None
        self._promotion = Promotion(
            config.tiers, tiers, terms, rank, config.is_shared, self._epoch, self._tell, self._notice,
            self._journal.write,
        )  # fmt: skip
        self._upkeep = Upkeep(self._catalog, terms, rank, keep, self._epoch, self._notice, self._promotion.kept)
        self._failure = ""
        self._writers = ThreadPoolExecutor(_WRITERS, "stillframe-flush")
        self._finisher = ThreadPoolExecutor(1, "stillframe-finish")
        crowd = terms.world_size if rank != COORDINATOR else 1
        self._commits = CommitLoop(
            self._settle, self._tell_waiting, self._upkeep.tidy, lambda: self._is_orphan, longest_pause_s(crowd)
        )

    def run(self) -> int:
        # SIGTERM too: it often goes to a whole job, whose trainer may still save.  The trainer's end is what counts.
        # The kernel sends SIGIO if another process opens a file while the store holds its probe lease.
        for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGIO):
            signal.signal(ignored, signal.SIG_IGN)
        try:
            self._heartbeat.beside(self._take_root)
        except StillframeError as error:
            self._tell(messages.Refused(*errors.to_record(error)))
            return 1
        self._listen()
        self._heartbeat.beside(self._end)
        return 0

    def _end(self) -> None:
        for number, writer in list(self._saves.items()):
            why = "KeeperError", "its trainer ended before it was staged"
            self._abandon(messages.Abandon(number, writer.begin.step, writer.begin.attempt, *why))
        self._writers.shutdown()
        self._finisher.shutdown()
        self._commits.finish()
        self._upkeep.close()
        if self._promotion.has_tiers:
            self._lock.release()  # the run that comes next need not wait for what it carries on itself
        self._promotion.finish()
        if isinstance(self._terms.store, PosixStore):
            with contextlib.suppress(StorageError):
                self._terms.store.close()
        self._journal.close(self._is_orphan)

    def _take_root(self) -> None:
        warning = ""
        try:
            with hastily(self._terms.store):
                self._root.take(is_awaited=True)
        except StorageError as error:
            # A root that cannot be written can still be restored from; saves will say what is wrong.
            warning = f"nothing can be saved for now: {errors.text_of(error)}"
        if self._lock.previous_failure:
            warning = f"a checkpoint of the run before is lost: {self._lock.previous_failure}"
        self._tell(messages.Ready(warning))

    def _taken(self) -> None:
        self._journal.begin()
        self._upkeep.start()
        self._promotion.start()

    def _notice(self, text: str) -> None:
        self._tell(messages.Notice(text))

    def _in_flight(self) -> list[SegmentWriter]:
        return list(self._saves.values())

    # --- listening -------------------------------------------------------------------------

    def _listen(self) -> None:
        """Until the trainer is gone, or says close, and nothing is left to receive."""
        while True:
            has_ended, has_said = self._trainer.wait(_POLL_MS if self._is_closing else int(liveness.BEAT_S * 500))
            if has_ended:
                self._orphaned()
            if self._saves or self._asked:
                self._heartbeat.beat()
            more = has_said and self._receive()
            if not more and (self._is_orphan or (self._is_closing and not self._saves)):
                return

    @property
    def _is_orphan(self) -> bool:
        return self._trainer.is_gone

    def _orphaned(self) -> None:
        if not self._is_orphan:
            self._trainer.is_gone = True
            self._epoch.hurry()
            self._heartbeat.note(self._lock.note)

    def _receive(self) -> bool:
        """Take every waiting message; tells whether there was any."""
        count = 0
        while True:
            try:
                received = self._trainer.hear()
            except BlockingIOError:
                return count > 0
            if received is None:
                self._orphaned()
                return False
            self._take(*received)
            count += 1

    def _take(self, message: FromTrainer, fd: int | None) -> None:
        if isinstance(message, messages.Chunk):
            self._take_chunk(message)
        elif isinstance(message, messages.Begin):
            assert fd is not None
            self._begin(message, fd)
        elif isinstance(message, messages.Staged):
            save = self._saves[message.save]
            save.staged_s, save.state = message.staged_s, State.STAGED
            self._journal.progress()
            self._finisher.submit(or_die, self._finish, message.save, save)
        elif isinstance(message, messages.Abandon):
            self._abandon(message)
        elif isinstance(message, messages.Uncommitted):
            if (waiting := self._saves.get(message.save)) is not None:
                waiting.word = message
                self._commits.look()
        elif isinstance(message, messages.Attach):
            assert fd is not None
            self._arena = memoryview(mmap.mmap(fd, message.nbytes))
            self._journal.arena_bytes = message.nbytes
            os.close(fd)
        elif isinstance(message, messages.Enter):
            self._epoch.enter(message)
            if message.request:
                self._answer(message.request, self._enter)
        elif isinstance(message, messages.Resume):
            self._epoch.resume(message.parent, message.is_claimed)
            self._promotion.carry(None)
            if message.is_durable:
                self._answer(message.request, self._put_down)
        elif isinstance(message, messages.Start):
            self._answer(message.request, self._put_down)
        elif isinstance(message, messages.Restored):
            self._journal.restored(message)
        elif isinstance(message, messages.Complete):
            self._finisher.submit(or_die, self._promotion.complete, message.save)
        elif isinstance(message, messages.Carry):
            self._promotion.carry(message.step)
        else:
            self._journal.updates(message.updates)
            self._is_closing = True
            self._heartbeat.note(self._lock.note)

    def _answer(self, request: int, work: Callable[[], None]) -> None:
        def answer() -> None:
            try:
                with hastily(self._terms.store):
                    work()
            except StillframeError as error:
                self._tell(messages.Done(request, *errors.to_record(error)))
            else:
                self._tell(messages.Done(request))
            self._asked.discard(request)
            self._promotion.wake()

        self._asked.add(request)
        self._finisher.submit(or_die, answer)

    def _enter(self) -> None:
        self._root.take(is_awaited=True)
        self._upkeep.wait_for_removal()
        self._epoch.claim()

    def _put_down(self) -> None:
        self._root.take(is_awaited=True)
        if self._epoch.decides:
            self._epoch.check_newest(self._epoch.current().epoch)  # put first, then looked: as with a manifest
            labels.follow_branch(self._catalog)

    def _begin(self, message: messages.Begin, fd: int) -> None:
        try:
            message, header, draft = read_draft(message, fd)
        finally:
            os.close(fd)
        is_counted = not self._is_alone and self._rank != COORDINATOR
        parts = self._catalog, self._epoch, is_counted, self._upkeep.wait_for_removal
        save = self._saves[message.save] = SegmentWriter(message, header, draft, *parts)
        save.on_waiting = lambda: self._tell_waiting(message.save, [COORDINATOR])
        self._begun = message.save
        self._journal.updates(message.telemetry.updates)
        self._journal.progress(is_news=True)
        save.pending.append(self._writers.submit(or_die, self._open, save))

    def _take_chunk(self, chunk: messages.Chunk) -> None:
        save = self._saves[chunk.save]
        save.received_bytes += chunk.nbytes
        assert self._arena is not None
        span = self._arena[chunk.span * CHUNK_BYTES : (chunk.span + 1) * CHUNK_BYTES]
        save.pending.append(self._writers.submit(or_die, self._flush_chunk, save, chunk, span))

    # --- working (writer and finisher threads) ---------------------------------------------

    def _open(self, save: SegmentWriter) -> None:
        save.guard(self._root.take)
        if save.error is None:
            self._upkeep.save_begins(save.begin.complete_step)
        save.guard(save.open)

    def _flush_chunk(self, save: SegmentWriter, chunk: messages.Chunk, span: memoryview) -> None:
        save.pending[0].result()  # the root is ours, and the file is open
        begun_s = time.monotonic()
        save.guard(lambda: save.write(chunk, span))
        save.count_flushed(chunk.nbytes, begun_s)
        self._tell(messages.Flushed(chunk.save, chunk.span, chunk.nbytes, begun_s))
        self._journal.progress()

    def _finish(self, number: int, save: SegmentWriter) -> None:
        for each in save.pending:
            each.result()
        save.guard(lambda: self._seal(number, save))
        if save.error is not None or self._is_alone:
            self._settle(number, save)
        else:
            has_locks, decides = self._lock.is_supported, self._rank == COORDINATOR
            leader = Coordinator(save, self._terms, has_locks, self._updates) if decides else None
            self._commits.add(number, leader or Member(save, self._terms, has_locks))

    def _settle(self, number: int, save: SegmentWriter) -> None:
        """End a save that is committed or has failed: tell the other ranks, publish, tell the trainer, prune."""
        if save.error is not None:
            self._fail(number, save)
            save.discard()
            self._forget(number, save, None)
            return
        committed_s = time.monotonic()
        self._note("")
        self._reporting.committed(save.identify())
        if problem := save.publish_label():
            self._notice(problem)
        with self._upkeep.after_commit(save.identify()):
            if self._catalog.rank is None:  # else the ranks find out together
                self._promotion.committed(save.identify())
                self._tell(messages.Committed(number, committed_s))  # before anything is removed: that may hang
            save.close()
            self._forget(number, save, committed_s)
            self._promotion.note()

    def _forget(self, number: int, save: SegmentWriter, committed_s: float | None) -> None:
        save.state = State.SETTLED
        del self._saves[number]
        self._journal.ended(save, committed_s, str(save.error or ""))

    def _seal(self, number: int, save: SegmentWriter) -> None:
        save.seal()
        save.state = State.SEALED
        before, self._previous = self._previous, save.fingerprint
        is_unchanged = self._previous is not None and self._previous == before
        self._tell(messages.Sealed(number, save.identify().epoch, time.monotonic(), is_unchanged))
        if self._terms.world_size == 1:
            save.commit([save.sealed])

    @property
    def _is_alone(self) -> bool:
        """It commits by itself: there is one rank, or each has a root of its own."""
        return self._terms.world_size == 1 or self._catalog.rank is not None

    def _tell_waiting(self, number: int, ranks: list[int]) -> None:
        self._tell(messages.AwaitingRanks(number, tuple(ranks[:_MAX_TOLD])))
        self._journal.progress()

    def _abandon(self, message: messages.Abandon) -> None:
        """A save that will not be staged, or committed: drop it, unless that is done."""
        save = self._saves.get(message.save)
        if save is None:
            if not 0 < message.save <= self._begun:  # else it has ended here
                self._finisher.submit(or_die, self._lose, message)
        elif save.state is State.RECEIVING:
            save.error = save.error or errors.from_record(message.kind, message.message)
            self._finisher.submit(or_die, self._drop, message.save, save)
        elif not self._is_orphan:
            self._commits.give_up(message.save, errors.from_record(message.kind, message.message))

    def _lose(self, message: messages.Abandon) -> None:
        """A save that an earlier keeper died with, or that never began."""
        # An earlier keeper may have published the manifest before it died: no rank may remove its files.
        self._reporting.unsaved(message.step, message.attempt, message.kind, message.message, files_stay=True)
        if self._epoch.decides:
            with contextlib.suppress(StillframeError):
                self._epoch.claim()
                labels.settle(self._catalog, SaveId(message.step, self._epoch.number or 0, message.attempt))

    def _drop(self, number: int, save: SegmentWriter) -> None:
        for each in save.pending:
            each.result()
        assert save.error is not None
        save.discard()
        self._reporting.unsaved(save.begin.step, save.begin.attempt, *errors.to_record(save.error))
        self._forget(number, save, None)

    def _fail(self, number: int, save: SegmentWriter) -> None:
        assert save.error is not None
        if not self._terms.store.caps.lands_late:  # else each request may wait for minutes: it is told first
            save.discard()
        kind, message = errors.to_record(save.error)
        self._note(message if message.startswith("step ") else f"step {save.begin.step}: {message}")
        self._tell(messages.Failed(number, kind, message, save.is_promised))  # first: the root may not answer
        if not save.is_told:
            self._reporting.unsaved(save.begin.step, save.begin.attempt, kind, message, save.is_promised)

    def _note(self, failure: str) -> None:
        """Keep the last failure in the lock's file until a save succeeds: there may be no trainer left to be told."""
        if failure != self._failure:
            self._failure = failure
            self._lock.note()

    def _says(self) -> Note:
        is_over = self._is_orphan or self._is_closing
        return Note("finishing" if is_over else "training", self._failure, self._heartbeat.noted())
