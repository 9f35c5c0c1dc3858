"""How ranks agree: threads stand in for ranks, around a real store of torch.distributed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from stillframe.errors import ConfigError, DeadlineError, IntegrityError, KeeperError, MismatchError
from stillframe.model import SaveId
from stillframe.ranks import group, told
from stillframe.ranks.calls import GuardedStore
from stillframe.ranks.group import Answer, Group, check_same
from stillframe.ranks.joining import join_group
from stillframe.save.saves import Save, Saves
from stillframe.save.seal_count import SealCount
from tests.support import run_fresh, until


def life(store: Any) -> list[Group]:
    """Three ranks, as three processes that have just started would be."""
    made = []
    for rank in range(3):
        made.append(Group(rank, 3, store, deadline_s=5.0))
        made[-1]._prefix = "stillframe/1"  # the first of its process that talks
    return made


@pytest.fixture
def ranks() -> list[Group]:
    return life(HashStore())


def together(ranks: list[Group], work: Callable[[Group], Any]) -> list[Any]:
    """What each rank got, or the error that it met."""

    def one(each: Group) -> Any:
        try:
            return work(each)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, ranks))


def total(answers: list[Answer]) -> int:
    return sum(int(each.value) for each in answers)


def test_every_rank_gets_the_verdict_of_rank_0(ranks: list[Group]) -> None:
    for _ in range(3):
        assert together(ranks, lambda each: each.decide("adding", lambda: each.rank + 1, total, int)) == [6, 6, 6]


def test_an_error_of_the_judge_is_raised_on_every_rank(ranks: list[Group]) -> None:
    def judge(answers: list[Answer]) -> int:
        check_same("colour", [each.value for each in answers])
        return 0

    found = together(ranks, lambda each: each.decide("painting", lambda: "red" if each.rank else "blue", judge, int))
    for error in found:
        assert isinstance(error, ConfigError)
        assert "rank 0: colour='blue'; ranks 1-2: colour='red'" in str(error)


def test_a_rank_keeps_its_own_error_and_the_others_hear_of_it(ranks: list[Group]) -> None:
    def say(rank: int) -> int:
        if rank == 1:
            raise MismatchError("it does not fit here")
        return rank

    def judge(answers: list[Answer]) -> int:
        assert [type(each.error) for each in answers] == [type(None), MismatchError, type(None)]
        raise MismatchError("on rank 1")

    first, own, third = together(ranks, lambda each: each.decide("fitting", lambda: say(each.rank), judge, int))
    assert str(own) == "it does not fit here"
    assert str(first) == str(third) == "on rank 1"


def test_any_exception_of_a_rank_reaches_the_others(ranks: list[Group]) -> None:
    def say(rank: int) -> int:
        return 1 // rank  # a bug on rank 0

    def judge(answers: list[Answer]) -> int:
        raise IntegrityError(str(answers[0].error))

    found = together(ranks, lambda each: each.decide("dividing", lambda: say(each.rank), judge, int))
    assert isinstance(found[0], ZeroDivisionError)
    assert "ZeroDivisionError" in str(found[1])


def test_a_rank_that_does_not_come_is_named(ranks: list[Group]) -> None:
    for each in ranks:
        each.deadline_s = 0.2
    found = together(ranks[:2], lambda each: each.decide("waiting", lambda: 1, total, int))
    for error in found:
        assert isinstance(error, DeadlineError)
        assert "waiting: rank 2 of 3 did not come within 0.2 s" in str(error)


def test_if_rank_0_does_not_come_the_others_say_so(ranks: list[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "_VERDICT_S", 0.1)
    for each in ranks:
        each.deadline_s = 0.1
    for error in together(ranks[1:], lambda each: each.decide("waiting", lambda: 1, total, int)):
        assert isinstance(error, DeadlineError)
        assert "rank 0 did not answer" in str(error)


def test_what_an_earlier_life_left_in_the_store_is_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    monkeypatch.setattr(group, "_VERDICT_S", 0.1)
    first, second, third = (life(store) for _ in range(3))
    assert together(first, lambda each: each.decide("adding", lambda: each.rank, total, int)) == [3, 3, 3]
    for each in second:
        each.deadline_s = 0.1
    for error in together(second[1:], lambda each: each.decide("calling", lambda: 1, total, int)):  # and then killed
        assert isinstance(error, DeadlineError)
    for _ in range(2):
        assert together(third, lambda each: each.decide("adding", lambda: each.rank + 10, total, int)) == [33, 33, 33]


class Sealing:
    """A rank that seals saves in a root of its own."""

    def __init__(self, group: Group) -> None:
        self.seals = SealCount(group, epoch=1)
        self.saves = Saves("raise")
        self.saves.on_end.append(self.seals.ended)

    def begin(self, step: int, attempt: int = 1) -> Save:
        save = self.saves.make(step, attempt, 0, time.monotonic())
        self.saves.add(save)
        return save

    def seal(self, step: int, attempt: int = 1, epoch: int = 1) -> Save:
        save = self.begin(step, attempt)
        self.seals.sealed(SaveId(step, epoch, attempt))
        assert self.saves.sealed(save.number, time.monotonic(), is_unchanged=False) is save
        self.seals.watch(SaveId(step, epoch, attempt), save, self.saves, lambda: None)
        return save


@pytest.fixture
def sealing(ranks: list[Group]) -> list[Sealing]:
    together(ranks, lambda each: each.decide("meeting", lambda: 0, total, int))
    return [Sealing(each) for each in ranks]


def test_where_roots_are_not_shared_a_save_is_committed_when_every_rank_has_sealed_it(sealing: list[Sealing]) -> None:
    first = [each.seal(1) for each in sealing]
    second = [each.seal(2) for each in sealing[:2]]
    for save in first:
        save.wait("committed", 10.0)
    until(lambda: [each.seals.complete_step() for each in sealing] == [1, 1, 1], "step 1 is complete")
    assert [save.phase for save in second] == ["sealed", "sealed"]
    second.append(sealing[2].seal(2))
    for save in second:
        save.wait("committed", 10.0)
    assert [each.seals.complete_step() for each in sealing] == [2, 2, 2]


def test_the_store_holds_only_what_is_under_way(
    sealing: list[Sealing], ranks: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two keys stayed of every save, and one for each rank."""
    store = ranks[0]._store
    at_first = store.num_keys()
    for each in ranks:
        monkeypatch.setattr(each._telling, "_watch_s", 0.001)
    for step in range(300):
        for save in [each.seal(step) for each in sealing]:
            save.wait("committed", 10.0)
    until(lambda: store.num_keys() - at_first <= 6, "what all have seen goes")
    assert all(len(each._told._words) <= 1 for each in ranks)


