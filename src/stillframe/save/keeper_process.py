"""One keeper process, as its trainer holds it: started, talked to, and its death noticed.

A keeper is started with exec, never fork; in its own session, so that Ctrl-C and a killed process group do not
reach it; isolated from the environment (``-I -S`` with the trainer's own ``sys.path``), so that it starts in tens of
milliseconds and imports what the trainer would.  Its stderr goes to a memfd: the tail of it is the reason given when
it dies, and a keeper that outlives its trainer holds no pipe of the trainer's open.

One thread per keeper receives its messages, in order, and then its death, exactly once.
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

from stillframe.errors import ConfigError, KeeperError
from stillframe.link.messages import Channel, FromKeeper, FromTrainer, KeeperConfig

logger = logging.getLogger("stillframe")

STALL_S = 300.0
"""A keeper that owes news for this long is given up: training must not hang because its storage does."""
_WATCH_MS = 5000
_GATHER_S = 0.05
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
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        size = os.fstat(self._errors).st_size
        tail = os.pread(self._errors, 2000, max(size - 2000, 0)).decode(errors="replace").strip()
        said = f"; its last words:\n{tail}" if tail else ""
        return f"the keeper (pid {self.pid}) {how}; saves in flight are lost, the next save starts another{said}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
