"""What two clients of the store on a file system did: the system calls that changed something, and what was asked."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

from stillframe.store.calls import Calls
from stillframe.store.posix import PosixStore
from stillframe.store.protocol import PARTIAL
from tests.store.support import fast_directory

BLOCK = 4096
TOP = 0
ROOT = "above/root"
Event: TypeAlias = "tuple[str, int, str, int, bytes]"
"""(what, node, name or "", number, bytes)."""


class Recorder(Calls):
    """Performs the calls of all clients below one directory, and notes those that change something."""

    def __init__(self, top: str, has_links: bool, turns: Turns | None = None) -> None:
        self.events: list[Event] = []
        self._has_links = has_links
        self._turns = turns
        self._nodes = {self._inode(os.stat(top)): TOP}
        self._count = 0

    @staticmethod
    def _inode(found: os.stat_result) -> tuple[int, int]:
        return found.st_dev, found.st_ino

    def _node(self, fd: int | None, name: str = "") -> int:
        found = os.stat(name, dir_fd=fd, follow_symlinks=False) if name or fd is None else os.fstat(fd)
        return self._nodes.get(self._inode(found), -1)

    def _made(self, fd: int | None, name: str) -> int:
        self._count += 1
        self._nodes[self._inode(os.stat(name, dir_fd=fd, follow_symlinks=False))] = self._count
        return self._count

    def _note(self, what: str, node: int, name: str = "", number: int = 0, data: bytes = b"") -> None:
        if node >= 0:
            self.events.append((what, node, name, number, data))

    def _turn(self) -> None:
        if self._turns is not None:
            self._turns.step()

    def open(self, name: str, flags: int, dir_fd: int | None = None) -> int:
        self._turn()
        is_new = bool(flags & os.O_CREAT) and (
            flags & os.O_EXCL or not os.path.lexists(f"/proc/self/fd/{dir_fd}/{name}")
        )
        fd = super().open(name, flags & ~os.O_DIRECT, dir_fd)
        if is_new:
            assert dir_fd is not None
            self._note("name", self._node(dir_fd), name, self._made(dir_fd, name))
        return fd

    def mkdir(self, name: str, dir_fd: int | None = None) -> None:
        self._turn()
        super().mkdir(name, dir_fd)
        above = self._node(None, os.path.dirname(name)) if dir_fd is None else self._node(dir_fd)
        self._note("mkdir", above, os.path.basename(name), self._made(dir_fd, name))

    def rmdir(self, name: str, dir_fd: int) -> None:
        self._turn()
        super().rmdir(name, dir_fd)
        self._note("drop", self._node(dir_fd), name)

    def unlink(self, name: str, dir_fd: int) -> None:
        self._turn()
        super().unlink(name, dir_fd)
        self._note("drop", self._node(dir_fd), name)

    def rename(self, old: str, new: str, old_fd: int, new_fd: int) -> None:
        self._turn()
        super().rename(old, new, old_fd, new_fd)
        self._note("name", self._node(new_fd), new, self._node(new_fd, new))
        self._note("drop", self._node(old_fd), old)

    def rename_new(self, old: str, new: str, dir_fd: int) -> None:
        self._turn()
        super().rename_new(old, new, dir_fd)
        self._note("name", self._node(dir_fd), new, self._node(dir_fd, new))
        self._note("drop", self._node(dir_fd), old)

    def link(self, old: str, new: str, dir_fd: int) -> None:
        self._turn()
        if not self._has_links:
            raise OSError(errno.EPERM, "no links here")
        super().link(old, new, dir_fd)
        self._note("name", self._node(dir_fd), new, self._node(dir_fd, new))

    def link_to(self, old: str, new: str, old_fd: int, new_fd: int) -> None:
        self._turn()
        super().link_to(old, new, old_fd, new_fd)
        self._note("name", self._node(new_fd), new, self._node(new_fd, new))

    def fsync(self, fd: int) -> None:
        self._turn()
        self._note("sync", self._node(fd))

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        self._turn()
        count = super().pwrite(fd, data[: 2 * BLOCK], offset)
        self._note("write", self._node(fd), "", offset, bytes(data[:count]))
        return count

    def append(self, fd: int, data: memoryview) -> int:
        self._turn()
        offset = os.fstat(fd).st_size
        count = super().append(fd, data)
        self._note("write", self._node(fd), "", offset, bytes(data[:count]))
        return count

    def pread(self, fd: int, into: memoryview, offset: int) -> int:
        self._turn()
        return super().pread(fd, into, offset)

    def truncate(self, fd: int, size: int) -> None:
        self._turn()
        super().truncate(fd, size)
        self._note("size", self._node(fd), "", size)

    def reserve(self, fd: int, size: int) -> None:
        super().reserve(fd, size)
        self._note("size", self._node(fd), "", os.fstat(fd).st_size)

    def is_local(self, fd: int) -> bool:
        return True

    def lease(self, fd: int) -> None:
        pass


class Turns:
    """Threads that take turns at every system call.

    The first makes so many calls, then the second so many, and so on; in the end the next one goes on to its end.
    """

    def __init__(self, switches: Sequence[int], count: int) -> None:
        self._owners = [number % count for number, calls in enumerate(switches) for _ in range(calls)]
        self._changed = threading.Condition()
        self._numbers: dict[int, int] = {}
        self._living = set(range(count))
        self._waiting: set[int] = set()
        self._current: int | None = None
        self._final = len(switches) % count

    def join(self, number: int) -> None:
        self._numbers[threading.get_ident()] = number

    def step(self) -> None:
        me = self._numbers[threading.get_ident()]
        with self._changed:
            self._waiting.add(me)
            self._let_go(me)
            assert self._changed.wait_for(lambda: self._current == me, timeout=30)
            self._waiting.discard(me)

    def leave(self) -> None:
        me = self._numbers[threading.get_ident()]
        with self._changed:
            self._living.discard(me)
            self._let_go(me)

    def _let_go(self, me: int) -> None:
        if self._current == me:
            self._current = None
        if self._current is None and self._waiting and self._waiting == self._living:
            owner = self._owners.pop(0) if self._owners else self._final
            self._current = owner if owner in self._waiting else min(self._waiting)
            self._changed.notify_all()


# --- what was asked for ---------------------------------------------------------------------


@dataclass
class Op:
    """One operation of a client; its effects, by key, unless its answer says that it had none."""

    client: int
    verb: str
    key: str
    value: bytes = b""
    other: str = ""
    begin: int = -1
    end: int = 1 << 30
    has_effect: bool = True
    saw: dict[str, bytes] = field(default_factory=dict)
    """What the directory of a claim held when it was called."""

    def perform(self, store: Any) -> None:
        if self.verb in ("put", "hint"):
            store.put(self.key, self.value, durable=self.verb == "put")
        elif self.verb == "put_new":
            self.saw = _visible(store.where(), os.path.dirname(self.key))
            self.has_effect = store.put_new(self.key, self.value)
        elif self.verb == "adopt":
            assert store.adopt(os.path.basename(self.other), self.key)
        elif self.verb == "delete":
            store.delete([self.key, *([self.other] if self.other else [])])
        elif self.verb == "rename":
            store.rename(self.key, self.other)
        elif self.verb == "link":
            store.link(self.key, self.other)
        else:
            writer = store.writer(self.key, len(self.value))
            view = memoryview(self.value)
            try:
                for start in reversed(range(0, len(view), BLOCK)):
                    writer.write_at(view[start : start + BLOCK], start)
                if self.verb == "write":
                    writer.finish()
            finally:
                writer.abort()

    def effects(self) -> dict[str, bytes | None]:
        if self.verb == "abort" or not self.has_effect:
            return {}
        if self.verb == "delete":
            return {self.key: None, self.other or self.key: None}
        if self.verb == "adopt":
            return {self.key: self.value, self.other: None}
        if self.verb == "link":
            return {self.other: self.value}
        return {self.key: None, self.other: self.value} if self.verb == "rename" else {self.key: self.value}


def _visible(root: str, directory: str) -> dict[str, bytes]:
    """What any client sees now, durable or not."""
    found = {}
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(os.path.join(root, directory)):
            path = os.path.join(directory, name)
            if os.path.isfile(os.path.join(root, path)) and not name.endswith(PARTIAL):
                found[path] = Path(root, path).read_bytes()
    return found


@dataclass(frozen=True)
class Scenario:
    """``switches``: the clients run at once; after so many system calls the turn goes to the other."""

    ops: Sequence[tuple[Any, ...]]
    switches: Sequence[int] = ()
    has_links: bool = True
    spare: str = ""


@dataclass
class Recording:
    events: list[Event]
    ops: list[Op]
    spare: str

    def keys(self) -> list[str]:
        return sorted({key for op in self.ops for key in (op.key, op.other) if key})

    def allowed(self, key: str, time: int) -> set[bytes | None] | None:
        """What a key may hold after a crash when so many events had happened; ``None``: anything."""
        mine = [op for op in self.ops if key in op.effects() and op.begin <= time]
        ended = [op for op in mine if op.end <= time and op.verb != "hint"]
        for hint in (op for op in mine if op.verb == "hint"):
            if not any(op.begin >= hint.end for op in ended):
                return None
        last = [op for op in ended if not any(later.begin >= op.end for later in ended if later is not op)]
        values = {op.effects()[key] for op in [*last, *(op for op in mine if op.end > time)]}
        return values if last else values | {None}

    def causes(self, found: dict[str, bytes | None], time: int) -> Iterator[tuple[str, str, set[bytes | None]]]:
        """(claim, other key, what it may hold): a claim that survived does so with all that its directory held."""
        for claim in self.ops:
            others = [op for op in self.ops if op is not claim and op.effects().get(claim.key) == claim.value]
            is_claimed = claim.verb == "put_new" and claim.has_effect and claim.begin <= time and not others
            if is_claimed and found[claim.key] == claim.value:
                for key, value in ((key, value) for key, value in claim.saw.items() if key in found):  # not a spare
                    mine = [op for op in self.ops if key in op.effects()]
                    if all(op.verb != "hint" for op in mine):
                        yield claim.key, key, {value, *(op.effects()[key] for op in mine if op.end > claim.begin)}


def record(scenario: Scenario, make: Callable[..., Any] = PosixStore) -> Recording:
    """Run a scenario.  The names of partial files are the same at every run."""
    ops = [Op(*each) for each in scenario.ops]
    count = max(op.client for op in ops) + 1
    turns = Turns(scenario.switches, count) if scenario.switches else None
    top = fast_directory()
    try:
        calls = Recorder(top, scenario.has_links, turns)
        tokens = (f"{number:08x}" for number in range(1 << 20))
        with mock.patch("stillframe.store.root._nonce", side_effect=tokens):
            stores = [make(f"{top}/{ROOT}", spare=scenario.spare, calls=calls) for _ in range(count)]
            if turns is None:
                _perform(ops, stores, calls.events)
            else:
                _perform_at_once(ops, stores, calls.events, turns)
        for store in stores:
            store._root.close()
        return Recording(calls.events, ops, scenario.spare)
    finally:
        shutil.rmtree(top)


def _perform(ops: Sequence[Op], stores: Sequence[Any], events: list[Event]) -> None:
    for op in ops:
        op.begin = len(events)
        op.perform(stores[op.client])
        op.end = len(events)


def _perform_at_once(ops: Sequence[Op], stores: Sequence[Any], events: list[Event], turns: Turns) -> None:
    errors: list[BaseException] = []

    def run(number: int) -> None:
        turns.join(number)
        try:
            turns.step()
            _perform([op for op in ops if op.client == number], stores, events)
        except BaseException as error:
            errors.append(error)
        finally:
            turns.leave()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
