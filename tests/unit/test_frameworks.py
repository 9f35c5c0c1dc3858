"""What the ways into training frameworks have in common."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch.distributed as dist

from stillframe.errors import ExistsError, StateError, StorageError
from stillframe.integrations.frameworks import agreed, here, together
from stillframe.store.protocol import Missing


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


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ExistsError("the tag is there"), ExistsError),
        (Missing("the tag is gone"), StorageError),  # one of our own, which is not public
        (PermissionError("its own"), StorageError),
        (UnicodeDecodeError("utf-8", b"", 0, 1, "cannot be made of its text"), StateError),
    ],
)
def test_a_rank_that_has_not_failed_raises_an_error_of_the_same_kind(
    monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception]
) -> None:
    told: list[Any] = []

    def gathered(said: list[Any], mine: Any) -> None:
        told.append(mine)
        said[:] = [mine, told[0]]

    def failing() -> int:
        raise error

    assert together(lambda: 1) == [1]  # without ranks
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather_object", gathered)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(dist, "all_reduce", lambda flag, _: flag.fill_(1))  # some rank has failed
    with pytest.raises(type(error), match=re.escape(str(error))):
        here(failing)
    text = re.escape(f"rank 1 could not load: {type(error).__name__}: {error}")
    with pytest.raises(kind, match=f"^{text}$") as found:
        together(lambda: 1, "load")
    assert type(found.value) is kind
    with pytest.raises(kind, match=f"^{text}$"):
        here(lambda: 1, "load")


def test_while_nothing_fails_the_ranks_compare_one_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathering objects takes several collectives, and on each rank as much memory as there are ranks."""
    compared: list[int] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo")
    monkeypatch.setattr(dist, "all_reduce", lambda flag, _: compared.extend(flag.tolist()))
    monkeypatch.setattr(dist, "all_gather_object", lambda *_: pytest.fail("an object was gathered"))
    assert here(lambda: "mine") == "mine"
    assert compared == [0]
