"""Accelerate on stillframe: a resumed loop ends as one left alone; directories, rotation, refusals.

The whole conformance suite, with kills and several ranks: tests/loops/test_accelerate.py.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin, ProjectConfiguration
from torch.utils.data import DataLoader, IterableDataset

import stillframe
from stillframe import Catalog, ConfigError
from stillframe.integrations.accelerate import attach
from tests.support import bytes_of, run_fresh, start_child, until

REPOSITORY = Path(__file__).resolve().parent.parent.parent
SAMPLES, SIZE, EPOCHS = 10, 2, 3


class Where:
    """What the program knows of its position; registered for checkpointing."""

    def __init__(self) -> None:
        self.epoch = self.batch = 0

    def state_dict(self) -> dict[str, int]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in torch.randperm(SAMPLES):  # drawn when the first sample is asked for
            yield torch.full((8,), float(number))


def noisy(samples: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws from all three generators where the batch is put together."""
    noise = random.random() + numpy.random.rand()
    batch = torch.stack(samples)
    return batch[:, 0].int(), batch * 0.1 + noise * torch.rand(batch.shape)


def loader_of(kind: str) -> DataLoader[Any]:
    if "streamed" in kind:
        return DataLoader(Streamed(), SIZE, collate_fn=noisy)
    data: Any = [torch.full((8,), float(number)) for number in range(SAMPLES)]
    workers = 2 if "workers" in kind else 0
    generator = torch.Generator().manual_seed(5) if "generator" in kind else None
    return DataLoader(data, SIZE, shuffle=True, num_workers=workers, generator=generator, collate_fn=noisy)


def make(place: Path, kind: str = "", limit: int | None = None) -> Any:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(
        cpu=True,
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=3 if "accumulated" in kind else 1),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler="seedable" in kind),
        project_config=ProjectConfiguration(
            project_dir=str(place), automatic_checkpoint_naming="named" not in kind, total_limit=limit
        ),
    )


def train(place: Path, kind: str = "", stop: int = 0, seed: int = 1, saved: Callable[[int], object] = int) -> Any:
    """A digest of everything at the end (``None`` if it was stopped), and the samples of each step of this life."""
    for each in (random.seed, numpy.random.seed, torch.manual_seed):
        each(seed)
    accelerator = make(place, kind)
    if "late" not in kind and "stock" not in kind:
        attach(accelerator, place / "_root")
    layers = [torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)
    where, order = Where(), []
    model, optimizer, loader, tests, scheduler = accelerator.prepare(
        model, optimizer, loader_of(kind), loader_of(""), scheduler
    )
    accelerator.register_for_checkpointing(where)
    if "late" in kind:
        attach(accelerator, place / "_root")
    if "stock" not in kind or (place / "checkpoints").exists():
        accelerator.load_state()
    if "stock" in kind:
        accelerator.project_configuration.iteration = seed  # it does not restore that
    torch.rand(7)  # whatever a program does before its loop
    for epoch in range(where.epoch, EPOCHS):
        batches = accelerator.skip_first_batches(loader, where.batch) if where.batch else loader
        for numbers, noise in batches:
            order.append(numbers.tolist())
            with accelerator.accumulate(model):
                accelerator.backward(model(noise).square().mean())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            where.batch += 1
            accelerator.save_state()
            saved(len(order))
            if len(order) == stop:
                accelerator.end_training()
                return None, order
        where.epoch, where.batch = epoch + 1, 0
        with torch.no_grad():
            for _, noise in tests:
                model(noise)
    accelerator.end_training()
    tensors = [*model.state_dict().values(), *(each["exp_avg"] for each in optimizer.state.values())]
    said = repr([scheduler.state_dict(), random.random(), numpy.random.rand(), torch.rand(4).tolist()])
    return hashlib.sha256(b"".join(map(bytes_of, tensors)) + said.encode()).hexdigest(), order


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.mark.parametrize(
    ("kind", "stops"), [("", [2, 5]), ("generator late", [7]), ("seedable accumulated", [5]), ("streamed", [7])]
)
def test_a_resume_within_a_pass_and_at_its_end_is_exact(tmp_path: Path, kind: str, stops: list[int]) -> None:
    digest, order = train(tmp_path / "calm", kind)
    assert len(order) == EPOCHS * SAMPLES // SIZE
    for stop in stops:
        place = tmp_path / f"hit-{stop}"
        _, first = train(place, kind, stop)
        again, second = train(place, kind, seed=99)
        assert first + second == order, stop
        assert again == digest, stop