def test_of_saves_that_failed_the_store_holds_the_newest(
    sealing: list[Sealing], ranks: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ranks[0]._store
    at_first = store.num_keys()
    monkeypatch.setattr(told, "MAX_TOLD", 20)
    for each in ranks:
        monkeypatch.setattr(each._telling, "_watch_s", 0.001)
    for step in range(100):
        sealed = [each.seal(step) for each in sealing[:2]]
        sealing[2].seals.failed(step, 1, "no space left")
        for save in sealed:
            with pytest.raises(KeeperError, match="no space left"):
                save.wait("committed", 10.0)
    until(lambda: store.num_keys() - at_first <= 20 * 4 + 1, "the oldest go")  # and who has left the epoch
    for save in [each.seal(1000) for each in sealing]:
        save.wait("committed", 10.0)


def test_a_rank_that_will_not_seal_says_so_to_the_others(sealing: list[Sealing]) -> None:
    saves = [each.seal(1) for each in sealing[:2]]
    failing = sealing[2].begin(1)
    sealing[2].saves.fail(failing.number, KeeperError("no space left"))
    for save in saves:
        with pytest.raises(KeeperError, match="step 1 is not committed: rank 2 could not save it: no space left"):
            save.wait("committed", 10.0)


def test_a_rank_that_never_seals_is_named_at_the_deadline(sealing: list[Sealing], ranks: list[Group]) -> None:
    for each in ranks:
        each.deadline_s = 0.1
    for save in [each.seal(1) for each in sealing[:2]]:
        with pytest.raises(DeadlineError, match="step 1 is not committed: rank 2 of 3 did not seal it"):
            save.wait("committed", 10.0)


def test_ranks_that_have_sealed_different_attempts_have_not_sealed_the_same(sealing: list[Sealing]) -> None:
    saves = [each.seal(1, attempt=1 + (each is sealing[2])) for each in sealing]
    time.sleep(0.5)
    assert [save.phase for save in saves] == ["sealed"] * 3
    assert [each.seals.complete_step() for each in sealing] == [-1, -1, -1]


def test_another_epoch_has_no_complete_step_yet(sealing: list[Sealing]) -> None:
    for save in [each.seal(5) for each in sealing]:
        save.wait("committed", 10.0)
    for each in sealing:
        each.seals.enter(2)
        assert each.seals.complete_step() == -1
    late = [each.seal(6, epoch=1) for each in sealing]  # its keepers had begun it before
    for save in late:
        save.wait("committed", 10.0)
    assert [each.seals.complete_step() for each in sealing] == [-1, -1, -1]


def test_a_rank_that_waits_in_a_round_still_tells_what_it_has_sealed(
    sealing: list[Sealing], ranks: list[Group]
) -> None:
    """It restores, and the others come to that only when their saves are committed."""
    with ThreadPoolExecutor(1) as pool:
        round_0 = pool.submit(lambda: ranks[0].decide("restoring", lambda: 1, total, int))
        until(lambda: ranks[0]._store.check([f"{ranks[0]._name}/2/0"]), "rank 0 waits for the others")
        for save in [each.seal(1) for each in sealing]:
            save.wait("committed", 10.0)
        assert together(ranks[1:], lambda each: each.decide("restoring", lambda: 1, total, int)) == [3, 3]
        assert round_0.result(10.0) == 3


def test_who_has_left_without_sealing_is_not_waited_for(sealing: list[Sealing], ranks: list[Group]) -> None:
    first = [each.seal(1) for each in sealing]
    second = [each.seal(2) for each in sealing[:2]]
    sealing[2].seals.leave()
    for save in first:
        save.wait("committed", 10.0)
    for save in second:
        with pytest.raises(KeeperError, match=r"step 2 is not committed: rank 2 went on to restore\(\) without saving"):
            save.wait("committed", 10.0)
    sealing[2].seals.stay()  # its restore has failed
    until(lambda: ranks[0].lacking("left/1") == 3, "the others see it")
    for save in [each.seal(3) for each in sealing]:
        save.wait("committed", 10.0)


def test_a_store_that_is_lost_fails_the_save(sealing: list[Sealing], ranks: list[Group]) -> None:
    save = sealing[0].seal(1)

    class Lost:
        def __getattr__(self, name: str) -> Any:
            raise ConnectionError("Broken pipe")

    ranks[0]._store = Lost()
    with pytest.raises(DeadlineError, match=r"step 1: cannot determine .* torch.distributed is gone \(Broken pipe\)"):
        save.wait("committed", 10.0)
    later = sealing[0].seal(2)  # nothing of it reaches the others
    with pytest.raises(DeadlineError, match="step 2: cannot determine"):
        later.wait("committed", 10.0)


def test_a_store_that_does_not_answer_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck:
        def __getattr__(self, name: str) -> Any:
            return lambda *_: threading.Event().wait(30)

    monkeypatch.setattr(group, "_VERDICT_S", 0.1)
    alone = Group(1, 2, Stuck(), deadline_s=0.1)
    with pytest.raises(DeadlineError, match="does not answer"):
        alone.decide("waiting", lambda: 1, total, int)
    alone.count("sealed")  # these return at once
    alone.say("failed", "why")
    alone.watch(lambda: True)


@pytest.mark.parametrize(
    ("rank", "world_size", "what"),
    [
        (1, None, "give both, or neither"),
        (None, 2, "give both, or neither"),
        (2, 2, "below the world size"),
        (-1, 2, "at least 0"),
        (0, 0, "below the world size"),
        (True, 2, "whole number"),
        (0, "2", "whole number"),
        (0, 2, "MASTER_ADDR"),
    ],
)
def test_a_place_that_cannot_be_is_refused(
    rank: Any, world_size: Any, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ConfigError, match=what):
        join_group(rank, world_size, 1.0)


def test_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert (join_group(None, None, 1.0).rank, join_group(None, None, 1.0).world_size) == (0, 1)
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ConfigError, match="not numbers"):
        join_group(None, None, 1.0)


