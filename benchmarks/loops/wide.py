"""What is trained: layers of one width, for as many bytes as are asked for."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from benchmarks.case import GIB

WIDTH, BATCH = 2048, 64


class Wide(torch.nn.Module):
    """With AdamW a checkpoint is three times the parameters, of 4 bytes each."""

    def __init__(self, gib: float) -> None:
        super().__init__()
        layers = max(round(gib * GIB / 12 / WIDTH**2), 1)
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layers(inputs).square().mean()}

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), fused=True)


def samples(steps: int) -> Any:
    """For so many batches of :data:`BATCH` on each rank; a list, which every loader takes."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return [{"inputs": torch.randn(WIDTH)} for _ in range(BATCH)] * steps * ranks