def test_a_loader_that_draws_its_order_in_another_way_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As on another number of ranks: Accelerate gives samplers a generator on several."""
    for first, then, is_told in (("generator", "", True), ("", "", False), ("seedable", "seedable", False)):
        caplog.clear()
        train(tmp_path / f"{first}-{then}", first, stop=2)
        train(tmp_path / f"{first}-{then}", then, stop=1, seed=2)
        assert ("come in another order" in caplog.text) == is_told, (first, then)


def test_accelerate_alone_is_not_exact(tmp_path: Path) -> None:
    """Else the test above would show nothing."""
    digest, order = train(tmp_path / "calm", "stock")
    _, first = train(tmp_path / "run", "stock", stop=2)
    again, second = train(tmp_path / "run", "stock", seed=99)
    assert first == order[:2]
    assert second != order[2:]
    assert again != digest


def parts(place: Path, kind: str = "named", limit: int | None = None, **options: Any) -> tuple[Any, Any, Any]:
    """An accelerator that is attached, with a model and an optimizer that have trained a little."""
    accelerator = make(place, kind, limit)
    attach(accelerator, place / "_root", **options)
    model = torch.nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    step(accelerator, model, optimizer)
    return accelerator, model, optimizer


def step(accelerator: Any, model: Any, optimizer: Any) -> None:
    accelerator.backward(model(torch.randn(2, 4)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def test_a_directory_appears_when_durable_and_loads(tmp_path: Path) -> None:
    accelerator, model, optimizer = parts(tmp_path)
    for name in ("epoch_0", "deeper/last", "epoch_1"):
        saved = accelerator.save_state(str(tmp_path / name))
        assert saved == tmp_path / name
    kept = model.weight.detach().clone()
    step(accelerator, model, optimizer)
    accelerator.save_state(tmp_path / "deeper/last")  # replaces
    last = model.weight.detach().clone()
    accelerator.load_state(tmp_path / "deeper/last")  # waits for it
    assert torch.equal(model.weight, last)
    accelerator.load_state(tmp_path / "epoch_0")
    assert torch.equal(model.weight, kept)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["_root", "deeper", "epoch_0", "epoch_1"]
    accelerator.load_state()
    assert torch.equal(model.weight, last)
    assert Catalog(tmp_path / "_root").steps() == [1, 3, 4]
    with pytest.raises(ValueError, match="epoch_7"):
        accelerator.load_state(tmp_path / "epoch_7")
    with pytest.raises(ConfigError, match="neither beside the root"):
        accelerator.save_state(tmp_path / "much" / "too" / "deep")
    (tmp_path / "made").mkdir()
    with pytest.raises(ConfigError, match="save_state makes it itself"):
        accelerator.save_state(tmp_path / "made")
    accelerator.end_training()

    other, model, _ = parts(tmp_path / "other")
    (tmp_path / "_root").rename(tmp_path / "elsewhere")  # when no keeper writes there any more
    with pytest.raises(stillframe.NotFoundError, match="was it moved without its root"):
        other.load_state(tmp_path / "epoch_0")
    (tmp_path / "elsewhere").rename(tmp_path / "_root")
    other.load_state(tmp_path / "epoch_0")  # of another root
    assert torch.equal(model.weight, kept)
    other.end_training()


def test_as_many_stay_as_total_limit_says_and_numbers_go_on(tmp_path: Path) -> None:
    for first in (0, 3):
        accelerator, _, _ = parts(tmp_path, "", limit=2)
        accelerator.load_state()
        assert accelerator.save_iteration == first
        for _ in range(3):
            accelerator.save_state()
        accelerator.end_training()
        names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
        assert names == [f"checkpoint_{first + 1}", f"checkpoint_{first + 2}"]
    assert Catalog(tmp_path / "_root").steps() == [5, 6]
    accelerator, _, _ = parts(tmp_path, "")
    accelerator.project_configuration.iteration = 5
    with pytest.raises(ValueError, match=r"call load_state\(\) first"):
        accelerator.save_state()
    accelerator.end_training()


def test_whoever_removes_a_directory_removes_the_checkpoint(tmp_path: Path) -> None:
    accelerator, _, _ = parts(tmp_path)
    for number in range(4):
        if number == 2:  # another life
            accelerator.end_training()
            accelerator, _, _ = parts(tmp_path)
        accelerator.save_state(tmp_path / f"step_{number}")
        until(lambda: number + 1 in accelerator._seen, "the directory is there, and was seen")  # noqa: B023
        if number > 1:
            shutil.rmtree(tmp_path / f"step_{number - 1}")  # goes with the save after this
    accelerator.end_training()
    assert Catalog(tmp_path / "_root").steps() == [1, 3, 4]


class Odd:
    """Its state is an object that only pickle knows."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"deep": [self.state]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        (self.state,) = state["deep"]


