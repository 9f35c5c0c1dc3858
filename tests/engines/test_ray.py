"""Ray Train on stillframe: a real Ray on this machine, one for all tests here, with workers on gloo."""

from __future__ import annotations

import dataclasses
import logging
import os
import random
import secrets
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import ray
import ray.train.collective
import torch
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
from ray.train.torch import TorchConfig, TorchTrainer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import stillframe
from stillframe import Catalog
from stillframe.integrations.ray import checkpointer, locate
from tests.engines.processes import below
from tests.loops.conformance import Conformance, assert_goes_on
from tests.loops.driving import BATCH, LIFE_S, SOURCE, STEPS, Life, Result, Wish, digest_of
from tests.support import until

pytestmark = [pytest.mark.timeout(1800), pytest.mark.filterwarnings("ignore")]
POLL_S = 0.2
"""How often Ray's controller asks the workers; two seconds, if nobody says otherwise."""


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{SOURCE / 'src'}{os.pathsep}{SOURCE}")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))  # else Ray writes one to the user's home
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", str(POLL_S))
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patch.setenv("HF_HUB_OFFLINE", "1")
        # Twice what a run needs: without its dashboard Ray does not soon free what a killed controller held.
        ray.init(num_cpus=6, include_dashboard=False, log_to_driver=False, configure_logging=False)
        yield
        ray.shutdown()


# --- in Ray's workers ------------------------------------------------------------------------


def notes_of(wish: Wish) -> Path:
    """Where a life writes what is no checkpoint: not on the disk that is full."""
    place = Path(wish.place)
    return place.parent.parent / "notes" if wish.kind == "apart" else place.with_suffix(".notes")


def train(given: dict[str, Any]) -> dict[str, Any] | None:
    wish = Wish(**given)
    notes, life = notes_of(wish), Life(wish)
    logging.getLogger("stillframe").addHandler(logging.FileHandler(notes / f"said-{life.rank}"))
    given_by_ray, reported = ray.train.get_checkpoint(), _watch_reports()
    found = None if given_by_ray is None else locate(given_by_ray)[1]
    plain = life.model()
    model = DistributedDataParallel(plain) if life.ranks > 1 else plain
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    data: Any = life.data()
    sampler: Any = DistributedSampler(data) if life.ranks > 1 else None
    batches = stillframe.Batches(DataLoader(data, BATCH, shuffle=sampler is None, sampler=sampler))
    state = stillframe.TrainState(model, optimizer, scheduler=scheduler, batches=batches)
    root = f"{wish.place}/_stillframe" if wish.kind in ("apart", "elsewhere") else None
    if wish.kind == "nodes":
        root = f"{wish.place}.disks/{{node}}"
    with checkpointer(state, root) as checkpoints:
        if not checkpoints.restored:  # a life before this one may have left nothing: then this is the first
            random.seed(3), numpy.random.seed(3), torch.manual_seed(3)
        step = checkpoints.restored.step or 0
        while step < wish.steps:
            if sampler is not None:
                sampler.set_epoch(batches.epoch)
            for batch in batches:
                loss = model(**batch).loss
                loss.backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                step += 1
                if wish.delay_s:  # who is killed later must not be at the end by then
                    time.sleep(0.1)
                if wish.kind in ("talking", "nodes"):
                    time.sleep(0.25)
                if wish.kind == "talking":
                    _talk(step)
                checkpoints.report(step, {"loss": loss.item(), "step": step})
                if step == wish.kill_at and life.rank == life.ranks - 1 and not (notes / "killed").exists():
                    (notes / "killed").touch()
                    life.saved(step)
                if step == wish.steps:
                    break
    more = {"restored": checkpoints.restored.step, "found": found, "reported": reported}
    return None if life.rank else dataclasses.asdict(life.result(plain, optimizer, scheduler, **more))


def _talk(step: int) -> None:
    """What else a loop may say to Ray."""
    ray.train.collective.barrier()
    if step % 5 == 0:
        ray.train.report({"own": step})
    assert ray.train.collective.broadcast_from_rank_zero(step) == step


def _watch_reports() -> list[int]:
    """From now on a report of a checkpoint that is not committed yet is an error.  The steps that were reported."""
    stock, steps = ray.train.report, list[int]()

    def report(metrics: dict[str, Any], checkpoint: Any = None, **how: Any) -> None:
        if checkpoint is not None:
            steps.append(locate(checkpoint)[1])  # raises unless it is committed
            assert metrics["step"] == steps[-1]
        stock(metrics, checkpoint, **how)

    ray.train.report = report
    return steps


