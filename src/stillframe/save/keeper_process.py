"""One keeper process, as its trainer holds it: started, talked to, and its death noticed.

A keeper is started with exec, never fork; in its own session, so that Ctrl-C and a killed process group do not
reach it; isolated from the environment (``-I -S`` with the trainer's own ``sys.path``), so that it starts in tens of
milliseconds and imports what the trainer would.  Its stderr goes to a memfd: the tail of it is the reason given when
it dies, and a keeper that outlives its trainer holds no pipe of the trainer's open.

One thread per keeper receives its messages, in order, and then its death, exactly once.  A message that cannot be
understood, or a bug in what it does to the saves, is the end of that keeper: it is killed before anything that it was
lent is used again, and the next save starts another.
"""

from __future__ import annotations

import contextlib
import json
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

from stillframe.errors import ConfigError, KeeperError, text_of
from stillframe.latch import Bell, is_running, join
from stillframe.link.liveness import Patience
from stillframe.link.messages import Alive, Channel, FromKeeper, FromTrainer, KeeperConfig, build
from stillframe.store import again_s, is_url
from stillframe.waits import Wait

_WATCH_MS = 5000
_GATHER_S = 0.05
_BOOTSTRAP = """
import json, sys
config = json.load(sys.stdin)
sys.path[:] = config.pop("path")
from stillframe.keeper.process import main
sys.exit(main(**config))
"""


