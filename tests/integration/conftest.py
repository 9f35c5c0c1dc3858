"""What frameworks leave behind in this process ends with the test: process groups, and variables that name ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before, was_initialized = dict(os.environ), dist.is_initialized()
    yield
    if dist.is_initialized() and not was_initialized:
        dist.destroy_process_group()
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)
