"""The whole campaign of mutated files: everything that reads a root reads every mutant."""

from __future__ import annotations

import time

import pytest

from tests.faults.mutants import OPERATIONS
from tests.faults.test_mutants import run_campaign


@pytest.mark.torture
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("number", range(10))
def test_20_000_mutants_are_refused_or_read_and_nothing_else(number: int) -> None:
    """In ten processes; the seed stands in every failure."""
    run_campaign(seed=int(time.time()) + number * 1000, count=2_000, at_once=len(OPERATIONS), timeout_s=3600)
