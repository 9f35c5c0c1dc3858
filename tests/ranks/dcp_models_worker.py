"""Models that torch has divided or wrapped, through torch.distributed.checkpoint: ``dcp_models_worker.py ROOT``.

Each kind is saved in every way, and loaded by itself and by others: what comes back is the same bit for bit, and so is
training from there.
"""

from __future__ import annotations

import copy
import importlib
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from stillframe import Catalog
from stillframe.integrations.dcp import Reader, Stager, Writer
from tests.ranks.leaving import leave
from tests.ranks.reshard_worker import Net, assert_alike, reference, train, wrap

warnings.simplefilter("ignore")
dcp: Any = importlib.import_module("torch.distributed.checkpoint")
LOADED_BY = {
    "fsdp1": "fsdp1 mesh",  # ShardedTensors, then DTensors
    "fsdp1 mesh": "plain",
    "hsdp": "tp",
    "tp": "fsdp compile",
    "fsdp compile": "hsdp",
}


def build(kind: str, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: torch.nn.Module
    if kind.startswith("fsdp1"):
        mesh = init_device_mesh("cpu", (2,)) if kind == "fsdp1 mesh" else None
        policy = ModuleWrapPolicy({torch.nn.Linear})
        cpu = torch.device("cpu")
        model = FullyShardedDataParallel(
            Net(), auto_wrap_policy=policy, device_id=cpu, use_orig_params=True, device_mesh=mesh
        )
    else:
        model = wrap(Net(), kind.removesuffix(" compile"))
    if kind.endswith(" compile"):
        model = torch.compile(model, backend="eager")  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, 2)
    return model, optimizer


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def load(model: torch.nn.Module, optimizer: torch.optim.Optimizer, root: Path, step: int) -> None:
    state = state_of(model, optimizer)
    planner = dcp.DefaultLoadPlanner(flatten_sharded_tensors=False)  # with it, DCP itself loses param_groups of FSDP1
    dcp.load(state, storage_reader=Reader(root, step=step), planner=planner)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def check(kind: str, other: str, root: Path, group: Any) -> None:
    model, optimizer = build(kind, seed=0)
    writer = Writer(root)
    stager = Stager(writer)
    expected = []
    for step in range(4):
        expected.append(copy.deepcopy(reference(model, optimizer)))
        state = state_of(model, optimizer)
        if step == 0:
            dcp.save(state, storage_writer=writer)
        elif step == 1 and kind != "fsdp1":  # DCP's own stager takes no ShardedTensor
            saving = dcp.async_save(state, storage_writer=writer, process_group=group)
        else:
            saving = dcp.async_save(state, storage_writer=writer, async_stager=stager, process_group=group)
        del state
        train(model, optimizer, 1)
        if step:
            getattr(saving, "upload_completion", saving).result()
    found = build(kind, seed=5)
    for step in range(4):
        load(*found, root, step)
        assert_alike(reference(*found), expected[step])
    train(*found, 1)
    assert_alike(reference(*found), reference(model, optimizer))
    found = build(other, seed=6)
    load(*found, root, 3)
    assert_alike(reference(*found), expected[3])
    assert Catalog(root).steps() == [0, 1, 2, 3]


def main() -> None:
    dist.init_process_group("gloo")
    group = dist.new_group(backend="gloo")
    for kind, other in LOADED_BY.items():
        check(kind, other, Path(sys.argv[1], kind), group)
    leave()


if __name__ == "__main__":
    main()
