"""A wait that lasts is told, also if another one for the same was told of a moment ago."""

from __future__ import annotations

import logging

import pytest

from stillframe import waits


class Clock:
    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


def test_a_wait_that_follows_another_is_told_later_and_not_never(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    monkeypatch.setattr(waits, "time", clock)
    monkeypatch.setattr(waits, "_told_s", {})
    told: list[float] = []
    with caplog.at_level(logging.WARNING, "stillframe"):
        for _ in range(2):  # one ends when it has been told of; then another begins
            wait = waits.Wait("a tier", 30.0)
            count = len(told)
            while len(told) == count:
                clock.now_s += 1
                assert clock.now_s < 1060
                wait.turn()
                told += [clock.now_s] * (len(caplog.records) - len(told))
    assert told == [1005.0, 1025.0]