# --- in the test -----------------------------------------------------------------------------


def fit(wish: Wish, ranks: int = 1, failures: int = 0, storage: Any = None) -> Any:
    """One run, as a driver has it: the same ``place`` again is the same run started again."""
    notes, place = notes_of(wish), Path(wish.place)
    notes.mkdir(parents=True, exist_ok=True)
    (notes / "killed").unlink(missing_ok=True)
    above = notes / "ray" if wish.kind == "apart" else place.parent
    run = RunConfig(
        name=place.name,
        storage_path="runs" if storage is not None else str(above),
        storage_filesystem=storage,
        failure_config=FailureConfig(max_failures=failures),
        checkpoint_config=CheckpointConfig(num_to_keep=wish.keep or None),
    )
    trainer = TorchTrainer(
        train,
        train_loop_config=dataclasses.asdict(wish),
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=ranks),
        run_config=run,
    )
    return trainer.fit()


class Living:
    """A run under way; as that of :mod:`tests.loops.driving`."""

    def __init__(self, wish: Wish, ranks: int) -> None:
        self.wish, self.error, self.result = wish, dict[str, Exception](), dict[str, Any]()
        self._thread = threading.Thread(target=self._run, args=[ranks])
        self._thread.start()

    def _run(self, ranks: int) -> None:
        try:
            self.result["it"] = fit(self.wish, ranks)
        except Exception as error:
            self.error["it"] = error

    def __enter__(self) -> Living:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(LIFE_S)

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> tuple[Result | None, str]:
        self._thread.join(LIFE_S)
        assert self.is_over
        notes = notes_of(self.wish)
        if self.wish.kill_at:
            assert isinstance(self.error["it"], TrainingFailedError), self.error
            assert (notes / "killed").exists()
            return None, ""
        assert not self.error, self.error
        return Result(**self.result["it"].return_value), (notes / "said-0").read_text()


def listed(result: Any) -> list[int]:
    """The steps that Ray lists at the end of a run."""
    return sorted(locate(checkpoint)[1] for checkpoint, _ in result.best_checkpoints)


def directories(place: Path) -> list[int]:
    return sorted(int(path.name[len("checkpoint_") :].split("-")[0]) for path in place.glob("checkpoint_*-e*"))


