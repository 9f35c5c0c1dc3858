"""Single promises of :mod:`stillframe.store.protocol`, each a function of two clients of one new, empty store."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial

from stillframe.errors import StorageError
from stillframe.store.protocol import PARTIAL, Missing, Store, read_all

BLOCK = 4096
_LIMIT = 1 << 24


def value_of(tag: int, size: int) -> bytes:
    return random.Random(f"{tag} {size}").randbytes(size)


def names_of(store: Store, directory: str = "") -> set[str]:
    found = [name for name in store.list(directory) if not name.endswith(PARTIAL)]
    assert len(set(found)) == len(found), f"a name is listed twice: {found}"
    return set(found)


def _ranges(first: Store, second: Store) -> None:
    for size in (0, 1, 511, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7):
        value = value_of(1, size)
        first.put("d/blob", value)
        for start in {0, 1, 512, BLOCK, 2 * BLOCK, max(size - 1, 0), size, size + 1, size + BLOCK}:
            for length in (0, 1, 100, BLOCK, 2 * BLOCK, size):
                into = bytearray(b"\xee" * length)
                count = second.read("d/blob", start, memoryview(into))
                want = value[start : start + length]
                assert count == len(want), f"{count} of {len(want)} bytes came from {start} of {size}"
                assert into[:count] == want, f"wrong bytes from {start} of {size}"
                assert into[count:] == b"\xee" * (length - count), "bytes after the end were changed"


def _absence(first: Store, second: Store) -> None:
    for key in ("none", "no/such", "a/b/none"):
        assert second.head(key) is None, key
        with _refusal(Missing, f"reading {key}"):
            second.read(key, 0, memoryview(bytearray(4)))
        with _refusal(Missing, f"reading all of {key}"):
            read_all(second, key, 10)
        second.delete([key])
    assert list(second.list("no")) == []
    first.put("here", b"")
    info = second.head("here")
    assert info is not None, "an empty value is a value"
    assert (info.size, info.is_ours) == (0, True)
    assert second.read("here", 0, memoryview(bytearray(4))) == 0


def _listing(first: Store, second: Store) -> None:
    for key in ("top", "d/one", "d/two", "d/deep/three", "e/f/four", "dd"):
        first.put(key, key.encode())
    assert {"top", "d/", "e/", "dd"} <= names_of(second)
    assert names_of(second, "d") == {"one", "two", "deep/"}
    assert names_of(second, "d/deep") == {"three"}
    assert names_of(second, "e") == {"f/"}
    first.delete(["d/one", "d/deep/three"])
    assert names_of(second, "d") - {"deep/"} == {"two"}


def _put_new(first: Store, second: Store) -> None:
    big = value_of(2, 2 * BLOCK + 1)
    assert first.put_new("d/key", big)
    assert second.put_new("d/key", big), "equal bytes are the client's own"
    for other in (b"", big[:-1], big + b"x", bytes(len(big))):
        assert not second.put_new("d/key", other), "put_new says True, but the key held other bytes"
        assert read_all(first, "d/key", _LIMIT) == big, "put_new changed a key that was there"
    first.delete(["d/key"])
    assert second.put_new("d/key", b"")
    assert not first.put_new("d/key", b"x"), "put_new says True, but the key held an empty value"


def _racing(first: Store, second: Store) -> None:
    for turn in range(6):
        gate, answers = threading.Barrier(4), dict.fromkeys(range(4), False)

        def race(number: int, gate: threading.Barrier, answers: dict[int, bool], key: str) -> None:
            gate.wait()
            answers[number] = (first, second)[number % 2].put_new(key, b"%d" % number)

        arguments = [(number, gate, answers, f"race/{turn}") for number in range(4)]
        threads = [threading.Thread(target=race, args=each) for each in arguments]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        winners = [number for number, is_winner in answers.items() if is_winner]
        assert len(winners) == 1, f"{len(winners)} of four clients that raced were told that they won"
        assert read_all(first, f"race/{turn}", 10) == b"%d" % winners[0]


def _deleting(first: Store, second: Store) -> None:
    for key in ("a", "d/a", "d/b", "d/e/a"):
        first.put(key, b"x")
    second.delete(["a", "none", "d/a", "no/such", "d/e/a", "d/none"])
    assert [key for key in ("a", "d/a", "d/b", "d/e/a") if first.head(key)] == ["d/b"]
    second.delete([])
    second.delete(["a", "d/b", "d/b"])
    assert first.head("d/b") is None
    first.put("d/b", b"again")
    assert read_all(second, "d/b", 10) == b"again"


def _keys(first: Store, second: Store) -> None:
    for key in ("", "/", "/etc/x", "..", "../x", "a/../b", "a//b", "./a", "a/.", "a\0b", "a/\0", "\ud800"):
        verbs: list[tuple[str, Callable[[], object]]] = [
            ("put", partial(first.put, key, b"x")),
            ("put_new", partial(first.put_new, key, b"x")),
            ("writer", partial(first.writer, key, 1)),
            ("read", partial(first.read, key, 0, memoryview(bytearray(1)))),
            ("head", partial(first.head, key)),
            ("delete", partial(first.delete, [key])),
        ]
        for verb, call in verbs:
            with _refusal(StorageError, f"{verb} of {key!r}"):
                call()
    key = "a" + PARTIAL
    for write in (partial(first.put, key, b"x"), partial(first.put_new, key, b"x"), partial(first.writer, key, 1)):
        with _refusal(StorageError, f"a key that ends in {PARTIAL}"):
            write()
    assert names_of(second) == set()


def _writers(first: Store, second: Store) -> None:
    for size in (0, 1, BLOCK, 5 * BLOCK + 9):
        value = value_of(3, size)
        first.put("d/blob", b"old")
        writer = first.writer("d/blob", size)
        starts = list(range(0, size, BLOCK))
        padded = memoryview(value + bytes(-size % BLOCK))  # the last block may reach beyond the size
        threads = [
            threading.Thread(target=writer.write_at, args=(padded[start : start + BLOCK], start))
            for start in reversed(starts)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert read_all(second, "d/blob", 10) == b"old", "a blob that is not finished is seen"
        writer.finish()
        assert read_all(second, "d/blob", _LIMIT) == value
        writer.abort()
        assert read_all(second, "d/blob", _LIMIT) == value, "abort after finish took the blob away"
        for call in (writer.finish, partial(writer.write_at, memoryview(b"x"), 0)):
            with _refusal(StorageError, "a writer that is over"):
                call()
    given_up = first.writer("new/blob", 10)
    given_up.write_at(memoryview(b"x" * 10), 0)
    given_up.abort()
    given_up.abort()
    assert second.head("new/blob") is None
    assert set(second.list("new")) == set(), "abort leaves something behind"


@contextlib.contextmanager
def _refusal(kind: type[StorageError], what: str) -> Iterator[None]:
    try:
        yield
    except kind:
        return
    raise AssertionError(f"{what} raised no {kind.__name__}")


PLAIN_CHECKS: dict[str, Callable[[Store, Store], None]] = {
    "ranges": _ranges,
    "absence": _absence,
    "listing": _listing,
    "put_new": _put_new,
    "racing": _racing,
    "deleting": _deleting,
    "keys": _keys,
    "writers": _writers,
}