def test_what_is_registered_comes_back_or_is_refused_by_its_path(tmp_path: Path) -> None:
    accelerator, _, _ = parts(tmp_path)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    second, third = accelerator.prepare(torch.nn.BatchNorm1d(3), torch.nn.Linear(2, 2))
    fine = Odd({"a": (1, None, b"x"), "t": torch.arange(3)})
    accelerator.register_for_checkpointing(fine)
    accelerator.save_state(tmp_path / "one")
    kept = [each.detach().clone() for each in (*second.state_dict().values(), *third.parameters())]
    second(torch.randn(4, 3))
    torch.nn.init.zeros_(third.weight)
    fine.state, accelerator.step = None, 77
    accelerator.scaler.load_state_dict({**accelerator.scaler.state_dict(), "scale": 2.0})
    accelerator.load_state(tmp_path / "one")
    found = [*second.state_dict().values(), *third.parameters()]
    assert all(map(torch.equal, kept, found))
    assert fine.state["a"] == (1, None, b"x")
    assert torch.equal(fine.state["t"], torch.arange(3))
    assert (accelerator.step, accelerator.scaler.state_dict()["scale"]) == (0, 16.0)
    accelerator.register_for_checkpointing(Odd(object()))
    with pytest.raises(stillframe.UnsupportedStateError, match="custom/1/deep/0"):
        accelerator.save_state(tmp_path / "two")
    with pytest.raises(stillframe.MismatchError):
        accelerator.load_state(tmp_path / "one")
    accelerator.end_training()