def test_many_keys_are_asked_for_a_few_at_a_time() -> None:
    """torch's server parses a long request anew with each piece of it: 16,384 keys in one took ten times as long."""
    real: Any = HashStore()
    asked: list[int] = []

    class Store:
        def multi_get(self, keys: list[str]) -> list[bytes]:
            asked.append(len(keys))
            return list(real.multi_get(keys))

        def multi_set(self, keys: list[str], values: list[str]) -> None:
            asked.append(len(keys))
            real.multi_set(keys, values)

    store = GuardedStore(Store())
    keys = [f"key {number}" for number in range(1300)]
    store.multi_set(keys, [f"value {number}" for number in range(1300)])
    assert [each.decode() for each in store.multi_get(keys)] == [f"value {number}" for number in range(1300)]
    assert asked == [512, 512, 276] * 2
    assert store.multi_get([]) == []


def test_a_thread_that_asks_the_store_does_not_abort_the_process_at_its_end() -> None:
    """Without the guard SIGABRT in 8 of 8 runs: a thread comes back from torch while the interpreter ends."""
    said = run_fresh(
        "import time\n"
        "from datetime import timedelta\n"
        "from torch.distributed import TCPStore\n"
        "from stillframe.ranks.group import Group\n"
        "timeout = timedelta(seconds=5)\n"
        "store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False, timeout=timeout)\n"
        "for _ in range(4):\n"
        "    group = Group(0, 2, store, 5.0)\n"
        "    group._telling._watch_s = 0.0\n"
        "    group.watch(lambda group=group: group.lacking('seals') < 0)\n"
        "time.sleep(0.2)\n"
        "print('ends')\n"
    )
    assert said == "ends\n"


