"""Pinning, with a runtime that keeps its books: each span once, unregistered before its memory goes, never twice."""

from __future__ import annotations

import contextlib
import gc
import logging
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stillframe.errors import StateError
from stillframe.link import arena as arenas
from stillframe.link import numa
from stillframe.link.arena import Arena
from stillframe.model import CHUNK_BYTES
from stillframe.save import pinning
from stillframe.save.pinning import Registrations

ALREADY, OUT_OF_MEMORY, UNKNOWN = 712, 2, 999


def mapped(address: int) -> bool:
    """Whether this process has memory there."""
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)


class Books:
    """CUDA's rules for registered memory, and a last error that stays with the thread until it is taken."""

    def __init__(self, *, node: int | None = None, failing: float = 0.0, seed: int = 0) -> None:
        self.node = node
        self.registered: dict[int, int] = {}
        self.violations: list[str] = []
        self.calls = 0
        self.raises = False
        self.unregisters = True
        self.hangs: threading.Event | None = None
        self._failing = failing
        self._random = random.Random(seed)
        self._errors: dict[int, int] = {}

    @property
    def last_error(self) -> int:
        return self._errors.get(threading.get_ident(), 0)

    def _refuse(self, code: int) -> int:
        self._errors[threading.get_ident()] = code
        return code

    def is_registered(self, address: int) -> bool:
        return any(at <= address < at + nbytes for at, nbytes in self.registered.items())

    def register(self, address: int, nbytes: int) -> int:
        self.calls += 1
        if nbytes > 1 << 30:
            self.violations.append("more than a GiB in one call")
        if not mapped(address) or not mapped(address + nbytes - 1):
            self.violations.append("memory that is not there")
        if any(at < address + nbytes and address < at + size for at, size in self.registered.items()):
            return self._refuse(ALREADY)
        fails = self._random.random() < self._failing
        if not (fails and self._random.random() < 0.5):  # a call that failed may have happened
            self.registered[address] = nbytes
        if self.raises or (fails and self._random.random() < 0.3):
            self._refuse(UNKNOWN)
            raise RuntimeError("the device is lost")
        if fails:
            self.registered.pop(address, None)
            return self._refuse(OUT_OF_MEMORY)
        return 0

    def unregister(self, address: int) -> int:
        if self.hangs is not None:
            self.hangs.wait()
        if not self.unregisters or self._random.random() < self._failing / 4:
            return self._refuse(UNKNOWN)
        if address not in self.registered:
            return self._refuse(pinning.NOT_REGISTERED)
        if not mapped(address):
            self.violations.append("unmapped while it was registered")
        del self.registered[address]
        return 0

    def clear_error(self) -> None:
        self._errors.pop(threading.get_ident(), None)


class Device:
    def __init__(self, books: Books | None) -> None:
        self._books = books

    def runtime(self) -> Books | None:
        return self._books


@pytest.fixture(autouse=True)
def _nothing_is_kept() -> Iterator[None]:
    before = set(arenas._kept)
    yield
    for address in set(arenas._kept) - before:  # of tests whose memory had to stay
        arenas._kept.pop(address).close()


def pin_all(arena: Arena) -> None:
    while arena.touch_one():
        pass


FILLER = object()


def never() -> bool:
    return False


def test_each_span_is_registered_once_whatever_devices_there_are(caplog: pytest.LogCaptureFixture) -> None:
    books = Books()
    arena = Arena(3 * CHUNK_BYTES)
    for _ in range(2):
        pinning.pin(arena, [Device(None), Device(books), Device(Books()), Device(books)])
        pin_all(arena)
    assert sorted(books.registered) == [arena.address + span * CHUNK_BYTES for span in range(3)]
    assert books.calls == 3
    address = arena.address
    arena.close()
    assert not books.registered
    assert not mapped(address)
    assert (books.violations, caplog.records) == ([], [])