def test_what_is_prepared_or_registered_in_another_order(tmp_path: Path) -> None:
    """Kinds may come in any order.  Within a kind the order is all that tells, so what does not fit is refused."""

    def begin(is_swapped: bool) -> tuple[Any, list[Any]]:
        accelerator = make(tmp_path, "named")
        attach(accelerator, tmp_path / "_root")
        wide, narrow = torch.nn.Linear(3, 2), torch.nn.Linear(2, 3)
        parts = [wide, torch.optim.SGD(wide.parameters(), 0.1, 0.9), narrow, torch.optim.AdamW(narrow.parameters())]
        order = [2, 3, 0, 1] if is_swapped else [0, 1, 2, 3]
        prepared = accelerator.prepare(*(parts[at] for at in order))
        return accelerator, [prepared[order.index(at)] for at in range(4)]

    accelerator, (wide, first, narrow, second) = begin(is_swapped=False)
    for model, optimizer, size in ((wide, first, 3), (narrow, second, 2)):
        accelerator.backward(model(torch.randn(2, size)).square().mean())
        optimizer.step()
    kept = [each.detach().clone() for each in (*wide.parameters(), *narrow.parameters())]
    accelerator.save_state(tmp_path / "one")
    late = Where()
    accelerator.register_for_checkpointing(late)
    late.epoch = 7
    accelerator.save_state(tmp_path / "two")
    late.epoch = 0
    accelerator.load_state(tmp_path / "two")
    assert late.epoch == 7
    with pytest.raises(stillframe.MismatchError, match="custom"):
        accelerator.load_state(tmp_path / "one")
    with pytest.warns(RuntimeWarning, match="restored in part.*custom"):
        accelerator.load_state(tmp_path / "one", strict=False)
    accelerator.end_training()

    accelerator, (wide, *_) = begin(is_swapped=True)
    before = wide.weight.detach().clone()
    with pytest.raises(stillframe.MismatchError, match="models/0"):
        accelerator.load_state(tmp_path / "one")
    assert torch.equal(wide.weight, before)
    accelerator.end_training()

    accelerator = make(tmp_path, "named")
    attach(accelerator, tmp_path / "_root")
    wide, narrow = torch.nn.Linear(3, 2), torch.nn.Linear(2, 3)
    first, second = torch.optim.SGD(wide.parameters(), 0.1, 0.9), torch.optim.AdamW(narrow.parameters())
    first, wide, second, narrow = accelerator.prepare(first, wide, second, narrow)
    accelerator.load_state(tmp_path / "one")
    assert all(map(torch.equal, kept, (*wide.parameters(), *narrow.parameters())))
    assert len(first.state) == len(second.state) == 2
    accelerator.end_training()


SHARDED = """
import sys
from pathlib import Path
import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, GradientAccumulationPlugin
from stillframe import ConfigError
from stillframe.integrations.accelerate import attach
from tests.loops.sharding import allow_fsdp, whole

allow_fsdp()
accelerator = Accelerator(
    cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2),
    gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2),
)
attach(accelerator, Path(sys.argv[1], "_root"))
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.1))
assert accelerator.is_fsdp2

def work():
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.randn(3, 4)).square().sum())
        optimizer.step()
        optimizer.zero_grad()

def now():
    tensors = [*model.state_dict().values(), *(each["exp_avg"] for each in optimizer.state.values())]
    return [whole(each).detach().clone() for each in tensors]

for _ in range(2):
    work()
kept = now()
accelerator.save_state(Path(sys.argv[1], "one"))
work()
try:
    accelerator.save_state(Path(sys.argv[1], "two"))
except ConfigError as error:
    assert "sync_each_batch=True" in str(error), error
else:
    raise AssertionError("gradients on their way were left out")
work()
assert not torch.equal(now()[0], kept[0])
accelerator.load_state(Path(sys.argv[1], "one"))
assert all(map(torch.equal, now(), kept))
accelerator.end_training()
"""


def test_fsdp2_is_saved_in_parts_and_never_without_its_gradients(tmp_path: Path) -> None:
    """On one rank; kills on two are in tests/loops."""
    run_fresh(SHARDED, tmp_path)


def test_gradients_on_their_way_are_part_of_it(tmp_path: Path) -> None:
    accelerator, model, optimizer = parts(tmp_path, "named accumulated")
    with accelerator.accumulate(model):
        step(accelerator, model, optimizer)
    assert model.weight.grad is not None
    kept = model.weight.grad.clone()
    accelerator.save_state(tmp_path / "one")
    with accelerator.accumulate(model):
        step(accelerator, model, optimizer)
    assert not torch.equal(model.weight.grad, kept)
    accelerator.load_state(tmp_path / "one")
    assert torch.equal(model.weight.grad, kept)
    accelerator.end_training()


def test_what_accelerate_wrote_is_left_to_it(tmp_path: Path) -> None:
    accelerator = make(tmp_path, "named")
    model = accelerator.prepare(torch.nn.Linear(4, 4))
    accelerator.save_state(str(tmp_path / "plain"))
    kept = model.weight.detach().clone()
    torch.nn.init.zeros_(model.weight)
    attach(accelerator)
    accelerator.load_state(str(tmp_path / "plain"))
    assert torch.equal(model.weight, kept)
    accelerator.save_state(tmp_path / "ours")
    accelerator.end_training()
    assert Catalog(tmp_path / "_stillframe").steps() == [1]


