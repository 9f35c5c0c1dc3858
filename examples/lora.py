"""LoRA by hand: the base comes from another run's root and stays as it is; only the adapters are saved.

python examples/lora.py
"""

import torch

import stillframe

BASE, ROOT, STEPS = "runs/lora_base", "runs/lora", 20


class Adapted(torch.nn.Module):
    """A linear layer that is frozen, and a product of two thin ones that is trained."""

    def __init__(self, base: torch.nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = torch.nn.Linear(base.in_features, rank, bias=False)
        self.up = torch.nn.Linear(rank, base.out_features, bias=False)
        torch.nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 256))
if stillframe.Catalog(BASE).latest() is None:  # stands for the run that has trained the base
    with stillframe.Checkpointer(BASE) as checkpointer:
        checkpointer.save(0, {"model": model})
stillframe.restore(BASE, {"model": model}, only="model")  # reads only: that run may still be training
model[0], model[2] = Adapted(model[0]), Adapted(model[2])

adapters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
optimizer = torch.optim.AdamW(adapters.values(), lr=1e-3)
state = {"adapters": adapters, "optimizer": optimizer, "rng": stillframe.RNG()}
with stillframe.Checkpointer(ROOT, keep=stillframe.KeepLast(3)) as checkpointer:
    start = checkpointer.restore(state).next_step
    for step in range(start, start + STEPS):
        batch = torch.randn(32, 256)
        loss = (model(batch) - batch.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.save(step, state)
        print(f"step {step:3}  loss {loss.item():.4f}")
print(f"committed; see `stillframe list {ROOT}`, and run me again")
