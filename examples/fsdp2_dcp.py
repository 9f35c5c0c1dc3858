"""FSDP2 with torch.distributed.checkpoint, saving lazily at every step; run it again and it goes on where it was.

torchrun --standalone --nproc-per-node 2 examples/fsdp2_dcp.py
"""

import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import stillframe
from stillframe.integrations.dcp import Reader, Stager, Writer

ROOT, STEPS = "runs/fsdp2_dcp", 20

dist.init_process_group("cpu:gloo")
saving = dist.new_group(backend="gloo")  # DCP plans in a thread of its own: give it a group of its own
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def state_of(step: int) -> dict:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "step": step}


start = 0
newest = [stillframe.Catalog(ROOT).latest()]
dist.broadcast_object_list(newest)  # rank 0's for all: the keeper of a run just killed may be committing another
if newest[0] is not None:
    state = state_of(0)
    dcp.load(state, storage_reader=Reader(ROOT, step=newest[0]))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    start = state["step"]

writer = Writer(ROOT)
stager = Stager(writer)
saved = None
for step in range(start + 1, start + STEPS + 1):
    batch = torch.randn(64, 512, generator=torch.Generator().manual_seed(step))
    loss = (model(batch) - batch).square().mean()
    loss.backward()
    optimizer.step()  # waits here only for what of the last save is not copied yet
    optimizer.zero_grad()
    if saved is not None:
        saved.upload_completion.result()  # raises if the save before failed; it has had a whole step's time
    began = time.perf_counter()
    saved = dcp.async_save(state_of(step), storage_writer=writer, async_stager=stager, process_group=saving)
    if dist.get_rank() == 0:
        blocked_ms = 1e3 * (time.perf_counter() - began)
        print(f"step {step:3}  loss {loss.item():.4f}  async_save returned after {blocked_ms:.1f} ms")
saved.upload_completion.result()
if dist.get_rank() == 0:
    print(f"committed; see `stillframe list {ROOT}`, and run me again")
dist.destroy_process_group()
