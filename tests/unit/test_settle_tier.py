"""Ranks that wait for a tier: rank 0 as long as it gets on, the others for rank 0."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from stillframe import spi
from stillframe.errors import StorageError
from stillframe.latch import Answer
from stillframe.ranks import group
from stillframe.ranks.group import Group

DEADLINE_S = 1.0


def outcomes(monkeypatch: pytest.MonkeyPatch, wait: Any) -> list[Answer[None]]:
    """What becomes of both ranks, if rank 0 waits like this."""
    monkeypatch.setattr(spi, "_FIRST_ROUND_S", 0.05)
    monkeypatch.setattr(group, "_VERDICT_S", 0.5)
    store, done = HashStore(), [Answer[None](), Answer[None]()]
    for rank, answer in enumerate(done):
        ranks = Group(rank, 2, store, DEADLINE_S)
        ranks._prefix = "stillframe/1"  # as in a process of its own
        run: Any = SimpleNamespace(_group=ranks, wait=wait)
        threading.Thread(target=answer.run, args=(lambda run=run: spi.settle_tier(run, "/tier"),), daemon=True).start()
    for answer in done:
        assert answer.wait(30)
    return done


def test_a_tier_that_takes_longer_than_a_deadline_is_waited_for_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for answer in outcomes(monkeypatch, lambda tier: time.sleep(3 * DEADLINE_S)):
        answer.get()


def test_what_ends_the_wait_of_rank_0_is_raised_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(tier: Any) -> None:
        time.sleep(2 * DEADLINE_S)
        raise StorageError("nothing is carried any more")

    for answer in outcomes(monkeypatch, fail):
        with pytest.raises(StorageError, match="nothing is carried any more"):
            answer.get()
