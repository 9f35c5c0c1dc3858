"""Whoever waits for a tier: as long as something moves there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from stillframe.errors import DeadlineError
from stillframe.link.messages import TierNews
from stillframe.model import SaveId
from stillframe.save import tier_book
from stillframe.save.saves import Save, Saves
from stillframe.save.tier_book import TierBook
from stillframe.tiers import TierConfig

STILL_S = 0.5
NEWS = TierNews(0, None, SaveId(5, 1, 1), SaveId(5, 1, 1), None, 0, 100, 0, "", False, is_known=True)


@pytest.fixture
def book(monkeypatch: pytest.MonkeyPatch) -> TierBook:
    monkeypatch.setattr(tier_book, "_STILL_S", STILL_S)
    monkeypatch.setattr(tier_book, "_LOOK_S", 0.02)
    return TierBook((TierConfig("/tier", 1, 0.0, "", 0.0),), Saves("warn"), lambda: None)


def committed(book: TierBook) -> Save:
    save = book._saves.make(5, 1, 0, 0.0)
    book._saves.add(save)
    book._saves.sealed(save.number, 0.0, False, 1)
    book._saves.committed(save.number, 0.0)
    return save


@contextmanager
def hearing(book: TierBook, **change: Any) -> Iterator[None]:
    """A keeper that says again and again that it tries, and that these numbers grow."""
    over, count = threading.Event(), 0

    def tell() -> None:
        nonlocal count
        while not over.wait(STILL_S / 10):
            count += 1
            book.hear(msgspec.structs.replace(NEWS, **{name: value * count for name, value in change.items()}))

    thread = threading.Thread(target=tell)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_tier_that_fails_again_and_again_is_not_waited_for_without_end(book: TierBook) -> None:
    """Each attempt is news, and nothing has moved."""
    save = committed(book)
    with hearing(book, failures=1), pytest.raises(DeadlineError, match="step 5 is not committed in /tier"):
        book.wait_for(save, "/tier", None)


def test_a_tier_that_gets_on_is_waited_for(book: TierBook) -> None:
    save = committed(book)
    with hearing(book, carried_bytes=1):
        timer = threading.Timer(3 * STILL_S, lambda: book.hear(msgspec.structs.replace(NEWS, committed=NEWS.target)))
        timer.start()
        book.wait_for(save, "/tier", None)
        timer.join()
