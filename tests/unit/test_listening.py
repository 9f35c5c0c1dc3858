"""The thread on which a keeper listens: no storage holds it up, and no trouble with storage ends it."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from stillframe.format.records import SealDraft, encode_shards, encode_tree
from stillframe.format.segment import encode_header
from stillframe.format.tree import DictNode
from stillframe.keeper.main import Keeper
from stillframe.link import messages
from stillframe.link.messages import KeeperConfig
from stillframe.retention import encode_policy
from stillframe.store.calls import Calls
from stillframe.store.posix import PosixStore
from tests.support import until


class Troubled(Calls):
    """Every look at a name waits, or fails as on a mount whose server is gone, once ``is_troubled``."""

    def __init__(self) -> None:
        self.is_troubled, self.is_stale = False, False
        self.go_on = threading.Event()

    def open(self, name: str, flags: int, dir_fd: int | None = None) -> int:
        if self.is_troubled and not self.is_stale:
            assert self.go_on.wait(30)
        elif self.is_stale:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return super().open(name, flags, dir_fd)


class Listening:
    """A keeper that is handed messages one by one, and what it told."""

    def __init__(self, root: Path) -> None:
        self.calls = Troubled()
        ours, self.theirs = socket.socketpair()
        config = KeeperConfig(str(root), "0123abcd", 0, 1, keep=encode_policy(None), has_events=False)
        self.keeper = Keeper(config, PosixStore(root, calls=self.calls), ours.detach(), self.theirs.fileno())
        self.told: list[messages.FromKeeper] = []
        self.keeper._tell = self.told.append  # type: ignore[assignment]
        self.keeper._take_root()

    def save(self, number: int) -> None:
        """An empty one."""
        header = encode_header([], {})
        tree = encode_tree(DictNode([], []))
        draft = msgspec.json.encode(SealDraft(0, 1, 0.0, encode_shards([]), tree, msgspec.Raw(b"[]")))
        fd = os.memfd_create("draft")
        os.write(fd, header + draft)
        self.keeper._take(messages.Begin(number, number, 1, 0.0, len(header), len(draft), 0, "", ()), fd)
        self.keeper._take(messages.Staged(number, 0.0), None)

    def ended(self, number: int) -> messages.Committed | messages.Failed:
        def found() -> list[messages.Committed | messages.Failed]:
            ends = [each for each in self.told if isinstance(each, messages.Committed | messages.Failed)]
            return [each for each in ends if each.save == number]

        until(found, f"save {number} ends")
        return found()[0]


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[Listening]:
    made = Listening(tmp_path)
    yield made
    made.calls.is_troubled = made.calls.is_stale = False
    made.calls.go_on.set()
    made.keeper._end()
    made.keeper._lock.release()
    made.keeper._trainer._channel.close()
    made.theirs.close()


def test_messages_are_taken_while_the_storage_hangs_and_after_it_failed(listening: Listening) -> None:
    calls = listening.calls
    calls.is_troubled = True
    listening.save(1)  # returns, or pytest's timeout ends it
    calls.go_on.set()
    assert isinstance(listening.ended(1), messages.Committed)

    calls.is_stale = True
    listening.save(2)
    failed = listening.ended(2)
    assert isinstance(failed, messages.Failed)
    assert failed.kind == "StorageError"

    calls.is_stale = False
    listening.save(3)
    assert isinstance(listening.ended(3), messages.Committed)
