"""Accelerate with a save at every step; kill it, run it again, and it ends as if nothing had happened.

python examples/accelerate_loop.py [DIRECTORY]
accelerate launch --cpu --num_processes 2 examples/accelerate_loop.py [DIRECTORY]
"""

import hashlib
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset

import stillframe.integrations.accelerate

PLACE, EPOCHS = sys.argv[1] if len(sys.argv) > 1 else "runs/accelerate_loop", 4


class Progress:
    """Where the loop is; Accelerate leaves that to the program."""

    epoch = batch = 0

    def state_dict(self) -> dict:
        return {"epoch": self.epoch, "batch": self.batch}

    def load_state_dict(self, state: dict) -> None:
        self.epoch, self.batch = state["epoch"], state["batch"]


config = ProjectConfiguration(project_dir=PLACE, automatic_checkpoint_naming=True, total_limit=3)
accelerator = Accelerator(project_config=config, cpu=True)
stillframe.integrations.accelerate.attach(accelerator)  # the only line that is not Accelerate's
set_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(256, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
samples = torch.randn(160, 32)
loader = DataLoader(TensorDataset(samples, samples.sum(1, keepdim=True)), 16, shuffle=True)
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
progress = Progress()
accelerator.register_for_checkpointing(progress)

accelerator.load_state()
for epoch in range(progress.epoch, EPOCHS):
    batches = accelerator.skip_first_batches(loader, progress.batch) if progress.batch else loader
    for inputs, targets in batches:
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        progress.batch += 1
        accelerator.save_state()
        accelerator.print(f"epoch {epoch} batch {progress.batch} loss {loss.item():.4f}")
    progress.epoch, progress.batch = epoch + 1, 0
weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
accelerator.print("digest", hashlib.sha256(weights).hexdigest()[:16])
accelerator.end_training()
