"""The model of the demo: a small decoder-only transformer over bytes.

Owns the architecture and its sizes; knows nothing of data, training or checkpoints.  Dropout is on, so
that a resumed run ends bit-equal only if the random number generators were restored as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn


@dataclass(frozen=True, slots=True)
class Sizes:
    """The defaults make about 9.9 million parameters; with AdamW, a state of about 120 MB."""

    vocabulary: int = 256
    context: int = 128
    width: int = 320
    heads: int = 5
    layers: int = 8
    dropout: float = 0.1


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.mix = nn.Linear(sizes.width, 3 * sizes.width)
        self.out = nn.Linear(sizes.width, sizes.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.mix(x).split(width, dim=2)
        )
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed: torch.Tensor = self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return mixed


class Block(nn.Module):
    """Attention, then an MLP; each behind a layer norm and beside a residual path."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(sizes.width)
        self.attention = Attention(sizes)
        self.mlp_norm = nn.LayerNorm(sizes.width)
        self.mlp = nn.Sequential(
            nn.Linear(sizes.width, 4 * sizes.width), nn.GELU(), nn.Linear(4 * sizes.width, sizes.width)
        )
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        after: torch.Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return after


class GPT(nn.Module):
    """Bytes in, the loss of the next byte out."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.bytes = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.context, sizes.width)
        self.dropout = nn.Dropout(sizes.dropout)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        self.apply(_initialise)
        self.head.weight = self.bytes.weight  # tied: one tensor under two names, stored once

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.scores(inputs).flatten(0, 1), targets.flatten())

    def scores(self, inputs: torch.Tensor) -> torch.Tensor:
        """For each byte, how likely each one is to be next."""
        places = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.dropout(self.bytes(inputs) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        scores: torch.Tensor = self.head(self.norm(x))
        return scores


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.1)  # it is also the head: smaller ones learn too slowly for a demo
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