def test_what_cannot_work_is_refused_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = make(tmp_path, "")
    for options, message in (
        ({"rank": 0}, "the accelerator decides"),
        ({"keep": stillframe.KeepLast(2)}, "total_limit says"),
        ({"skip": "slow"}, "'exact' or 'fast'"),
        ({"arena": "plenty"}, "plenty"),
    ):
        with pytest.raises(ConfigError, match=message):
            attach(accelerator, tmp_path / "_root", **options)
        assert type(accelerator) is Accelerator
    with pytest.raises(ConfigError, match="all ranks see"):
        attach(accelerator, "s3://bucket/run")
    with pytest.raises(ConfigError, match=r"give an accelerate.Accelerator"):
        attach(object())
    with monkeypatch.context() as patched:
        patched.setattr("accelerate.__version__", "1.16.0")
        with pytest.raises(ConfigError, match=r"accelerate 1.16.0 was not tested"):
            attach(accelerator)
    attach(accelerator)
    with pytest.raises(ConfigError, match="attached already"):
        attach(accelerator)
    accelerator.register_save_state_pre_hook(lambda models, weights, directory: None)
    with pytest.raises(ConfigError, match="register_for_checkpointing"):
        accelerator.save_state()
    accelerator.end_training()


DYING = """
import os, signal, sys
from pathlib import Path
from stillframe import Catalog
from tests.integration.test_accelerate import train
from tests.support import until

def saved(step):
    if step == 7:
        until(lambda: Catalog(Path(sys.argv[1], "_root")).latest(), "a commit")  # else there is nothing to go on from
        os.kill(os.getpid(), signal.SIGKILL)

train(Path(sys.argv[1]), saved=saved)
"""


def test_after_a_kill_it_goes_on(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the child: more of them add up in another order
    request.addfinalizer(lambda: torch.set_num_threads(before))
    digest, order = train(tmp_path / "calm")
    child = start_child(DYING, tmp_path / "run")
    child.communicate(timeout=100)
    assert child.returncode == -signal.SIGKILL
    again, rest = train(tmp_path / "run", seed=5)
    assert 0 < len(rest) < len(order)
    assert rest == order[-len(rest) :]
    assert again == digest


def test_the_example_ends_alike_after_a_kill(tmp_path: Path) -> None:
    program = [sys.executable, "-W", "ignore", str(REPOSITORY / "examples/accelerate_loop.py")]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "OMP_NUM_THREADS": "1"}
    calm = subprocess.run([*program, tmp_path / "calm"], env=env, capture_output=True, text=True, timeout=60)
    assert calm.returncode == 0, calm.stderr
    with subprocess.Popen([*program, tmp_path / "run"], env=env, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("epoch 1 batch 4"):
                child.kill()
    again = subprocess.run([*program, tmp_path / "run"], env=env, capture_output=True, text=True, timeout=60)
    assert again.returncode == 0, again.stderr
    assert again.stdout.splitlines()[-1].startswith("digest")
    assert len(again.stdout.splitlines()) < len(calm.stdout.splitlines())
    assert calm.stdout.endswith(again.stdout)
    assert len(list((tmp_path / "run/checkpoints").iterdir())) == 3


def test_the_lines_of_the_guide_run(tmp_path: Path) -> None:
    text = (REPOSITORY / "docs/guides/accelerate.md").read_text()
    first, second = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for epochs in (1, 2):
        model, progress = torch.nn.Linear(8, 1), Where()
        optimizer = torch.optim.AdamW(model.parameters())
        scope: dict[str, Any] = {
            "accelerator": make(tmp_path), "model": model, "optimizer": optimizer, "progress": progress,
            "loader": DataLoader([(torch.rand(8), torch.rand(1))] * 4, 2, shuffle=True), "epochs": epochs,  # type: ignore[arg-type]
            "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer), "loss_of": torch.nn.functional.mse_loss,
        }  # fmt: skip
        exec(first + second, scope)
        assert progress.epoch == epochs
    assert Catalog(tmp_path / "_stillframe").steps() == [1, 2, 3, 4]
