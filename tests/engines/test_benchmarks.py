"""``python -m benchmarks.loops`` runs with engines; as :mod:`tests.loops.test_benchmarks` for the other frameworks."""

from __future__ import annotations

import pytest

from tests.loops.driving import LIFE_S
from tests.loops.test_benchmarks import measure


@pytest.mark.timeout(LIFE_S + 30)
@pytest.mark.parametrize("engine", ["megatron", "ray", "torchtitan"])
def test_an_engine_is_measured(engine: str) -> None:
    measure(engine)
