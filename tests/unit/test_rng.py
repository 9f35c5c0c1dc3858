"""The random state of accelerators, restored where other devices are visible than at save time."""

from __future__ import annotations

import random
import re
import warnings
from pathlib import Path

import pytest
import torch

import stillframe
from stillframe.state import rng


class Generators:
    """Stands in for torch's accelerators: the state of each is one number."""

    def __init__(self, *numbers: int, current: int = 0) -> None:
        self.numbers = list(numbers)
        self.count = len(numbers)
        self.current = current

    def get(self, index: int) -> torch.Tensor:
        return torch.tensor([self.numbers[index]], dtype=torch.uint8)

    def set(self, index: int, state: torch.Tensor) -> None:
        self.numbers[index] = int(state)


@pytest.mark.parametrize(
    ("saved", "here", "after", "said"),
    [
        (Generators(1, 2), Generators(8, 9), [1, 2], ""),
        (Generators(1, 2, current=1), Generators(8, 9), [2, 2], ""),
        (Generators(1, 2, 3, 4), Generators(9), [1], "saved with 4 accelerators, restored with 1.*number 1, 2, 3$"),
        (Generators(1, 2, 3, 4, current=2), Generators(9), [3], "took the state of number 0, 1, 3$"),
        (Generators(1, current=0), Generators(7, 8, 9, current=2), [1, 8, 1], "unchanged is number 1$"),
        (Generators(1, 2), Generators(), [], "saved with 2 accelerators, restored with 0.*number 0, 1$"),
        (
            Generators(),
            Generators(8, 9),
            [8, 9],
            "saved with 0 accelerators, restored with 2: unchanged is number 0, 1",
        ),
    ],
)
def test_what_is_there_is_restored_and_the_rest_is_told(
    monkeypatch: pytest.MonkeyPatch, saved: Generators, here: Generators, after: list[int], said: str
) -> None:
    monkeypatch.setattr(rng, "Devices", lambda: saved)
    state = stillframe.RNG().state_dict()
    drawn = random.random(), torch.rand(3).tolist()
    monkeypatch.setattr(rng, "Devices", lambda: here)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stillframe.RNG().load_state_dict(state)
    assert [bool(said and re.search(said, str(each.message))) for each in caught] == [True] * bool(said)
    assert here.numbers == after
    assert (random.random(), torch.rand(3).tolist()) == drawn


def test_a_checkpoint_of_four_devices_is_restored_on_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rng, "Devices", lambda: Generators(1, 2, 3, 4, current=3))
    with stillframe.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"rng": stillframe.RNG(), "x": torch.ones(2)})
    here = Generators(9)
    monkeypatch.setattr(rng, "Devices", lambda: here)
    state = {"rng": stillframe.RNG(), "x": torch.zeros(2)}
    with pytest.warns(RuntimeWarning, match="saved with 4 accelerators, restored with 1"):
        assert stillframe.restore(tmp_path, state).step == 1
    assert here.numbers == [4]


def test_the_real_devices_are_as_many_as_torch_has() -> None:
    devices = rng.Devices()
    assert devices.count == (torch.accelerator.device_count() if torch.accelerator.is_available() else 0)
