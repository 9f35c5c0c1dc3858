"""Saves at every step to a local disk; every fifth step goes on to a shared directory.  Run it again and it goes on.

python examples/tiers.py
python examples/tiers.py --lost      # removes the local disk first: it goes on from the shared directory
"""

import shutil
import sys

import torch

import stillframe

LOCAL, SHARED, STEPS = "runs/tiers/local", "runs/tiers/shared", 22
# On a cluster: LOCAL = "/nvme/{node}/gpt", and further tiers such as Tier("s3://bucket/gpt", every=timedelta(hours=1)).

if "--lost" in sys.argv:
    shutil.rmtree(LOCAL)

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
state = {"model": model, "optimizer": optimizer, "rng": stillframe.RNG()}
shared = stillframe.Tier(SHARED, every=5, keep=stillframe.KeepLast(2))

with stillframe.Checkpointer(LOCAL, keep=stillframe.KeepLast(6), tiers=[shared]) as checkpointer:
    report = checkpointer.restore(state)  # from the nearest place that has the newest complete step
    print(f"goes on from step {report.step} in {report.source}" if report else "starts anew")
    for step in range(report.next_step, report.next_step + STEPS):
        batch = torch.randn(16, 64)
        loss = (model(batch) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        checkpointer.save(step, state)  # as without tiers: the tier is filled in the background
        print(f"step {step:3}  loss {loss.item():.4f}")
    checkpointer.wait(tier=shared)  # until the tier has every step that is due there
    (tier,) = checkpointer.stats().tiers
    print(f"committed; the tier is {tier.behind_steps} steps behind; see `stillframe list {LOCAL}`")
