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
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stillframe import errors
from stillframe.checkpoint.catalog import Catalog
from stillframe.checkpoint.lock import RootLock
from stillframe.errors import StillframeError, StorageError
from stillframe.format.records import Failure
from stillframe.keeper import labels
from stillframe.keeper.commit import COORDINATOR, Coordinator, Member, Terms
from stillframe.keeper.commit_loop import Waiting, longest_pause_s
from stillframe.keeper.journal import Journal
from stillframe.keeper.retention import Pruner, remove_spares, sweep
from stillframe.keeper.segment import Fingerprint, Flush, read_draft, report_failure
from stillframe.link import messages
from stillframe.link.messages import Channel, FromKeeper, FromTrainer
from stillframe.model import CHUNK_BYTES
from stillframe.retention import Keep
from stillframe.store import durable

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
        self._catalog = Catalog(terms.root, None if is_shared else rank)
        self._rank = rank
        self._lock = RootLock(terms.root, rank, terms.attempt)
        self._channel: Channel[FromTrainer, FromKeeper] = Channel(socket.socket(fileno=sock), FromTrainer)
        self._trainer = trainer
        self._is_orphan = False
        self._is_closing = False
        self._arena: memoryview | None = None
        self._flushes: dict[int, Flush] = {}
        self._journal = Journal(terms, rank, keep, lambda: list(self._flushes.values()))
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
        self._waiting = Waiting(
            self._settle, self._tell_waiting, self._tidy, lambda: self._is_orphan, longest_pause_s(crowd)
        )

    def run(self) -> int:
        # SIGTERM too: it often goes to a whole job, whose trainer may still save.  The trainer's end is what counts.
        # SIGIO: somebody opens a file while durable.is_nobody_elses asks.
        for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGIO):
            signal.signal(ignored, signal.SIG_IGN)
        try:
            self._take_root()
        except (StillframeError, OSError) as error:
            self._tell(messages.Refused(*errors.to_record(error)))
            return 1
        self._listen()
        for save, flush in list(self._flushes.items()):
            self._abandon(save, flush.begin.step, "KeeperError", "its trainer ended before it was staged")
        self._writers.shutdown()
        self._finisher.shutdown()
        self._waiting.finish()
        with contextlib.suppress(OSError):
            self._pruner.close()
        self._journal.close(self._is_orphan)
        return 0

    def _take_root(self) -> None:
        warning = ""
        try:
            self._lock_root()
        except StorageError as error:
            # A root that cannot be written can still be restored from; saves will say what is wrong.
            warning = f"nothing can be saved for now: {error}"
        if self._lock.previous_failure:
            warning = f"a checkpoint of the run before is lost: {self._lock.previous_failure}"
        self._tell(messages.Ready(warning))

    def _lock_root(self) -> None:
        """The root is there and ours; tried again at each save, for a root that could not be written before."""
        if self._lock.is_wanted:
            with durable.storage_errors(f"locking {self._catalog.root}"):
                durable.make_dirs(self._catalog.root)
                self._lock.acquire()
                self._journal.begin()
                if self._lock.is_held and (self._rank == 0 or self._catalog.rank is not None):
                    self._met_others = sweep(self._catalog, self._terms.attempt, "all" if self._is_alone else "partial")
                    labels.finish(self._catalog, self._terms.attempt)
                    if self._catalog.rank is None:
                        remove_spares(self._catalog, self._terms.world_size)

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
            if not more and (self._is_orphan or (self._is_closing and not self._flushes)):
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
            flush = self._flushes[message.save]
            flush.staged_s = message.staged_s
            self._journal.progress()
            self._finisher.submit(_or_die, self._finish, message.save, flush)
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
        with open(fd, "rb") as file:
            header, draft = read_draft(os.pread(file.fileno(), message.header_bytes + message.draft_bytes, 0), message)
        # Only a step that is saved again may be just being pruned; else nothing waits for a removal: it may take long.
        is_again = self._is_alone and self._catalog.dir(message.step).exists()
        flush = Flush(message, header, draft, self._catalog, self._tidying if is_again else threading.Lock())
        flush.is_counted = not self._is_alone and self._rank != COORDINATOR
        self._complete_step = max(self._complete_step, message.complete_step)
        self._pruner.begun(message.step)
        flush.attempt(self._lock_root)
        self._flushes[message.save] = flush
        self._journal.updates(message.telemetry.updates)
        self._journal.progress(is_news=True)
        flush.pending.append(self._writers.submit(flush.attempt, flush.open))

    def _take_chunk(self, chunk: messages.Chunk) -> None:
        flush = self._flushes[chunk.save]
        flush.received_bytes += chunk.nbytes
        assert self._arena is not None
        span = self._arena[chunk.span * CHUNK_BYTES : (chunk.span + 1) * CHUNK_BYTES]
        flush.pending.append(self._writers.submit(self._flush_chunk, flush, chunk, span))

    # --- working (writer and finisher threads) ---------------------------------------------

    def _flush_chunk(self, flush: Flush, chunk: messages.Chunk, span: memoryview) -> None:
        begun_s = time.monotonic()
        flush.attempt(lambda: flush.write(chunk, span))
        flush.count_flushed(chunk.nbytes, begun_s)
        self._tell(messages.Flushed(chunk.save, chunk.span, chunk.nbytes, begun_s))
        self._journal.progress()

    def _finish(self, save: int, flush: Flush) -> None:
        for each in flush.pending:
            each.result()
        flush.attempt(lambda: self._seal(save, flush))
        if flush.error is not None or self._is_alone:
            self._settle(save, flush)
        elif self._rank == COORDINATOR:
            self._waiting.add(save, Coordinator(flush, self._terms, self._lock.is_supported))
        else:
            self._waiting.add(save, Member(flush, self._terms, self._lock.is_supported))

    def _settle(self, save: int, flush: Flush) -> None:
        """It is committed, or has failed: the end of it."""
        committed_s = None
        if not flush.is_counted:
            flush.attempt(flush.publish_label)
        if flush.error is not None:
            self._fail(save, flush)
        else:
            committed_s = time.monotonic()
            self._note("")
            self._prune(flush.begin.step)
            self._tell(messages.Committed(save, committed_s))  # only now: who has waited sees what the policy keeps
        flush.close()
        del self._flushes[save]
        self._journal.ended(flush, committed_s, str(flush.error or ""))

    def _seal(self, save: int, flush: Flush) -> None:
        flush.seal()
        fingerprint = flush.fingerprint
        is_unchanged = fingerprint is not None and fingerprint == self._previous
        self._previous = fingerprint
        self._tell(messages.Sealed(save, time.monotonic(), is_unchanged))
        if self._is_alone:
            flush.commit([flush.entry])

    @property
    def _is_alone(self) -> bool:
        """It commits by itself: there is one rank, or each has a root of its own."""
        return self._terms.world_size == 1 or self._catalog.rank is not None

    def _tell_waiting(self, save: int, ranks: list[int]) -> None:
        self._tell(messages.AwaitingRanks(save, tuple(ranks[:_MAX_TOLD])))
        self._journal.progress()

    def _steps_in_flight(self) -> set[int]:
        return {flush.begin.step for flush in list(self._flushes.values())}

    def _tidy(self) -> bool:
        """What the policy has let go meanwhile; tells whether there may be more."""
        if self._pruner.has_work:
            with contextlib.suppress(OSError, StillframeError), self._tidying:
                self._pruner.tidy()
        return self._pruner.has_work

    def _prune(self, step: int) -> None:
        complete_step = None if self._catalog.rank is None else self._complete_step
        try:
            with self._tidying:
                self._pruner.committed(step, complete_step)
                if self._met_others:
                    self._met_others = sweep(self._catalog, self._terms.attempt, "nothing")
        except (OSError, StillframeError) as error:
            self._tell(messages.Notice(f"old checkpoints could not be removed: {error}"))

    def _abandon(self, save: int, step: int, kind: str, message: str) -> None:
        """A save that will not be staged: drop it, unless it is finishing already."""
        flush = self._flushes.get(save)
        if flush is None:  # it failed before it began
            self._report(step, kind, message)
        elif flush.staged_s is None:
            flush.error = flush.error or errors.from_record(kind, message)
            self._finisher.submit(_or_die, self._drop, save, flush)

    def _drop(self, save: int, flush: Flush) -> None:
        for each in flush.pending:
            each.result()
        assert flush.error is not None
        flush.discard()
        self._report(flush.begin.step, *errors.to_record(flush.error))
        del self._flushes[save]
        self._journal.ended(flush, None, str(flush.error))

    def _report(self, step: int, kind: str, message: str) -> None:
        """Let the other ranks know that this one will not seal the step."""
        if not self._is_alone and not self._catalog.is_committed(step):
            failure = Failure(step, self._rank, self._terms.attempt, kind, message[:10_000])
            report_failure(self._catalog.dir(step), failure)

    def _fail(self, save: int, flush: Flush) -> None:
        assert flush.error is not None
        if not flush.is_promised:
            flush.discard()
        kind, message = errors.to_record(flush.error)
        self._report(flush.begin.step, kind, message)
        self._note(message if message.startswith("step ") else f"step {flush.begin.step}: {message}")
        self._tell(messages.Failed(save, kind, message))

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


def _or_die(work: Callable[[int, Flush], None], save: int, flush: Flush) -> None:
    """A bug must not leave a save hanging: the trainer reports a dead keeper, with this traceback."""
    try:
        work(save, flush)
    except BaseException:
        traceback.print_exc()
        os._exit(70)


def main(
    *,
    root: str,
    attempt: str,
    rank: int,
    world_size: int,
    keep_last: int | None,
    keep_every: int | None,
    is_shared: bool,
    deadline_s: float,
    sock: int,
    trainer: int,
) -> int:
    os.nice(_NICE)
    ctypes.CDLL(None).prctl(_PR_SET_NAME, b"stillframe-keep", 0, 0, 0)
    terms = Terms(Path(root), attempt, world_size, deadline_s)
    return Keeper(terms, rank, Keep(keep_last, keep_every), is_shared, sock, trainer).run()
