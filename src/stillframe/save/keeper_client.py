"""The trainer's side of its keeper: starts the process, talks to it, notices its death, starts the next one.

A keeper is started with exec, never fork; in its own session, so that Ctrl-C and a killed process group do not
reach it; isolated from the environment (``-I -S`` with the trainer's own ``sys.path``), so that it starts in tens of
milliseconds and imports what the trainer would.  Its stderr goes to a memfd: the tail of it is the reason given when
it dies, and a keeper that outlives its trainer holds no pipe of the trainer's open.

Invariants:
- there is at most one current keeper; before the next one starts, the saves of a dead one have failed and its spans
  are free;
- one thread per keeper receives its messages, in order, and then its death, exactly once.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from stillframe import errors
from stillframe.errors import BusyError, ConfigError, DeadlineError, KeeperError, StillframeError
from stillframe.link import messages
from stillframe.link.arena import Arena
from stillframe.link.messages import Channel, FromKeeper, FromTrainer, KeeperConfig
from stillframe.model import RestoreReport
from stillframe.save.saves import Save, Saves
from stillframe.units import format_ranks

logger = logging.getLogger("stillframe")

READY_S = 300.0
"""How long to wait for the root: the keeper of the run before may still be finishing."""
STALL_S = 300.0
"""A keeper that owes news for this long is given up: training must not hang because its storage does."""
_WATCH_MS = 5000
_GATHER_S = 0.05
_YOUNG_S = 1.0
_NO_SAVE = -1
_BOOTSTRAP = (
    "import json, sys; config = json.loads(sys.argv[2]); sys.path[:] = config.pop('path');"
    "from stillframe.keeper.main import main; sys.exit(main(**config))"
)


class KeeperProcess:
    """One running keeper.  ``on_message`` and then, once, ``on_exit`` are called on a thread of its own.

    ``owes_news`` tells whether silence means that it hangs, ``is_awaited`` whether somebody wants news at once.
    """

    def __init__(
        self,
        config: KeeperConfig,
        on_message: Callable[[FromKeeper], None],
        on_exit: Callable[[KeeperProcess, KeeperError | None], None],
        owes_news: Callable[[], bool],
        is_awaited: Callable[[], bool],
    ) -> None:
        self._on_message = on_message
        self._on_exit = on_exit
        self._owes_news = owes_news
        self._is_awaited = is_awaited
        self._is_closing = False
        self.is_gone = False
        """It ended, and what it had been lent is about to be taken back."""
        self.has_arena = False
        self.started_s = time.monotonic()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._errors = os.memfd_create("stillframe-keeper-stderr", os.MFD_CLOEXEC)
        trainer = os.pidfd_open(os.getpid())
        try:
            self._process = self._start(config, theirs.fileno(), trainer)
        except BaseException as error:
            ours.close()
            os.close(self._errors)
            if isinstance(error, OSError):
                raise KeeperError(f"the keeper could not be started with {sys.executable!r}: {error}") from error
            raise
        finally:
            theirs.close()
            os.close(trainer)
        self.pid = self._process.pid
        self._channel: Channel[FromKeeper, FromTrainer] = Channel(ours, FromKeeper)
        self._thread = threading.Thread(target=self._receive, name="stillframe-receive", daemon=True)
        self._thread.start()

    def _start(self, config: KeeperConfig, sock: int, trainer: int) -> subprocess.Popen[bytes]:
        if not sys.executable:
            raise ConfigError(
                "sys.executable is empty (an embedded interpreter?): set it to a Python that can run the keeper"
            )
        here = str(Path(__file__).absolute().parents[2])
        path = [here, *(os.path.abspath(entry) for entry in sys.path if entry)]
        arguments = json.dumps({"path": path, "sock": sock, "trainer": trainer, **asdict(config)})
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _BOOTSTRAP, "stillframe-keeper", arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._errors,
            pass_fds=(sock, trainer), start_new_session=True, cwd="/",
        )  # fmt: skip

    def send(self, message: FromTrainer, fd: int | None = None) -> None:
        """Raises :class:`KeeperError` when it is gone; the receiving thread then reports why."""
        try:
            self._channel.send(message, fd)
        except OSError as error:
            raise KeeperError(f"the keeper (pid {self.pid}) is gone: {error}") from error

    def expect_exit(self) -> None:
        """From now on its end is not a failure."""
        self._is_closing = True

    def hang_up(self) -> None:
        """End the conversation; a thread that is blocked in :meth:`send` wakes with an error."""
        with contextlib.suppress(OSError):
            self._channel.socket.shutdown(socket.SHUT_RDWR)

    def join(self, timeout_s: float | None) -> None:
        """Wait until it has ended and ``on_exit`` has run."""
        self._thread.join(timeout_s)

    # --- on the receiving thread -----------------------------------------------------------

    def _receive(self) -> None:
        is_silent = self._listen()
        self.is_gone = True
        if is_silent:
            # Its storage hangs, perhaps for ever: do not wait for it to die.
            self._process.kill()
            self.hang_up()
            error = KeeperError(
                f"the keeper (pid {self.pid}) made no progress for {STALL_S:g} s: does the storage hang?"
            )
            self._on_exit(self, error)
            self._process.wait()
        else:
            code = self._process.wait()
            is_expected = code == 0 and self._is_closing
            self._on_exit(self, None if is_expected else KeeperError(self._obituary(code)))
        self._channel.close()
        os.close(self._errors)

    def _listen(self) -> bool:
        """Pass on its messages until it is gone, or has been silent for too long: tells whether it has."""
        poll = select.poll()
        poll.register(self._channel.socket, select.POLLIN)
        quiet_s = 0.0
        while True:
            if not poll.poll(_WATCH_MS):
                # Counted in turns of waiting, not by the clock: a trainer that was stopped and continued saw no turns.
                quiet_s = quiet_s + _WATCH_MS / 1000 if self._owes_news() else 0.0
                if quiet_s >= STALL_S:
                    return True
                continue
            quiet_s = 0.0
            try:
                received = self._channel.receive()
            except ConnectionError:
                continue  # it went with our messages unread; what it sent before is queued behind this
            if received is None:
                return False
            try:
                self._on_message(received[0])
            except Exception:  # a log handler that raises, say: later news must not be lost because of it
                logger.exception("news from the keeper met an unexpected error")
            if not self._is_awaited() and not poll.poll(0):
                # Each waking takes the GIL from the training loop: unless somebody waits, let news gather.
                time.sleep(_GATHER_S)

    def _obituary(self, code: int) -> str:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        size = os.fstat(self._errors).st_size
        tail = os.pread(self._errors, 2000, max(size - 2000, 0)).decode(errors="replace").strip()
        said = f"; its last words:\n{tail}" if tail else ""
        return f"the keeper (pid {self.pid}) {how}; saves in flight are lost, the next save starts another{said}"


class KeeperClient:
    """The current keeper, and what its messages and its death do to the saves.  Thread: safe from any.

    ``on_commit``, if given, is called with each committed step.
    """

    def __init__(self, config: KeeperConfig, saves: Saves, on_commit: Callable[[int], None] | None) -> None:
        self._config = config
        self._saves = saves
        self._on_commit = on_commit
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
                    self._config, self._hear, self._on_exit, self._saves.owes_news, self._is_awaited
                )
                self._saves.keeper_started()
                self._report_lost(self._current)
            return self._current

    def _report_lost(self, keeper: KeeperProcess) -> None:
        """Tell the other ranks, through this keeper, which saves died with an earlier one.

        Its lock is held again, so that they no longer notice the death by themselves.
        """
        lost, self._lost = self._lost, []
        for save in lost:
            if save.error is not None:
                with contextlib.suppress(KeeperError):  # it is gone, too: then its lock tells
                    keeper.send(messages.Abandon(save.number, save.step, *errors.to_record(save.error)))

    def report_unsaved(self, step: int, error: StillframeError) -> None:
        """Tell the other ranks that this one does not save a step that they may be saving."""
        if self._config.world_size > 1:
            with contextlib.suppress(KeeperError):
                self.start().send(messages.Abandon(_NO_SAVE, step, *errors.to_record(error)))

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
            self._saves.sealed(message.save, message.at_s, message.is_unchanged)
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
            save = self._saves.committed(message.save, message.at_s)
            if save is not None and self._on_commit is not None:
                self._on_commit(save.step)
        elif isinstance(message, messages.Failed):
            error = errors.from_record(message.kind, message.message)
            self._saves.tell_failed(self._saves.fail(message.save, error))
        elif isinstance(message, messages.Notice):
            logger.warning("%s", message.message)
        elif isinstance(message, messages.Ready):
            if message.warning:
                logger.warning("%s", message.warning)
            self._answered.set()
        else:
            self._refusal = errors.from_record(message.kind, message.message)

    def _is_awaited(self) -> bool:
        return self._saves.is_awaited or (self._arena is not None and self._arena.is_awaited)

    def _on_exit(self, process: KeeperProcess, error: KeeperError | None) -> None:
        with self._lock:
            # All of this before another keeper can be started: its saves and spans are not these.
            reason = self._refusal or error or KeeperError(f"the keeper (pid {process.pid}) left with saves in flight")
            failed = self._saves.fail_all(reason)
            self._lost += failed
            if self._arena is not None:
                self._arena.give_back_all()
            if self._current is process:
                self._current = None
            self._answered.set()
            self._replace(process)
        self._saves.tell_failed(failed)

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