class TestRay(Conformance):
    kind_on_full_disk = "apart"

    def living(self, wish: Wish, ranks: int = 1) -> Any:
        return Living(wish, ranks)

    @staticmethod
    def checkpoints(place: Path) -> dict[int, Path]:
        """All that are committed; Ray hears of the newest, every now and then."""
        return {step: place / str(step) for step in Catalog(place / "_stillframe").steps()}

    @staticmethod
    def read(path: Path) -> str:
        found = stillframe.load(path.parent / "_stillframe", int(path.name), only="model")
        return digest_of(found["model"].values())

    def test_a_killed_worker_is_restarted_by_ray_and_the_run_ends_alike(self, tmp_path: Path) -> None:
        result = fit(Wish(str(tmp_path / "run"), kill_at=6, seed=2), ranks=2, failures=1)
        assert (tmp_path / "run.notes/killed").exists()
        assert result.error is None
        assert_goes_on(Result(**result.return_value), self.calm("", 2))
        assert result.return_value["more"]["restored"] > 0

    def test_as_many_stay_as_were_asked_for(self, tmp_path: Path) -> None:
        """Ray has its list, and nobody else deletes what is on it, or keeps what is not; whatever else it is told."""
        place = tmp_path / "run"
        result = fit(Wish(str(place), keep=2, steps=40, kind="talking"), ranks=2)
        assert len(result.return_value["more"]["reported"]) > 2, "Ray had nothing to let go"
        assert len(listed(result)) == 2
        assert listed(result) == directories(place) == Catalog(self.root(place)).steps()
        assert listed(result)[-1] == locate(result.checkpoint)[1] == 40
        assert result.metrics["step"] == 40

    def test_with_roots_on_the_nodes_ray_hears_of_what_all_of_them_see(self, tmp_path: Path) -> None:
        """A tier in the directory of the run.  What is on Ray's list stays there, and little else."""
        place = tmp_path / "run"
        wish = Wish(str(place), keep=2, steps=40, kind="nodes", kill_at=12)
        result = fit(wish, ranks=2, failures=1)
        more, tier = result.return_value["more"], self.root(place)
        assert more["restored"] > 0
        assert len(more["reported"]) > 2, "Ray had nothing to let go"
        assert locate(result.checkpoint) == (str(tier), 40)
        assert len(listed(result)) == 2
        assert set(listed(result)) <= set(Catalog(tier).steps())
        assert len(Catalog(tier).steps()) <= 4
        for step in listed(result):
            assert stillframe.load(tier, step, only="model")["model"]
        assert_goes_on(Result(**result.return_value), self.calm_of(40))

    def calm_of(self, steps: int) -> Result:
        with tempfile.TemporaryDirectory() as place:
            return Result(**fit(Wish(f"{place}/run", steps=steps), ranks=2).return_value)

    def test_what_ray_gives_can_be_restored_from(self, tmp_path: Path) -> None:
        """In the driver, and in the workers of a run that is started again; what a killed worker left is put right."""
        place = tmp_path / "run"
        first = fit(Wish(str(place), keep=2))
        root, step = locate(first.checkpoint)
        assert (root, step) == (str(place / "_stillframe"), STEPS)
        assert (
            digest_of(stillframe.load(root, step, only="model")["model"].values()) == first.return_value["parameters"]
        )
        left = place / "checkpoint_000000000999-e0009-1"  # of which Ray has never heard
        left.mkdir()
        again = fit(Wish(str(place), keep=2, steps=STEPS + 4, seed=2))
        assert again.return_value["more"]["found"] == again.return_value["more"]["restored"] == STEPS
        assert locate(again.checkpoint)[1] == STEPS + 4
        assert not left.exists()
        assert listed(again) == directories(place) == Catalog(root).steps()
        moved = tmp_path / "moved"
        place.rename(moved)
        name = Path(again.checkpoint.path).name
        assert locate(ray.train.Checkpoint(str(moved / name))) == (str(moved / "_stillframe"), STEPS + 4)

    def test_a_run_that_has_nothing_left_to_do_is_reported(self, tmp_path: Path) -> None:
        """Its workers were killed when all was committed, and Ray had not heard of it."""
        wish = Wish(str(tmp_path / "run"), kill_at=STEPS)
        self.die(wish)
        result = fit(dataclasses.replace(wish, kill_at=0, seed=2))
        more = result.return_value["more"]
        if more["restored"] == STEPS:
            assert more["reported"] == [STEPS]
        assert locate(result.checkpoint)[1] == STEPS
        assert result.metrics["step"] == STEPS

    def test_a_killed_controller_costs_no_checkpoint(self, tmp_path: Path) -> None:
        place = tmp_path / "run"
        wish = Wish(str(place), keep=2, steps=40, kind="talking")
        with Living(wish, 2) as living:
            until(lambda: (Catalog(self.root(place)).latest() or 0) >= 8, "some checkpoints", 300)
            for controller in below(os.getpid(), "TrainController"):  # those of runs that are over may be there, too
                os.kill(controller, signal.SIGKILL)
            until(lambda: living.is_over, "the end of the run", 300)
        assert isinstance(living.error["it"], ray.exceptions.ActorDiedError)
        result = fit(dataclasses.replace(wish, seed=2), ranks=2)
        assert result.return_value["more"]["restored"] >= 8
        assert listed(result) == directories(place) == Catalog(self.root(place)).steps()
        assert listed(result)[-1] == 40

    def test_another_number_of_workers_goes_on(self, tmp_path: Path) -> None:
        self.die(Wish(str(tmp_path / "run"), kill_at=7), ranks=2)
        result = fit(Wish(str(tmp_path / "run"), seed=2), ranks=1)
        assert 0 < result.return_value["more"]["restored"] <= 7
        assert locate(result.checkpoint)[1] == STEPS

    def test_storage_that_is_no_directory_needs_a_root(self, tmp_path: Path) -> None:
        storage = SubTreeFileSystem(str(tmp_path), LocalFileSystem())
        with pytest.raises(TrainingFailedError, match="say where the checkpoints are to be"):
            fit(Wish(str(tmp_path / "run")), storage=storage)
        result = fit(Wish(str(tmp_path / "run"), kind="elsewhere", keep=2), storage=storage)
        root, step = locate(result.checkpoint)
        assert (root, step) == (str(tmp_path / "run/_stillframe"), STEPS)
        assert listed(result) == Catalog(root).steps() == directories(tmp_path / "runs/run")
