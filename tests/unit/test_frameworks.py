"""What the ways into training frameworks have in common."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from stillframe.errors import StorageError
from stillframe.integrations.frameworks import agreed


def test_an_unexpected_error_on_rank_0_reaches_the_ranks_that_wait_for_its_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[Any] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda found, _: said.extend(found))

    def find() -> int:
        raise PermissionError("not yours")

    with pytest.raises(PermissionError, match="not yours"):
        agreed(find)
    assert isinstance(said[0], StorageError)
    assert "on rank 0: PermissionError: not yours" in str(said[0])