def test_a_store_that_hangs_delays_the_end_of_the_process_for_a_moment_only() -> None:
    said = run_fresh(
        "import threading, time\n"
        "from stillframe.ranks import calls\n"
        "calls._EXIT_S = 0.2\n"
        "class Hung:\n"
        "    def check(self, keys):\n"
        "        asked.set()\n"
        "        time.sleep(3600)\n"
        "asked = threading.Event()\n"
        "store = calls.GuardedStore(Hung())\n"
        "threading.Thread(target=store.check, args=([],), daemon=True).start()\n"
        "assert asked.wait(10)\n"
        "print('ends')\n"
    )
    assert said == "ends\n"


def test_rank_0_asks_little_more_of_the_store_for_a_thousand_ranks() -> None:
    """Requests of rank 0: a round trip for each rank would be seconds at the start of a large job."""

    class Counted:
        def __init__(self) -> None:
            self.store: Any = HashStore()
            self.count = 0

        def __getattr__(self, name: str) -> Any:
            self.count += 1
            return getattr(self.store, name)

    counted, many = Counted(), 1000
    first = Group(0, many, counted, deadline_s=30.0)
    first._prefix = "stillframe/1"
    calls = [f"{rank:016x}" for rank in range(1, many)]

    def others() -> None:
        counted.store.append("stillframe/1/calls", "".join(calls[:500]))
        name = counted.store.get(f"stillframe/1/answer/{calls[0]}").decode()
        counted.store.append("stillframe/1/calls", "".join(calls[500:]))
        for rank, call in enumerate(calls, 1):
            assert counted.store.get(f"stillframe/1/answer/{call}").decode() == name
            counted.store.set(f"{name}/1/{rank}", b'{"value":1}')

    thread = threading.Thread(target=others)
    thread.start()
    assert first.decide("adding", lambda: 1, total, int) == many
    thread.join()
    assert counted.count < many / 5
