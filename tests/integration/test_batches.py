"""A resumed loop gets the batches, their order and the random numbers that a loop left alone gets."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

import stillframe
from stillframe import Batches, Checkpointer, StateError
from tests.support import bytes_of, run_child, start_child

EPOCHS, SAMPLES, SIZE = 3, 10, 2


class Noisy(Dataset[Any]):
    """Each sample has its number, and noise that is drawn where it is loaded."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.rand(8)


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return ((index, torch.rand(8)) for index in range(SAMPLES))


def loader_of(kind: str) -> DataLoader[Any]:
    if kind == "streamed":
        return DataLoader(Streamed(), SIZE)
    workers = 2 if "workers" in kind else 0
    generator = torch.Generator().manual_seed(5) if "generator" in kind else None
    return DataLoader(Noisy(), SIZE, shuffle=True, num_workers=workers, generator=generator)


def train(root: Path, kind: str, stop: int = -1, seed: int = 1, kills: bool = False) -> tuple[str, list[list[int]]]:
    """A digest of everything at the end, and the samples of each step of this life."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    batches = Batches(loader_of(kind))
    state = {"model": model, "optimizer": optimizer, "data": batches}
    order: list[list[int]] = []
    with Checkpointer(root, keep=stillframe.KeepLast(2)) as checkpointer:
        step = checkpointer.restore(state).next_step
        torch.rand(7)  # whatever a program does before its loop
        for _ in range(batches.epoch, EPOCHS):
            for numbers, noise in batches:
                order.append(numbers.tolist())
                optimizer.zero_grad()
                model(noise).square().mean().backward()
                optimizer.step()
                checkpointer.save(step, state)
                if step == stop and kills:
                    os.kill(os.getpid(), signal.SIGKILL)
                if step == stop:
                    return "stopped", order
                step += 1
    tensors = [*model.state_dict().values(), *(each["exp_avg"] for each in optimizer.state.values()), torch.rand(4)]
    return hashlib.sha256(b"".join(map(bytes_of, tensors))).hexdigest(), order


@pytest.mark.parametrize("kind", ["plain", "generator", "streamed"])
def test_a_resume_within_a_pass_and_at_its_ends_is_exact(tmp_path: Path, kind: str) -> None:
    digest, order = train(tmp_path / "calm", kind)
    assert len(order) == EPOCHS * SAMPLES // SIZE
    for stop in (0, 3, 4, 14):
        root = tmp_path / f"hit-{stop}"
        _, first = train(root, kind, stop)
        again, second = train(root, kind, seed=99)
        assert first + second == order, stop
        assert again == digest, stop


def test_without_it_a_resume_is_not_exact(tmp_path: Path) -> None:
    """Else the tests above would show nothing."""
    torch.manual_seed(1)
    whole = [numbers.tolist() for _ in range(2) for numbers, _ in loader_of("plain")]
    torch.manual_seed(1)
    rng, orders = stillframe.RNG(), []
    for numbers, _ in loader_of("plain"):
        orders.append(numbers.tolist())
        if len(orders) == 3:
            kept = rng.state_dict()
            break
    rng.load_state_dict(kept)
    rest = [numbers.tolist() for numbers, _ in loader_of("plain")][3:]
    assert orders + rest != whole[:5]


def test_it_survives_several_lives_and_a_save_before_the_loop(tmp_path: Path) -> None:
    digest, order = train(tmp_path / "calm", "plain")
    found: list[list[int]] = []
    for stop in (2, 4, 5, 11):
        found += train(tmp_path / "hit", "plain", stop, seed=stop - 1)[1]
    batches = Batches(loader_of("plain"))
    state: dict[str, Any] = {"data": batches}
    with Checkpointer(tmp_path / "hit") as checkpointer:
        checkpointer.restore(state, only="data")
        before = batches.state_dict()
        torch.rand(3)
        after = batches.state_dict()
    assert (before["epoch"], before["batch"]) == (2, 2)
    assert bytes_of(before["now"]["rng"]["torch"]) == bytes_of(after["now"]["rng"]["torch"])
    again, rest = train(tmp_path / "hit", "plain", seed=7)
    assert (again, found + rest) == (digest, order)


def test_other_data_is_noticed() -> None:
    batches, other = Batches([1, 2, 3]), Batches(iter([1]))
    assert len(batches) == 3
    assert next(iter(batches)) == 1
    state = batches.state_dict()
    state["batch"] = 2
    other.load_state_dict(state)
    with pytest.raises(StateError, match="has 1 batches, of which 2 were taken"):
        next(iter(other))
    with pytest.raises(StateError, match="1 generators of its own, and had 0"):
        Batches(loader_of("generator")).load_state_dict(state)


def test_the_numbers_go_on_after_the_first_batch_of_a_loader_with_its_own_position() -> None:
    rng = stillframe.RNG()
    rng.again()  # nothing was restored
    torch.manual_seed(3)
    state = rng.state_dict()
    expected = torch.rand(3)
    rng.load_state_dict(state)
    next(iter(loader_of("plain")))
    rng.again()
    assert torch.equal(torch.rand(3), expected)


CODE = """
import json, sys
from pathlib import Path
from tests.integration import test_batches as module
stop = int(sys.argv[2])
print(json.dumps(module.train(Path(sys.argv[1]), "workers", stop, seed=int(sys.argv[3]), kills=True)))
"""


@pytest.mark.parametrize("stop", [4, 7])
def test_a_killed_loop_with_workers_that_draw_resumes_bit_for_bit(tmp_path: Path, stop: int) -> None:
    digest, order = json.loads(run_child(CODE, tmp_path / "calm", -1, 1))
    child = start_child(CODE, tmp_path / "hit", stop, 1)
    child.communicate(timeout=120)
    assert child.returncode == -signal.SIGKILL
    again, rest = json.loads(run_child(CODE, tmp_path / "hit", -1, 2))
    assert again == digest
    assert rest == order[-len(rest) :]
    assert len(order) - stop - 1 <= len(rest) < len(order)


def divided(ranks: int, size: int, samples: int = 24) -> list[Batches[torch.Tensor]]:
    """The loaders of all ranks."""
    data: Any = range(samples)
    samplers = [DistributedSampler[int](data, ranks, rank, seed=3) for rank in range(ranks)]
    return [Batches(DataLoader(data, size, sampler=each)) for each in samplers]


def taken(batches: Batches[torch.Tensor], count: int | None = None) -> list[int]:
    return [int(sample) for batch in itertools.islice(batches, count) for sample in batch]


@pytest.mark.parametrize(("then", "now"), [((4, 1), (2, 2)), ((2, 2), (1, 2)), ((1, 2), (2, 1)), ((3, 2), (2, 3))])
@pytest.mark.parametrize("steps", [1, 3, 4])
def test_on_other_ranks_every_sample_of_the_pass_still_comes_once(
    then: tuple[int, int], now: tuple[int, int], steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = divided(*then), divided(*now)
    before = [sample for each in first for sample in taken(each, steps)]
    for rank, each in enumerate(second):
        each.load_state_dict(first[rank % len(first)].state_dict())
    assert sorted(before + [sample for each in second for sample in taken(each)]) == list(range(24))
    assert all(each.epoch == 1 for each in second)
    assert not caplog.messages


def test_samples_that_come_twice_on_other_ranks_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    first, second = divided(2, 3), divided(2, 4)
    before = [sample for each in first for sample in taken(each, 1)]
    for one, other in zip(first, second, strict=True):
        other.load_state_dict(one.state_dict())
    after = [sample for each in second for sample in taken(each)]
    assert len(before) == 6
    assert sorted(after) == list(range(24))
    assert "2 × 3" in caplog.text
    assert "the last 6 of them come again" in caplog.text
    first = divided(2, 5)  # the last batch is a short one
    for each in first:
        taken(each, 3)
    (alone,) = divided(1, 5)
    alone.load_state_dict(first[0].state_dict())
    assert taken(alone) == []


@pytest.mark.parametrize(("then", "now"), [((1, 1), (1, 5)), ((2, 3), (1, 7)), ((1, 5), (3, 2))])
def test_a_pass_that_was_complete_is_so_on_other_ranks(
    then: tuple[int, int], now: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    """It is saved in the last round of the loop, and no batch of the loaders that go on ends where this one did."""
    first, second = divided(*then), divided(*now)
    assert sorted(sample for each in first for sample in taken(each, len(first[0]))) == list(range(24))
    for each in second:
        each.load_state_dict(first[0].state_dict())
        assert taken(each) == []
        assert each.epoch == 1
    assert not caplog.messages


def test_a_loader_that_is_not_divided_by_a_sampler_tells_of_other_ranks(caplog: pytest.LogCaptureFixture) -> None:
    batches = Batches(DataLoader(range(8), 2))  # type: ignore[arg-type]
    taken(batches, 1)
    saved = batches.state_dict()
    batches.load_state_dict(saved)
    assert not caplog.messages
    saved["share"]["ranks"] = 2
    batches.load_state_dict(saved)
    assert batches.batch == 1
    assert "some samples come twice, others not at all" in caplog.text
    assert "exclude" in caplog.text
    caplog.clear()
    batches.load_state_dict({**saved, "batch": 0})  # between two passes nothing is amiss
    assert not caplog.messages


def test_a_stream_with_another_batch_size_tells_that_it_cannot_find_its_place(caplog: pytest.LogCaptureFixture) -> None:
    first, second = (Batches(DataLoader(Streamed(), size)) for size in (2, 5))
    next(iter(first))
    second.load_state_dict(first.state_dict())
    assert second.batch == 1
    assert "1 × 2 (ranks × batch size) when this was saved, and are 1 × 5 now" in caplog.text
