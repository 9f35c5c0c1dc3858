"""FSDP2 under Ray Train on two CPU workers, saved at every step.  Kill a worker, and Ray goes on from the newest step.

python examples/ray_fsdp2.py
"""

import os

import ray
import torch
import torch.distributed as dist
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch.distributed.fsdp import fully_shard

import stillframe

PLACE, STEPS = os.path.abspath("runs"), 40


def train(config: dict) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)), torch.nn.Dropout(0.1))
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = stillframe.TrainState(model, optimizer, rng=stillframe.RNG())
    with stillframe.integrations.ray.checkpointer(state) as checkpoints:  # restores the newest, if there is one
        if dist.get_rank() == 0:
            print(f"begins at step {checkpoints.next_step}")
        for step in range(checkpoints.next_step, config["steps"]):
            batch = torch.randn(32, 256)
            loss = (model(batch) - batch).square().mean()
            loss.backward()
            optimizer.step()  # waits here only for what of the last save is not copied yet
            optimizer.zero_grad()
            checkpoints.report(step, {"loss": loss.item()})  # Ray hears of it when it is committed


if __name__ == "__main__":
    ray.init(num_cpus=3)
    trainer = TorchTrainer(
        train,
        train_loop_config={"steps": STEPS},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=PLACE,
            name="ray_fsdp2",  # the same name again goes on
            failure_config=FailureConfig(max_failures=3),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    result = trainer.fit()
    root, step = stillframe.integrations.ray.locate(result.checkpoint)
    weights = stillframe.load(root, step, only="model")["model"]
    print(f"step {step}, loss {result.metrics['loss']:.4f}, {sum(each.numel() for each in weights.values())} weights")
    print(f"see `stillframe list {root}`; run me again with more STEPS")
