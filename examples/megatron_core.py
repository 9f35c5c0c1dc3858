"""A parallel layer of Megatron-core on two CPU ranks, saved at every step, nobody waits for it.  Kill it, run it again.

torchrun --nproc-per-node 2 examples/megatron_core.py
"""

import os

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig

from stillframe.integrations.megatron import LoadStrategy, SaveStrategy, latest

PLACE, STEPS = os.path.abspath("runs/megatron_core"), 40

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
torch.manual_seed(0)
config = TransformerConfig(num_layers=1, hidden_size=256, num_attention_heads=4, use_cpu_initialization=True)
init, groups = torch.nn.init.xavier_normal_, {"dp_cp_group": parallel_state.get_data_parallel_group(True)}
model = ColumnParallelLinear(256, 512, config=config, init_method=init, bias=False, gather_output=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def sharded(step: int) -> dict:
    """What Megatron's own models and optimizers build, by hand: which part of which tensor this rank holds."""
    momentum = optimizer.state[model.weight].get("momentum_buffer", torch.zeros_like(model.weight))
    return {
        "model": model.sharded_state_dict(metadata=groups),
        "momentum": ShardedTensor.from_rank_offsets("momentum", momentum, (0, rank, ranks)),
        "rng": ShardedObject("rng", torch.get_rng_state(), (ranks,), (rank,)),  # each rank its own
        "step": step,
    }


strategy, begin = SaveStrategy(), 0
newest = latest(PLACE)  # waits until what a killed run had copied is a checkpoint, too
if newest is not None:
    loaded = dist_checkpointing.load(sharded(0), newest, LoadStrategy())
    model.load_state_dict(loaded["model"])
    optimizer.state[model.weight]["momentum_buffer"] = loaded["momentum"]
    torch.set_rng_state(loaded["rng"])
    begin = loaded["step"]
print(f"rank {rank} begins after step {begin}", flush=True)
for step in range(begin + 1, STEPS + 1):
    output, _ = model(torch.randn(32, 256))
    output.square().mean().backward()
    optimizer.step()  # waits here only for what of the last save is not copied yet
    optimizer.zero_grad()
    directory = f"{PLACE}/iter_{step:07d}"
    os.makedirs(directory, exist_ok=True)
    request = dist_checkpointing.save(sharded(step), directory, strategy, async_sharded_save=True)
request.execute_sync()  # or AsyncCallsQueue, which needs a CUDA device; all but the last are committed before
strategy.close()
print(f"rank {rank}: sum {model.weight.double().sum():.12f}; see `stillframe list {PLACE}/_stillframe`", flush=True)