class KeeperProcess:
    """One keeper, once started.  ``on_message`` and then, once, ``on_exit`` are called on a thread of its own.

    ``owes_news`` tells whether it is waited for, and given up if it does not get on (:mod:`stillframe.link.liveness`);
    ``is_awaited`` whether somebody wants news at once.
    """

    def __init__(
        self,
        config: KeeperConfig,
        on_message: Callable[[KeeperProcess, FromKeeper], None],
        on_exit: Callable[[KeeperProcess, KeeperError | None], None],
        owes_news: Callable[[], bool],
        is_awaited: Callable[[], bool],
    ) -> None:
        self._config = config
        self._on_message = on_message
        self._on_exit = on_exit
        self._owes_news = owes_news
        self._is_awaited = is_awaited
        self._is_closing = False
        self.is_gone = False
        """It ended, and what it had been lent is about to be taken back."""
        self.has_arena = False
        self._wanted = Bell()
        self.doing = ""
        """What it has last said that it is in; for people to read."""
        self._is_in_storage = False
        self.pid = 0
        self._thread = threading.Thread(target=self._receive, name="stillframe-receive", daemon=True)

    def start(self) -> None:
        """Raises :class:`KeeperError`, :class:`ConfigError`.  Whatever interrupts it, no keeper is left that nobody
        knows of."""
        self.started_s = time.monotonic()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel: Channel[FromKeeper, FromTrainer] = Channel(ours, FromKeeper)
        self._errors = os.memfd_create("stillframe-keeper-stderr", os.MFD_CLOEXEC)
        trainer = os.pidfd_open(os.getpid())
        try:
            self._process = self._spawn(theirs.fileno(), trainer)
            self.pid = self._process.pid
            self._thread.start()
        except BaseException as error:
            self._undo()
            if isinstance(error, OSError):
                raise KeeperError(f"the keeper could not be started with {sys.executable!r}: {error}") from error
            raise
        finally:
            theirs.close()
            os.close(trainer)

    def _undo(self) -> None:
        if is_running(self._thread):  # it was interrupted at the very end: that thread cleans up
            self.end()
            return
        self._channel.close()  # one that runs without being known here ends by itself
        os.close(self._errors)
        if self.pid:
            self._process.kill()

    def _spawn(self, sock: int, trainer: int) -> subprocess.Popen[bytes]:
        config = self._config
        if not sys.executable:
            raise ConfigError(
                "sys.executable is empty (an embedded interpreter?): set it to a Python that can run the keeper"
            )
        here = str(Path(__file__).absolute().parents[2])
        path = [here, *(os.path.abspath(entry) for entry in sys.path if entry)]
        arguments = {"path": path, "sock": sock, "trainer": trainer, "build": build(), **asdict(config)}
        # In a memfd, not on the command line: there one argument has 128 KiB at most, and the path may be longer.
        memory = os.memfd_create("stillframe-keeper-arguments", os.MFD_CLOEXEC)
        try:
            os.pwrite(memory, json.dumps(arguments).encode("ascii"), 0)
            return subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BOOTSTRAP, "stillframe-keeper", f"rank={config.rank}", config.root],
                stdin=memory, stdout=subprocess.DEVNULL, stderr=self._errors,
                pass_fds=(sock, trainer), start_new_session=True, cwd="/",
            )  # fmt: skip
        finally:
            os.close(memory)

    def waited_for(self) -> Callable[[], None]:
        """Somebody waits until it can use the root: what to call at each turn, so that it is told."""
        root, options = self._config.root, self._config.storage_options
        wait = Wait(root, again_s(options) if is_url(root) else None)

        def turn() -> None:
            if self._is_in_storage:  # whom else it waits for, it says itself
                wait.turn(f"the keeper (pid {self.pid}) is {self.doing}")

        return turn

    def send(self, message: FromTrainer, fd: int | None = None) -> None:
        """Raises :class:`KeeperError` when it is gone; the receiving thread then reports why."""
        try:
            self._channel.send(message, fd)
        except OSError as error:
            raise KeeperError(f"the keeper (pid {self.pid}) is gone: {error}") from error

    def look_now(self) -> None:
        """Somebody waits for news: gather no longer."""
        self._wanted.ring()

    @property
    def is_listened_to(self) -> bool:
        return is_running(self._thread)

    def expect_exit(self) -> None:
        """From now on its end is not a failure."""
        self._is_closing = True

    def hang_up(self) -> None:
        """End the conversation; a thread that is blocked in :meth:`send` wakes with an error."""
        with contextlib.suppress(OSError):
            self._channel.socket.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """Kill it, before anything that it was lent is used again.  Not waited for: its storage may hang."""
        self._process.kill()
        self.hang_up()

    def wait_ended(self, timeout_s: float | None) -> bool:
        """Wait until it has ended and ``on_exit`` has run.  Tells whether it has."""
        return join(self._thread, timeout_s)

    # --- on the receiving thread -----------------------------------------------------------

    def _receive(self) -> None:
        try:
            verdict = self._listen()
            lost = "Saves in flight are lost, the next save starts another keeper"
            error = KeeperError(f"the keeper (pid {self.pid}) {verdict} {lost}") if verdict else None
        except BaseException as problem:
            error = KeeperError(
                f"a message of the keeper (pid {self.pid}) says cannot be decoded ({type(problem).__name__}: "
                f"{text_of(problem)}); it was ended, and the next save starts another"
            )
        if error is not None:
            self.end()
        else:
            code = self._process.wait()
            error = None if code == 0 and self._is_closing else KeeperError(self._obituary(code))
        self.is_gone = True
        try:
            self._on_exit(self, error)
        finally:
            self._process.wait()
            self._channel.close()
            os.close(self._errors)

    def _listen(self) -> str:
        """Pass on its messages until it is gone, or is to be given up: tells why it is."""
        poll = select.poll()
        poll.register(self._channel.socket, select.POLLIN)
        patience = Patience()
        while True:
            if not poll.poll(_WATCH_MS):
                patience.waited(_WATCH_MS / 1000)
                if not self._owes_news():
                    patience = Patience()
                elif patience.verdict:
                    return patience.verdict
                continue
            try:
                received = self._channel.receive()
            except ConnectionError:
                continue  # it went with our messages unread; what it sent before is queued behind this
            if received is None:
                return ""
            message = received[0]
            if isinstance(message, Alive):
                patience.heard(message.pulse)
                self.doing, self._is_in_storage = message.pulse.doing, message.pulse.operation != 0
                if patience.verdict and self._owes_news():
                    return patience.verdict
                continue
            patience.heard()
            self._on_message(self, message)
            if not self._is_awaited() and not poll.poll(0):
                # Each waking takes the GIL from the training loop: unless somebody waits, let news gather.
                self._wanted.wait(_GATHER_S)

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
