"""Hundreds of real signals at random moments."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.test_signals import interrupt

pytestmark = [pytest.mark.torture, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("seed", [2, 3, 4])
def test_a_loop_interrupted_200_times_hangs_nowhere_and_tears_nothing(tmp_path: Path, seed: int) -> None:
    interrupt(200, seed, tmp_path, 1700)
