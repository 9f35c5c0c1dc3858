"""Other people's loops, with their own storage and with ours: DeepSpeed's ``save_checkpoint``, DCP's three calls."""

from __future__ import annotations

import importlib
import os
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from benchmarks import disk
from benchmarks.case import GIB, Case
from benchmarks.systems.base import init_alone

_LAYERS = 24


def deepspeed_loop(case: Case, directory: Path) -> dict[str, Any]:
    """ZeRO-1 in bf16, a checkpoint at every iteration; blocked is the time in ``save_checkpoint``.

    ``case.gib`` is what a rank saves: its share of 12 bytes a parameter (rank 0 has the weights, too).
    """
    warnings.simplefilter("ignore")
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.ops.__compatible_ops__.clear()  # compile nothing
    deepspeed.init_distributed("gloo", verbose=False)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
    }
    if case.system == "stillframe":
        from stillframe.integrations.deepspeed import install

        install()
        config["datastates_ckpt"] = {"host_cache_size": 0}
    engine = _engine(deepspeed, case, config)
    quiet = [_iteration(engine, case, None)[0] for _ in range(case.iterations + 1)][1:]
    saving, blocked = [], []
    for step in range(case.iterations + 1):
        if step == case.iterations:
            expected = _shares(engine)
        whole_s, blocked_s = _iteration(engine, case, directory)
        if step:  # the first plans, and touches its buffers for the first time
            saving.append(whole_s)
            blocked.append(blocked_s)
    engine.destroy()
    other = _engine(deepspeed, case, config)
    _iteration(other, case, None)  # its optimizer has no state before
    other.load_checkpoint(str(directory))
    right = all(torch.equal(one, two) for one, two in zip(expected, _shares(other), strict=True))
    other.destroy()
    return {"quiet_s": quiet, "saving_s": saving, "blocked_s": blocked, "is_right": right}


def _engine(deepspeed: Any, case: Case, config: dict[str, Any]) -> Any:
    parameters = case.gib * GIB * case.ranks / 12
    width = int((parameters / _LAYERS) ** 0.5)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(_LAYERS)))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def _iteration(engine: Any, case: Case, directory: Path | None) -> tuple[float, float]:
    """Seconds of a whole one, and of them in ``save_checkpoint``, which comes first."""
    width = engine.module[0].in_features
    torch.distributed.barrier()
    began = time.perf_counter()
    if directory is not None:
        engine.save_checkpoint(str(directory))
    blocked = time.perf_counter() - began
    loss = engine(torch.ones(1, width, dtype=torch.bfloat16)).float().square().mean()
    engine.backward(loss)
    time.sleep(case.compute_s)
    engine.step()
    return time.perf_counter() - began, blocked


def _shares(engine: Any) -> list[torch.Tensor]:
    """This rank's part of the optimizer."""
    found = [each.detach().clone() for each in engine.optimizer.single_partition_of_fp32_groups]
    for state in engine.optimizer.optimizer.state.values():
        found += [each.detach().clone() for each in state.values() if isinstance(each, torch.Tensor)]
    return found


def dcp_calls(case: Case, directory: Path) -> dict[str, Any]:
    """``dcp.save`` until it returns, ``dcp.async_save`` until it returns, ``dcp.load`` with a cold cache."""
    warnings.simplefilter("ignore")
    init_alone()
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")
    items = int(case.gib * GIB / 12 / _LAYERS)
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(items)) for _ in range(_LAYERS))
    optimizer = torch.optim.AdamW(model.parameters())

    def update() -> None:
        for each in model.parameters():
            each.grad = torch.ones_like(each)
        optimizer.step()

    def state() -> dict[str, Any]:
        moments = {
            f"{number}.{name}": each
            for number, parameter in enumerate(model.parameters())
            for name, each in optimizer.state[parameter].items()
        }
        return {"model": dict(model.state_dict()), "optimizer": moments}

    update()
    stager: Any = None
    if case.system == "stillframe":
        from stillframe.integrations.dcp import Reader, Stager, Writer

        writer = Writer(directory / "root")
        stager = Stager(writer)
    figures: dict[str, list[float]] = {"save_s": [], "async_s": [], "load_s": []}
    right = True
    for step in range(case.iterations + 1):
        update()
        current = state()
        place = directory / f"{step}"
        if stager is None:
            writer = dcp.FileSystemWriter(place)
        began = time.perf_counter()
        dcp.save(current, storage_writer=writer)
        save_s = time.perf_counter() - began
        expected = [each.detach().clone() for part in current.values() for each in part.values()]
        read = {key: {name: torch.empty_like(each) for name, each in part.items()} for key, part in current.items()}
        for part in read.values():
            for each in part.values():
                each.fill_(1)  # touched before, as live tensors are
        disk.drop_caches(directory)
        reader = dcp.FileSystemReader(place) if stager is None else Reader(directory / "root")
        began = time.perf_counter()
        dcp.load(read, storage_reader=reader)
        load_s = time.perf_counter() - began
        got = [each for part in read.values() for each in part.values()]
        right = right and all(torch.equal(one, two) for one, two in zip(got, expected, strict=True))
        if stager is None:
            writer = dcp.FileSystemWriter(directory / f"{step}-async")
        began = time.perf_counter()
        saved = dcp.async_save(current, storage_writer=writer, async_stager=stager)
        async_s = time.perf_counter() - began
        time.sleep(case.compute_s)
        began = time.perf_counter()
        optimizer_waits_s = 0.0
        if stager is not None:  # the fence, without the update
            saved.staging_completion.result()
            optimizer_waits_s = time.perf_counter() - began
        (saved.upload_completion if stager is not None else saved).result()
        if step:
            figures["save_s"].append(save_s)
            figures["load_s"].append(load_s)
            figures["async_s"].append(async_s + optimizer_waits_s)
    size = sum(each.nbytes for part in current.values() for each in part.values())
    return {**figures, "bytes": size, "is_right": right}
