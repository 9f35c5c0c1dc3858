"""A server that nobody answers for: every wait ends, is told while it lasts, and can be interrupted."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import stillframe
from stillframe import Catalog, Checkpointer, DeadlineError, StorageError, Tier, spi, waits
from stillframe.checkpoint.lock import RootLock
from stillframe.checkpoint.survey import survey
from stillframe.checkpoint.tiers import look_at_tiers
from stillframe.format import names
from stillframe.format.epochs import Carried, decode_carrying
from stillframe.keeper.taking import Taking
from stillframe.latch import later
from stillframe.model import SaveId
from stillframe.save import keeper_process
from stillframe.store import clouds, hastily, open_store
from stillframe.store.activity import Activity
from stillframe.store.objects import open_objects
from tests.faults.held import bootstrap
from tests.support import is_alive, pause, until

URL = "s3://bucket/run"
SOON_S = 15.0
"""Far below the 30 s and 300 s that a server is waited for."""
LEAVE_SOON = """
from stillframe.keeper import leaving
leaving._ATTEMPT_S = 1.5
"""
"""A keeper that could go waits so long for an attempt in which nothing moves."""


@pytest.fixture
def dead() -> Iterator[str]:
    """An address where connections are refused, and nobody else can begin to listen."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "TELL_S", 0.1)
    monkeypatch.setattr(waits, "_told_s", {})
    monkeypatch.setattr(keeper_process, "_BOOTSTRAP", bootstrap(more=LEAVE_SOON))


def options(at: str, **more: Any) -> dict[str, Any]:
    return {"endpoint": at, "access_key_id": "a", "secret_access_key": "b", "region": "c", **more}


class Interrupting(logging.Handler):
    """Ctrl-C when one of these is said: on the thread that says it, so it is known where that is."""

    def __init__(self, *at: str) -> None:
        super().__init__()
        self.at = at
        self.interrupted_s: list[float] = []
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith(self.at):
            self.interrupted_s.append(time.monotonic())
            self.said.append(record.getMessage())
            signal.raise_signal(signal.SIGINT)


@pytest.fixture
def interrupting() -> Iterator[Callable[..., Interrupting]]:
    with contextlib.ExitStack() as stack:

        def begin(*at: str) -> Interrupting:
            handler = Interrupting(*at)
            logging.getLogger("stillframe").addHandler(handler)
            stack.callback(logging.getLogger("stillframe").removeHandler, handler)
            return handler

        yield begin


INTERRUPTED = "close() was interrupted"


