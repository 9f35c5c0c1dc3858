"""A loopback proxy before a server of objects: passes on, or does to some requests what networks and servers do."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

_PIECE = 64 * 1024
_ANSWER_S = 120.0
_CONDITIONS = {"if-none-match": "*", "x-goog-if-generation-match": "0"}
"""That an object be new, as S3 and as Google have it."""
_REASONS = {403: "Forbidden", 404: "Not Found", 503: "Service Unavailable", 507: "Insufficient Storage"}


@dataclass(slots=True)
class Fault:
    """What is done to requests; to those that are not meant nothing is."""

    methods: str = "GET HEAD PUT POST DELETE"
    only: str = ""
    """Those whose path has this in it."""
    conditional: bool = False
    """Those with a condition that the object be new."""
    times: int = 1_000_000
    """The first so many."""
    status: int = 0
    """Answered by the proxy itself, with ``code``."""
    code: str = ""
    hangs: bool = False
    """Not answered at all, as long as the fault lasts."""
    cut_request: int | None = None
    """The connection is cut after so many bytes of the body."""
    cut_answer: int | None = None
    """… or of the server's answer; 0: it has done it, and nobody hears of it."""
    drops_condition: bool = False
    """The server gets the request without its condition; of S3, signed."""
    shift_s: float = 0.0
    """The server of S3 gets it as if the client's clock were so far ahead, signed."""
    met: int = field(default=0, init=False)
    """Requests that it was done to."""


@dataclass(slots=True)
class Request:
    method: str
    target: str
    """The path and the query, encoded."""
    headers: dict[str, str]
    """By their names in lower case."""

    @property
    def size(self) -> int:
        return int(self.headers.get("content-length", 0))

    @property
    def is_conditional(self) -> bool:
        return any(self.headers.get(name) == value for name, value in _CONDITIONS.items())

    def head(self) -> bytes:
        lines = [f"{self.method} {self.target} HTTP/1.1", *(f"{name}: {value}" for name, value in self.headers.items())]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    def sign(self, key: str, secret: str, region: str, at_s: float) -> None:
        """By AWS's version 4, again: with the headers that are there now, at another time."""
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(at_s))
        self.headers["x-amz-date"] = stamp
        names = sorted(name for name in self.headers if name in ("host", "if-none-match") or name.startswith("x-amz-"))
        path, _, query = self.target.partition("?")
        sorted_query = "&".join(sorted(each if "=" in each else f"{each}=" for each in query.split("&") if each))
        lines = [self.method, path, sorted_query, *(f"{name}:{self.headers[name].strip()}" for name in names)]
        text = "\n".join([*lines, "", ";".join(names), self.headers["x-amz-content-sha256"]])
        scope = f"{stamp[:8]}/{region}/s3/aws4_request"
        to_sign = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(text.encode()).hexdigest()}"
        signed = f"AWS4{secret}".encode()
        for each in (stamp[:8], region, "s3", "aws4_request", to_sign):
            signed = hmac.digest(signed, each.encode(), "sha256")
        self.headers["authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={key}/{scope}, SignedHeaders={';'.join(names)}, Signature={signed.hex()}"
        )


class Proxy:
    """``options``: those of the server; :attr:`options` lead through the proxy.  Thread: safe from any."""

    def __init__(self, options: dict[str, str]) -> None:
        place = "endpoint" if "endpoint" in options else "base_url"
        server = urlsplit(options[place])
        assert server.hostname is not None
        assert server.port is not None
        self._server = server.hostname, server.port
        is_signed = "secret_access_key" in options
        self._keys = (options["access_key_id"], options["secret_access_key"], options["region"]) if is_signed else None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.options = {**options, place: f"http://127.0.0.1:{self._listener.getsockname()[1]}"}
        self._lock = threading.Lock()
        self._fault: Fault | None = None
        self._is_over = threading.Event()
        threading.Thread(target=self._listen, name="proxy", daemon=True).start()

    def stop(self) -> None:
        self._is_over.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    @contextlib.contextmanager
    def doing(self, fault: Fault) -> Iterator[Fault]:
        """From here to the end of the block; then what hangs is cut."""
        over = threading.Event()
        with self._lock:
            self._fault, self._is_over = fault, over
        try:
            yield fault
        finally:
            with self._lock:
                self._fault = None
            over.set()

    def _meet(self, request: Request) -> tuple[Fault | None, threading.Event]:
        with self._lock:
            fault = self._fault
            is_meant = (
                fault is not None
                and request.method in fault.methods.split()
                and fault.only in unquote(request.target)
                and (not fault.conditional or request.is_conditional)
                and fault.met < fault.times
            )
            if fault is None or not is_meant:
                return None, self._is_over
            fault.met += 1
            return fault, self._is_over

    # --- on threads of its own -------------------------------------------------------------

    def _listen(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), name="proxied", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), client, client.makefile("rb") as reader:
            while (request := _read_request(reader)) is not None:
                fault, is_over = self._meet(request)
                if fault is not None and fault.hangs:
                    is_over.wait()
                    _cut(client)
                    return
                if fault is not None and fault.status:
                    reader.read(request.size)
                    client.sendall(_refusal(fault, request.method))
                    continue
                self._pass_on(request, reader, client, fault or Fault())
                return

    def _pass_on(self, request: Request, reader: BinaryIO, client: socket.socket, fault: Fault) -> None:
        """One request for each connection: the server ends it, and says so."""
        request.headers["connection"] = "close"
        if fault.drops_condition:
            for name in _CONDITIONS:
                request.headers.pop(name, None)
        if self._keys is not None and (fault.drops_condition or fault.shift_s):
            request.sign(*self._keys, time.time() + fault.shift_s)
        with socket.create_connection(self._server, timeout=_ANSWER_S) as server:
            server.sendall(request.head())
            left = request.size if fault.cut_request is None else min(request.size, fault.cut_request)
            while left:
                piece = reader.read(min(left, _PIECE))
                if not piece:
                    return
                server.sendall(piece)
                left -= len(piece)
            if fault.cut_request is not None:
                _cut(client)
                return
            sent = 0
            while piece := server.recv(_PIECE):
                if fault.cut_answer is not None and sent + len(piece) > fault.cut_answer:
                    client.sendall(piece[: max(fault.cut_answer - sent, 0)])
                    if fault.cut_answer:
                        time.sleep(0.05)  # else what was sent before is not read
                    _cut(client)
                    return
                client.sendall(piece)
                sent += len(piece)


def _read_request(reader: BinaryIO) -> Request | None:
    """``None`` if no more come."""
    words = reader.readline().decode("latin-1").split()
    if len(words) != 3:
        return None
    headers = {}
    while line := reader.readline().decode("latin-1").strip():
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    return Request(words[0], words[1], headers)


def _refusal(fault: Fault, method: str) -> bytes:
    text = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{fault.code}</Code><Message>no</Message></Error>'
    head = [
        f"HTTP/1.1 {fault.status} {_REASONS[fault.status]}",
        "Content-Type: application/xml",
        f"Content-Length: {len(text)}",
    ]
    return "\r\n".join([*head, "", "" if method == "HEAD" else text]).encode()


def _cut(client: socket.socket) -> None:
    """At once, as a machine that has gone: what was not sent is lost."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
