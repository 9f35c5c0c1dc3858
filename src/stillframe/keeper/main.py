"""The keeper's main loop: messages in, work out to threads, news back; then finish and go.

The main thread only listens, so it always notices the trainer's death: by the socket, and by a
pidfd, because data-loader workers forked from the trainer keep the socket open.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import select
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from stillframe import errors
from stillframe.checkpoint.catalog import Catalog
from stillframe.checkpoint.lock import RootLock
from stillframe.errors import StillframeError, StorageError
from stillframe.format import names
from stillframe.format.records import Failure
from stillframe.keeper import labels
from stillframe.keeper.commit import COORDINATOR, Coordinator, Member, Terms
from stillframe.keeper.commit_loop import CommitLoop, longest_pause_s, or_die
from stillframe.keeper.journal import Journal
from stillframe.keeper.retention import Pruner, remove_spares, sweep
from stillframe.keeper.segment import Fingerprint, SegmentWriter, State, read_draft, report_failure
from stillframe.link import messages
from stillframe.link.messages import Channel, FromKeeper, FromTrainer, KeeperConfig
from stillframe.model import CHUNK_BYTES
from stillframe.retention import Keep
from stillframe.store.posix import PosixStore

_WRITERS = 4
"""Threads that hash and write: more than one so that the disk never waits for a hash."""
_NICE = 10
_POLL_MS = 50
_PR_SET_NAME = 15
_MAX_TOLD = 100
"""Ranks named in one message."""


class Keeper:
    def __init__(self, terms: Terms, rank: int, keep: Keep, is_shared: bool, sock: int, trainer: int) -> None:
        self._terms = terms
        self._catalog = Catalog(terms.store, None if is_shared else rank)
        self._rank = rank
        self._lock = RootLock(terms.store, rank, terms.attempt)
        self._channel: Channel[FromTrainer, FromKeeper] = Channel(socket.socket(fileno=sock), FromTrainer)
        self._trainer = trainer
        self._is_orphan = False
        self._is_closing = False
        self._is_cleared = False
        self._arena: memoryview | None = None
        self._saves: dict[int, SegmentWriter] = {}
        self._journal = Journal(terms, rank, keep, lambda: list(self._saves.values()))
        self._previous: Fingerprint | None = None
        self._complete_step = -1
        self._met_others = False
        """Keepers of another attempt were still at work when we swept."""
        self._pruner = Pruner(self._catalog, keep, rank, terms.attempt, self._is_alone, self._steps_in_flight)
        self._tidying = threading.Lock()
        self._failure = ""
        self._writers = ThreadPoolExecutor(_WRITERS, "stillframe-flush")
        self._finisher = ThreadPoolExecutor(1, "stillframe-finish")
        crowd = terms.world_size if rank != COORDINATOR else 1
        self._commits = CommitLoop(
            self._settle, self._tell_waiting, self._tidy, lambda: self._is_orphan, longest_pause_s(crowd)
        )

    def run(self) -> int:
        # SIGTERM too: it often goes to a whole job, whose trainer may still save.  The trainer's end is what counts.
        # The kernel sends SIGIO if another process opens a file while the store holds its probe lease.
        for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGIO):
            signal.signal(ignored, signal.SIG_IGN)
        try:
            self._take_root()
        except StillframeError as error:
            self._tell(messages.Refused(*errors.to_record(error)))
            return 1
        self._listen()
        for number, writer in list(self._saves.items()):
            self._abandon(number, writer.begin.step, "KeeperError", "its trainer ended before it was staged")
        self._writers.shutdown()
        self._finisher.shutdown()
        self._commits.finish()
        if isinstance(self._terms.store, PosixStore):
            with contextlib.suppress(StorageError):
                self._terms.store.close()
        self._journal.close(self._is_orphan)
        return 0

    def _take_root(self) -> None:
        warning = ""
        try:
            self._lock_root()
        except StorageError as error:
            # A root that cannot be written can still be restored from; saves will say what is wrong.
            warning = f"nothing can be saved for now: {errors.text_of(error)}"
        if self._lock.previous_failure:
            warning = f"a checkpoint of the run before is lost: {self._lock.previous_failure}"
        self._tell(messages.Ready(warning))

    def _lock_root(self) -> None:
        """The root is there and ours; asked at each save, for a root that could not be written before, or was removed.

        It is cleared once, before the first save: later, files of this attempt are those of saves in flight.
        """
        if self._lock.is_wanted:
            self._lock.acquire()
            self._journal.begin()
            if self._lock.is_held and not self._is_cleared:
                self._is_cleared = True
                try:
                    self._clear_root()
                except StorageError as error:  # it keeps no save from being made
                    self._tell(
                        messages.Notice(
                            f"what earlier runs have left could not all be removed: {errors.text_of(error)}"
                        )
                    )

    def _clear_root(self) -> None:
        """Of what earlier runs have left.  Raises :class:`StorageError`, after all of it has been tried."""
        with contextlib.ExitStack() as stack:
            stack.callback(remove_spares, self._catalog, self._rank, self._terms.world_size)
            if self._rank == 0 or self._catalog.rank is not None:
                stack.callback(labels.finish, self._catalog, self._terms.attempt)
                self._met_others = sweep(self._catalog, self._terms.attempt, "all" if self._is_alone else "partial")

    # --- listening -------------------------------------------------------------------------

    def _listen(self) -> None:
        """Until the trainer is gone, or says close, and nothing is left to receive."""
        poll = select.poll()
        poll.register(self._channel.socket, select.POLLIN)
        poll.register(self._trainer, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll(_POLL_MS if self._is_closing else 1000)}
            if self._trainer in ready:
                self._orphaned()
            more = self._channel.socket.fileno() in ready and self._receive()
            if not more and (self._is_orphan or (self._is_closing and not self._saves)):
                return

    def _orphaned(self) -> None:
        if not self._is_orphan:
            self._is_orphan = True
            self._lock.note("finishing", self._failure)

    def _receive(self) -> bool:
        """Take every waiting message; tells whether there was any."""
        count = 0
        while True:
            try:
                received = self._channel.receive(flags=socket.MSG_DONTWAIT)
            except BlockingIOError:
                return count > 0
            except ConnectionError:
                # The trainer went with our news unread.  What it sent before is still queued behind this.
                continue
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
            self._abandon(message.save, message.step, message.kind, message.message)
        elif isinstance(message, messages.Attach):
            assert fd is not None
            self._arena = memoryview(mmap.mmap(fd, message.nbytes))
            self._journal.arena_bytes = message.nbytes
            os.close(fd)
        elif isinstance(message, messages.Restored):
            self._journal.restored(message)
        else:
            self._journal.updates(message.updates)
            self._is_closing = True

    def _begin(self, message: messages.Begin, fd: int) -> None:
        try:
            header, draft = read_draft(os.pread(fd, message.header_bytes + message.draft_bytes, 0), message)
        finally:
            os.close(fd)
        # Only a step that is saved again may be just being pruned; else nothing waits for a removal: it may take long.
        tidying = self._tidying if self._is_again(message.step) else threading.Lock()
        is_counted = not self._is_alone and self._rank != COORDINATOR
        save = self._saves[message.save] = SegmentWriter(message, header, draft, self._catalog, tidying, is_counted)
        self._complete_step = max(self._complete_step, message.complete_step)
        self._pruner.begun(message.step)
        save.guard(self._lock_root)
        self._journal.updates(message.telemetry.updates)
        self._journal.progress(is_news=True)
        save.pending.append(self._writers.submit(save.guard, save.open))

    def _is_again(self, step: int) -> bool:
        """Whether the step has files already; also if that cannot be told."""
        try:
            return self._is_alone and self._terms.store.head(names.step_dir(step)) is not None
        except StorageError:
            return True

    def _take_chunk(self, chunk: messages.Chunk) -> None:
        save = self._saves[chunk.save]
        save.received_bytes += chunk.nbytes
        assert self._arena is not None
        span = self._arena[chunk.span * CHUNK_BYTES : (chunk.span + 1) * CHUNK_BYTES]
        save.pending.append(self._writers.submit(self._flush_chunk, save, chunk, span))

    # --- working (writer and finisher threads) ---------------------------------------------

    def _flush_chunk(self, save: SegmentWriter, chunk: messages.Chunk, span: memoryview) -> None:
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
            wait_for = Coordinator if self._rank == COORDINATOR else Member
            self._commits.add(number, wait_for(save, self._terms, self._lock.is_supported))

    def _settle(self, number: int, save: SegmentWriter) -> None:
        """End a save that is committed or has failed: publish its label, prune, tell the trainer."""
        committed_s = None
        if not save.is_counted:
            save.guard(save.publish_label)
        if save.error is not None:
            self._fail(number, save)
        else:
            committed_s = time.monotonic()
            self._note("")
            self._prune(save.begin.step)
            self._tell(messages.Committed(number, committed_s))  # only now: who has waited sees what the policy keeps
        save.close()
        self._forget(number, save, committed_s)

    def _forget(self, number: int, save: SegmentWriter, committed_s: float | None) -> None:
        save.state = State.SETTLED
        del self._saves[number]
        self._journal.ended(save, committed_s, str(save.error or ""))

    def _seal(self, number: int, save: SegmentWriter) -> None:
        save.seal()
        save.state = State.SEALED
        fingerprint = save.fingerprint
        is_unchanged = fingerprint is not None and fingerprint == self._previous
        self._previous = fingerprint
        self._tell(messages.Sealed(number, time.monotonic(), is_unchanged))
        if self._is_alone:
            save.commit([save.entry])

    @property
    def _is_alone(self) -> bool:
        """It commits by itself: there is one rank, or each has a root of its own."""
        return self._terms.world_size == 1 or self._catalog.rank is not None

    def _tell_waiting(self, number: int, ranks: list[int]) -> None:
        self._tell(messages.AwaitingRanks(number, tuple(ranks[:_MAX_TOLD])))
        self._journal.progress()

    def _steps_in_flight(self) -> set[int]:
        return {save.begin.step for save in list(self._saves.values())}

    def _tidy(self) -> bool:
        """Remove what the policy has let go meanwhile; returns whether there may be more."""
        if self._pruner.has_work:
            with contextlib.suppress(StillframeError), self._tidying:
                self._pruner.tidy()
        return self._pruner.has_work

    def _prune(self, step: int) -> None:
        complete_step = None if self._catalog.rank is None else self._complete_step
        try:
            with self._tidying:
                self._pruner.committed(step, complete_step)
                if self._met_others:
                    self._met_others = sweep(self._catalog, self._terms.attempt, "nothing")
        except StillframeError as error:
            self._tell(messages.Notice(f"old checkpoints could not be removed: {errors.text_of(error)}"))

    def _abandon(self, number: int, step: int, kind: str, message: str) -> None:
        """A save that will not be staged: drop it, unless it is finishing already."""
        save = self._saves.get(number)
        if save is None:  # it failed before it began
            self._report(step, kind, message)
        elif save.state is State.RECEIVING:
            save.error = save.error or errors.from_record(kind, message)
            self._finisher.submit(or_die, self._drop, number, save)

    def _drop(self, number: int, save: SegmentWriter) -> None:
        for each in save.pending:
            each.result()
        assert save.error is not None
        save.discard()
        self._report(save.begin.step, *errors.to_record(save.error))
        self._forget(number, save, None)

    def _report(self, step: int, kind: str, message: str) -> None:
        """Let the other ranks know that this one will not seal the step."""
        if not self._is_alone:
            with contextlib.suppress(StorageError):
                if not self._catalog.is_committed(step):
                    failure = Failure(step, self._rank, self._terms.attempt, kind, message[:10_000])
                    report_failure(self._catalog, failure)

    def _fail(self, number: int, save: SegmentWriter) -> None:
        assert save.error is not None
        if not save.is_promised:
            save.discard()
        kind, message = errors.to_record(save.error)
        self._report(save.begin.step, kind, message)
        self._note(message if message.startswith("step ") else f"step {save.begin.step}: {message}")
        self._tell(messages.Failed(number, kind, message))

    def _note(self, failure: str) -> None:
        """Keep the last failure in the lock's file until a save succeeds: there may be no trainer left to be told."""
        if failure != self._failure:
            self._failure = failure
            self._lock.note("finishing" if self._is_orphan else "training", failure)

    def _tell(self, message: FromKeeper) -> None:
        """Send to the trainer while there is one; never wait for one that is gone."""
        while not self._is_orphan:
            try:
                self._channel.send(message, flags=socket.MSG_DONTWAIT)
                return
            except BlockingIOError:
                poll = select.poll()
                poll.register(self._channel.socket, select.POLLOUT)
                poll.register(self._trainer, select.POLLIN)
                if any(fd == self._trainer for fd, _ in poll.poll(1000)):
                    return
            except OSError:
                return


def main(*, sock: int, trainer: int, **given: Any) -> int:
    """``given``: the fields of :class:`KeeperConfig`."""
    config = KeeperConfig(**given)
    os.nice(_NICE)
    ctypes.CDLL(None).prctl(_PR_SET_NAME, b"stillframe-keep", 0, 0, 0)
    store = PosixStore(config.root, spare=names.spare(config.rank))
    terms = Terms(store, config.attempt, config.world_size, config.deadline_s)
    keep = Keep(config.keep_last, config.keep_every)
    return Keeper(terms, config.rank, keep, config.is_shared, sock, trainer).run()
