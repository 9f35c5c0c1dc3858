"""FSDP2 on CPUs, for the drivers.

Accelerate turns FSDP on only where ranks have accelerators: on CPUs a plugin is ignored, and what trains is DDP.  All
that it does then runs on CPUs, too: so these ranks are given out for ones with GPUs, and their device is the CPU.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist


def allow_fsdp() -> None:
    """Before an accelerator is made, or the arguments of a Trainer."""
    from accelerate import DistributedType, PartialState

    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]


def whole(tensor: Any) -> Any:
    """All of a tensor that may be sharded.  A collective."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
