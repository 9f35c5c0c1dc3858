"""HSDP with tensor parallelism: 2 replicas, each sharded over ranks, each layer split over 2 ranks; saves every step.

torchrun --standalone --nproc-per-node 8 examples/hsdp_tp.py    # then again with 4: the checkpoint fits another mesh
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import stillframe

ROOT, STEPS, REPLICAS, SPLIT = "runs/hsdp_tp", 20, 2, 2


class Block(torch.nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(size)
        self.up = torch.nn.Linear(size, 4 * size)
        self.down = torch.nn.Linear(4 * size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


dist.init_process_group("cpu:gloo")
world_size = dist.get_world_size()
mesh = init_device_mesh(
    "cpu", (REPLICAS, world_size // (REPLICAS * SPLIT), SPLIT), mesh_dim_names=("replicate", "shard", "tensor")
)
torch.manual_seed(0)  # the same weights on every rank, before they are split
model = torch.nn.Sequential(*(Block(64) for _ in range(4)))
for block in model:
    parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(block, mesh=mesh["replicate", "shard"])
fully_shard(model, mesh=mesh["replicate", "shard"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)  # foreach cannot mix two meshes
state = stillframe.TrainState(model, optimizer)

reader = dist.get_rank() // SPLIT  # the ranks that split a layer read the same data
with stillframe.Checkpointer(ROOT, keep=stillframe.KeepLast(3)) as checkpointer:
    start = checkpointer.restore(state).next_step  # the same on all ranks; from this mesh or any other
    for step in range(start, start + STEPS):
        dice = torch.Generator().manual_seed(1000 * step + reader)
        batch = torch.randn(16, 64, generator=dice)
        loss = (model(batch) - batch.roll(1, dims=1)).square().mean()
        loss.backward()
        optimizer.step()  # waits here only for what of the last save is not copied yet
        optimizer.zero_grad()
        checkpointer.save(step, state)  # each replica writes a share; nothing is written twice
        if dist.get_rank() == 0:
            print(f"step {step:3}  loss {loss.item():.4f}")
    checkpointer.wait()
    if dist.get_rank() == 0:
        print(f"committed; see `stillframe list {ROOT}`, and run me again")
dist.destroy_process_group()
