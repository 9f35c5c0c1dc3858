"""torchtitan's own ``Trainer`` on CPUs, with a tiny Llama; one life of a training run.

torchtitan wants an accelerator, and a torch newer than 2.13.  So that it runs without, these things are changed: the
device that it takes for granted, and a function that torch does not have yet (:func:`prepare`); flex attention, which
has no backward on a CPU; bf16 in forward; a reduction that gloo does not have; and the ``spmd_backend``.  To the model
dropout is added, so that random numbers matter.  Pipeline parallelism does not run with torch 2.13.
"""

from __future__ import annotations

import json
import os
import random
import socket
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import IterableDataset, get_worker_info

from tests.loops.driving import Life, Result, Wish, digest_of
from tests.ranks.saying import say

VOCABULARY, DIM, LENGTH = 64, 32, 8


def prepare() -> None:
    """Before anything else of torchtitan is imported: its parts take the names from there."""
    from torchtitan.tools import utils

    about = types.SimpleNamespace(total_memory=2**30)
    utils.device_type, utils.device_module = "cpu", types.SimpleNamespace(
        set_device=lambda device: None, device_count=lambda: 1, current_device=lambda: 0, synchronize=lambda: None,
        get_device_name=lambda device: "CPU", get_device_properties=lambda device: about,
        reset_peak_memory_stats=lambda: None, empty_cache=lambda: None, memory_stats=lambda device: {},
    )  # fmt: skip
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = dist.distributed_c10d._set_pg_timeout  # type: ignore[attr-defined]


prepare()

import torchtitan.models.llama3 as llama  # noqa: E402
from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.models.common import Embedding, Linear, RMSNorm  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.common.rope import ComplexRoPE  # noqa: E402
from torchtitan.tools.logging import init_logger  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from stillframe import StorageError  # noqa: E402
from stillframe.integrations.torchtitan import Manager  # noqa: E402


def on_cpu(spec: Any) -> Any:
    """A model as torchtitan has it, changed so that it trains on CPUs with gloo."""
    parallelize = spec.parallelize_fn

    def parallelized(*given: Any, **how: Any) -> Any:
        model = parallelize(*given, **how)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return model

    spec.parallelize_fn = parallelized
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return spec


class Texts(IterableDataset[Any]):
    """A sample's first token is its number.  In the process that trains, the rest is drawn at random."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks, self.taken = rank, ranks, 0

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        while True:
            place, places = (0, 1) if worker is None else (worker.id, worker.num_workers)
            number = ((self.taken * places + place) * self.ranks + self.rank) % VOCABULARY
            drawn = torch.Generator().manual_seed(number) if worker is not None else None
            text = torch.randint(VOCABULARY, (LENGTH + 1,), generator=drawn)
            text[0] = number
            self.taken += 1
            yield {"input": text[:-1]}, text[1:]

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]


class Loader(ParallelAwareDataloader):  # type: ignore[misc]
    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):  # type: ignore[misc]
        is_reversed: bool = False
        """Rank 0 reads what the last rank usually reads, and so on."""

    def __init__(
        self,
        config: Config,
        *,
        dp_rank: int,
        dp_world_size: int,
        local_batch_size: int,
        snapshot_every_n_steps: Any,
        **_: Any,
    ) -> None:
        dp_rank = dp_world_size - 1 - dp_rank if config.is_reversed else dp_rank
        more = {"num_workers": config.num_workers, "snapshot_every_n_steps": snapshot_every_n_steps or 1}
        super().__init__(Texts(dp_rank, dp_world_size), dp_rank, dp_world_size, batch_size=local_batch_size, **more)


class Tokens(BaseTokenizer):  # type: ignore[misc]
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return VOCABULARY


def model(dim: int = DIM, hidden_dim: int = 64, layers: int = 2) -> Any:
    spec = llama.model_registry("debugmodel")
    spec.model = llama.Llama3Model.Config(
        dim=dim,
        vocab_size=VOCABULARY,
        tok_embeddings=Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=dim, param_init=llama._EMBEDDING_INIT),
        norm=RMSNorm.Config(normalized_shape=dim, param_init=llama._NORM_INIT),
        lm_head=Linear.Config(in_features=dim, out_features=VOCABULARY, param_init=llama._output_linear_init(dim)),
        layers=llama._build_llama3_layers(
            n_layers=layers, dim=dim, n_heads=4, n_kv_heads=2, hidden_dim=hidden_dim, attn_backend="flex",
            rope=ComplexRoPE.Config(dim=dim // 4, max_seq_len=LENGTH, theta=10000),
        ),
    )  # fmt: skip
    return on_cpu(spec)


def config(place: str, steps: int, checkpoint: Any, **parallelism: Any) -> Any:
    return Trainer.Config(
        model_spec=model(),
        hf_assets_path=place,
        dump_folder=place,
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
        tokenizer=Tokens.Config(),
        dataloader=Loader.Config(),
        optimizer=default_adamw(lr=0.01),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=3, total_steps=40),
        training=TrainingConfig(
            local_batch_size=2, seq_len=LENGTH, steps=steps, mixed_precision_param="float32", disable_cuda_graphs=True
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor", **parallelism),
        metrics=MetricsProcessor.Config(log_freq=1, disable_color_printing=True),
        checkpoint=checkpoint,
        debug=DebugConfig(seed=7),
    )


def seat() -> None:
    """What torchrun says, for a rank that is alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in alone.items():
        os.environ.setdefault(name, value)


