"""What else saves in Lightning, or changes what is saved: callbacks, two optimizers, SLURM, a second fit."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from stillframe import Catalog
from tests.integration.test_lightning import DATA, L, ModelCheckpoint, Module, fit, names, ours, saves, trainer
from tests.support import assert_same

pytestmark = pytest.mark.filterwarnings("default")  # Lightning's own


class Stop(L.Callback):  # type: ignore[misc]
    """Ends training with an error, after the saves of a step."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_start(self, made: Any, *_: Any) -> None:
        if made.global_step == self.at:
            raise RuntimeError("enough")


@pytest.mark.parametrize(("top", "kept"), [(1, [5]), (3, [4, 5, 6]), (-1, [1, 2, 3, 4, 5, 6, 7, 8])])
def test_the_best_are_kept(tmp_path: Path, top: int, kept: list[int]) -> None:
    fit(trainer(tmp_path, 8, best := saves(tmp_path, monitor="score", save_top_k=top)), 1)
    assert names(tmp_path) == [f"step={step}.ckpt" for step in kept]
    assert Catalog(tmp_path / "_stillframe").steps() == kept
    assert Module.load_from_checkpoint(best.best_model_path).hparams["width"] == 8


def test_what_is_saved_because_of_an_error_is_resumed_from(tmp_path: Path) -> None:
    calm = fit(trainer(tmp_path / "calm", 6), 1)
    for number, kind in enumerate(("ModelCheckpoint", "OnExceptionCheckpoint")):
        place = tmp_path / kind
        callback: Any = L.pytorch.callbacks.OnExceptionCheckpoint(place)
        if number == 0:
            callback = ModelCheckpoint(place, "at", every_n_train_steps=100, save_last="link", save_on_exception=True)
        with pytest.raises(RuntimeError, match="enough"):
            fit(trainer(tmp_path, 6, callback, Stop(4)), 1)
        (path,) = [place / name for name in names(place) if not name.startswith("last")]
        again = fit(trainer(tmp_path, 6), 2, path)
        assert_same(dict(again.state_dict()), dict(calm.state_dict()))


class Two(Module):
    """Two optimizers that take turns, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = torch.nn.Linear(1, 1)

    def training_step(self, batch: torch.Tensor, index: int) -> None:
        for number, optimizer in enumerate(self.optimizers()):
            optimizer.zero_grad()
            self.manual_backward(self.other(self.layers(batch)).square().mean() * (1 - 2 * number))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.layers.parameters()), torch.optim.SGD(self.other.parameters(), 0.1, momentum=0.9)


def fit_two(made: Any, seed: int, source: Any = None) -> Any:
    torch.manual_seed(seed)
    module = Two()
    made.fit(module, DataLoader(DATA, 2, shuffle=True), ckpt_path=source)
    return [module.state_dict(), *(each.state_dict() for each in made.optimizers)]


def test_two_optimizers_by_hand(tmp_path: Path) -> None:
    calm = fit_two(trainer(tmp_path / "calm", 22), 1)
    fit_two(trainer(tmp_path, 14, saves(tmp_path / "run", save_top_k=-1)), 1)
    again = fit_two(trainer(tmp_path, 22), 2, tmp_path / "run" / "step=10.ckpt")
    assert_same(again, calm)


class Average(L.pytorch.callbacks.WeightAveraging):  # type: ignore[misc]
    """Of the weights, at every step, or at the end of every epoch: after the epoch's last save."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when = when

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return (step_idx if self.when == "steps" else epoch_idx) is not None


@pytest.mark.parametrize("when", ["steps", "epochs"])
def test_averaged_weights(tmp_path: Path, when: str) -> None:
    calm = Average(when)
    fit(trainer(tmp_path / "calm", 20, calm), 1)
    fit(trainer(tmp_path, 16, Average(when), saves(tmp_path / "run", save_top_k=-1), by_epoch(tmp_path / "epochs")), 1)
    assert "step=8.ckpt" in names(tmp_path / "run")
    sources = ["run/step=11", "epochs/step=8"]
    if when == "steps":  # else, resumed from this one, Lightning leaves the end of the epoch out
        sources.append("run/step=8")
    for source in sources:
        again = Average(when)
        fit(trainer(tmp_path, 20, again), 2, tmp_path / f"{source}.ckpt")
        assert_same(again._average_model.state_dict(), calm._average_model.state_dict())


