"""Megatron-core where there is no CUDA: it asks for a CUDA device by name in many places, and gets the CPU.

Imported before Megatron, by drivers and examples of these tests, and by the demo of several hosts.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from tests.loops.driving import BATCH, SAMPLES, Life


class _OnCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if "cuda" in str(given.get("device")):
            given = {**given, "device": "cpu"}
        return func(*args, **given)


def pretend() -> None:
    """For the rest of this process."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # some of its functions would be compiled first
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
    _OnCpu().__enter__()  # type: ignore[no-untyped-call]


def tensor_parallel(kind: str, ranks: int) -> int:
    return 1 if "dp" in kind else ranks


class Run:
    """Model, optimizer, scheduler and numbers of one rank, as Megatron's training loop has them."""

    def __init__(self, life: Life, seed: int, silence: timedelta = timedelta(minutes=30)) -> None:
        from megatron.core import parallel_state
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.transformer.transformer_config import TransformerConfig

        parallel_state.initialize_model_parallel(
            tensor_parallel(life.wish.kind, life.ranks), distributed_timeout_minutes=silence.total_seconds() / 60
        )
        self.tp = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
        self.dp = parallel_state.get_data_parallel_rank()
        config = TransformerConfig(
            num_layers=2, hidden_size=32, num_attention_heads=4, use_cpu_initialization=True, attention_dropout=0.0,
            hidden_dropout=0.1, gated_linear_unit=True, add_bias_linear=False, bias_activation_fusion=False,
            masked_softmax_fusion=False, gradient_accumulation_fusion=False,
        )  # fmt: skip
        torch.manual_seed(7)
        spec = get_gpt_layer_local_spec()
        self.model = GPTModel(config=config, transformer_layer_spec=spec, vocab_size=64, max_sequence_length=8)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        lr, self.optimizer.param_groups[0]["lr"] = self.optimizer.param_groups[0]["lr"], 0.0
        self.optimizer.step()  # its state exists from the beginning, as Megatron's optimizers have it
        self.optimizer.param_groups[0]["lr"] = lr
        self.rank = life.rank
        self.seed(seed)

    def seed(self, number: int) -> None:
        torch.manual_seed(number)  # alike on all tensor parallel ranks, as Megatron wants it
        numpy.random.seed(number)
        random.seed(1000 * number + self.rank)

    def sharded(self, iteration: int) -> dict[str, Any]:
        from megatron.core.dist_checkpointing import ShardedObject
        from megatron.core.dist_checkpointing.optimizer import (
            get_param_id_to_sharded_param_map,
            make_sharded_optimizer_tensor,
        )

        model = self.model.sharded_state_dict()
        by_number = get_param_id_to_sharded_param_map(model, self.model.parameters())
        states = [self.optimizer.state[each] for each in self.model.parameters()]
        optimizer = {
            name: {
                number: make_sharded_optimizer_tensor(each, states[number][name], f"optimizer.{name}")
                for number, each in by_number.items()
            }
            for name in ("exp_avg", "exp_avg_sq")
        }
        numbers = [{"python": random.getstate(), "numpy": numpy.random.get_state(), "torch": torch.get_rng_state()}]
        return {
            "model": model,
            "optimizer": optimizer,
            "numbers": ShardedObject("rng_state", numbers, (1, self.tp[1]), (0, self.tp[0]), replica_id=self.dp),
            "iteration": iteration,
            "steps": float(states[0]["step"]),
            "scheduler": self.scheduler.state_dict(),
            "args": argparse.Namespace(lr=0.01),
        }

    def restore(self, loaded: dict[str, Any]) -> int:
        self.model.load_state_dict(loaded["model"])
        with torch.no_grad():
            for number, parameter in enumerate(self.model.parameters()):
                self.optimizer.state[parameter]["step"].fill_(loaded["steps"])
                for name in ("exp_avg", "exp_avg_sq"):
                    self.optimizer.state[parameter][name].copy_(loaded["optimizer"][name][number])
        self.scheduler.load_state_dict(loaded["scheduler"])
        self.optimizer.param_groups[0]["lr"] = self.scheduler.get_last_lr()[0]
        if "numbers" in loaded:
            (numbers,) = loaded["numbers"]
            random.setstate(numbers["python"])
            numpy.random.set_state(numbers["numpy"])
            torch.set_rng_state(numbers["torch"])
        return int(loaded["iteration"])

    def step(self, life: Life, number: int, data: list[dict[str, torch.Tensor]]) -> float:
        """The loss.  As Megatron's samplers do, the number of the step says which samples are next."""
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(number * BATCH // SAMPLES)).tolist()
        at = number * BATCH % SAMPLES
        ids = torch.stack([data[each]["input_ids"] for each in order[at : at + BATCH]])
        life._note(self.model, (), {"input_ids": ids})
        length = ids.shape[1]
        mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]
        random.random()
        loss = self.model(ids, torch.arange(length).expand_as(ids), mask, labels=ids).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return float(loss.item())

    def ended(self, life: Life, **more: Any) -> None:
        """Says what came of it, of all ranks."""
        own = {
            "model": [each.detach() for each in self.model.parameters()],
            "optimizer": {number: self.optimizer.state[each] for number, each in enumerate(self.model.parameters())},
            "numbers": random.getstate(),
        }
        all_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(all_ranks, own)
        tensors = {f"{rank}.{at}": one for rank, each in enumerate(all_ranks) for at, one in enumerate(each["model"])}
        states = {f"{rank}.{at}": one for rank, each in enumerate(all_ranks) for at, one in each["optimizer"].items()}
        other = {"scheduler": self.scheduler.state_dict(), "numbers": [each["numbers"] for each in all_ranks]}
        life.ended(
            SimpleNamespace(state_dict=lambda: tensors),  # type: ignore[arg-type]
            SimpleNamespace(state_dict=lambda: {"state": states}),
            SimpleNamespace(state_dict=lambda: other),
            **more,
        )
