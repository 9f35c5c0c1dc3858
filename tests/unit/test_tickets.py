"""Tickets: one rank issues the identity of a save; on every rank it stands for that save, once."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path

import msgspec
import pytest

from stillframe import Catalog, Checkpointer, ConfigError, ExistsError, UnsupportedStateError, spi
from stillframe.model import SaveId
from stillframe.save.saves import Save, Saves
from stillframe.save.steps import TakenSteps
from stillframe.spi import Ticket


def steps(root: Path) -> TakenSteps:
    return TakenSteps(Catalog(root))


def begun(saves: Saves, step: int, attempt: int, total_bytes: int, requested_s: float) -> Save:
    save = saves.make(step, attempt, total_bytes, requested_s)
    saves.add(save)
    return save


def ended(saves: Saves, ticket: Ticket, is_committed: bool) -> Save:
    save = begun(saves, ticket.step, ticket.attempt, 0, 0.0)
    if is_committed:
        saves.committed(save.number, 0.0)
    else:
        saves.fail(save.number, ConfigError("on purpose"))
    return save


def test_tickets_are_numbered_one_after_the_other(tmp_path: Path) -> None:
    issuing = steps(tmp_path)
    assert [issuing.issue(None) for _ in range(3)] == [Ticket(0), Ticket(1), Ticket(2)]
    assert issuing.issue(None, least=10) == Ticket(10)
    assert issuing.issue(20) == Ticket(20)
    with pytest.raises(ExistsError, match=r"step 15 comes before step 20, which is being saved .* rewind\(\)"):
        issuing.issue(15)
    assert issuing.issue(None) == Ticket(21)
    issuing.enter(SaveId(40))
    assert issuing.issue(None) == Ticket(41)
    with pytest.raises(ExistsError, match="comes before step 40"):
        issuing.issue(39)


def test_a_ticket_comes_after_what_an_earlier_run_has_committed_since_the_first_look(tmp_path: Path) -> None:
    """A checkpointer is made while the keeper of a run that was killed still commits; a ticket is issued after that."""
    issuing, restored = steps(tmp_path), steps(tmp_path)
    issuing.look()
    restored.look()
    with Checkpointer(tmp_path) as earlier:
        earlier.save(6, {"n": 1})
    assert issuing.issue(None) == Ticket(7)
    restored.enter(SaveId(3))  # the run goes on from there, whatever is newer
    assert restored.issue(None) == Ticket(4)


def test_steps_rise_but_for_those_that_failed(tmp_path: Path) -> None:
    saving, saves = steps(tmp_path), Saves("warn")
    saves.on_end.append(saving.ended)

    def begin(step: int) -> Save:
        return begun(saves, step, saving.begin(step), 0, 0.0)

    first = begin(5)
    with pytest.raises(ExistsError, match=r"step 3 comes before step 5, which is being saved .* rewind\(\)"):
        begin(3)
    saves.committed(first.number, 0.0)
    with pytest.raises(ExistsError, match="step 3 comes before step 5, which has been saved in this run already"):
        begin(3)
    with pytest.raises(ExistsError, match="step 3 comes before step 5"):
        saving.issue(3)
    failing = begin(9)
    saves.fail(failing.number, ConfigError("on purpose"))
    lower = begin(7)  # nobody will restore step 9
    saves.committed(lower.number, 0.0)
    again = begin(9)
    assert again.attempt == 2
    saving.give_back(9, 2, has_failed=False)  # skipped
    assert begin(8).attempt == 1
    assert saving.issue(None) == Ticket(10), "a number that was tried is not given out"


def test_who_saves_a_later_step_in_the_middle_of_a_save_wins(tmp_path: Path) -> None:
    """A signal handler saves step 8 while the training loop takes step 7: what it saves then is newer than step 8."""
    saving = steps(tmp_path)

    class Interrupted(dict[int, object]):
        def setdefault(self, step: int, default: object = None) -> object:
            found = super().setdefault(step, default)
            if step == 7:
                saving.begin(8)
            return found

    saving._taken = Interrupted()  # type: ignore[assignment]
    with pytest.raises(ExistsError, match="step 7 comes before step 8"):
        saving.begin(7)
    saving.begin(9)


def test_of_what_was_saved_only_the_newest_is_remembered(tmp_path: Path) -> None:
    saving, saves = steps(tmp_path), Saves("warn")
    saves.on_end.append(saving.ended)
    waiting = begun(saves, 0, saving.begin(0), 0, 0.0)
    for step in range(1, 1200):
        save = begun(saves, step, saving.begin(step), 0, 0.0)
        saves.committed(save.number, 0.0)
    assert len(saving._taken) <= 1001
    assert saving._taken[0].attempt == waiting.attempt == 1, "it is still on its way"


def test_no_two_threads_are_given_the_same(tmp_path: Path) -> None:
    issuing = steps(tmp_path)
    found: list[Ticket] = []
    threads = [threading.Thread(target=lambda: found.extend(issuing.issue(None) for _ in range(200))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 800


@pytest.mark.parametrize("is_issuer", [True, False])
def test_a_ticket_is_used_once(tmp_path: Path, is_issuer: bool) -> None:
    issuing = steps(tmp_path)
    ticket = issuing.issue(7)
    with pytest.raises(ExistsError, match="being saved"):
        issuing.issue(7)
    with pytest.raises(ExistsError, match="being saved"):
        issuing.begin(7)
    using = issuing if is_issuer else steps(tmp_path)
    using.redeem(ticket)
    for is_committed in (None, False, True):
        if is_committed is not None:
            using.ended(ended(Saves("warn"), ticket, is_committed))
        with pytest.raises(ExistsError, match="used already"):
            using.redeem(ticket)
        if is_committed is False:
            ticket = Ticket(7, 2)
            if is_issuer:
                assert issuing.issue(7) == ticket
            using.redeem(ticket)


def test_an_attempt_that_was_given_up_does_not_count_any_more(tmp_path: Path) -> None:
    """Rank 0 knows that the first has failed; the other rank is not told until later, or never."""
    issuing, other = steps(tmp_path), steps(tmp_path)
    first = issuing.issue(7)
    issuing.redeem(first)
    other.redeem(first)
    assert issuing.withdraw(first), "it had begun"
    second = issuing.issue(7)
    assert second == Ticket(7, 2)
    for each in (issuing, other):
        each.redeem(second)
        each.ended(ended(Saves("warn"), first, is_committed=False))  # the news comes late
        with pytest.raises(ExistsError, match="being saved"):
            each.begin(7)
        each.ended(ended(Saves("warn"), second, is_committed=True))
        with pytest.raises(ExistsError, match="has been saved"):
            each.begin(7)
        with pytest.raises(ExistsError, match="used already"):
            each.redeem(first)
    third = issuing.issue(None)
    assert not issuing.withdraw(third), "nothing had begun"
    assert issuing.issue(third.step) == Ticket(third.step, 2)


def test_a_ticket_travels(tmp_path: Path) -> None:
    ticket = Ticket(12, 3)
    assert pickle.loads(pickle.dumps(ticket)) == ticket
    assert msgspec.json.decode(msgspec.json.encode(ticket), type=Ticket) == ticket


def test_a_save_has_the_identity_of_its_ticket(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(41, {"n": 0})
        first = spi.issue(checkpointer)
        assert first == Ticket(42)
        spi.save(checkpointer, {"n": 1}, first, metadata={"loss": 0.5}).wait()
        with pytest.raises(ExistsError, match="used already"):
            spi.save(checkpointer, {"n": 2}, first)
        second = spi.issue(checkpointer, 50)
        with pytest.raises(UnsupportedStateError):
            spi.save(checkpointer, {"n": object()}, second)
        again = spi.issue(checkpointer, 50)
        assert again == Ticket(50, 2)
        spi.save(checkpointer, {"n": 3}, again).wait()
        with pytest.raises(ConfigError, match="step must be"):
            spi.issue(checkpointer, -1)
        assert checkpointer.save(51, {"n": 4}).attempt == 1
    catalog = Catalog(tmp_path)
    assert catalog.steps() == [41, 42, 50, 51]
    assert catalog.find(50).attempt == 2
    with catalog.open(42) as found:
        assert found.manifest.metadata == {"loss": 0.5}
        assert found.of(0).seal.updates is None
