"""The arena: a span has one owner at a time."""

from __future__ import annotations

import ctypes
import mmap
import queue
import random
import threading
from collections.abc import Iterator

import pytest

from stillframe.link.arena import Arena
from stillframe.model import CHUNK_BYTES
from tests.support import until


def never() -> bool:
    return False


FILLER, KEEPER = object(), object()


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(3 * CHUNK_BYTES + 5)
    yield made
    made.close()


def take(arena: Arena) -> int:
    span = arena.take(never, FILLER)
    assert span is not None
    return span


def test_it_holds_whole_spans_only(arena: Arena) -> None:
    assert (arena.spans, arena.nbytes, len(arena.memory)) == (3, 3 * CHUNK_BYTES, 3 * CHUNK_BYTES)


def test_its_memory_is_that_of_its_descriptor(arena: Arena) -> None:
    arena.memory[CHUNK_BYTES : CHUNK_BYTES + 4] = b"span"
    with mmap.mmap(arena.fd, arena.nbytes) as other:
        assert other[CHUNK_BYTES : CHUNK_BYTES + 4] == b"span"


def test_its_memory_starts_at_its_address(arena: Arena) -> None:
    arena.memory[:4] = b"here"
    assert ctypes.string_at(arena.address, 4) == b"here"


def test_every_span_is_lent_once(arena: Arena) -> None:
    assert sorted(take(arena) for _ in range(3)) == [0, 1, 2]
    assert arena.free_spans == 0


def test_a_span_given_back_is_lent_again_first(arena: Arena) -> None:
    first, _ = take(arena), take(arena)
    arena.hand_over(first, FILLER, KEEPER)
    arena.give_back(first, KEEPER)
    assert take(arena) == first


def test_a_span_that_is_not_lent_is_not_freed_twice(arena: Arena) -> None:
    span = take(arena)
    arena.give_back(span, FILLER)
    arena.give_back(span, FILLER)
    assert arena.free_spans == 3
    assert sorted(take(arena) for _ in range(3)) == [0, 1, 2]


def test_the_dead_keepers_spans_are_free_but_not_those_being_filled(arena: Arena) -> None:
    filling, handed = take(arena), take(arena)
    arena.hand_over(handed, FILLER, KEEPER)
    arena.give_back_all(KEEPER)
    assert sorted([take(arena), take(arena)]) == sorted({0, 1, 2} - {filling})
    assert arena.free_spans == 0


def test_a_span_handed_over_after_the_keepers_death_can_be_given_back(arena: Arena) -> None:
    span = take(arena)
    arena.give_back_all(KEEPER)
    arena.hand_over(span, FILLER, KEEPER)
    arena.give_back(span, KEEPER)
    assert arena.free_spans == 3


def test_who_had_a_span_before_cannot_touch_it(arena: Arena) -> None:
    """Its keeper gives it back, another save takes it; then the first save, or a dead keeper, comes late."""
    span = take(arena)
    arena.hand_over(span, FILLER, KEEPER)
    arena.give_back(span, KEEPER)
    other = object()
    assert arena.take(never, other) == span
    arena.hand_over(span, FILLER, KEEPER)
    for late in (FILLER, KEEPER):
        arena.give_back(span, late)
        arena.retire([span], late)
        arena.give_back_all(late)
    assert arena.free_spans == 2
    arena.give_back(span, other)
    assert arena.free_spans == 3


class Taker(threading.Thread):
    """Takes one span; ``span`` is what it got."""

    def __init__(self, arena: Arena) -> None:
        super().__init__(daemon=True)
        self.arena = arena
        self.is_cancelled = False
        self.span: int | None = -1
        self.start()
        until(lambda: arena.is_awaited, "the wait")

    def run(self) -> None:
        self.span = self.arena.take(lambda: self.is_cancelled, FILLER)

    def result(self) -> int | None:
        self.join(30)
        assert not self.is_alive()
        return self.span


def test_a_waiting_taker_gets_the_next_span_given_back(arena: Arena) -> None:
    lent = [take(arena) for _ in range(3)]
    taker = Taker(arena)
    assert taker.is_alive()
    arena.give_back(lent[1], FILLER)
    assert taker.result() == lent[1]


def test_a_waiting_taker_is_woken_when_the_keeper_dies(arena: Arena) -> None:
    for span in [take(arena) for _ in range(3)]:
        arena.hand_over(span, FILLER, KEEPER)
    taker = Taker(arena)
    arena.give_back_all(KEEPER)
    assert taker.result() in {0, 1, 2}


def test_a_cancelled_taker_is_woken_and_gets_nothing(arena: Arena) -> None:
    for span in [take(arena) for _ in range(3)]:
        arena.hand_over(span, FILLER, KEEPER)
    taker = Taker(arena)
    taker.is_cancelled = True
    arena.give_back_all(KEEPER)
    assert taker.result() is None
    assert arena.free_spans == 3


def test_a_cancelled_taker_gets_nothing_even_if_there_is_room(arena: Arena) -> None:
    assert arena.take(lambda: True, FILLER) is None
    assert arena.free_spans == 3


def test_waiting_is_counted_and_shown_only_while_it_lasts(arena: Arena) -> None:
    lent = [take(arena) for _ in range(3)]
    assert arena.wait_s == 0.0
    taker = Taker(arena)
    arena.give_back(lent[0], FILLER)
    taker.result()
    assert arena.wait_s > 0.0
    assert not arena.is_awaited


def test_untouched_spans_are_touched_one_by_one_until_none_is_left(arena: Arena) -> None:
    take(arena)
    assert [arena.touch_one() for _ in range(3)] == [True, True, False]


def test_closing_twice_is_harmless(arena: Arena) -> None:
    arena.close()
    arena.close()
    assert arena.fd == -1


def test_no_span_ever_has_two_owners() -> None:
    """Several fillers, one keeper that dies now and then with what it was lent."""
    arena = Arena(3 * CHUNK_BYTES)
    owners: dict[int, str] = {}
    handed: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    looking = threading.Lock()
    faults: list[str] = []

    def fill() -> None:
        for _ in range(300):
            span = take(arena)
            with looking:
                if span in owners:
                    faults.append(f"span {span} was lent while the {owners[span]} had it")
                owners[span] = "filler"
            with looking:
                owners[span] = "keeper"
                arena.hand_over(span, FILLER, KEEPER)
            handed.put(span)

    def keep() -> None:
        chance = random.Random(0)
        while (span := handed.get()) is not None:
            with looking:
                if chance.random() < 0.1:
                    for each in [each for each, owner in owners.items() if owner == "keeper"]:
                        del owners[each]
                    arena.give_back_all(KEEPER)
                elif owners.get(span) == "keeper":
                    del owners[span]
                    arena.give_back(span, KEEPER)

    fillers = [threading.Thread(target=fill, daemon=True) for _ in range(5)]
    keeper = threading.Thread(target=keep, daemon=True)
    for thread in (*fillers, keeper):
        thread.start()
    for thread in fillers:
        thread.join(60)
    handed.put(None)
    keeper.join(60)
    assert not any(thread.is_alive() for thread in (*fillers, keeper))
    assert faults == []
    assert sorted(take(arena) for _ in range(3)) == [0, 1, 2]
    arena.close()