def test_nothing_is_registered_in_the_way_of_a_save() -> None:
    """Only when the stager has nothing else to do; and never what a copy may be writing to."""
    books = Books()
    arena = Arena(2 * CHUNK_BYTES)
    pinning.pin(arena, [Device(books)])
    spans = [arena.take(never, FILLER), arena.take(never, FILLER)]
    assert books.calls == 0
    assert not arena.touch_one()
    assert spans[0] is not None
    arena.hand_over(spans[0], FILLER, object())  # the keeper reads it
    pin_all(arena)
    assert list(books.registered) == [arena.address + spans[0] * CHUNK_BYTES]
    assert spans[1] is not None
    arena.give_back(spans[1], FILLER)
    arena.close()
    assert not books.registered


def test_the_next_arena_may_lie_where_the_first_was() -> None:
    books = Books()
    for _ in range(4):
        arena = Arena(2 * CHUNK_BYTES)
        pinning.pin(arena, [Device(books)])
        pin_all(arena)
        assert len(books.registered) == 2
        arena.close()
    assert (books.registered, books.violations) == ({}, [])


def test_memory_that_another_left_registered_is_not_used() -> None:
    arena = Arena(2 * CHUNK_BYTES)
    books = Books()
    books.registered[arena.address + CHUNK_BYTES] = 4096
    with pytest.raises(StateError, match="freed without unpinning"):
        pinning.pin(arena, [Device(books)])
    arena.close()


def test_what_cannot_be_unregistered_is_not_unmapped(caplog: pytest.LogCaptureFixture) -> None:
    books = Books()
    arena = Arena(2 * CHUNK_BYTES)
    pinning.pin(arena, [Device(books)])
    pin_all(arena)
    books.unregisters = False
    address = arena.address
    arena.close()
    del arena
    gc.collect()
    assert mapped(address)
    assert [record.getMessage() for record in caplog.records] == [
        "the arena could not be unpinned (OSError: runtime error 999); its memory stays until the process ends"
    ]


def test_a_runtime_that_hangs_does_not_hang_close(caplog: pytest.LogCaptureFixture) -> None:
    books = Books()
    arena = Arena(CHUNK_BYTES)
    pinning.pin(arena, [Device(books)])
    pin_all(arena)
    books.hangs = threading.Event()
    with mock.patch.object(pinning, "_RELEASE_S", 0.2):
        arena.close()
    assert mapped(arena.address)
    assert "does not answer" in caplog.text
    books.hangs.set()


def test_a_device_that_may_still_write_keeps_its_memory() -> None:
    books = Books()
    for how in ("it is said", "a span is retired", "a span is being filled"):
        arena = Arena(2 * CHUNK_BYTES)
        pinning.pin(arena, [Device(books)])
        pin_all(arena)
        span = None if how == "it is said" else arena.take(never, FILLER)
        if span is not None and "retired" in how:
            arena.retire([span], FILLER)
        arena.close(is_in_use=span is None)
        assert mapped(arena.address), how
    assert len(books.registered) == 6


def test_an_arena_that_is_dropped_stays_as_long_as_it_is_registered() -> None:
    books = Books()
    arena = Arena(CHUNK_BYTES)
    address = arena.address
    pinning.pin(arena, [Device(books)])
    pin_all(arena)
    del arena
    gc.collect()
    assert mapped(address)


@pytest.mark.parametrize("raises", [False, True])
def test_a_runtime_that_refuses_is_asked_a_few_times_and_told_of_once(
    raises: bool, caplog: pytest.LogCaptureFixture
) -> None:
    books = Books(failing=0.0 if raises else 1.0)
    books.raises = raises
    arena = Arena(10 * CHUNK_BYTES)
    pinning.pin(arena, [Device(books)])
    pin_all(arena)
    assert books.calls == 4
    assert books.last_error == 0  # nobody else is blamed for it
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    books.raises, books._failing = False, 0.0
    arena.close()
    assert (books.registered, books.violations) == ({}, [])


