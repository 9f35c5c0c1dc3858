"""FSDP2's collectives for the queued device: through host memory and gloo, which knows nothing of it.

On the stream that FSDP2 calls them on, as NCCL's; only what gloo does is done by the host, which waits for it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule


class AllGather:
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> None:
        host = torch.empty(output_tensor.shape, dtype=output_tensor.dtype)
        dist.all_gather_single(host, input_tensor.cpu(), group=group)
        output_tensor.copy_(host, non_blocking=True)


class ReduceScatter:
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        host = input_tensor.cpu()
        dist.all_reduce(host, group=group)
        if op == dist.ReduceOp.AVG:
            host /= dist.get_world_size(group)
        mine = host.chunk(dist.get_world_size(group))[dist.get_rank(group)]
        output_tensor.copy_(mine.view(output_tensor.shape), non_blocking=True)


def use(model: torch.nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(AllGather())  # type: ignore[arg-type]
            module.set_custom_reduce_scatter(ReduceScatter())  # type: ignore[arg-type]
