"""The lines of the guides run as they stand there, and do what the guide says."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import stillframe
from tests.meta.test_docs import end_by_signal, names
from tests.support import assert_same, make_model

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def blocks_of(document: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (REPOSITORY / document).read_text(), re.DOTALL)


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_everyday_use() -> None:
    class Vocabulary:
        pass

    saving, restoring, options, reading, leaf = blocks_of("docs/guides/everyday.md")
    state = {"model": make_model()}
    with stillframe.Checkpointer("runs/gpt") as checkpointer:
        checkpointer.save(1000, state).wait()
        scope: dict[str, Any] = {"stillframe": stillframe, "checkpointer": checkpointer, "state": state, "step": 1001}
        exec(saving, scope)
        exec(restoring, scope)
        assert (scope["report"].step, stillframe.Catalog("runs/gpt").latest()) == (1001, 1000)
        exec(options, {**scope, "root": "other"})
        checkpointer.wait()
        exec(reading, scope)
        assert stillframe.Catalog("runs/gpt").latest() == 1002
        assert_same(dict(scope["weights"]), dict(state["model"].state_dict()))
        exec(leaf, {**scope, "Vocabulary": Vocabulary, "encode": vars, "decode": Vocabulary})


class _Stopped(Exception):
    pass


class _Training:
    """Draws a number for each batch it is given; stops before a batch, as if it were killed there."""

    def __init__(self, stop_at: int | None) -> None:
        self.seen: list[list[float]] = []
        self._stop_at = stop_at

    def __call__(self, batch: torch.Tensor) -> None:
        if len(self.seen) == self._stop_at:
            raise _Stopped
        self.seen.append([*batch.flatten().tolist(), torch.rand(1).item()])


def _train(code: str, root: str, seed: int, stop_at: int | None = None) -> list[list[float]]:
    torch.manual_seed(seed)
    model, training = make_model(), _Training(stop_at)
    scope = {
        **names(model, 9), "stillframe": stillframe, "dataset": torch.arange(20.0), "epochs": 3, "train": training,
        "read_stream": lambda start: iter(torch.arange(start, 1000.0, 8)),
    }  # fmt: skip
    code = re.sub(r'Checkpointer\("runs/\w+"', f'Checkpointer("{root}"', code)
    try:
        exec(code, scope)
    except _Stopped:
        assert stop_at is not None
    return training.seen


@pytest.mark.parametrize("stop_at", [2, 3, 4])  # of three batches an epoch: in the first, after its last, in the second
@pytest.mark.parametrize("way", [0, 1, 2])
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's
def test_loaders_go_on_where_they_were(way: int, stop_at: int) -> None:
    code = blocks_of("docs/guides/data.md")[way]
    if "torchdata" in code:
        pytest.importorskip("torchdata")  # `make test` installs it
    alone = _train(code, "alone", seed=0)
    assert len(alone) == 9
    first = _train(code, "killed", seed=0, stop_at=stop_at)
    rest = _train(code, "killed", seed=1)
    assert first + rest == alone


def test_an_average_is_whole_also_when_the_scaler_skips_steps() -> None:
    average, by_hand = blocks_of("docs/guides/updates.md")
    model, calls = make_model(), iter(range(100))

    def loss_of(model: torch.nn.Module) -> torch.Tensor:
        factor = float("inf") if next(calls) % 3 == 1 else 1.0
        loss: torch.Tensor = model(torch.randn(4, 32)).square().mean() * factor
        return loss

    scope: dict[str, Any] = {**names(model, 6), "torch": torch, "device": "cpu", "loss_of": loss_of}
    code = average.replace('Checkpointer("runs/ema"', 'Checkpointer("runs/ema", audit=True')
    exec(code, scope)
    assert stillframe.Catalog("runs/ema").steps() == list(range(6))
    stored = stillframe.load("runs/ema", only="average")["average"]
    assert_same(dict(stored), dict(scope["average"].state_dict()))
    scope["loss_of"] = lambda model: model(torch.randn(4, 32)).square().mean()
    exec(by_hand.replace('Checkpointer("runs/clip"', 'Checkpointer("runs/clip", audit=True'), scope)
    assert stillframe.Catalog("runs/clip").steps() == list(range(6))


def test_without_its_fence_the_update_by_hand_is_refused() -> None:
    by_hand = blocks_of("docs/guides/updates.md")[1].replace("checkpointer.fence()", "pass")
    loss_of = {"loss_of": lambda model: model(torch.randn(4, 32)).square().mean()}
    with pytest.raises(stillframe.TornError):
        exec(by_hand.replace('"runs/clip"', '"runs/clip", audit=True'), {
            **names(make_model(), 6), **loss_of, "torch": torch, "stillframe": stillframe,
        })  # fmt: skip


def test_the_job_file_of_the_guide_is_the_one_that_is_run() -> None:
    guide = (REPOSITORY / "docs/guides/slurm.md").read_text()
    assert f"```bash\n{(REPOSITORY / 'examples/slurm_preemption.sbatch').read_text()}```" in guide


def test_a_job_under_slurm_asks_to_be_started_again() -> None:
    (code,) = blocks_of("docs/guides/slurm.md")
    scope = names(make_model(), 1000)
    scope["state"] = {"model": scope["model"], "optimizer": scope["optimizer"]}
    Path("runs").mkdir()
    assert end_by_signal(code, scope, before="train_forward_backward(") == 143
    assert Path("runs/gpt.again").exists()
    Path("runs/gpt.again").unlink()
    exec(code, {**scope, "steps": 3})
    assert not Path("runs/gpt.again").exists()
    assert stillframe.Catalog("runs/gpt").steps() == [0]


class _Headed(torch.nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = torch.nn.Linear(32, 32)
        self.head = torch.nn.Linear(32, classes)


def test_fine_tuning_begins_with_the_weights_of_another_run() -> None:
    tune, head, lora = blocks_of("docs/guides/finetuning.md")
    old, model, other = _Headed(10), _Headed(10), _Headed(3)
    fresh = other.head.weight.detach().clone()
    adapter = torch.nn.Parameter(torch.zeros(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())

    def train(_model: torch.nn.Module) -> None:
        adapter.grad = torch.ones(4, 4)

    scope: dict[str, Any] = {
        "torch": torch, "model": model, "optimizer": optimizer, "other": other, "train": train, "steps": 2,
        "add_adapters": lambda _model: {"down": adapter},
    }  # fmt: skip
    with stillframe.Checkpointer("runs/pretrained") as checkpointer:
        checkpointer.save(7, {"model": old, "optimizer": torch.optim.SGD(old.parameters())}).wait()
        with pytest.raises(stillframe.MismatchError):  # as the guide says
            stillframe.restore("runs/pretrained", {"model": model})
        exec(tune, scope)  # that run is still open
        assert_same(dict(model.state_dict()), dict(old.state_dict()))
        exec(head, scope)
    assert torch.equal(other.body.weight, old.body.weight)
    assert torch.equal(other.head.weight, fresh)
    exec(lora, scope)
    trained = adapter.detach().clone()
    with torch.no_grad():
        adapter.zero_()
    exec(lora, scope)
    assert (scope["report"].step, stillframe.Catalog("runs/lora").steps()) == (1, [0, 1])
    assert torch.equal(adapter.detach(), trained)
    assert sorted(stillframe.load("runs/lora")) == ["adapters", "optimizer", "rng"]


def test_an_evaluation_reads_beside_a_run() -> None:
    beside, best = blocks_of("docs/guides/evaluation.md")
    trained, model = make_model(), make_model()
    seen: list[torch.nn.Module] = []
    with stillframe.Checkpointer("runs/gpt", keep=stillframe.KeepLast(2)) as checkpointer:
        for step in range(4):
            checkpointer.save(step, {"model": trained}).wait()
        scope = {"model": model, "evaluate": seen.append, "last_step": 3}
        exec(beside, scope)
        assert_same(dict(model.state_dict()), dict(trained.state_dict()))
        assert seen == [model]
    losses = iter([5.0, 1.0, 4.0, 2.0, 3.0, 6.0, 7.0])
    exec(best, {"stillframe": stillframe, "model": model, "steps": 7, "train": lambda _model: next(losses)})
    assert stillframe.Catalog("runs/best").steps() == [1, 3, 4, 5, 6]


def test_the_lines_on_the_arena(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks_of("docs/guides/arena.md")
    exec(code, {"state": {"model": make_model()}})
    assert capsys.readouterr().out.startswith(f"{64 << 20} ")


def test_a_file_of_torch_save_is_taken_over() -> None:
    (code,) = blocks_of("docs/guides/migrating.md")
    old, model = make_model(), make_model()
    torch.save({"model": old.state_dict(), "optimizer": torch.optim.AdamW(old.parameters()).state_dict()}, "old.pt")
    exec(code, names(model, 1))
    assert_same(dict(model.state_dict()), dict(old.state_dict()))
    exec(code, names(make_model(), 1))
    assert stillframe.Catalog("runs/new").steps() == [0, 1]


def test_the_lines_on_dcp() -> None:
    (block,) = blocks_of("docs/guides/dcp.md")
    dist: Any = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dcp = importlib.import_module("torch.distributed.checkpoint")
        scope: dict[str, Any] = {
            "dcp": dcp,
            "dist": dist,
            "state_dict": make_model().state_dict(),
            "stillframe": stillframe,
        }
        exec(block, scope)
        scope["saved"].upload_completion.result()
    finally:
        dist.destroy_process_group()
    assert stillframe.Catalog("runs/7b").steps() == [0, 100, 101]
