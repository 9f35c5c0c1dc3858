"""A small GPT with DeepSpeed's ZeRO on stillframe, saving at every step; run it again and it goes on where it was.

torchrun --standalone --nproc-per-node 2 examples/deepspeed_gpt.py
"""

import time

import deepspeed
import torch
from torch import nn

import stillframe.integrations.deepspeed

SAVE_DIR, STEPS = "runs/deepspeed_gpt", 20
CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
    "datastates_ckpt": {"host_cache_size": 1},  # DeepSpeed's own key, GiB
}


class GPT(nn.Module):
    def __init__(self, width: int = 128, depth: int = 2, vocabulary: int = 256, length: int = 64) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        inputs, targets = text[:, :-1], text[:, 1:]
        hidden = self.token(inputs) + self.place.weight[: inputs.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1])
        return nn.functional.cross_entropy(
            self.head(self.blocks(hidden, mask=mask, is_causal=True)).flatten(0, 1), targets.flatten()
        )


stillframe.integrations.deepspeed.install()  # the one line

deepspeed.init_distributed("gloo")
torch.manual_seed(0)
model = GPT()
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
with open(__file__, "rb") as file:
    text = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).long()

path, client = engine.load_checkpoint(SAVE_DIR)
start = client["step"] if path else 0
for step in range(start + 1, start + STEPS + 1):
    generator = torch.Generator().manual_seed(100 * step + engine.global_rank)
    starts = torch.randint(len(text) - 65, (8,), generator=generator)
    loss = engine(torch.stack([text[at : at + 65] for at in starts]))
    engine.backward(loss)
    engine.step()  # waits here only for what of the last save is not copied yet
    began = time.perf_counter()
    engine.save_checkpoint(SAVE_DIR, client_state={"step": step})
    if engine.global_rank == 0:
        blocked_ms = 1e3 * (time.perf_counter() - began)
        print(f"step {step:3}  loss {loss.item():.4f}  save_checkpoint returned after {blocked_ms:.1f} ms")
engine.destroy()  # everything is committed when this returns
if engine.global_rank == 0:
    print(f"committed; see `stillframe list {SAVE_DIR}`, and run me again")
torch.distributed.destroy_process_group()
