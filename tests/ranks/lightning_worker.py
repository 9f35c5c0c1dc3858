"""A rank that trains a sharded model under Lightning.  Arguments: a directory, and what to do."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.strategies import ModelParallelStrategy as FabricStrategy
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

import stillframe
from stillframe import RNG, Batches, Catalog, ConfigError, MismatchError, UnsupportedStateError, spi
from stillframe.integrations.lightning import CheckpointIO
from tests.ranks.leaving import leave
from tests.support import assert_same

DATA: Any = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))


def layers() -> torch.nn.Sequential:
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3)
    )


def local(state: Any) -> Any:
    """What this rank holds, copied."""
    return spi.mapped(state, lambda _, each: getattr(each, "_local_tensor", each).clone() if is_tensor(each) else each)


def is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


# --- Fabric ----------------------------------------------------------------------------------


def shard(model: Any, mesh: Any) -> Any:
    for each in (model[0], model[3], model):
        fully_shard(each, mesh=mesh["data_parallel"])
    return model


def fabric_of(*plugins: Any) -> Any:
    sizes = {"data_parallel_size": dist.get_world_size() if dist.is_initialized() else 2, "tensor_parallel_size": 1}
    return L.Fabric(accelerator="cpu", devices=2, strategy=FabricStrategy(shard, **sizes), plugins=list(plugins))


def state_of(fabric: Any, seed: int) -> dict[str, Any]:
    module = layers()
    model = fabric.setup_module(module)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(module.parameters(), lr=0.01))
    torch.manual_seed(seed + fabric.global_rank)
    batches: Any = Batches(DataLoader(DATA, 2, shuffle=True))
    return {"model": model, "optimizer": optimizer, "rng": RNG(), "batches": batches, "steps": 0}


def train(fabric: Any, state: dict[str, Any], save_to: Path | None = None) -> Any:
    """Six steps in all; saved after the third."""
    for batch in state["batches"]:
        fabric.backward(state["model"](batch).square().mean())
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        state["steps"] += 1
        if state["steps"] == 3 and save_to is not None:
            fabric.save(save_to, {**state, "more": dist.get_rank()})
        if state["steps"] == 6:
            break
    return [local([state["model"].state_dict(), state["optimizer"].state_dict()]), torch.rand(3)]


def fabric(place: Path) -> None:
    """Every rank goes on as it would have, and has what it had."""
    (made := fabric_of(CheckpointIO())).launch()
    calm = train(made, state_of(made, 1), place / "state.ckpt")
    again = state_of(made, 5)
    assert made.load(place / "state.ckpt", again) == {"more": dist.get_rank()}
    assert again["steps"] == 3
    assert_same(train(made, again), calm)

    some = {"model": state_of(made, 5)["model"]}
    rest = made.load(place / "state.ckpt", some)
    assert sorted(rest) == ["batches", "more", "rng", "steps"]
    whole = made.load(place / "state.ckpt")
    assert sorted(whole) == ["batches", "model", "more", "optimizer", "rng", "steps"]
    assert whole["more"] == dist.get_rank()
    full = some["model"].state_dict()["0.weight"].full_tensor()
    assert_same(whole["model"]["0.weight"], full)
    with pytest.raises(ConfigError, match="load_raw"):
        made.load_raw(place / "state.ckpt", some["model"])
    with pytest.raises(KeyError, match="other"):
        made.load(place / "state.ckpt", {**some, "other": 0})
    narrow = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Identity(), torch.nn.Identity(), torch.nn.Linear(8, 2))
    with pytest.raises(MismatchError, match="model"):
        made.load(place / "state.ckpt", {"model": made.setup_module(narrow)})
    made.strategy.teardown()


def refused(place: Path) -> None:
    """An error on one rank is one on all; what cannot come back is not saved; the next save is a good one."""
    (made := fabric_of(CheckpointIO())).launch()
    state, rank = state_of(made, 1), dist.get_rank()
    odd = {**state, "odd": (lambda: 0) if rank == 1 else 0}
    with pytest.raises(UnsupportedStateError, match=r"odd is a builtins\.function"):
        made.save(place / "odd.ckpt", odd)
    weight = state["model"].state_dict()["0.weight"]
    with pytest.raises(UnsupportedStateError, match="more/weight is a DTensor"):
        made.save(place / "odd.ckpt", {**state, "more": {"weight": weight}})
    (place / "file.ckpt").touch()
    dist.barrier()
    with pytest.raises(stillframe.ExistsError, match=r"file\.ckpt is a file"):
        made.save(place / "file.ckpt", state)
    made.save(place / "state.ckpt", state)
    made.strategy.teardown()
    assert len(Catalog(place / "_stillframe").steps()) == 1
    assert sorted(path.name for path in place.iterdir()) == ["_stillframe", "file.ckpt", "state.ckpt"]


def stock(place: Path) -> None:
    """What Lightning itself has written is loaded by Lightning."""
    (plain := fabric_of()).launch()
    state = state_of(plain, 1)
    train(plain, state)
    plain.save(place / "stock.ckpt", {key: state[key] for key in ("model", "optimizer", "steps")})
    made = fabric_of(CheckpointIO())
    made.launch()
    other = {key: each for key, each in state_of(made, 5).items() if key in ("model", "optimizer", "steps")}
    made.load(place / "stock.ckpt", other)
    assert other["steps"] == 6
    for name in ("0.weight", "3.bias"):  # of buffers, Lightning saves one rank's
        assert_same(*(local(each["model"].state_dict()[name]) for each in (other, state)))
    with pytest.raises(ValueError, match="single file"):
        made.load_raw(place / "stock.ckpt", other["model"])
    with pytest.raises(NotImplementedError, match="does not support setting a"):
        fabric_of(L.fabric.plugins.TorchCheckpointIO())


# --- Trainer ---------------------------------------------------------------------------------


class Parallel(L.LightningModule):  # type: ignore[misc]
    """Its layers are divided among the ranks; all see the same batches."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = layers()

    def configure_model(self) -> None:
        if self.device_mesh is not None and not hasattr(self.layers[0].weight, "placements"):
            whole = Replicate()
            plan = {"0": ColwiseParallel(output_layouts=whole), "3": RowwiseParallel(input_layouts=whole)}
            parallelize_module(self.layers, self.device_mesh["tensor_parallel"], plan)

    def training_step(self, batch: torch.Tensor, _: int) -> Any:
        self.log("score", abs(self.global_step - 2.0))
        return self.layers(batch).square().mean()

    def validation_step(self, batch: torch.Tensor, _: int) -> None:
        self.log("drawn", torch.rand(()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fit(place: Path, steps: int, seed: int, source: Any = None, **more: Any) -> tuple[Any, Any]:
    strategy = ModelParallelStrategy(save_distributed_checkpoint=seed == 1)  # which makes no difference
    saves = ModelCheckpoint(place, "{step}", every_n_train_steps=1, **{"save_top_k": 1, **more})
    made = L.Trainer(
        plugins=[CheckpointIO()], callbacks=[saves], strategy=strategy, accelerator="cpu", devices=2,
        logger=False, enable_progress_bar=False, enable_model_summary=False, max_steps=steps, limit_val_batches=1,
    )  # fmt: skip
    torch.manual_seed(seed)
    module = Parallel()
    torch.manual_seed(seed)
    loader: Any = DataLoader(DATA, 2, shuffle=True)
    made.fit(module, loader, DataLoader(DATA, 2), ckpt_path=source)
    return made, local([module.state_dict(), made.optimizers[0].state_dict()])


def trainer(place: Path) -> None:
    """Tensor parallelism: the best is kept, "last" is gone on from, a validation loads the best."""
    _, calm = fit(place / "calm", 11, 1)
    made, _ = fit(place / "run", 9, 1, monitor="score", save_last=True)
    assert sorted(path.name for path in (place / "run").glob("*.ckpt")) == ["last.ckpt", "step=3.ckpt"]
    assert made.checkpoint_callback.best_model_path == str(place / "run" / "step=3.ckpt")
    made.validate(dataloaders=DataLoader(DATA, 2), ckpt_path="best", verbose=False)
    best = {
        name: getattr(each, "full_tensor", lambda each=each: each)() for name, each in made.model.state_dict().items()
    }
    assert_same(dict(best), dict(Parallel.load_from_checkpoint(place / "run" / "step=3.ckpt").state_dict()))
    _, again = fit(place / "run", 11, 2, "last", save_last=True)
    assert_same(again, calm)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for name in sys.argv[2:]:
        (at := Path(sys.argv[1], name)).mkdir(exist_ok=True)
        globals()[name](at)
    leave()
