"""The contract of :mod:`stillframe.store.protocol` as tests, for pytest or unittest.  Needs Hypothesis.

Write a function that gives two clients of one new, empty store, and bind the result in a test module::

    from stillframe.testing.store_contract import Clients, store_contract

    def make() -> Clients:
        backend = MyBackend()
        return Clients((MyStore(backend), MyStore(backend)), close=backend.close)

    TestMyStore = store_contract(make)

A store refuses bad keys with ``check_key`` and ``check_new_key`` of the same module.  A store that can be made to fail
hands over :class:`Faults` as well.  No crash is simulated: durability needs tests of its own.

The model knows, for every key, the values that are possible now and the operations that may still land.  After an
operation that returned, one value is possible; an operation that raised adds one.  Whatever is read, listed or answered
must be possible, and leaves only the values that agree with it.
"""

from __future__ import annotations

import random
import unittest
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import ClassVar, Protocol, TypeAlias, TypeVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from stillframe.errors import StorageError
from stillframe.store.memory import Fault
from stillframe.store.protocol import PARTIAL, Missing, Store, Writer
from stillframe.testing.store_checks import BLOCK, PLAIN_CHECKS, names_of, value_of

_T = TypeVar("_T")


class Faults(Protocol):
    """How the suite makes a store fail."""

    def arm(self, fault: Fault, step: int) -> None:
        """The next operation of either client fails this way, at its ``step``-th call to the back end if any."""

    def disarm(self) -> None:
        """Operations succeed again."""

    def land(self) -> None:
        """What was to happen later happens now."""


@dataclass(frozen=True)
class Clients:
    """Two clients of one new store."""

    stores: tuple[Store, Store]
    faults: Faults | None = None
    close: Callable[[], object] = lambda: None
    ignored: frozenset[str] = frozenset()
    """Names in the root that are the store's own."""


Make: TypeAlias = "Callable[[], Clients]"


def store_contract(make: Make, examples: int = 60, steps: int = 30) -> type[unittest.TestCase]:
    """A test case with a method for each check; ``examples`` random sequences of ``steps`` operations are tried."""

    def method(name: str) -> Callable[[unittest.TestCase], None]:
        return lambda _: check_store(make, examples, steps, only=name)

    names = [*PLAIN_CHECKS, "any_sequence"]
    return type("StoreContract", (unittest.TestCase,), {f"test_{name}": method(name) for name in names})


