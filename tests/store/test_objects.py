"""The contract on object stores: obstore's own store in memory, with every request failing in turn.

A real server is asked in tests/servers.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError, GenericError, PreconditionError
from obstore.store import AzureStore, GCSStore, LocalStore, MemoryStore, S3Store

from stillframe import Catalog, Checkpointer, ConfigError
from stillframe.errors import StorageError
from stillframe.link.messages import KeeperConfig
from stillframe.model import SaveId
from stillframe.store import open_store, opened
from stillframe.store.address import root_address
from stillframe.store.memory import Fault
from stillframe.store.objects import ObjectStore
from stillframe.store.profile import with_profile
from stillframe.store.protocol import Info, Missing, NotOurs, read_all
from stillframe.testing.store_contract import Clients, store_contract

REQUESTS = ("put", "get", "get_range", "delete", "list_with_delimiter", "list")
URL = "memory://bucket/root"


class FaultyRequests:
    """obstore, one of whose next requests fails."""

    def __init__(self) -> None:
        self._armed: tuple[Fault, int] | None = None
        self._late: list[Callable[[], Any]] = []

    def arm(self, fault: Fault, step: int) -> None:
        self._armed = fault, step % 6

    def disarm(self) -> None:
        self._armed = None

    def land(self) -> None:
        late, self._late = self._late, []
        for work in late:
            try:
                work()
            except obstore.exceptions.AlreadyExistsError:
                pass

    def __getattr__(self, name: str) -> Any:
        request = getattr(obstore, name)

        def call(*arguments: Any, **options: Any) -> Any:
            fault, step = self._armed or (None, 0)
            if fault is None:
                return request(*arguments, **options)
            self._armed = (fault, step - 1) if step else None
            if step:
                return request(*arguments, **options)
            if fault is Fault.LATE and name in ("put", "delete"):
                kept = [bytes(each) if isinstance(each, memoryview | bytearray) else each for each in arguments]
                self._late.append(lambda: request(*kept, **options))
            elif fault is Fault.REPLY_LOST:
                request(*arguments, **options)
            raise GenericError("an injected fault")

        return call


@pytest.mark.parametrize(
    "root",
    [
        "s3://key:secret@bucket/x",
        "s3:/key:secret@bucket/x",
        "az://container/x?sv=1&sig=secret",
        "https://account.blob.core.windows.net/container?sig=secret",
        "ftp://me:secret@host/x",
    ],
)
def test_a_secret_in_a_url_is_not_told(root: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(root)
    assert "secret" not in str(caught.value)


def clients() -> Clients:
    backend, faults = MemoryStore(), FaultyRequests()
    stores = ObjectStore(backend, URL), ObjectStore(backend, URL)
    for store in stores:
        store.server._obstore = faults  # type: ignore[assignment]
    return Clients(stores, faults)


TestObjects = store_contract(clients)


# --- blobs -------------------------------------------------------------------------------------


@pytest.fixture
def store() -> ObjectStore:
    return ObjectStore(MemoryStore(), URL)


def objects(store: ObjectStore) -> list[str]:
    return sorted(each["path"] for page in obstore.list(store.server._backend) for each in page)


def write(store: ObjectStore, key: str, *parts: tuple[int, bytes], size: int) -> None:
    writer = store.writer(key, size)
    for offset, data in parts:
        writer.write_at(memoryview(data), offset)
    writer.finish()


def test_a_blob_is_a_few_objects_each_one_request(store: ObjectStore) -> None:
    write(store, "d/blob", (10, b"b" * 10), (0, b"a" * 10), (30, b"d" * 100), size=35)
    assert read_all(store, "d/blob", 100) == b"a" * 10 + b"b" * 10 + bytes(10) + b"d" * 5
    assert len(objects(store)) == 4
    assert list(store.list("d")) == ["blob"]
    info = store.head("d/blob")
    assert info is not None
    assert info.size == 35
    assert store.infos("d") == {"blob": info}
    store.delete(["d/blob"])
    assert objects(store) == []


def test_whoever_opens_a_blob_reads_it_without_its_index(store: ObjectStore) -> None:
    write(store, "d/blob", (0, b"a" * 10), (10, b"b" * 10), size=20)
    info, read, _ = opened(store, "d/blob")
    assert info == Info(20)
    obstore.delete(store.server._backend, "d/blob")
    found = bytearray(30)
    assert read(5, memoryview(found)) == 15
    assert found[:15] == b"a" * 5 + b"b" * 10


def test_what_lies_in_one_part_of_a_blob_is_lent(store: ObjectStore) -> None:
    """Whatever else it is, is to be read."""
    write(store, "d/blob", (0, b"a" * 10), (10, b"bcdefghijk"), (30, b"l"), size=31)
    _, read, lend = opened(store, "d/blob")

    def lent(start: int, length: int) -> bytes | None:
        found = lend(start, length)
        return None if found is None else bytes(found)

    assert lent(10, 10) == b"bcdefghijk"
    assert lent(12, 3) == b"def"
    assert lent(30, 1) == b"l"
    assert [lent(*each) for each in ((5, 10), (19, 2), (20, 5), (30, 2), (40, 1))] == [None] * 5
    (part,) = (path for path in objects(store) if path.endswith(".parts/0000000000010"))
    obstore.put(store.server._backend, part, b"bcd")
    assert lent(10, 10) == b"bcd"
    obstore.delete(store.server._backend, part)
    assert lent(10, 10) is None
    with pytest.raises(NotOurs):
        read(10, memoryview(bytearray(10)))


def test_an_opened_blob_that_was_replaced_or_removed_is_looked_at_again(store: ObjectStore) -> None:
    write(store, "d/blob", (0, b"old" * 10), size=30)
    _, read, _ = opened(store, "d/blob")
    found = bytearray(30)
    write(store, "d/blob", (0, b"new"), size=3)
    assert read(0, memoryview(found)) == 3
    assert found[:3] == b"new"
    store.put("d/blob", b"value")
    assert read(0, memoryview(found)) == 5
    store.delete(["d/blob"])
    with pytest.raises(Missing):
        read(0, memoryview(found))


def test_what_is_opened_may_be_a_value_or_nothing(store: ObjectStore) -> None:
    store.put("d/value", b"value")
    info, read, lend = opened(store, "d/value")
    assert lend(0, 5) is None
    found = bytearray(3)
    assert (info, read(2, memoryview(found)), bytes(found)) == (Info(5), 3, b"lue")
    info, read, lend = opened(store, "d/none")
    assert lend(0, 5) is None
    assert info is None
    with pytest.raises(Missing):
        read(0, memoryview(found))


@pytest.mark.parametrize("left", [b"", b"a" * 9])
def test_a_part_that_was_cut_short_is_damage(store: ObjectStore, left: bytes) -> None:
    write(store, "d/blob", (0, b"a" * 10), size=10)
    (part,) = (path for path in objects(store) if ".parts/" in path)
    obstore.put(store.server._backend, part, left)
    _, read, _ = opened(store, "d/blob")
    for each in (read, partial(store.read, "d/blob")):
        with pytest.raises(NotOurs, match="too short"):
            each(0, memoryview(bytearray(10)))


def test_a_blob_that_is_not_finished_is_listed_and_can_be_removed(store: ObjectStore) -> None:
    writer = store.writer("d/blob", 20)
    writer.write_at(memoryview(b"a" * 10), 0)
    (name,) = store.list("d")
    assert name.startswith("blob.")
    assert name.endswith(".partial")
    assert store.head("d/blob") is None
    store.delete([f"d/{name}"])
    assert objects(store) == []


def test_what_a_writer_gave_up_is_gone_unless_its_end_is_not_known(store: ObjectStore) -> None:
    writer = store.writer("blob", 10)
    writer.write_at(memoryview(b"a" * 10), 0)
    writer.abort()
    assert objects(store) == []
    faults = FaultyRequests()
    store.server._obstore = faults  # type: ignore[assignment]
    writer = store.writer("blob", 10)
    writer.write_at(memoryview(b"a" * 10), 0)
    faults.arm(Fault.LATE, 2)  # the requests before look what is there
    with pytest.raises(StorageError):
        writer.finish()
    writer.abort()
    faults.land()
    assert read_all(store, "blob", 10) == b"a" * 10, "it came late, and is whole"


def test_parts_that_overlap_are_refused(store: ObjectStore) -> None:
    writer = store.writer("blob", 20)
    writer.write_at(memoryview(b"a" * 10), 0)
    writer.write_at(memoryview(b"b" * 10), 5)
    with pytest.raises(StorageError, match="overlaps"):
        writer.finish()


@pytest.mark.parametrize("text", [b"", b"{}", b"[" * 100_000, b"\xff", b'{"size":5,"nonce":"x","parts":[["a",1]]}'])
def test_an_index_of_somebody_else_is_an_error(store: ObjectStore, text: bytes) -> None:
    obstore.put(store.server._backend, "blob", text, attributes={"stillframeindex": "5"})
    with pytest.raises(StorageError) as caught:
        store.read("blob", 0, memoryview(bytearray(5)))
    assert not isinstance(caught.value, Missing)
    store.delete(["blob"])
    assert objects(store) == []


def test_a_part_that_is_gone_is_no_silence(store: ObjectStore) -> None:
    write(store, "blob", (0, b"a" * 10), (10, b"b" * 10), size=20)
    (part,) = [each for each in objects(store) if each.endswith("/0000000000010")]
    obstore.delete(store.server._backend, part)
    assert store.read("blob", 0, memoryview(bytearray(10))) == 10
    with pytest.raises(NotOurs, match="parts of it are not there"):
        store.read("blob", 5, memoryview(bytearray(10)))


HOSTILE = [
    '{"size":5,"nonce":"../../ab","parts":[]}',
    '{"size":5,"nonce":"0123abcd","parts":[[3,2],[0,3]]}',
    '{"size":5,"nonce":"0123abcd","parts":[[0,4],[3,2]]}',
    '{"size":5,"nonce":"0123abcd","parts":[[-4,2]]}',
    '{"size":5,"nonce":"0123abcd","parts":[[0,6]]}',
    '{"size":6,"nonce":"0123abcd","parts":[[0,5]]}',
]


@pytest.mark.parametrize("text", HOSTILE)
def test_an_index_that_cannot_be_true_is_refused(store: ObjectStore, text: str) -> None:
    obstore.put(store.server._backend, "blob", text.encode(), attributes={"stillframeindex": "5"})
    with pytest.raises(NotOurs):
        store.read("blob", 0, memoryview(bytearray(5)))


@pytest.mark.parametrize("mark", ["9" * 5000, "-1", "x", ""])
def test_a_mark_that_is_no_size_is_a_stranger(store: ObjectStore, mark: str) -> None:
    obstore.put(store.server._backend, "blob", b"{}", attributes={"stillframeindex": mark})
    info = store.head("blob")
    assert info is not None
    assert not info.is_ours


def test_a_server_that_removes_one_by_one_removes_them_all(tmp_path: Path) -> None:
    """Such a one ends at the first that is not there, wherever that stands."""
    store = ObjectStore(LocalStore(tmp_path), URL)
    paths = [f"d/k{number:02d}" for number in range(30)]
    for path in paths:
        obstore.put(store.server._backend, path, b"x")
    store.delete(["d/aa-missing", *paths, "d/zz-missing"])
    assert objects(store) == []


def test_errors_of_the_library_do_not_get_through(store: ObjectStore) -> None:
    class Conflict:
        def __getattr__(self, name: str) -> Any:
            def call(*_: Any, **options: Any) -> Any:
                raise AlreadyExistsError("409 OperationAborted")

            return call

    store.server._obstore = Conflict()  # type: ignore[assignment]
    for call in (
        lambda: store.put("a", b"1"),
        lambda: store.delete(["a"]),
        lambda: store.head("a"),
        lambda: store.read("a", 0, memoryview(bytearray(1))),
        lambda: list(store.list()),
    ):
        with pytest.raises(StorageError):
            call()
    store.writer("a", 1).abort()


def test_a_forked_child_is_refused_and_does_not_hang(store: ObjectStore) -> None:
    store.put("a", b"1")
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert "forked child" in pool.apply_async(_look).get(timeout=30)


def _look() -> str:
    try:
        open_store("s3://bucket/x", {"endpoint": "http://127.0.0.1:1"})
    except ConfigError as error:
        return str(error)
    return "no error"


def test_options_are_told_to_the_keeper_or_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"storage_options\['timeout'\] is a timedelta"):
        Checkpointer("s3://bucket/x", storage_options={"timeout": timedelta(seconds=5)})
    assert "sesame" not in repr(KeeperConfig("r", "0123abcd", 0, 1, storage_options={"secret_access_key": "sesame"}))


def test_messages_name_a_url_as_it_was_given(store: ObjectStore) -> None:
    assert Catalog(store).dir(SaveId(1)) == f"{URL}/step-000000000001-e0001-1"


# --- servers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [0, -1, "5s", True, 1e9])
def test_a_time_to_ask_again_is_a_number_of_seconds(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"storage_options\['retry_timeout'\].*number of seconds"):
        open_store("s3://b/x", {"retry_timeout": given, "skip_signature": True})


@pytest.mark.parametrize(
    ("status", "code", "about"),
    [
        (403, "ExpiredToken", r"403 Forbidden \(ExpiredToken\); the credentials have expired: renew them"),
        (403, "RequestTimeTooSkewed", "the clocks of this machine and of the server are too far apart"),
        (403, "QuotaExceeded", "a quota is reached: make room there"),
        (507, "XMinioStorageFull", "507 .*there is no room"),
        (403, "AccessDenied", "they must be allowed to read, write, list and delete"),
        (403, "InvalidAccessKeyId", "look at the credentials and at what they may do"),
        (503, "SlowDown", r"503 Service Unavailable.*, asked \d+ times in .*; it is overloaded, or down"),
    ],
)
def test_an_answer_is_told_with_what_to_do(status: int, code: str, about: str) -> None:
    text = f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>"
    options = {"skip_signature": True, "account_name": "me", "retry_timeout": 0.3}
    with answering(status, text, []) as endpoint:
        store = open_store("az://container/x", {**options, "endpoint": endpoint})
        with pytest.raises(StorageError, match=about):
            store.read("a", 0, memoryview(bytearray(1)))
        with pytest.raises(StorageError, match=about):  # a HEAD has no text that tells
            store.head("a")


def test_a_server_that_does_not_answer_is_named() -> None:
    options = {"skip_signature": True, "endpoint": "http://127.0.0.1:1", "retry_timeout": 0.3}
    store = open_store("s3://b/x", options)
    with pytest.raises(StorageError, match=r"http://127.0.0.1:1 does not answer \(Connection refused\).*does it run"):
        store.put_new("a", b"1")


def test_a_password_in_a_servers_url_is_not_told() -> None:
    options = {"skip_signature": True, "endpoint": "http://me:secret@127.0.0.1:1", "retry_timeout": 0.3}
    with pytest.raises(StorageError, match=r"http://127.0.0.1:1 does not answer") as silent:
        open_store("s3://b/x", options).put_new("a", b"1")
    with answering(403, "no", []) as endpoint:
        store = open_store("s3://b/x", {**options, "endpoint": endpoint.replace("//", "//me:secret@")})
        with pytest.raises(StorageError, match="403 Forbidden") as refused:
            store.put_new("a", b"1")
    assert "secret" not in f"{silent.value} {refused.value}"


@pytest.mark.parametrize("text", ["HTTP error: blocked by policy", "error sending request", "BadScheme"])
def test_what_a_server_says_is_not_taken_for_what_the_library_says(text: str) -> None:
    asked: list[str] = []
    with answering(403, text, asked) as endpoint:
        store = open_store("s3://b/x", {"skip_signature": True, "endpoint": endpoint, "retry_timeout": 20})
        assert isinstance(store, ObjectStore)
        with pytest.raises(StorageError, match=r"answer is 403 Forbidden; look at the credentials"):
            store.server.put_if_free("a", b"1")
    assert len(asked) == 1  # refused is refused: it is not tried again


def test_conflicts_and_lost_answers_in_turn_come_to_an_end(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stormy(FaultyRequests):
        def put(self, *_: Any, **__: Any) -> None:
            errors.append(next(turns))
            raise errors[-1]

    errors: list[Exception] = []
    lost, conflict = GenericError("error sending request"), PreconditionError("another one was faster")
    turns = itertools.cycle([lost, lost, lost, conflict])
    monkeypatch.setattr(type(store.server), "_again_s", 1.0)
    store.server._obstore = Stormy()  # type: ignore[assignment]
    began = time.monotonic()
    with pytest.raises(StorageError):
        store.server.put_if_free("a", b"1")
    assert len(errors) > 4
    assert time.monotonic() - began < 5  # not a second for each conflict


def test_a_server_that_ignores_the_condition_is_refused(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    class Careless(FaultyRequests):
        def __getattr__(self, name: str) -> Any:
            request = super().__getattr__(name)

            def put(*arguments: Any, **options: Any) -> Any:
                options.pop("mode", None)
                return request(*arguments, **options)

            return put if name == "put" else request

    store.server._obstore = Careless()  # type: ignore[assignment]
    with pytest.raises(StorageError, match="If-None-Match"):
        store.put_new("a", b"1")
    assert objects(store) == []


@pytest.mark.parametrize(
    ("root", "about"),
    [
        ("ftp://host/x", "cannot write to"),
        ("file:///x", "cannot write to"),
        ("s3:/bucket/x", "went through pathlib"),
        ("s3://", "BUCKET/DIRECTORY"),
        ("s3://bucket/../x", "BUCKET/DIRECTORY"),
        ("s3://bucket/run#1", "BUCKET/DIRECTORY"),
        ("s3://bucket/run?x=1", "BUCKET/DIRECTORY"),
        ("s3://bucket/a%2Fb", "BUCKET/DIRECTORY"),
        ("s3://key:secret@bucket/x", "storage_options"),
        ("gcs://bucket/x", r"it knows s3://, gs://, az://"),
        ("abfs://container/x", "cannot write to"),
        ("gs:/bucket/x", "went through pathlib"),
        ("gs://bucket/a b", "gs://BUCKET/DIRECTORY"),
        ("az://container/../x", "az://CONTAINER/DIRECTORY"),
        ("s3://bucket//x", "BUCKET/DIRECTORY"),
    ],
)
def test_a_url_that_cannot_be_a_root_is_refused(root: str, about: str) -> None:
    with pytest.raises(ConfigError, match=about):
        open_store(root)


def test_urls_are_written_in_one_way() -> None:
    assert root_address("s3://bucket/a/") == root_address("s3://bucket/a") == "s3://bucket/a"
    for root in ("s3://bucket", "gs://bucket/a", "az://container/a/b"):
        assert root_address(root) == root


def test_options_that_cannot_be_are_refused_before_anything_is_done() -> None:
    with pytest.raises(ConfigError, match="storage_options"):
        open_store("s3://bucket/x", {"no_such_option": secrets.token_hex(2)})
    with pytest.raises(ConfigError, match="is a directory"):
        open_store("/tmp", {"endpoint": "http://127.0.0.1:1"})


# --- what differs between the clouds -----------------------------------------------------------


@pytest.fixture
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*os.environ]:
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_")):
            monkeypatch.delenv(name)


@pytest.mark.usefixtures("no_environment")
@pytest.mark.parametrize(
    ("url", "options", "kind", "place"),
    [
        ("s3://place/a/b", {"region": "eu-west-1"}, S3Store, "bucket"),
        ("gs://place/a/b", {"bearer_token": "x"}, GCSStore, "bucket"),
        ("az://place/a/b", {"account_name": "me", "account_key": "AAAA"}, AzureStore, "container_name"),
    ],
)
def test_every_kind_is_opened_where_the_url_says(
    url: str, options: dict[str, str], kind: type[Any], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_BUCKET", "GOOGLE_BUCKET", "AZURE_CONTAINER_NAME"):
        monkeypatch.setenv(name, "elsewhere")
    store = open_store(url, options)
    assert isinstance(store, ObjectStore)
    backend: Any = store.server._backend
    assert type(backend) is kind
    assert backend.prefix == "a/b"
    assert backend.config[place] == "place"
    assert store.where("c") == f"{url}/c"
    with pytest.raises(ConfigError, match="is named by the URL"):
        open_store(url, {**options, place.upper(): "elsewhere"})


@pytest.mark.usefixtures("no_environment")
def test_an_account_comes_from_the_environment_or_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="AZURE_STORAGE_ACCOUNT_NAME"):
        open_store("az://container/x")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "me")
    assert isinstance(open_store("az://container/x"), ObjectStore)


@pytest.mark.usefixtures("no_environment")
@pytest.mark.parametrize(
    ("url", "options", "variable"),
    [
        ("s3://place/x", {"skip_signature": True}, "AWS_ENDPOINT_URL"),
        ("gs://place/x", {"skip_signature": True}, "GOOGLE_BASE_URL"),
        ("az://place/x", {"skip_signature": True, "account_name": "me"}, "AZURE_STORAGE_ENDPOINT"),
    ],
)
def test_a_server_without_tls_is_used_if_it_was_named(
    url: str, options: dict[str, Any], variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    with answering(404, "", seen) as endpoint:
        monkeypatch.setenv(variable, endpoint)
        with pytest.raises(Missing):
            open_store(url, options).read("a", 0, memoryview(bytearray(1)))
    assert seen
    assert seen[0].endswith("/x/a")


@pytest.mark.parametrize(
    "xml", ["<?xml version='1.0'?>\n<Error>\n<Code>Odd</Code>", "\ufeff<?xml ?><Error><Code>Odd</Code>"]
)
def test_the_xml_of_a_server_is_not_told_but_its_code(xml: str) -> None:
    options = {"skip_signature": True, "account_name": "me"}
    with answering(400, xml, []) as endpoint, pytest.raises(StorageError) as caught:
        open_store("az://container/x", {**options, "endpoint": endpoint}).read("416", 0, memoryview(bytearray(1)))
    assert "400 Bad Request (Odd)" in str(caught.value)
    assert "xml" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["<!DOCTYPE html>\n<html><title>502</title>", "<HTML>Bad gateway", '{\n"error": {"code": 502}}']
)
def test_of_a_page_for_browsers_or_programs_nothing_is_told(text: str) -> None:
    about = "answer is 502 Bad Gateway(, asked .*)?; it is overloaded, or down$"
    with answering(502, text, []) as endpoint, pytest.raises(StorageError, match=about):
        [*open_store("gs://bucket/x", {"bearer_token": "x", "base_url": endpoint, "retry_timeout": 0.1}).list("a")]


@pytest.mark.parametrize(
    ("url", "about"),
    [("s3://b/x", "AWS_ACCESS_KEY_ID"), ("gs://b/x", "GOOGLE_APPLICATION_CREDENTIALS"), ("az://c/x", "account_key")],
)
def test_whoever_has_no_credentials_is_told_where_they_come_from(url: str, about: str) -> None:
    error = "Error performing token request: GET http://169.254.169.254/x: 403 Forbidden"
    with pytest.raises(StorageError, match=f"no credentials were given.*{about}"):
        failing(url, error).put("a", b"1")


def test_whoever_has_credentials_that_give_no_token_is_not_told_to_give_some() -> None:
    asked = "Error performing token request: Error performing POST https://accounts.google.com/o/oauth2/token in 1ms"
    refused = f'{asked} - Server returned non-2xx status code: 400 Bad Request: {{\n  "error": "invalid_grant"\n}}'
    with pytest.raises(StorageError, match=r"answer is 400 Bad Request \(invalid_grant\); .*revoked.*renew") as caught:
        failing("gs://b/x", refused).put("a", b"1")
    assert "were given" not in str(caught.value)
    with pytest.raises(StorageError, match=r"https://accounts.google.com does not answer.*can it be reached"):
        failing("gs://b/x", f"{asked} - HTTP error: error sending request").put("a", b"1")


def failing(url: str, text: str) -> ObjectStore:
    class Obstore:
        def __getattr__(self, name: str) -> Any:
            def call(*_: Any, **options: Any) -> Any:
                raise GenericError(text)

            return call

    store = ObjectStore(MemoryStore(), url)
    store.server._obstore = Obstore()  # type: ignore[assignment]
    return store


@pytest.mark.usefixtures("no_environment")
def test_a_profile_is_used_or_it_is_said_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "credentials").write_text("[me]\naws_access_key_id = a-key\naws_secret_access_key = sesame\n")
    (tmp_path / "config").write_text("[profile me]\nregion = eu-west-1\n[profile empty]\nregion = eu-west-1\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert with_profile("s3://bucket/x", {}) == {}
    monkeypatch.setenv("AWS_PROFILE", "me")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "botocore.session", None)
        with pytest.raises(ConfigError, match="pip install botocore"):
            open_store("s3://bucket/x")
    pytest.importorskip("botocore")
    found = with_profile("s3://bucket/x", {})
    assert found["region"] == "eu-west-1"
    keys = found["credential_provider"]()
    assert (keys["access_key_id"], keys["secret_access_key"]) == ("a-key", "sesame")
    assert "region" not in with_profile("s3://bucket/x", {"region": "us-east-1"})
    for url, options in (("s3://b/x", {"access_key_id": "other"}), ("az://c/x", {}), ("gs://b/x", {})):
        assert with_profile(url, options) == {}
    for name in ("empty", "nobody"):
        monkeypatch.setenv("AWS_PROFILE", name)
        with pytest.raises(ConfigError, match=f"AWS_PROFILE={name}"):
            open_store("s3://bucket/x")


@contextlib.contextmanager
def answering(status: int, text: str, seen: list[str]) -> Iterator[str]:
    """A server on loopback that answers everything in one way, and notes the paths that it was asked for."""

    class Handler(BaseHTTPRequestHandler):
        wbufsize = -1  # head and body go in one: a client may be content with the head

        def handle_all(self) -> None:
            seen.append(unquote(self.path.partition("?")[0]))
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(b"" if self.command == "HEAD" else text.encode())

        do_GET = do_HEAD = do_PUT = handle_all

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
