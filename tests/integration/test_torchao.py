"""Weights that torchao has quantised: saved and restored as they are, and into their own kind only."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import stillframe
from stillframe import Checkpointer, MismatchError
from tests.support import assert_same
from tests.wrapping import apart

pytest.importorskip("torchao")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torchao.quantization as torchao

WEIGHTS = {
    "float8": lambda: torchao.Float8WeightOnlyConfig(),
    "int8": lambda: torchao.Int8WeightOnlyConfig(),
    "int8 with activations": lambda: torchao.Int8DynamicActivationInt8WeightConfig(),
    "int4 in int8": lambda: torchao.IntxWeightOnlyConfig(),
}


def quantised(name: str, seed: int) -> Any:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 128)).to(torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torchao.quantize_(model, WEIGHTS[name]())
    return model


@pytest.mark.parametrize("name", WEIGHTS)
def test_quantised_weights_come_back(tmp_path: Path, name: str) -> None:
    model, live = quantised(name, 1), quantised(name, 2)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": model})
    weight = live[1].weight
    stillframe.restore(tmp_path, {"model": live})
    assert live[1].weight is weight
    assert_same(apart(live), apart(model))
    for other in WEIGHTS.keys() - {name}:
        before = quantised(other, 3)
        expected = apart(before)
        with pytest.raises(MismatchError, match=r"model/0.weight: a .*Tensor .*in the checkpoint"):
            stillframe.restore(tmp_path, {"model": before})
        assert_same(apart(before), expected)
