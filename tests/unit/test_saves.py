"""A save may fail at any moment, also between two looks at it."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import pytest

from stillframe.errors import DeadlineError, KeeperError
from stillframe.save import saves as saves_module
from stillframe.save.saves import Save, Saves

pytestmark = pytest.mark.timeout(30)


class FailsWhenLookedAt(Save):
    """Its phase is ``captured`` the first few times that somebody asks."""

    looks = 0

    @property
    def phase(self) -> Any:
        if self.looks:
            self.looks -= 1
            return "captured"
        if self._phase == "captured":
            self._saves.fail(self.number, KeeperError("on purpose"))
        return self._phase


def make(looks: int) -> tuple[Saves, FailsWhenLookedAt]:
    saves = Saves("raise")
    save = FailsWhenLookedAt(saves, 1, 1, 1, 0, time.monotonic())
    save.looks = looks
    saves.add(save)
    return saves, save


@pytest.mark.parametrize("looks", range(6))
def test_whoever_waits_learns_of_the_failure(looks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saves_module, "LOOK_S", 0.01)
    saves, save = make(looks)
    with pytest.raises(KeeperError, match="on purpose"):
        save.wait()
    saves, save = make(looks)
    saves.wait_all("committed", None)
    with pytest.raises(KeeperError, match="on purpose"):
        saves.raise_untold()


@pytest.mark.parametrize("looks", range(4))
def test_a_wait_that_times_out_in_that_moment_never_says_that_it_is_done(looks: int) -> None:
    saves, save = make(looks)
    with pytest.raises((KeeperError, DeadlineError)):
        save.wait(timeout_s=0.0)
    saves, save = make(looks)
    with contextlib.suppress(DeadlineError):
        saves.wait_all("committed", 0.0)


def test_many_waits_and_failures_at_once() -> None:
    for _ in range(50):
        saves = Saves("warn")
        made = [saves.make(step, 1, 0, time.monotonic()) for step in range(20)]
        for each in made:
            saves.add(each)
        thread = threading.Thread(target=lambda: [saves.fail(each.number, KeeperError("on purpose")) for each in made])  # noqa: B023
        thread.start()
        saves.wait_all("committed", 10)
        thread.join()
