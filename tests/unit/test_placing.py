"""A verified chunk goes into a tensor the same way, whether its memory is ours or lent by a store, read-only."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from stillframe.restoring.place import _Memory, _put


@pytest.mark.parametrize("made", [bytes, bytearray])
@pytest.mark.parametrize("live", [lambda: torch.zeros(4, 6), lambda: torch.zeros(6, 4).t()], ids=["plain", "strided"])
def test_lent_memory_is_placed_like_our_own(
    made: Callable[[bytes], bytes | bytearray], live: Callable[[], torch.Tensor]
) -> None:
    expected = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    stored = b"before" + bytes(2) + expected.numpy().tobytes() + b"after"
    into = live()
    memory = _Memory(memoryview(made(stored)))
    _put(memory, slice(8, 8 + 48), into, 0)  # two of four rows
    assert torch.equal(into[:2], expected[:2])
    assert not into[2:].any()
    _put(memory, slice(8 + 48, 8 + 96), into, 48)
    assert torch.equal(into, expected)
