"""Training that saves when Slurm wants its node back, and goes on when Slurm starts it again.

sbatch examples/slurm_preemption.sbatch
torchrun --standalone --nproc-per-node 2 examples/slurm_preemption.py      # the same without Slurm
"""

import os
import pathlib

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import stillframe

RUN = pathlib.Path("runs/slurm_preemption")  # named after the run, not after the job: the next job has to find it
STEPS = int(os.environ.get("STEPS", "200"))


def main() -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = stillframe.TrainState(model, optimizer, rng=stillframe.RNG())
    every = stillframe.Every(steps=50, minutes=30)
    with stillframe.Checkpointer(RUN, keep=stillframe.KeepLast(3), every=every) as checkpointer:
        preemption = stillframe.on_preemption(checkpointer, state, deadline_s=20)  # torchrun kills after 30 s
        start = checkpointer.restore(state).next_step
        if start == 0:
            torch.manual_seed(1000 + dist.get_rank())  # each rank draws batches of its own
        for step in range(start, STEPS):
            batch = torch.randn(1024, 256)
            loss = (model(batch) - batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if dist.get_rank() == 0:
                print(f"step {step:3}  loss {loss.item():.6f}", flush=True)
            if checkpointer.due(step, last=step == STEPS - 1):
                checkpointer.save(step, state)
            preemption.check(step)  # after a signal: saves this step on all ranks, waits until it is durable, exits


dist.init_process_group("cpu:gloo")
try:
    main()
except SystemExit as end:
    if end.code == 143:  # it was SIGTERM, and there is work left: tell the job file to start the job again
        RUN.with_suffix(".again").touch()
    raise
dist.destroy_process_group()
if int(os.environ["RANK"]) == 0:
    print("committed; all steps are done")
