"""A plain loop with a DataLoader and an average of the weights, saving at every step; run it again and it goes on.

python examples/plain_loop.py
"""

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import stillframe

ROOT, STEPS = "runs/plain_loop", 20

torch.manual_seed(0)
dataset = torch.utils.data.TensorDataset(torch.randn(160, 64))
loader = torch.utils.data.DataLoader(dataset, batch_size=16, shuffle=True, num_workers=2)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(256, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
batches = stillframe.Batches(loader)  # iterate over it: position and random numbers become part of the state

state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "average": average, "batches": batches}
with stillframe.Checkpointer(ROOT, keep=stillframe.KeepLast(3) | stillframe.KeepBest("loss")) as checkpointer:
    start = step = checkpointer.restore(state).next_step
    while step < start + STEPS:
        for (batch,) in batches:
            loss = (model(batch) - batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()  # waits here only for what of the last save is not copied yet
            scheduler.step()
            average.update_parameters(model)  # right after optimizer.step(): needs no fence of its own
            checkpointer.save(step, state, metadata={"loss": loss.item()})
            print(f"step {step:3}  epoch {batches.epoch}  loss {loss.item():.4f}")
            step += 1
            if step == start + STEPS:
                break
print(f"committed; see `stillframe list {ROOT}`, and run me again")
