"""The device is built before its tests begin, so that none of them waits for it, and its process ends with them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.device.build import build
from tests.device.running import end_workers


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if any(Path(__file__).parent in item.path.parents for item in items):
        with contextlib.suppress(Exception):  # each test says what is wrong
            build()


@pytest.fixture(scope="session", autouse=True)
def _no_worker_is_left() -> Iterator[None]:
    yield
    end_workers()
