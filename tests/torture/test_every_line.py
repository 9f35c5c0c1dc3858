"""An error or an interrupt at every line of what saves, waits and restores."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.test_every_line import try_lines

pytestmark = [pytest.mark.torture, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("mode", ["once", "always"])
@pytest.mark.parametrize("where", ["stage", "receive", "arrive"])
def test_every_line_of_the_threads(where: str, mode: str, tmp_path: Path) -> None:
    assert try_lines(where, mode, 0, 1, tmp_path, 1700) > 80


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("mode", ["once", "always"])
def test_every_line_of_the_keeper(mode: str, part: int, tmp_path: Path) -> None:
    assert try_lines("keeper", mode, part, 4, tmp_path, 1700) > 500


@pytest.mark.parametrize("where", ["save", "fence", "wait", "restore", "close"])
def test_every_line_of_a_call(where: str, tmp_path: Path) -> None:
    assert try_lines(where, "once", 0, 1, tmp_path, 1700) > 10
