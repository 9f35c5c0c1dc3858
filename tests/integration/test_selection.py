"""``restore(only=…, exclude=…)``: what is chosen comes back, the rest stays as it is, whether it fits or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import stillframe
from stillframe import Checkpointer, ConfigError, MismatchError, TrainState
from tests.support import assert_same, make_model, train_step


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


def trained(seed: int, lr: float = 0.1) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    train_step(model, optimizer)
    return {"model": model, "optimizer": optimizer, "data": {"epoch": seed, "seen": [seed] * 3}, "rows": [seed, "x"]}


def copied(state: dict[str, Any]) -> dict[str, Any]:
    parts = {key: value.state_dict() if hasattr(value, "state_dict") else value for key, value in state.items()}
    copy: dict[str, Any] = torch.utils._pytree.tree_map(
        lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf,
        parts,
    )
    return copy


def test_what_is_not_chosen_stays_as_it_is(root: Path) -> None:
    saved = trained(1)
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, saved)
    stored = copied(saved)

    def check(live: dict[str, Any], *chosen: str, **options: Any) -> None:
        before = copied(live)
        report = stillframe.restore(root, live, **options)
        assert report.step == 1
        after = copied(live)
        for part in before:
            assert_same(after[part], stored[part] if part in chosen else before[part], part)

    check(trained(2), "model", only="model")
    check(trained(2), "model", "optimizer", exclude=["data", "row*"])
    check(trained(2), "model", "data", only=("*",), exclude=("optimizer", "rows"))

    live = trained(2, lr=0.7)
    weight = live["model"][0].weight.detach().clone()
    stillframe.restore(root, live, only=["model/*", "data/seen"], exclude="model/0.weight")
    assert_same(live["model"][0].weight.detach(), weight)
    assert_same(live["model"][2].weight.detach(), saved["model"][2].weight.detach())
    assert (live["data"], live["rows"]) == ({"epoch": 2, "seen": [1, 1, 1]}, [2, "x"])


def test_the_moments_of_an_optimizer_come_back_without_its_learning_rate(root: Path) -> None:
    saved = trained(1)
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, {"optimizer": saved["optimizer"]})
        checkpointer.save(2, TrainState(saved["model"], saved["optimizer"]))
    moments = saved["optimizer"].state_dict()["state"]
    for fresh in (True, False):
        for exclude in ("optimizer/param_groups", "optimizer/param_groups/*/lr"):
            for step in (1, 2):
                live = trained(2, lr=0.7)
                if fresh:
                    live["optimizer"] = torch.optim.AdamW(live["model"].parameters(), lr=0.7)
                state: Any = (
                    TrainState(live["model"], live["optimizer"]) if step == 2 else {"optimizer": live["optimizer"]}
                )
                stillframe.restore(root, state, step, exclude=exclude)
                assert_same(live["optimizer"].state_dict()["state"], moments)
                assert live["optimizer"].param_groups[0]["lr"] == 0.7
    live = trained(2, lr=0.7)
    own = copied(live)["optimizer"]["state"]
    stillframe.restore(root, live, 1, only="optimizer/param_groups")
    assert live["optimizer"].param_groups[0]["lr"] == 0.1
    assert_same(live["optimizer"].state_dict()["state"], own)
    stillframe.restore(root, live, 1, only="optimizer/state/0")
    assert_same(live["optimizer"].state_dict()["state"], {**own, 0: moments[0]})


def test_what_does_not_fit_is_no_mismatch_if_it_is_not_chosen(root: Path) -> None:
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, {"model": torch.nn.Linear(3, 3), "gone": torch.ones(2), "log": [1, 2], "n": 1})
    state = {"model": torch.nn.Linear(4, 3), "new": {"x": torch.ones(2)}, "log": [1, 2, 3], "n": 0}
    for options in ({}, {"exclude": "model/weight"}, {"exclude": ["model/weight", "gone"]}, {"only": ["n", "new/x"]}):
        with pytest.raises(MismatchError):
            stillframe.restore(root, state, **options)
    report = stillframe.restore(root, state, exclude=["model/weight", "gone", "new", "log"])
    assert (report.missing, report.unexpected, report.mismatched) == ((), (), ())
    assert (state["log"], state["n"]) == ([1, 2, 3], 1)


def test_a_pattern_that_matches_nothing_is_an_error_and_nothing_is_touched(root: Path) -> None:
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, {"model": torch.nn.Linear(3, 3)})
        live = torch.nn.Linear(3, 3)
        before = live.weight.detach().clone()
        for options in ({"only": ["model", "modle/*"]}, {"exclude": "modle/*"}):
            with pytest.raises(ConfigError, match=r"'modle/\*' matches nothing"):
                checkpointer.restore({"model": live}, **options)
        with pytest.raises(ConfigError, match="give a path or pattern"):
            checkpointer.restore({"model": live}, only=[1])  # type: ignore[list-item]
    assert_same(live.weight.detach(), before)
