"""A stand-in for Google Cloud Storage: the requests of its XML API that obstore makes for ``gs://``, in memory.

No server of Google's kind could be installed for tests.  This one is written from Google's description of the XML API.
It answers 501 to all else, so that a request that obstore begins to make is noticed.  The tests of the contract, runs,
kills, commands, faults and a lost root were once run by hand on Google's storage-testbench as well, and passed.  That
has writes, conditions, generations and ranges of its own, and asks for no token; listing, removal, metadata and entity
tags were added to it, as its XML API has none.  Google's own service was never tried: its tokens, its limits, its
texts of errors, buckets with a hierarchical namespace.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import socket
import threading
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

TOKEN: Final = "of-no-use-elsewhere"
_PAGE: Final = 5
"""Names in one answer to a listing; Google's has 1000."""
_XML: Final = "<?xml version='1.0' encoding='UTF-8'?>"


class Object(NamedTuple):
    data: bytes = b""
    generation: int = 1
    at_s: float = 0.0
    meta: tuple[tuple[str, str], ...] = ()

    @property
    def tag(self) -> str:
        return f'"{hashlib.md5(self.data, usedforsecurity=False).hexdigest()}"'


class Gcs:
    """From :meth:`start` to :meth:`stop`, as often as one likes: the objects stay.  Thread: safe from any."""

    def __init__(self, home: Path) -> None:
        self.buckets: dict[str, dict[str, Object]] = {}
        self.lock = threading.Lock()
        self.generation = 0
        self.replace_s = 0.0
        """An object may be replaced once in so long; with Google, once a second."""
        self.slowed = 0
        """How often it was tried sooner."""
        self.clients: set[socket.socket] = set()
        self._port = 0
        self._server: ThreadingHTTPServer | None = None

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self._port}"

    @property
    def options(self) -> dict[str, str]:
        """For ``storage_options=``."""
        return {"base_url": f"http://{self.host}", "bearer_token": TOKEN}

    @property
    def environment(self) -> dict[str, str]:
        """The same for programs."""
        return {f"GOOGLE_{name.upper()}": value for name, value in self.options.items()}

    def start(self) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), type("Handler", (_Handler,), {"gcs": self}))
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="gcs", daemon=True).start()

    def stop(self) -> None:
        """At once: connections are cut, whatever they are at."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        for each in [*self.clients]:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def make_place(self, name: str) -> None:
        self.buckets[name] = {}


class _Handler(BaseHTTPRequestHandler):
    gcs: Gcs
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer goes in one

    def handle(self) -> None:
        self.gcs.clients.add(self.connection)
        with contextlib.suppress(OSError):
            super().handle()
        self.gcs.clients.discard(self.connection)

    def serve(self) -> None:
        url = urlsplit(self.path)
        bucket, _, name = (unquote(each) for each in url.path[1:].partition("/"))
        objects = self.gcs.buckets.get(bucket)
        body = self.rfile.read(size := int(self.headers.get("Content-Length", 0)))
        if len(body) < size:  # it was cut
            self.close_connection = True
        elif self.headers.get("Metadata-Flavor") == "Google" and name.endswith("/service-accounts/default/token"):
            self.answer(200, json.dumps({"access_token": TOKEN, "expires_in": 3600}).encode())
        elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.refuse(401, "AuthenticationRequired")
        elif objects is None:
            self.refuse(404, "NoSuchBucket")
        elif self.command == "GET" and not name:
            self.list(dict(objects), dict(parse_qsl(url.query)))
        elif url.query or self.command == "POST":
            self.refuse(501, "NotImplemented")
        elif self.command == "PUT":
            with self.gcs.lock:
                self.put(objects, name, body)
        elif (found := objects.get(name)) is None or (self.command == "DELETE" and not objects.pop(name, None)):
            self.refuse(404, "NoSuchKey")
        elif self.command == "DELETE":
            self.answer(204)
        else:
            self.get(found)

    do_GET = do_HEAD = do_PUT = do_DELETE = do_POST = serve

    def put(self, objects: dict[str, Object], name: str, body: bytes) -> None:
        there = objects.get(name)
        wanted = self.headers.get("x-goog-if-generation-match")
        if wanted is not None and int(wanted) != (there.generation if there else 0):
            self.refuse(412, "PreconditionFailed")
        elif there is not None and time.time() - there.at_s < self.gcs.replace_s:
            self.gcs.slowed += 1
            self.refuse(429, "SlowDown")
        else:
            self.gcs.generation += 1
            meta = tuple(each for each in self.headers.items() if each[0].lower().startswith("x-goog-meta-"))
            new = objects[name] = Object(body, self.gcs.generation, time.time(), meta)
            self.answer(200, b"", {"ETag": new.tag, "x-goog-generation": str(new.generation)})

    def get(self, found: Object) -> None:
        headers = {"ETag": found.tag, "x-goog-generation": str(found.generation), **dict(found.meta)}
        headers["Last-Modified"] = formatdate(found.at_s, usegmt=True)
        asked, size = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")), len(found.data)
        if self.headers.get("If-None-Match") == found.tag:
            self.answer(304, b"", headers)
        elif asked is None:
            self.answer(200, found.data, headers)
        elif (start := int(asked[1])) >= size:
            self.refuse(416, "InvalidRange")
        else:
            end = min(int(asked[2]) + 1, size)
            self.answer(206, found.data[start:end], {**headers, "Content-Range": f"bytes {start}-{end - 1}/{size}"})

    def list(self, objects: dict[str, Object], query: dict[str, str]) -> None:
        prefix, delimiter, after = (query.pop(each, "") for each in ("prefix", "delimiter", "continuation-token"))
        if query != {"list-type": "2"}:
            self.refuse(501, "NotImplemented")
            return
        found: dict[str, str] = {}
        for name, each in objects.items():
            cut = name.find(delimiter, len(prefix)) + 1 if delimiter else 0
            shown = name[:cut] if cut else name
            if name.startswith(prefix) and shown > after:
                at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(each.at_s))
                about = f"<Size>{len(each.data)}</Size><LastModified>{at}</LastModified><ETag>{each.tag}</ETag>"
                entry = f"<Contents><Key>{escape(name)}</Key>{about}</Contents>"
                found[shown] = f"<CommonPrefixes><Prefix>{escape(shown)}</Prefix></CommonPrefixes>" if cut else entry
        names = sorted(found)
        parts = [found[name] for name in names[:_PAGE]]
        if len(names) > _PAGE:
            parts.append(f"<NextContinuationToken>{escape(names[_PAGE - 1])}</NextContinuationToken>")
        self.answer(200, f"{_XML}<ListBucketResult>{''.join(parts)}</ListBucketResult>".encode())

    def refuse(self, status: int, code: str) -> None:
        self.answer(status, f"{_XML}<Error><Code>{code}</Code><Message>no</Message></Error>".encode())

    def answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            if name != "Content-Length" or status not in (204, 304):
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)

    def log_message(self, *_: Any) -> None: ...
