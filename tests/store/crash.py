"""Every state that a crash may leave of the system calls that a store has made, and whether the contract allows it.

The model of a disk: data that was not fsynced is there or not for each block of 4096 bytes, and the block that was
written last may be torn at 512; the size likewise.  Each change of a directory's entry is lost or kept alone, until
that directory is fsynced; a rename is two of them.  fsync of a file makes its data and size durable, not its name.
fsync of a directory covers what was there when it was called, and only when it has returned.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from stillframe.store.calls import Calls
from stillframe.store.posix import PosixStore
from stillframe.store.protocol import PARTIAL, read_all
from tests.store.recording import BLOCK, ROOT, TOP, Event, Op, Recording
from tests.store.support import SPARE, fast_directory

State: TypeAlias = "tuple[tuple[str, int, bytes | None], ...]"
"""(path, node, content; ``None``: a directory), sorted."""


@dataclass
class _Directory:
    now: dict[str, int] = field(default_factory=dict)
    durable: dict[str, int] = field(default_factory=dict)
    lost: dict[str, list[tuple[int, int | None]]] = field(default_factory=dict)
    """What each name that changed since the last fsync has meant since, and since when."""

    def sync(self, until: int) -> None:
        """What was changed up to this time is durable."""
        for name, history in list(self.lost.items()):
            newest = max((number for number, (time, _) in enumerate(history) if time <= until), default=0)
            self.durable.pop(name, None)
            if (child := history[newest][1]) is not None:
                self.durable[name] = child
            self.lost[name] = history[newest:]
            if len(self.lost[name]) == 1:
                del self.lost[name]


@dataclass
class _File:
    now: bytes = b""
    durable: bytes = b""
    versions: dict[int, list[bytes]] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)


def _block(data: bytes, number: int) -> bytes:
    return data[number * BLOCK : (number + 1) * BLOCK].ljust(BLOCK, b"\0")


Choose: TypeAlias = Callable[[list[Any]], Any]


class Disk:
    """``hints``: names of files that are never fsynced, and decide nothing: one of their states is drawn each time."""

    def __init__(self, hints: str = "(?!)", chance: random.Random | None = None) -> None:
        self._hints, self._chance = re.compile(hints), chance or random.Random(0)
        self._directories: dict[int, _Directory] = {TOP: _Directory()}
        self._files: dict[int, _File] = {}
        self._time = 0

    def apply(self, event: Event) -> None:
        """``sync``: its number tells how many events had happened when it was called; 0: all before it."""
        what, node, name, number, data = event
        self._time += 1
        if what == "nothing":
            return
        if what in ("name", "mkdir", "drop"):
            directory = self._directories[node]
            if what == "mkdir":
                self._directories[number] = _Directory()
            elif what == "name" and number not in self._directories:
                self._files.setdefault(number, _File())
            before = directory.lost.setdefault(name, [(0, directory.durable.get(name))])
            before.append((self._time, None if what == "drop" else number))
            directory.now.pop(name, None)
            if what != "drop":
                directory.now[name] = number
        elif what == "sync" and node in self._directories:
            self._directories[node].sync(number or self._time)
        elif what == "sync":
            self._files[node] = _File(self._files[node].now, self._files[node].now)
        else:
            self._change(self._files[node], what, number, data)

    def _change(self, file: _File, what: str, number: int, data: bytes) -> None:
        before = file.now
        if what == "size":
            file.now = before[:number].ljust(number, b"\0")
        else:
            file.now = before[:number].ljust(number, b"\0") + data + before[number + len(data) :]
        file.sizes.append(len(file.now))
        for block in range(number // BLOCK, -(-(number + len(data)) // BLOCK)):
            old, new = _block(before, block), _block(file.now, block)
            torn = [new[:at] + old[at:] for at in (512, BLOCK - 512)]
            file.versions.setdefault(block, []).extend([new, *torn])

    def state(self, choose: Choose) -> State:
        found: list[tuple[str, int, bytes | None]] = []
        judged: dict[int, Choose] = {}

        def walk(node: int, path: str) -> None:
            directory = self._directories[node]
            for name in sorted({*directory.durable, *directory.lost, *directory.now}):
                options = [each for _, each in directory.lost.get(name, [(0, directory.durable.get(name))])]
                draw = self._chance.choice if self._hints.search(name) else choose
                child = directory.now.get(name) if name.endswith(PARTIAL) else draw(_distinct(options))
                if child is None:
                    continue
                if child in self._directories:
                    found.append((path + name, child, None))
                    walk(child, f"{path}{name}/")
                else:
                    found.append((path + name, child, b""))
                    if not name.endswith((PARTIAL, ".spare")):
                        judged[child] = draw

        walk(TOP, "")
        contents = {node: self._content(self._files[node], draw) for node, draw in sorted(judged.items())}
        return tuple(
            (path, node, None if content is None else contents.get(node, b"")) for path, node, content in found
        )

    def _content(self, file: _File, choose: Choose) -> bytes:
        if not file.versions and not file.sizes:
            return file.durable
        size = choose(_distinct([len(file.now), len(file.durable), *file.sizes]))
        blocks = [
            choose(_distinct([_block(file.now, each), _block(file.durable, each), *file.versions[each]]))
            if each in file.versions
            else _block(file.durable, each)
            for each in range(-(-size // BLOCK))
        ]
        return b"".join(blocks)[:size]

    def states(self, limit: int, chance: random.Random) -> set[State]:
        """All of them if they are few; else some of them: those that come first, and a sample."""
        found: set[State] = set()
        trail: list[tuple[int, int]] = []
        for _ in range(limit):
            found.add(self._at(trail))
            while trail and trail[-1][0] + 1 == trail[-1][1]:
                trail.pop()
            if not trail:
                return found
            trail[-1] = trail[-1][0] + 1, trail[-1][1]
        return found | {self.state(chance.choice) for _ in range(limit)}

    def _at(self, trail: list[tuple[int, int]]) -> State:
        """The state of these choices; the first option is taken for those that follow, and they are added."""
        at = iter(range(1 << 30))

        def choose(options: list[Any]) -> Any:
            number = next(at)
            if number == len(trail):
                trail.append((0, len(options)))
            return options[trail[number][0]]

        return self.state(choose)


def _distinct(options: list[Any]) -> list[Any]:
    return list(dict.fromkeys(options))


# --- judging --------------------------------------------------------------------------------


class Judge:
    """Rebuilds states, reads them with a fresh store, and compares with what is allowed.  Counts the distinct ones."""

    def __init__(self) -> None:
        self.count = 0
        self._top = fast_directory()

    def close(self) -> None:
        shutil.rmtree(self._top)

    def judge(self, recording: Recording, limit: int, seed: int = 0) -> None:
        """Raises ``AssertionError`` for a state that the contract forbids."""
        disk, chance = Disk(), random.Random(seed)
        keys = recording.keys()
        seen: dict[State, dict[str, bytes | None]] = {}
        for time in range(len(recording.events) + 1):
            if time:
                disk.apply(recording.events[time - 1])
            allowed = {key: recording.allowed(key, time) for key in keys}
            for state in disk.states(limit, chance):
                if state not in seen:
                    seen[state] = self._read(state, recording, is_used=len(seen) % 8 == 0 or SPARE in str(state))
                for key, value in seen[state].items():
                    values = allowed[key]
                    assert values is None or value in values, (
                        f"{key} holds {_short(value)} after a crash at {time}; allowed: {[*map(_short, values)]}; "
                        f"the last events: {str(recording.events[max(time - 3, 0) : time])[:1000]}"
                    )
                for claim, key, values in recording.causes(seen[state], time):
                    assert seen[state][key] in values, (
                        f"{claim} survived a crash at {time}, but not {key}, which it had seen: now "
                        f"{_short(seen[state][key])}"
                    )
        self.count += len(seen)

    def _read(self, state: State, recording: Recording, is_used: bool) -> dict[str, bytes | None]:
        keys = recording.keys()
        with contextlib.ExitStack() as stack:
            stack.callback(self._clear)
            self._build(state)
            store = PosixStore(f"{self._top}/{ROOT}", spare=recording.spare, calls=_Cached())
            stack.callback(store._root.close)
            found = self._values(store, keys)
            listed = set(_listed(store))
            assert listed - {SPARE} == {key for key, value in found.items() if value is not None}, listed
            if is_used:  # life goes on, and changes nothing else
                Op(0, "write", "new/blob", b"n" * 5000).perform(store)
                assert read_all(store, "new/blob", 5000) == b"n" * 5000
                assert self._values(store, keys) == found, "a new blob was written over an old one"
                for key in keys:
                    store.put(key, b"again")
                    assert read_all(store, key, 5) == b"again"
            return found

    @staticmethod
    def _values(store: PosixStore, keys: list[str]) -> dict[str, bytes | None]:
        return {key: read_all(store, key, 1 << 20) if store.head(key) else None for key in keys}

    def _build(self, state: State) -> None:
        made: dict[int, str] = {}
        for path, node, content in state:
            full = f"{self._top}/{path}"
            if content is None:
                os.mkdir(full)
            elif node in made:
                os.link(made[node], full)
            else:
                made[node] = full
                with open(full, "wb") as file:
                    file.write(content)

    def _clear(self) -> None:
        for name in os.listdir(self._top):
            shutil.rmtree(f"{self._top}/{name}")


class _Cached(Calls):
    """Through the page cache, and without waiting for a disk."""

    def open(self, name: str, flags: int, dir_fd: int | None = None) -> int:
        return super().open(name, flags & ~os.O_DIRECT, dir_fd)

    def fsync(self, fd: int) -> None:
        pass


def _listed(store: PosixStore, directory: str = "") -> Iterator[str]:
    for name in store.list(directory):
        path = f"{directory}/{name}" if directory else name
        if name.endswith("/"):
            yield from _listed(store, path[:-1])
        elif not name.endswith(PARTIAL):
            yield path


def _short(value: bytes | None) -> str:
    return "nothing" if value is None else f"{len(value)} bytes {value[:4]!r}"
