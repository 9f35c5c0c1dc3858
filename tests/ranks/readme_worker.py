"""Run by torchrun: the lines for several ranks of README and guide, twice each; the second time they resume."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import stillframe
from tests.ranks.leaving import leave

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def blocks(document: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (REPOSITORY / document).read_text(), re.DOTALL)


def names(step: int) -> dict[str, Any]:
    return {
        "torch": torch, "stillframe": stillframe, "fully_shard": fully_shard, "step": step, "steps": 3 * step,
        "model": torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)), "batches": {"position": step},
        "progress": {"tokens": 0}, "next_batch": lambda _step: torch.randn(2, 8),
    }  # fmt: skip


if __name__ == "__main__":
    root = sys.argv[1]
    dist.init_process_group("gloo")
    (readme,) = [block for block in blocks("README.md") if "TrainState" in block]
    loop, reading = blocks("docs/guides/ranks.md")
    for name, code in (("readme", readme), ("guide", loop)):
        scopes = [names(step) for step in (1, 2)]
        for scope in scopes:
            exec(code.replace("/shared/gpt", f"{root}/{name}"), scope)
        starts = [scope["report"].step for scope in scopes]
        assert starts == [None, 1 if name == "readme" else 2], starts
    assert scopes[1]["progress"] == {"tokens": 6 * 4096}
    exec(reading.replace("/shared/gpt", f"{root}/guide"), scopes[1])
    assert scopes[1]["weights"]["0.weight"].shape == (8, 8)
    leave()
