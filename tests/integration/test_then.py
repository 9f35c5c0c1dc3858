"""Functions that are called when a save is committed: when, where, and what becomes of those that misbehave."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from stillframe import Catalog, Checkpointer, ConfigError, DeadlineError, Save, UnsupportedStateError, spi
from tests.support import kill, pause, run_child, until


def test_it_is_called_when_the_checkpoint_is_durable_and_has_its_label(tmp_path: Path) -> None:
    seen: list[tuple[int, list[int], bool, str]] = []

    def note(save: Save) -> None:
        seen.append(
            (save.step, Catalog(tmp_path).steps(), (tmp_path / f"tag{save.step}").is_dir(), save.phase),
        )

    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            spi.save(checkpointer, {"n": step}, step, label=spi.Label(f"tag{step}", ("x",))).then(note)
            checkpointer.wait()
    assert [(each[0], each[2], each[3]) for each in seen] == [(1, True, "committed"), (2, True, "committed")]
    assert seen[0][1][:1] == [1]
    assert seen[1][1] == [1, 2]


def test_they_are_called_in_order_on_a_thread_of_their_own_and_close_waits(tmp_path: Path) -> None:
    order: list[object] = []
    threads: set[int] = set()
    gate = threading.Event()

    def slow(save: Save) -> None:
        threads.add(threading.get_ident())
        gate.wait(30)
        order.append(save.step)

    checkpointer = Checkpointer(tmp_path)
    saves = [checkpointer.save(step, {"n": step}) for step in (1, 2, 3)]
    for save in saves:
        save.then(slow)
    checkpointer.wait()  # neither waits for a function, nor is held up by one
    assert order == []
    saves[0].then(lambda save: order.append("late"))  # it is committed already
    threading.Timer(0.2, gate.set).start()
    checkpointer.close()
    assert order == [1, 2, 3, "late"] or order == [1, "late", 2, 3]
    assert threading.get_ident() not in threads
    assert len(threads) == 1


def test_what_a_function_raises_costs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    called: list[int] = []

    def bad(save: Save) -> None:
        raise SystemExit("no")

    with caplog.at_level(logging.WARNING, "stillframe"), Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"n": 1}).then(bad)
        save = checkpointer.save(2, {"n": 2})
        save.then(lambda save: called.append(save.step))
    assert called == [2]
    assert "the function raised SystemExit: no" in caplog.text
    with pytest.raises(ConfigError, match="give a function"):
        save.then(3)  # type: ignore[arg-type]


def test_it_is_not_called_for_a_save_that_fails(tmp_path: Path) -> None:
    """But what waits for its end, whichever it is, is."""
    called: list[int] = []
    over: list[tuple[int, str]] = []
    with Checkpointer(tmp_path, on_error="warn") as checkpointer:
        first = checkpointer.save(1, {"n": 1})
        spi.when_over(first, lambda save: over.append((save.step, save.phase)))
        first.wait()
        pid = spi.keeper_pid(checkpointer)
        assert pid is not None
        pause(pid)
        save = checkpointer.save(2, {"n": 2})
        save.then(lambda save: called.append(save.step))
        spi.when_over(save, lambda save: over.append((save.step, save.phase)))
        save.wait("staged")
        kill(pid)
        until(lambda: save.error is not None, "the save failed")
        spi.when_over(save, lambda save: over.append((-save.step, save.phase)))  # it is over already
        with pytest.raises(UnsupportedStateError):
            checkpointer.save(3, {"f": object()})
    assert called == []
    assert over == [(1, "committed"), (2, "failed"), (-2, "failed")]


def test_a_thread_that_cannot_be_had_at_once_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[int] = []
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "stillframe-then":
            monkeypatch.setattr(threading.Thread, "start", start)
            raise RuntimeError("can't start new thread")
        start(thread)

    with Checkpointer(tmp_path) as checkpointer:
        save = checkpointer.save(1, {"n": 1})
        save.wait()
        monkeypatch.setattr(threading.Thread, "start", refuse)
        save.then(lambda save: called.append(save.step))
        assert called == []
    assert called == [1]


def test_close_gives_up_on_a_function_that_hangs(tmp_path: Path) -> None:
    gate = threading.Event()
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"n": 1}).then(lambda save: gate.wait(30))
    checkpointer.wait()
    with pytest.raises(DeadlineError, match=r"Save.then\(\) has not returned"):
        checkpointer.close(timeout_s=0.3)
    gate.set()
    assert Catalog(tmp_path).steps() == [1]


def test_a_function_may_have_other_steps_removed(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"n": 1}).wait()
        checkpointer.save(2, {"n": 2}).then(lambda save: Catalog(tmp_path).delete(1))
    assert Catalog(tmp_path).steps() == [2]


CODE = """
import sys, threading
from stillframe import Checkpointer
checkpointer = Checkpointer(sys.argv[1])
say = lambda word: print(word, flush=True)
runs = threading.Event()
checkpointer.save(1, {"n": 1}).then(lambda save: (say("one"), runs.set(), threading.Event().wait(1), say("ended")))
runs.wait()
checkpointer.save(2, {"n": 2}).then(lambda save: say("two"))
"""


def test_at_exit_the_one_that_runs_is_waited_for(tmp_path: Path) -> None:
    said = run_child(CODE, tmp_path)
    assert said.split() == ["one", "ended"]
