"""One end of the SEQPACKET socket: whole messages, in order, each optionally with a file descriptor."""

from __future__ import annotations

import array
import socket
from typing import Generic, TypeVar

import msgspec

_MAX_PACKET = 64 * 1024
_In = TypeVar("_In")
_Out = TypeVar("_Out")


class Channel(Generic[_In, _Out]):
    """Thread: any may send; one may receive."""

    def __init__(self, end: socket.socket, incoming: object) -> None:
        self.socket = end
        self._decoder = msgspec.msgpack.Decoder(incoming)

    def send(self, message: _Out, fd: int | None = None, *, flags: int = 0) -> None:
        """Blocks while the other side's queue is full.  Raises ``OSError`` when it is gone."""
        data = msgspec.msgpack.encode(message)
        assert len(data) <= _MAX_PACKET, "messages are small; large things travel in a memfd"
        ancillary = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        self.socket.sendmsg([data], ancillary, flags | socket.MSG_NOSIGNAL)

    def receive(self, *, flags: int = 0) -> tuple[_In, int | None] | None:
        """The next message and the descriptor that came with it; ``None`` when the other side is gone."""
        data, ancillary, _, _ = self.socket.recvmsg(_MAX_PACKET, socket.CMSG_SPACE(4), flags | socket.MSG_CMSG_CLOEXEC)
        if not data:
            return None
        fds = array.array("i")
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
        message: _In = self._decoder.decode(data)
        return message, fds[0] if fds else None

    def close(self) -> None:
        self.socket.close()
