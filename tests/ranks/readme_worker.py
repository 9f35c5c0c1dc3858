"""Run by torchrun: the README's lines for several ranks, twice; the second run resumes."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import stillframe

README = (Path(__file__).resolve().parent.parent.parent / "README.md").read_text()
(BLOCK,) = [block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "TrainState" in block]

if __name__ == "__main__":
    root = sys.argv[1]
    dist.init_process_group("gloo")
    code = BLOCK.replace("/shared/gpt", root)
    starts = []
    for step in (1, 2):
        scope: dict[str, Any] = {
            "torch": torch, "stillframe": stillframe, "fully_shard": fully_shard, "step": step,
            "model": torch.nn.Linear(8, 8), "loader_state": {"position": step},
        }  # fmt: skip
        exec(code, scope)
        starts.append(scope["report"].step)
    assert starts == [None, 1], starts
    dist.destroy_process_group()