class Replace(L.Callback):  # type: ignore[misc]
    """Other weights for validation, and at the end, as averages are put there: past autograd's count of changes."""

    def on_validation_start(self, made: Any, module: Any) -> None:
        self.kept = [each.detach().clone() for each in module.parameters()]
        self.on_train_end(made, module)

    def on_validation_end(self, made: Any, module: Any) -> None:
        for each, kept in zip(module.parameters(), self.kept, strict=True):
            each.data.copy_(kept)

    def on_train_end(self, made: Any, module: Any) -> None:
        for each in module.parameters():
            each.data.fill_(7)


def test_weights_that_are_replaced_after_a_save_are_saved_as_they_were(tmp_path: Path) -> None:
    made = trainer(tmp_path, 32, Replace(), saves(tmp_path / "run", save_top_k=-1), by_epoch(tmp_path / "epochs"))
    fit(made, 1)
    plugin = ours.CheckpointIO()
    for path in [tmp_path / f"{kind}/step={step}.ckpt" for step in (8, 16, 24, 32) for kind in ("run", "epochs")]:
        for name, value in plugin.load_checkpoint(path)["state_dict"].items():
            assert not value.eq(7).any(), (path, name)
    plugin.teardown()


class Scheduled(Module):
    """Its learning rate changes with the epochs, as a scheduler does unless Lightning is told otherwise."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def fit_scheduled(made: Any, seed: int, source: Any = None, sampler: Any = None) -> Any:
    torch.manual_seed(seed)
    module = Scheduled()
    made.fit(module, DataLoader(DATA, 2, shuffle=sampler is None, sampler=sampler), ckpt_path=source)
    return [dict(module.state_dict()), made.lr_scheduler_configs[0].scheduler.state_dict(), made.current_epoch]


def by_epoch(place: Path) -> Any:
    return saves(place, every_n_train_steps=None, every_n_epochs=1, save_top_k=-1)


def test_a_learning_rate_that_changes_with_the_epochs(tmp_path: Path) -> None:
    calm = fit_scheduled(trainer(tmp_path / "calm", 20), 1)
    by_step = saves(tmp_path / "steps", save_top_k=-1)
    fit_scheduled(trainer(tmp_path, 18, by_step, by_epoch(tmp_path / "epochs")), 1)
    for source in ("steps/step=8", "steps/step=9", "steps/step=16", "epochs/step=8", "epochs/step=16"):
        assert_same(fit_scheduled(trainer(tmp_path, 20), 2, tmp_path / f"{source}.ckpt"), calm, source)


@pytest.mark.parametrize("validates", [False, True])
@pytest.mark.parametrize("limit", [{"max_steps": 20}, {"max_steps": -1, "max_epochs": 3}], ids=["steps", "epochs"])
def test_a_save_at_the_end_of_an_epoch_is_followed_by_the_next_epoch(
    tmp_path: Path, limit: dict[str, int], validates: bool
) -> None:
    def run(seed: int, source: Any, *callbacks: Any) -> tuple[list[tuple[str, int]], Any]:
        told: list[tuple[str, int]] = []
        hooks = {
            "on_train_epoch_start": lambda _, made, __: told.append(("start", made.current_epoch)),
            "on_train_batch_start": lambda _, made, __, ___, index: told.append(("batch", index)),
            "on_validation_start": lambda _, made, __: told.append(("validation", made.current_epoch)),
            "on_train_epoch_end": lambda _, made, __: told.append(("end", made.current_epoch)),
        }
        tell = type("Tell", (L.Callback,), hooks)()
        options = {"num_sanity_val_steps": 0, "limit_val_batches": int(validates), **limit}
        made = trainer(tmp_path, options.pop("max_steps"), tell, *callbacks, **options)
        return told, dict(fit(made, seed, source).state_dict())

    told, calm = run(1, None, by_epoch(tmp_path / "run"))
    for step in (8, 16):
        told_again, again = run(2, tmp_path / "run" / f"step={step}.ckpt")
        assert told_again == told[told.index(("start", step // 8)) :]
        assert_same(again, calm, str(step))


class Halt(L.Callback):  # type: ignore[misc]
    """Ends training in the middle of an epoch, as a time limit does."""

    def on_train_batch_end(self, made: Any, *_: Any) -> None:
        made.should_stop = made.global_step == 11


@pytest.mark.parametrize(
    ("first", "limit"),
    [
        ({"max_steps": 11}, {"max_steps": 20}),
        ({"max_steps": 20}, {"max_steps": 20}),
        ({"max_steps": -1, "max_epochs": 2}, {"max_steps": -1, "max_epochs": 3}),
    ],
    ids=["max_steps", "steps", "epochs"],
)
def test_an_epoch_in_which_training_was_stopped_goes_on(
    tmp_path: Path, first: dict[str, int], limit: dict[str, int]
) -> None:
    """Lightning calls the end of the epoch there, and ModelCheckpoint saves."""

    def run(place: str, limit: dict[str, int], seed: int, source: Any, *callbacks: Any) -> Any:
        sampler: Any = DistributedSampler(DATA, 1, 0)  # its order is that of the epoch that it is told
        options = dict(limit)
        return fit_scheduled(
            trainer(tmp_path / place, options.pop("max_steps"), *callbacks, **options), seed, source, sampler
        )

    calm = run("calm", limit, 1, None)
    run("run", first, 1, None, Halt(), by_epoch(tmp_path / "run"))
    assert_same(run("again", limit, 2, tmp_path / "run" / "step=11.ckpt"), calm)


def test_a_trainer_may_fit_again(tmp_path: Path) -> None:
    calm = fit(trainer(tmp_path / "calm", 9), 1)
    made = trainer(tmp_path, 4, saves(place := tmp_path / "run", save_last="link"))
    module = fit(made, 1)
    made.fit_loop.epoch_loop.max_steps = 9
    loader: Any = DataLoader(DATA, 2, shuffle=True)
    made.fit(module, loader, DataLoader(DATA, 2), ckpt_path="last")
    assert names(place) == ["last.ckpt", "step=9.ckpt"]
    assert_same(dict(module.state_dict()), dict(calm.state_dict()))
    for call in (made.validate, made.test):
        call(Judged(), DataLoader(DATA, 2), ckpt_path=place / "last.ckpt", verbose=False)
        assert_same(dict(made.lightning_module.state_dict()), dict(calm.state_dict()))


class Judged(Module):
    def test_step(self, batch: torch.Tensor, index: int) -> None:
        pass


def test_slurm_takes_the_job_away_and_starts_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its signal saves a checkpoint that is durable when Lightning asks for another job."""
    asked: list[list[str]] = []
    monkeypatch.setattr(f"{L.__name__}.pytorch.trainer.connectors.signal_connector.call", asked.append)
    for name, value in {"JOB_ID": "1", "NTASKS": "1", "JOB_NAME": "run", "PROCID": "0", "LOCALID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    calm = fit(trainer(tmp_path / "calm", 6), 1)

    class Take(L.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, made: Any, *_: Any) -> None:
            if made.global_step == 3:
                signal.raise_signal(signal.SIGUSR1)

    fit(trainer(place := tmp_path / "run", 5, Take(), enable_checkpointing=False), 1)
    assert asked == [["scontrol", "requeue", "1"]]
    assert names(place) == ["hpc_ckpt_1.ckpt"]
    again = fit(trainer(place, 6, enable_checkpointing=False), 2)
    assert_same(dict(again.state_dict()), dict(calm.state_dict()))