# --- one life --------------------------------------------------------------------------------


def wishes(kind: str) -> dict[str, Any]:
    """``kind``: JSON of what a life has besides the usual; fields of the configuration, and ours."""
    return json.loads(kind) if kind else {}


def configured(wish: Wish) -> Any:
    more = wishes(wish.kind)
    parallelism, is_reversed, _ = more.pop("parallelism", {}), more.pop("reversed", False), more.pop("full", None)
    workers, is_stock = more.pop("workers", 0), more.pop("stock", False)
    fields = {"interval": 1, "keep_latest_k": wish.keep, "last_save_model_only": False, **more}
    checkpoint = CheckpointManager.Config(enable=True, **fields) if is_stock else Manager.Config(**fields)
    made = config(wish.place, wish.steps, checkpoint, **parallelism)
    made.dataloader.num_workers, made.dataloader.is_reversed = workers, is_reversed
    return made


def live(life: Life) -> None:
    wish = life.wish
    init_logger()
    seat()
    trainer = configured(wish).build()
    life.seed(wish.seed)
    order: list[list[int]] = []

    def note(module: torch.nn.Module, given: Any) -> None:
        order.append(given[0][:, 0].tolist())

    for part in trainer.model_parts:
        part.register_forward_pre_hook(note)
    add_dropout(trainer)
    watch(trainer.checkpointer, life)
    trainer.train()
    more = {"step": trainer.step, "tokens": trainer.ntokens_seen}
    result = made(trainer, order, more)
    trainer.close()
    if life.rank == 0:
        say("RESULT " + json.dumps(result.__dict__))
    dist.barrier()
    dist.destroy_process_group()


def add_dropout(trainer: Any) -> None:
    for part in trainer.model_parts:
        for layer in part.layers.values():
            layer.register_forward_hook(lambda module, given, out: torch.nn.functional.dropout(out, 0.1))


def watch(manager: Any, life: Life) -> None:
    load, save = manager.load, manager.save

    def loading(step: int) -> bool:
        is_loaded: bool = load(step)
        if not is_loaded:  # a life before this one may have left nothing: then this is the first
            life.seed(3)
        return is_loaded

    def saving(step: int, last_step: bool = False) -> bool:
        try:
            is_saved: bool = save(step, last_step=last_step)
        except StorageError:
            if "full" not in wishes(life.wish.kind):
                raise
            return False
        life.saved(step)
        return is_saved

    manager.load, manager.save = loading, saving


def made(trainer: Any, order: list[list[int]], more: dict[str, Any]) -> Result:
    """Of all ranks: whole tensors, by their names, however they are spread."""
    weights = {name: each for part in trainer.model_parts for name, each in part.named_parameters()}
    optimizer = trainer.optimizers.state_dict()
    own = [_digests(weights), _digests(optimizer), order]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    numbers = [random.random(), numpy.random.rand(3).tolist(), torch.rand(3).tolist()]
    orders = [each[2] for each in gathered]
    return Result(
        repr(sorted({name: digest for each in gathered for name, digest in each[0].items()}.items())),
        repr(sorted({name: digest for each in gathered for name, digest in each[1].items()}.items())),
        repr(trainer.lr_schedulers.state_dict()),
        repr(numbers),
        [[number for each in at for number in each] for at in zip(*orders, strict=True)],
        more,
    )


def _digests(tensors: dict[str, Any]) -> dict[str, str]:
    found = {}
    for name, value in tensors.items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        found[name] = digest_of([whole.detach()]) if isinstance(whole, torch.Tensor) else repr(whole)
    return found


def main() -> None:
    """``torchtitan.train``, here: run as a program, with its arguments."""
    from torchtitan.models.llama3 import config_registry
    from torchtitan.train import main as train

    registry = config_registry.model_registry
    config_registry.model_registry = lambda *given, **how: on_cpu(registry(*given, **how))
    train()


if __name__ == "__main__":
    main()
