"""What strace has seen, as events of the model of a disk (:mod:`tests.store.crash`), and what was told meanwhile.

The lines of a trace are in the order of time, whichever process they are of.  A call that others came between has two
lines: one when it is called, one when it returns.

- A change counts from its return on, so that nobody's fsync covers it by mistake; or, if the call of another process
  shows that it has happened before, from there on.
- A process that is killed in the middle of a change of names may have made it, or not: it has if a later call shows so,
  or if it is there when the run is over.
- An fsync covers what had happened when it was called, and counts from its return on.
- What is said counts from the moment when somebody begins to say it.

A call that changes the root and is not known here is an error.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from stillframe.link import messages
from tests.store.crash import Disk
from tests.store.recording import TOP, Event
from tests.torture.power_cut import record

_LINE = re.compile(r"(\d+) +\d+\.\d+ (.*)", re.DOTALL)
_RESUMED = re.compile(r"<\.\.\. \w+ resumed>(.*)", re.DOTALL)
_FD = re.compile(r"(?:AT_FDCWD|\d+)<([^>]*)>(.*)", re.DOTALL)
_SOCKETS = re.compile(r"\[\d+<([^>]*)>, \d+<([^>]*)>\]")
_PACKET = re.compile(r'iov_base="([^"]*)"')
_UNFINISHED = " <unfinished ...>"
_DETACHED = " <detached ...>"
"""Like the other: its process was killed meanwhile."""
_KILLED = "?"
_FROM_TRAINER = msgspec.msgpack.Decoder(messages.FromTrainer)
_FROM_KEEPER = msgspec.msgpack.Decoder(messages.FromKeeper)


class Note(NamedTuple):
    """``time``: how many events had happened.

    ``what``: the ``life`` of this number begins; a keeper is ``requested`` to save this step; a trainer is told that it
    is ``committed``; a run has ``resumed`` from it, goes ``back`` to it, or has ``rewound`` to it.
    """

    time: int
    what: str
    number: int


class _TooEarly(Exception):
    """Something else has happened at this path, and has not been seen to return."""

    def __init__(self, path: str) -> None:
        self.path = path


class _Call:
    def __init__(self, text: str, began: int) -> None:
        self._text = text
        self.began = began
        """How many events had happened."""
        self.is_done = False
        self.node: int | None = None
        self.parse(text)

    def parse(self, text: str) -> None:
        self.name, _, rest = text.partition("(")
        rest = rest.replace(f"{_UNFINISHED})", ")").removesuffix(_UNFINISHED).removesuffix(_DETACHED)
        args, _, result = rest.rpartition("= ")
        is_whole = args.rstrip().endswith(")")
        self.args = (args.rstrip()[:-1] if is_whole else rest).split(", ")
        self.result = result.split(maxsplit=1)[0] if is_whole else _KILLED

    def resumed(self, rest: str) -> _Call:
        self.parse(self._text + rest)
        return self

    def fd(self, at: int = 0) -> str:
        """The path behind a descriptor; empty if it is gone."""
        found = _FD.fullmatch(self.args[at])
        assert found is not None, self.args[at][:300]
        return "" if "deleted" in found[2] else self._bytes(found[1]).decode()

    def path(self, at: int) -> str:
        """Of a name; before it may be the descriptor of its directory."""
        name = self._bytes(self.args[at]).decode()
        return name if name.startswith("/") or at == 0 else os.path.join(self.fd(at - 1), name)

    def data(self) -> bytes:
        data = self._bytes(self.args[1])
        return data if self.result == _KILLED else data[: int(self.result)]

    @staticmethod
    def _bytes(text: str) -> bytes:
        assert not text.endswith("..."), "the trace has not all of it"
        return bytes.fromhex(text.strip('"').replace("\\x", ""))

    def __str__(self) -> str:
        return f"{self._text[:400]} = {self.result}"


@dataclass
class Parser:
    """Of the traces of one root, one after the other; beside each is what was there when its run was over.

    ``top``: the directory that holds the root; it was there before.  Beside it is the file ``notes`` of the trainees.
    """

    top: Path
    events: list[Event] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    paths: dict[str, int] = field(default_factory=lambda: {"": TOP})
    """Within ``top``: what is there now."""

    def __post_init__(self) -> None:
        self._count = TOP
        self._directories = {TOP}
        self._sizes: dict[int, int] = {}
        self._written: dict[int, int] = {}
        """When each file was written last."""
        self._cut_off: set[int] = set()
        """Files that somebody was killed in the middle of writing: how much of that happened cannot be determined."""
        self._place = "".join(f"\\x{each:02x}" for each in os.fsencode(self.top.parent))
        self._told_notes = str(self.top.with_name("notes"))

    # --- lines -----------------------------------------------------------------------------

    def read(self, trace: Path) -> None:
        """Raises ``AssertionError`` for what cannot be."""
        self._begun: dict[str, _Call] = {}
        self._doubtful: list[_Call] = []
        """Changes of names that their processes were killed in the middle of."""
        self._pairs: dict[str, str] = {}
        self._steps: dict[tuple[str, int], int] = {}
        with open(trace) as lines:
            for line in lines:
                found = _LINE.fullmatch(line.rstrip("\n"))
                assert found is not None, line[:300]
                self._read(*found.groups())
        for call in self._begun.values():
            self._returned(call)
        there = set(record.listing(trace).read_text().splitlines())
        for path in sorted(there ^ (self.paths.keys() - {""})):
            self._hurry(path)

    def _read(self, process: str, text: str) -> None:
        if text.startswith("+++"):
            text = "<... call resumed>"  # it was killed in the middle
        if resumed := _RESUMED.fullmatch(text):
            call = self._begun.pop(process, None)
            if call is not None:
                self._returned(call.resumed(resumed[1]))
        elif self._place in text or text.startswith(("sendmsg(", "socketpair(")):
            call = _Call(text.removesuffix(_UNFINISHED), len(self.events))
            self._called(call)
            if text.endswith(_UNFINISHED):
                self._begun[process] = call
            else:
                self._returned(call)

    def _called(self, call: _Call) -> None:
        if call.name == "sendmsg":
            self._said(call)
        elif call.name in _DESCRIPTORS:
            path = call.fd()
            if path == self._told_notes:
                what, number = call.data().decode().split()
                self.notes.append(Note(len(self.events), what, int(number)))
            elif (inside := self._inside(path)) is not None:
                call.node = self._find(inside)

    def _returned(self, call: _Call) -> None:
        if call.is_done or call.result.startswith("-"):
            return
        if call.name == "socketpair":
            self._pair(call)
        elif call.name in _DESCRIPTORS:
            if call.node is not None and not (call.result == _KILLED and call.name in _SYNCS):
                _DESCRIPTORS[call.name](self, call, call.node)
                if call.result == _KILLED:
                    self._cut_off.add(call.node)
        elif call.name in _NAMES:
            if call.result == _KILLED:
                self._doubtful.append(call)
                return
            try:
                self._apply(call)
            except _TooEarly:
                raise AssertionError(f"this cannot be: {call}") from None
        elif call.name not in ("sendmsg", "sendfile", "splice"):
            raise AssertionError(f"what does this do? {call}")

    def _apply(self, call: _Call) -> None:
        """A change of names, behind those that it shows to have happened."""
        for _ in range(len(self._begun) + len(self._doubtful) + 1):
            try:
                return _NAMES[call.name](self, call)
            except _TooEarly as error:
                if not self._hurry(error.path):
                    raise
        return None

    def _hurry(self, path: str) -> bool:
        """Whether a call that has not returned, as far as the trace tells, has changed something there."""
        for call in [*self._begun.values(), *self._doubtful]:
            if call.name in _NAMES and not call.is_done and path in self._targets(call):
                try:
                    _NAMES[call.name](self, call)
                except _TooEarly:
                    continue
                call.is_done = True
                return True
        return False

    def _targets(self, call: _Call) -> set[str | None]:
        ats = [at for at, each in enumerate(call.args) if each.startswith('"')]
        return {self._inside(call.path(at)) for at in ats}

    def _inside(self, path: str) -> str | None:
        """Within ``top``; ``None`` if it is not."""
        if path == str(self.top):
            return ""
        return path[len(str(self.top)) + 1 :] if path.startswith(f"{self.top}/") else None

    def _find(self, path: str) -> int:
        if path not in self.paths and self._hurry(path):
            return self._find(path)
        assert path in self.paths, f"{path} is not there, but it is open"
        return self.paths[path]

    # --- what is said ----------------------------------------------------------------------

    def _pair(self, call: _Call) -> None:
        found = _SOCKETS.search(", ".join(call.args))
        if found is not None and "SOCK_SEQPACKET" in call.args[1]:
            self._pairs |= {found[1]: found[1], found[2]: found[1]}

    def _said(self, call: _Call) -> None:
        socket = _FD.fullmatch(call.args[0])
        pair = self._pairs.get(socket[1]) if socket is not None else None
        packet = _PACKET.search(", ".join(call.args))
        if pair is None or packet is None:
            return
        data = bytes.fromhex(packet[1].replace("\\x", ""))
        tag = msgspec.msgpack.decode(data)[0]
        if tag == "Begin":
            begin = _FROM_TRAINER.decode(data)
            self._steps[pair, begin.save] = begin.step
            self.notes.append(Note(len(self.events), "requested", begin.step))
        elif tag == "Committed":
            self.notes.append(Note(len(self.events), "committed", self._steps[pair, _FROM_KEEPER.decode(data).save]))

    # --- names -----------------------------------------------------------------------------

    def _is_new(self, path: str) -> bool:
        """Whether it can be made now."""
        if os.path.dirname(path) not in self.paths:
            raise _TooEarly(os.path.dirname(path))
        return path not in self.paths

    def _name(self, what: str, path: str, node: int) -> None:
        self.events.append((what, self.paths[os.path.dirname(path)], os.path.basename(path), node, b""))
        self.paths[path] = node

    def _drop(self, path: str) -> None:
        self.events.append(("drop", self.paths[os.path.dirname(path)], os.path.basename(path), 0, b""))
        del self.paths[path]

    def _open(self, call: _Call) -> None:
        path, flags = self._inside(call.path(1)), call.args[2]
        if path is None:
            return
        assert "O_TRUNC" not in flags, call
        if "O_CREAT" not in flags:
            if path not in self.paths:
                self._hurry(path)
        elif self._is_new(path):
            self._count += 1
            self._name("name", path, self._count)
        elif "O_EXCL" in flags:
            raise _TooEarly(path)

    def _mkdir(self, call: _Call) -> None:
        path = self._inside(call.path(0 if call.name == "mkdir" else 1))
        if path is None:
            return
        if not self._is_new(path):
            raise _TooEarly(path)
        self._count += 1
        self._directories.add(self._count)
        self._name("mkdir", path, self._count)

    def _link(self, call: _Call) -> None:
        old, new = self._inside(call.path(1)), self._inside(call.path(3))
        if old is None or new is None:
            return
        if old not in self.paths:
            raise _TooEarly(old)
        if not self._is_new(new):
            raise _TooEarly(new)
        self._name("name", new, self.paths[old])

    def _rename(self, call: _Call) -> None:
        old, new = self._inside(call.path(1)), self._inside(call.path(3))
        if old is None or new is None:
            return
        if old not in self.paths:
            raise _TooEarly(old)
        is_new = self._is_new(new)
        if not is_new and (self.paths[old] == self.paths[new] or "RENAME_NOREPLACE" in call.args[-1]):
            raise _TooEarly(new)
        assert self.paths[old] not in self._directories, call
        self._name("name", new, self.paths[old])
        self._drop(old)

    def _unlink(self, call: _Call) -> None:
        path = self._inside(call.path(1))
        if path is None:
            return
        if path not in self.paths:
            raise _TooEarly(path)
        below = [each for each in self.paths if each.startswith(f"{path}/")]
        if below:
            raise _TooEarly(below[0])
        self._drop(path)

    # --- contents --------------------------------------------------------------------------

    def _change(self, what: str, node: int, number: int, data: bytes, size: int) -> None:
        self.events.append((what, node, "", number, data))
        self._sizes[node] = size
        self._written[node] = len(self.events)

    def _write(self, call: _Call, node: int) -> None:
        """At the end, if no offset is given: logs are written so."""
        data, size = call.data(), self._sizes.get(node, 0)
        offset = int(call.args[3]) if call.name == "pwrite64" else size
        self._change("write", node, offset, data, max(size, offset + len(data)))

    def _truncate(self, call: _Call, node: int) -> None:
        size = int(call.args[1])
        self._change("size", node, size, b"", size)

    def _reserve(self, call: _Call, node: int) -> None:
        assert call.args[1] == "0", call
        size = max(self._sizes.get(node, 0), int(call.args[2]) + int(call.args[3]))
        self._change("size", node, size, b"", size)

    def _sync(self, call: _Call, node: int) -> None:
        assert self._written.get(node, 0) <= call.began, f"it was written meanwhile: {call}"
        if call.began:
            self.events.append(("sync", node, "", call.began, b""))

    # --- the proof of it -------------------------------------------------------------------

    def check(self) -> None:
        """What the events lead to is what is there, byte for byte."""
        disk = Disk()
        for event in self.events:
            disk.apply(event)
        for path, node in self.paths.items():
            place = self.top / path
            assert place.exists(), f"{path} is not there"
            if node not in self._directories | self._cut_off:
                assert disk._files[node].now == place.read_bytes(), f"{path} is different"
        there = {str(each.relative_to(self.top)) for each in self.top.rglob("*")}
        assert there == self.paths.keys() - {""}, there ^ (self.paths.keys() - {""})


_SYNCS = {"fsync", "fdatasync"}
_DESCRIPTORS = {
    "write": Parser._write, "pwrite64": Parser._write, "ftruncate": Parser._truncate, "fallocate": Parser._reserve,
    "fsync": Parser._sync, "fdatasync": Parser._sync,
}  # fmt: skip
_NAMES = {
    "openat": Parser._open, "mkdir": Parser._mkdir, "mkdirat": Parser._mkdir, "linkat": Parser._link,
    "renameat": Parser._rename, "renameat2": Parser._rename, "unlinkat": Parser._unlink,
}  # fmt: skip
