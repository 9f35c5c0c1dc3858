"""FSDP2 with a Checkpointer, saving at every step; run it again and it goes on where it was.

torchrun --standalone --nproc-per-node 2 examples/fsdp2_native.py
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import stillframe

ROOT, STEPS = "runs/fsdp2_native", 20

dist.init_process_group("cpu:gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
state = stillframe.TrainState(model, optimizer, rng=stillframe.RNG())

with stillframe.Checkpointer(ROOT, keep=stillframe.KeepLast(3)) as checkpointer:
    start = checkpointer.restore(state).next_step  # the same on all ranks
    for step in range(start, start + STEPS):
        batch = torch.randn(64, 512)
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()  # waits here only for what of the last save is not copied yet
        optimizer.zero_grad()
        checkpointer.save(step, state)
        if dist.get_rank() == 0:
            print(f"step {step:3}  loss {loss.item():.4f}")
    checkpointer.wait()
    if dist.get_rank() == 0:
        print(f"committed; see `stillframe list {ROOT}`, and run me again")
dist.destroy_process_group()
