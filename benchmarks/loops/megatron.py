"""``dist_checkpointing.save`` of Megatron-core on one rank, called as its training loop does; the last two directories stay.

Megatron asks for a CUDA device by name; it is given the CPU (:mod:`tests.engines.megatron_on_cpu`).
"""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.loops.clock import Clock
from benchmarks.loops.wide import BATCH, WIDTH, Wide
from tests.engines import megatron_on_cpu

OURS = "stillframe"
WAYS = ("Megatron", "Megatron, async", OURS)
_prepare = functools.cache(megatron_on_cpu.pretend)


def train(model: Wide, steps: int, way: str | None, place: Path, clock: Clock) -> None:
    _prepare()
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    from stillframe.integrations.megatron import SaveStrategy

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    optimizer, queue = model.optimizer(), AsyncCallsQueue()
    strategy: Any = SaveStrategy() if way == OURS else TorchDistSaveShardedStrategy("torch_dist", 1)
    for step in range(1, steps + 1):
        model(torch.randn(BATCH, WIDTH))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        if way is None:
            continue
        directory = place / f"iter_{step:07d}"
        directory.mkdir()
        with clock.saving():
            request = dist_checkpointing.save(
                sharded(model, optimizer, step), str(directory), strategy, async_sharded_save=way != "Megatron"
            )
            if request is not None:
                queue.schedule_async_request(request)
            queue.maybe_finalize_async_calls(blocking=False)
        for each in sorted(path.parent for path in place.glob("iter_*/metadata.json"))[:-2]:
            shutil.rmtree(each)
    queue.maybe_finalize_async_calls(blocking=True)
    if way == OURS:
        strategy.close()
    dist.destroy_process_group()


def sharded(model: Wide, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    from megatron.core.dist_checkpointing import ShardedTensor

    tensors = {
        f"{kind}.{name}": tensor
        for name, each in model.named_parameters()
        for kind, tensor in {"model": each, **optimizer.state[each]}.items()
        if kind != "step"
    }
    return {**{key: ShardedTensor.from_rank_offsets(key, each) for key, each in tensors.items()}, "iteration": step}