def test_a_device_that_cannot_be_asked_costs_no_save(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def runtime(self) -> Books:
            raise RuntimeError("no driver")

    arena = Arena(CHUNK_BYTES)
    pinning.pin(arena, [Broken()])
    assert "no driver" in caplog.text
    arena.close()


@settings(max_examples=60, deadline=None)
@given(failing=st.floats(0, 0.6), seed=st.integers(0, 1 << 16), data=st.data())
def test_the_books_are_right_however_it_fails(failing: float, seed: int, data: st.DataObject) -> None:
    """At the end nothing is registered, or the memory is still there."""
    books = Books(failing=failing, seed=seed)
    before = set(arenas._kept)
    with mock.patch.object(logging.getLogger("stillframe"), "warning"):
        arena = Arena(3 * CHUNK_BYTES)
        taken = []
        for action in data.draw(st.lists(st.sampled_from(["pin", "touch", "take", "give"]), max_size=12)):
            if action == "pin":
                pinning.pin(arena, [Device(books)])
            elif action == "touch":
                arena.touch_one()
            elif action == "take" and arena.free_spans:
                taken.append(arena.take(never, FILLER))
            elif action == "give" and taken:
                span = taken.pop()
                assert span is not None
                arena.give_back(span, FILLER)
            assert books.last_error == 0
        for span in taken:
            assert span is not None
            arena.give_back(span, FILLER)
        address = arena.address
        arena.close()
    if books.registered:
        assert mapped(address)
        for kept in set(arenas._kept) - before:
            arenas._kept.pop(kept).close()
    assert books.violations == []


def test_a_span_is_bound_to_the_node_before_it_is_registered() -> None:
    """To node 0, which every machine has; the kernel is asked for real."""
    books = Books(node=0)
    arena = Arena(2 * CHUNK_BYTES)
    with mock.patch.object(numa, "bind", side_effect=numa.bind) as bind:
        pinning.pin(arena, [Device(books), Device(Books(node=0))])
        pin_all(arena)
    moved = [call.kwargs for call in bind.call_args_list]
    assert moved == [{}, {"is_moved": True}, {"is_moved": True}]
    assert isinstance(arena._pins, Registrations)
    assert arena._pins.stats.node == 0
    assert numa.bind(arena.address, arena.nbytes, 0)
    assert numa.node_at(arena.address) == 0
    arena.close()


def test_devices_at_two_nodes_bind_nothing() -> None:
    arena = Arena(CHUNK_BYTES)
    with mock.patch.object(numa, "bind") as bind:
        pinning.pin(arena, [Device(Books(node=0)), Device(Books(node=1))])
        pin_all(arena)
    bind.assert_not_called()
    arena.close()


def test_a_node_that_does_not_exist_is_refused_by_the_kernel() -> None:
    arena = Arena(CHUNK_BYTES)
    assert not numa.bind(arena.address, arena.nbytes, 1000)
    arena.close()


@pytest.mark.parametrize(
    ("said", "online", "wanted"),
    [("1\n", "0-1\n", 1), ("-1\n", "0-1\n", None), ("0\n", "0\n", None), ("", "0-1", None)],
)
def test_the_node_of_a_device_is_read_from_the_system(
    tmp_path: Path, said: str, online: str, wanted: int | None
) -> None:
    device = tmp_path / "bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text(said)
    (tmp_path / "devices/system/node").mkdir(parents=True)
    (tmp_path / "devices/system/node/online").write_text(online)
    assert numa.node_of_pci("0000:3B:00.0", str(tmp_path)) == wanted
    assert numa.node_of_pci("0000:ff:00.0", str(tmp_path)) is None


def test_huge_pages_are_asked_for() -> None:
    """Whether there are any is the system's affair: this one may have none for shared memory."""
    arena = Arena(CHUNK_BYTES)
    with contextlib.closing(arena):
        lines = Path("/proc/self/smaps").read_text().splitlines()
        begins = [number for number, line in enumerate(lines) if line.startswith(f"{arena.address:08x}-")]
        assert begins
        flags = next(line for line in lines[begins[0] :] if line.startswith("VmFlags"))
        assert "hg" in flags.split()
