"""The trainer, as its keeper sees it: messages from it, news to it, and its end.

It is noticed by the socket and by a pidfd, because data-loader workers forked from the trainer keep the socket open.
"""

from __future__ import annotations

import contextlib
import select
import socket

from stillframe.link.liveness import Pulse
from stillframe.link.messages import Alive, Channel, FromKeeper, FromTrainer


class Trainer:
    """Thread: any may tell; one may listen."""

    def __init__(self, sock: int, pidfd: int) -> None:
        self._channel: Channel[FromTrainer, FromKeeper] = Channel(socket.socket(fileno=sock), FromTrainer)
        self._pidfd = pidfd
        self.is_gone = False
        self._events = select.poll()
        self._events.register(self._channel.socket, select.POLLIN)
        self._events.register(pidfd, select.POLLIN)

    def wait(self, timeout_ms: int) -> tuple[bool, bool]:
        """Whether its process has ended, and whether it has said something."""
        ready = {fd for fd, _ in self._events.poll(timeout_ms)}
        return self._pidfd in ready, self._channel.socket.fileno() in ready

    def hear(self) -> tuple[FromTrainer, int | None] | None:
        """The next message; ``None`` if it has hung up.  Raises ``BlockingIOError`` if there is none for now."""
        while True:
            try:
                return self._channel.receive(flags=socket.MSG_DONTWAIT)
            except ConnectionError:
                # It went with our news unread.  What it sent before is still queued behind this.
                continue

    def tell_alive(self, pulse: Pulse) -> None:
        """Never waits: if it does not listen, it does not wait for this either."""
        with contextlib.suppress(OSError):
            self._channel.send(Alive(pulse), flags=socket.MSG_DONTWAIT)

    def tell(self, message: FromKeeper) -> None:
        """Never waits for a trainer that is gone."""
        while not self.is_gone:
            try:
                self._channel.send(message, flags=socket.MSG_DONTWAIT)
                return
            except BlockingIOError:
                poll = select.poll()
                poll.register(self._channel.socket, select.POLLOUT)
                poll.register(self._pidfd, select.POLLIN)
                if any(fd == self._pidfd for fd, _ in poll.poll(1000)):
                    return
            except OSError:
                return
