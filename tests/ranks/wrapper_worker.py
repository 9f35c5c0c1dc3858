"""A rank that saves and restores DTensors whose local tensors are wrappers, and says what it met.

Arguments: the root, and what to do.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import stillframe
from stillframe import Checkpointer, MismatchError, TrainState
from tests.ranks.leaving import leave
from tests.support import assert_same
from tests.wrapping import Scaled, apart

ROWS, WIDTH = 48, 64


def spread(seed: int, placement: Any, context: Any = None) -> Any:
    """Of (rows, width), on all ranks; each quantises its own box."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    values = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
    box = values.chunk(dist.get_world_size(), dim=placement.dim)[dist.get_rank()] if placement.is_shard() else values
    return DTensor.from_local(
        Scaled.of(box.contiguous(), context), mesh, [placement], run_check=False, shape=values.shape, stride=(WIDTH, 1)
    )


def by_hand(root: Path) -> None:
    """The same layout comes back, replicas too; any other is refused on every rank, and nothing is touched."""
    rank = dist.get_rank()
    saved = {"rows": spread(1, Shard(0)), "columns": spread(2, Shard(1)), "all": spread(3, Replicate())}
    saved["all"].to_local().codes[0, 0] = rank  # replicas that differ, as with random rounding
    with Checkpointer(root, deadline_s=60) as checkpointer:
        checkpointer.save(1, saved).wait()
        live = {"rows": spread(4, Shard(0)), "columns": spread(5, Shard(1)), "all": spread(6, Replicate())}
        assert checkpointer.restore(live).step == 1
        assert_same(apart(live), apart(saved))
        for name, placement in (("rows", Shard(1)), ("rows", Replicate()), ("columns", Shard(0)), ("all", Shard(0))):
            other = {**live, name: spread(7, placement)}
            before = apart(other)
            with pytest.raises(
                MismatchError, match=rf"{name}: a .*Scaled of shape \[48, 64\].*the layout that was saved"
            ):
                checkpointer.restore(other)
            assert_same(apart(other), before)
        plain = {**live, "all": spread(8, Replicate()).to_local()}
        assert checkpointer.restore(plain).step == 1  # all of it on every rank, as a DTensor or not
        assert_same(apart(plain["all"]), apart(saved["all"]))
        found = stillframe.load(root, rank=rank)["rows"]
        assert found["part_of"]["boxes"][0]["offset"] == (24 * rank, 0), found
        assert_same(found["tensors"]["codes"], saved["rows"].to_local().codes)


def low_bit(root: Path) -> None:
    """torchao's optimizers under FSDP2, with int8 weights: the state of both is DTensors of wrappers."""
    import torchao.optim

    torch.compiler.set_stance("force_eager")
    for kind in (torchao.optim.AdamW8bit, torchao.optim.AdamW4bit, torchao.optim.AdamWFp8):
        model, optimizer = low_bit_run(1, kind, steps=1)
        first = optimizer.state[model[0].weight]["exp_avg"]
        assert type(first.to_local()).__name__.startswith("OptimState"), first
        assert type(model[0].weight.to_local()).__name__.startswith("Int8"), model
        with Checkpointer(root / kind.__name__, deadline_s=60) as checkpointer:
            checkpointer.save(1, TrainState(model, optimizer))
            expected = apart(optimizer), apart(model)
            for steps in (0, 1):  # a fresh optimizer has no wrappers yet
                other, its = low_bit_run(2, kind, steps)
                assert checkpointer.restore(TrainState(other, its)).step == 1
                assert_same((apart(its), apart(other)), expected)
        train(model, optimizer)
        train(other, its)
        assert_same((apart(its), apart(other)), (apart(optimizer), apart(model)))


def low_bit_run(seed: int, kind: Any, steps: int) -> tuple[Any, Any]:
    from torchao.prototype.quantized_training import Int8QuantizedTrainingLinearWeight

    torch.manual_seed(seed)
    model: Any = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Linear(128, 8))
    quantised = Int8QuantizedTrainingLinearWeight.from_float(model[0].weight.detach())
    model[0].weight = torch.nn.Parameter(quantised)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = kind(model.parameters())
    for _ in range(steps):
        train(model, optimizer)
    return model, optimizer


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(100 + dist.get_rank())
    model(torch.randn(4, 128)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def float8(root: Path) -> None:
    """Weights that FSDP2 gathers as float8 (gloo cannot, so nothing is trained): a wrapper that gets a scale later."""
    from torchao.float8 import (
        Float8LinearConfig,
        convert_to_float8_training,
        precompute_float8_dynamic_scale_for_fsdp,
    )

    def made(seed: int, has_scale: bool) -> Any:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
        model = fully_shard(convert_to_float8_training(model, config=config))
        if has_scale:
            precompute_float8_dynamic_scale_for_fsdp(model)
        return model

    model = made(1, has_scale=True)
    with Checkpointer(root / "float8", deadline_s=60) as checkpointer:
        checkpointer.save(1, {"model": model})
        live, without = made(2, has_scale=True), made(3, has_scale=False)
        assert checkpointer.restore({"model": live}).step == 1
        found, expected = (apart(dict(each.named_parameters())) for each in (live, model))
        assert_same(found, expected)
        assert "_precomputed_scale" in found["0.weight"]
        with pytest.raises(
            MismatchError, match=r"0.weight: .* _precomputed_scale in the checkpoint, with _tensor in the"
        ):
            checkpointer.restore({"model": without})


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    for name in sys.argv[2:]:
        {"by_hand": by_hand, "low_bit": low_bit, "float8": float8}[name](Path(sys.argv[1]))
    leave()
