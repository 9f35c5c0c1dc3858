"""What `save(metadata=)` takes, and what becomes of it."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
import torch

from stillframe import ConfigError
from stillframe.model import check_metadata


def test_numbers_of_torch_are_plain_numbers() -> None:
    assert check_metadata({"loss": torch.tensor(0.5), "n": torch.tensor([3])}) == {"loss": 0.5, "n": 3}


def test_a_number_that_is_not_finite_is_told_from_one_that_is_missing() -> None:
    given = {"a": math.nan, "b": math.inf, "c": torch.tensor(-math.inf), "d": None}
    stored = msgspec.json.decode(msgspec.json.encode(check_metadata(given)))
    assert stored == {"a": "nan", "b": "inf", "c": "-inf", "d": None}


@pytest.mark.parametrize("value", [torch.ones(3), torch.ones(0), [1], {"a": 1}, 1j, b"a"], ids=repr)
def test_what_is_no_plain_value_is_refused_by_its_name(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"metadata\['curve'\]"):
        check_metadata({"loss": 1.0, "curve": value})