@pytest.mark.parametrize("at", [["waiting for s3"], ["waiting for s3", INTERRUPTED]], ids=["once", "twice"])
def test_ctrl_c_ends_close_soon_and_it_says_what_is_left(
    tmp_path: Path, dead: str, at: list[str], interrupting: Any, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = Checkpointer(tmp_path, tiers=[Tier(URL, storage_options=options(dead))])
    checkpointer.save(7, {"weights": torch.zeros(10)}).wait()
    handler = interrupting(*at)
    with pytest.raises(KeyboardInterrupt):
        checkpointer.close()
    assert len(handler.interrupted_s) == len(at)
    assert time.monotonic() - handler.interrupted_s[0] < SOON_S
    assert handler.said[0].startswith(f"waiting for {URL}: step 7 is to be carried there (")
    left = f"Its keeper carries on as long as that works, and the next run does the rest: {URL}: step 7 "
    assert f"{INTERRUPTED}. {left}" in "".join([caplog.text, *handler.said])
    assert stillframe.load(tmp_path)["weights"].shape == (10,)
    checkpointer.close()  # may be called again


def test_ctrl_c_in_close_gives_up_what_is_not_staged_and_says_so(
    tmp_path: Path, interrupting: Any, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = Checkpointer(tmp_path, arena="32MiB", on_error="warn")
    keeper = spi.keeper_pid(checkpointer)
    assert keeper is not None
    checkpointer.save(1, {"weights": torch.zeros(100)}).wait()
    pause(keeper)
    try:
        saves = [checkpointer.save(step, {"weights": torch.zeros(9 << 20)}) for step in (2, 3)]  # 36 MiB
        timer = threading.Timer(1.0, signal.raise_signal, [signal.SIGINT])
        began_s = time.monotonic()
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            timer.start()
            checkpointer.close()
        assert time.monotonic() - began_s < 2 * SOON_S
    finally:
        os.kill(keeper, signal.SIGCONT)
    assert [save.phase for save in saves] == ["failed", "failed"]
    assert f"{INTERRUPTED}. Steps that are not saved: 2, 3" in caplog.text


def test_ctrl_c_ends_a_request_that_is_repeated(dead: str, interrupting: Any) -> None:
    handler = interrupting(f"waiting for {URL} at {dead} (")
    with pytest.raises(KeyboardInterrupt):
        stillframe.restore(URL, {}, storage_options=options(dead))
    assert time.monotonic() - handler.interrupted_s[0] < SOON_S


def test_a_root_that_is_down_is_told_of_and_then_an_error(dead: str, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(URL, storage_options=options(dead, retry_timeout=0.5)) as checkpointer:
        assert f"waiting for {URL} at {dead}" in caplog.text
        with pytest.raises(StorageError, match=rf"{dead} does not answer \(Connection refused\)"):
            checkpointer.restore({})


def test_for_somebody_who_waits_a_keeper_is_as_hasty_as_anybody(dead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what has been waited for once is not waited for a second time."""
    monkeypatch.setattr(clouds, "_READ_AGAIN_S", 0.5)
    store = open_objects(URL, options(dead), Activity())
    taken: list[None] = []
    taking = Taking(store, RootLock(store, 0, "run"), lambda: taken.append(None))
    began_s = time.monotonic()
    with hastily(store), pytest.raises(StorageError, match="does not answer") as first:
        taking.take(is_awaited=True)
    assert time.monotonic() - began_s < SOON_S
    with hastily(store), pytest.raises(StorageError) as second:
        taking.take(is_awaited=True)
    assert second.value is first.value
    assert not taken
    assert not later(taking.take).wait(3.0)  # for a save, it goes on


def test_a_tier_that_is_down_is_told_of_while_it_is_looked_at(
    tmp_path: Path, dead: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"ENDPOINT_URL": dead, "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "REGION": "c"}
    for name, value in given.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setattr("stillframe.restoring.sources._PATIENCE_S", 1.5)
    monkeypatch.setattr("stillframe.checkpoint.tiers.PATIENCE_S", 1.5)
    tiers = [Tier(URL, storage_options={"retry_timeout": 600})]
    with Checkpointer(tmp_path, tiers=tiers) as checkpointer:
        checkpointer.save(1, {"weights": torch.zeros(10)}).wait()
        keeper = spi.keeper_pid(checkpointer) or 0
        checkpointer.close(timeout_s=1)
    assert f"{URL} is left behind by close()" in caplog.text
    caplog.clear()
    waits._told_s.clear()
    assert stillframe.restore(tmp_path, {"weights": torch.ones(10)}, tiers=tiers).step == 1
    silence = f"nobody has answered at {dead} for 1.5 s: does it run, and can it be reached from here?"
    told = [each.message for each in caplog.records if each.levelno == logging.WARNING]
    assert told[0].startswith(f"waiting for {URL}: what does it hold? (")
    assert told[1:] == [f"{URL} is not restored from: {silence}"]
    caplog.clear()
    waits._told_s.clear()
    (view,) = look_at_tiers(survey(tmp_path))
    assert view.trouble == silence
    assert f"waiting for {URL}: what does it hold?" in caplog.text
    until(lambda: not is_alive(keeper), "the keeper leaves a request that is repeated for ten minutes")
    assert Carried(URL, None, SaveId(1)) in carried(tmp_path), "the next run knows what is due"


def test_a_keeper_leaves_a_tier_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a dead mount does: no call into it returns, and none fails."""
    gate, root, tier = tmp_path / "gate", tmp_path / "root", tmp_path / "tier"
    held = f"""
from stillframe.store.calls import Calls
import os, time
real = Calls.pwrite
def pwrite(self, fd, *more):
    while os.path.exists({str(gate)!r}) and os.readlink(f"/proc/self/fd/{{fd}}").startswith({str(tier)!r}):
        time.sleep(0.1)
    return real(self, fd, *more)
Calls.pwrite = pwrite
"""
    monkeypatch.setattr(keeper_process, "_BOOTSTRAP", bootstrap(more=held + LEAVE_SOON))
    gate.touch()
    checkpointer = Checkpointer(root, tiers=[Tier(tier)])
    checkpointer.save(1, {"weights": torch.zeros(10)}).wait()
    keeper = spi.keeper_pid(checkpointer) or 0
    checkpointer.close(timeout_s=1)
    until(lambda: not is_alive(keeper), "the keeper leaves")
    assert Catalog(tier).steps() == []
    (noted,) = carried(root)
    assert noted.root == str(tier)
    assert SaveId(1) in (noted.save, noted.waiting)
    gate.unlink()
    with Checkpointer(root, tiers=[Tier(tier)]) as checkpointer:
        began_s = time.monotonic()
    assert time.monotonic() - began_s < SOON_S, "what is due is carried by a run that restores or saves: not this one"
    with Checkpointer(root, tiers=[Tier(tier)]) as checkpointer:
        assert checkpointer.restore({"weights": torch.ones(10)}).step == 1
    assert Catalog(tier).steps() == [1]


def carried(root: Path) -> list[Carried]:
    """What the root says is to be carried on."""
    return decode_carrying((root / names.carrying(0)).read_bytes(), file="").tiers


def test_waiting_for_a_tier_that_is_down_is_told(tmp_path: Path, dead: str, caplog: pytest.LogCaptureFixture) -> None:
    tier = Tier(URL, storage_options=options(dead, retry_timeout=1))
    checkpointer = Checkpointer(tmp_path, tiers=[tier])
    checkpointer.save(7, {"weights": torch.zeros(10)}).wait()
    with pytest.raises(DeadlineError, match=f"{URL} is behind: step 7 is to be carried there"):
        checkpointer.wait(tier=tier, timeout_s=6)
    assert f"waiting for {URL}: step 7 is to be carried there" in caplog.text
    checkpointer.close(timeout_s=0.1)


def test_a_wait_that_does_not_last_is_not_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert list(open_store(tmp_path).list()) == []
    assert waits.waited(lambda: 3, waits.Wait("nobody", 1.0)) == 3
    assert not caplog.text


def test_who_was_just_told_of_is_not_told_of_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "TELL_S", 0.0)
    for _ in range(5):
        waits.Wait("somebody", None).turn("why")
    assert caplog.messages == ["waiting for somebody: why (0 s so far; as long as it gets on)"]
    waits._told_s["somebody"] -= 1000
    waits.Wait("somebody", None).turn()
    assert len(caplog.messages) == 2