def check_store(make: Make, examples: int = 60, steps: int = 30, only: str = "", shrinks: bool = True) -> None:
    """Raises ``AssertionError`` at the first promise that the store breaks; ``shrinks``: by a short sequence."""
    for name, check in PLAIN_CHECKS.items():
        if only in ("", name):
            clients = make()
            try:
                check(*clients.stores)
            finally:
                clients.close()
    if only in ("", "any_sequence"):
        machine = type("Machine", (_Machine,), {"make": staticmethod(make)})
        options = settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate, Phase.shrink] if shrinks else [Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        run_state_machine_as_test(machine, settings=options)


# --- any sequence --------------------------------------------------------------------------


@dataclass
class _Possible:
    """What one key may hold; ``None``: nothing."""

    now: set[bytes | None] = field(default_factory=lambda: {None})
    late: set[tuple[bytes | None, bool]] = field(default_factory=set)
    """(value, whether only if nothing is there)."""

    def all(self) -> set[bytes | None]:
        found = self.now | {value for value, is_new in self.late if not is_new}
        return found | {value for value, is_new in self.late if is_new and None in found}

    def raised(self, value: bytes | None, is_new: bool, lands_late: bool) -> None:
        if not is_new or None in self.all():
            self.now.add(value)
        if lands_late:
            self.late.add((value, is_new))

    def saw(self, agrees: Callable[[bytes | None], bool], what: str) -> None:
        self.now = {value for value in self.all() if agrees(value)}
        assert self.now, f"{what}: no operation explains it"

    def landed(self) -> None:
        self.now, self.late = self.all(), set()


@dataclass
class _Writing:
    writer: Writer
    key: str
    value: bytes
    chunks: list[tuple[int, int]]


_KEYS = ("a", "b", "d/x", "d/y", "d/e/x", "f/g/x")
_DIRECTORIES = ("", "d", "d/e", "f", "f/g", "none")
_CLIENT = st.integers(0, 1)
_KEY = st.sampled_from(_KEYS)
_VALUE = st.builds(value_of, st.integers(0, 2), st.sampled_from([0, 1, 7, BLOCK, BLOCK + 1, 2 * BLOCK + 5]))
_FAULT = st.one_of(st.none(), st.none(), st.tuples(st.sampled_from(Fault), st.integers(0, 24)))
_Failing: TypeAlias = "tuple[Fault, int] | None"


class _Machine(RuleBasedStateMachine):
    make: ClassVar[Callable[[], Clients]]

    def __init__(self) -> None:
        super().__init__()
        self.clients = type(self).make()
        self.stores = self.clients.stores
        self.lands_late = self.stores[0].caps.lands_late
        self.keys = {key: _Possible() for key in _KEYS}
        self.writing: list[_Writing] = []
        self.was_armed = False

    def attempt(self, fault: _Failing, work: Callable[[], _T]) -> tuple[_T | None, bool]:
        """The answer, and whether it returned one."""
        faults = self.clients.faults
        is_armed = faults is not None and fault is not None and (self.lands_late or fault[0] is not Fault.LATE)
        try:
            if faults is not None and fault is not None and is_armed:
                self.was_armed = True
                faults.arm(*fault)
            return work(), True
        except Missing:
            raise
        except StorageError:
            if not is_armed:
                raise
            return None, False
        finally:
            if faults is not None:
                faults.disarm()

    def settle(self, key: str, value: bytes | None, is_done: bool) -> None:
        if is_done:
            self.keys[key].now = {value}
        else:
            self.keys[key].raised(value, False, self.lands_late)

    @rule(client=_CLIENT, key=_KEY, value=_VALUE, durable=st.booleans(), fault=_FAULT)
    def put(self, client: int, key: str, value: bytes, durable: bool, fault: _Failing) -> None:
        _, is_done = self.attempt(fault, lambda: self.stores[client].put(key, value, durable))
        self.settle(key, value, is_done)

    @rule(client=_CLIENT, key=_KEY, value=_VALUE, fault=_FAULT)
    def put_new(self, client: int, key: str, value: bytes, fault: _Failing) -> None:
        is_ours, is_done = self.attempt(fault, lambda: self.stores[client].put_new(key, value))
        if not is_done:
            self.keys[key].raised(value, True, self.lands_late)
        elif is_ours:
            self.keys[key].saw(lambda held: held in (None, value), f"put_new of {key!r} says True")
            self.keys[key].now = {value}
        else:
            self.keys[key].saw(lambda held: held not in (None, value), f"put_new of {key!r} says False")

    @rule(client=_CLIENT, keys=st.lists(_KEY, max_size=4), fault=_FAULT)
    def delete(self, client: int, keys: Sequence[str], fault: _Failing) -> None:
        _, is_done = self.attempt(fault, lambda: self.stores[client].delete(keys))
        for key in keys:
            self.settle(key, None, is_done)

    @rule(client=_CLIENT, key=_KEY, value=_VALUE, order=st.randoms(use_true_random=False), fault=_FAULT)
    def write(self, client: int, key: str, value: bytes, order: random.Random, fault: _Failing) -> None:
        ends = sorted({0, len(value), *(order.randrange(len(value) + 1) for _ in range(3))})
        chunks = list(pairwise(ends))
        order.shuffle(chunks)
        writer, _ = self.attempt(fault, lambda: self.stores[client].writer(key, len(value)))
        if writer is not None:
            self.writing.append(_Writing(writer, key, value, chunks))

    @rule(number=st.integers(0, 9), count=st.integers(1, 4), is_last=st.booleans(), fault=_FAULT)
    def write_on(self, number: int, count: int, is_last: bool, fault: _Failing) -> None:
        if not self.writing:
            return
        work = self.writing[number % len(self.writing)]
        for start, end in work.chunks[: None if is_last else count]:
            write = partial(work.writer.write_at, memoryview(work.value)[start:end], start)
            _, is_done = self.attempt(None if is_last else fault, write)
            if not is_done:
                self.give_up(number)
                return
            work.chunks.remove((start, end))
        if is_last:
            _, is_done = self.attempt(fault, work.writer.finish)
            self.settle(work.key, work.value, is_done)
            self.give_up(number)

    @rule(number=st.integers(0, 9))
    def give_up(self, number: int) -> None:
        if self.writing:
            self.writing.pop(number % len(self.writing)).writer.abort()

    @rule(
        client=_CLIENT, key=_KEY, start=st.sampled_from([0, 1, BLOCK, 9000]), length=st.sampled_from([1, BLOCK, 9000])
    )
    def read(self, client: int, key: str, start: int, length: int) -> None:
        into = bytearray(length)
        try:
            count = self.stores[client].read(key, start, memoryview(into))
        except Missing:
            self.keys[key].saw(lambda held: held is None, f"{key!r} is missing")
            return
        got, end = bytes(into[:count]), start + length
        self.keys[key].saw(lambda held: held is not None and held[start:end] == got, f"reading {key!r}")

    @rule(client=_CLIENT, key=_KEY)
    def head(self, client: int, key: str) -> None:
        info = self.stores[client].head(key)
        size = None if info is None else info.size
        self.keys[key].saw(lambda held: (None if held is None else len(held)) == size, f"{key!r} has {size} bytes")

    @rule(client=_CLIENT, directory=st.sampled_from(_DIRECTORIES))
    def list(self, client: int, directory: str) -> None:
        names = names_of(self.stores[client], directory) - self.clients.ignored
        prefix = f"{directory}/" if directory else ""
        below = {key: key.removeprefix(prefix).partition("/") for key in self.keys if key.startswith(prefix)}
        assert names <= {name + slash for name, slash, _ in below.values()}, f"{directory!r} lists {names}"
        for key, (name, slash, _) in below.items():
            if name + slash not in names:
                self.keys[key].saw(lambda held: held is None, f"{directory!r} does not list {key!r}")
            elif not slash:
                self.keys[key].saw(lambda held: held is not None, f"{directory!r} lists {key!r}")

    @rule()
    def land(self) -> None:
        if self.clients.faults is not None:
            self.clients.faults.land()
            for possible in self.keys.values():
                possible.landed()

    def teardown(self) -> None:
        try:
            while self.writing:
                self.give_up(0)
            self.land()
            for key in _KEYS:
                self.read(0, key, 0, 1 << 16)
                self.read(1, key, 0, 1 << 16)
            if not self.was_armed:
                left = [name for each in _DIRECTORIES for name in self.stores[0].list(each) if name.endswith(PARTIAL)]
                assert not left, f"nothing failed, and {left} is left"
        finally:
            self.clients.close()
