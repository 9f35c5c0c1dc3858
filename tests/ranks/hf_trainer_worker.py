"""transformers' Trainer with DeepSpeed on stillframe: ``hf_trainer_worker.py OUT STAGE …``."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"

import deepspeed  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from accelerate import DistributedType, PartialState  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from stillframe import Catalog  # noqa: E402
from stillframe.integrations import deepspeed as ours  # noqa: E402
from tests.ranks.saying import say  # noqa: E402
from tests.support import assert_same  # noqa: E402

logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
deepspeed.ops.__compatible_ops__.clear()  # compile nothing
STEPS = 6


class Stop(TrainerCallback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self.at


def trained(out: Path, stage: int, resume: bool, stop: int = STEPS) -> tuple[dict[int, float], dict[str, torch.Tensor]]:
    """The loss of each step, and the weights at the end."""
    torch.manual_seed(1 + resume)
    settings = {
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
        "datastates_ckpt": {},
    }
    arguments = TrainingArguments(
        str(out), deepspeed=settings, max_steps=STEPS, save_steps=2, save_total_limit=2, logging_steps=1,
        learning_rate=0.01, per_device_train_batch_size=1, report_to=[], disable_tqdm=True, seed=3,
        lr_scheduler_type="constant",
    )  # fmt: skip
    shape: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 32}
    shape |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**shape))  # type: ignore[no-untyped-call]
    numbers = torch.Generator().manual_seed(0)
    texts = [torch.randint(32, (8,), generator=numbers) for _ in range(32)]
    data = [{"input_ids": text, "labels": text} for text in texts]
    trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Stop(stop)])
    assert trainer.args.world_size == dist.get_world_size()
    trainer.train(resume_from_checkpoint=resume or None)
    losses = {int(each["step"]): each["loss"] for each in trainer.state.log_history if "loss" in each}
    with deepspeed.zero.GatheredParameters(list(model.parameters()) if stage == 3 else []):
        return losses, {name: each.detach().clone() for name, each in model.named_parameters()}


def main() -> None:
    root = Path(sys.argv[1])
    # On a CPU, accelerate takes each rank of DeepSpeed for a run of its own; what it knows of GPUs is right here, too.
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)
    ours.install()
    for stage in map(int, sys.argv[2:]):
        calm, expected = trained(root / f"calm-{stage}", stage, resume=False)
        trained(root / f"hit-{stage}", stage, resume=False, stop=3)
        hit, found = trained(root / f"hit-{stage}", stage, resume=True)
        assert_same(found, expected)
        assert sorted(calm) == list(range(1, STEPS + 1)), calm
        assert {step: calm[step] for step in hit} == hit, (calm, hit)
        assert min(hit) <= 4, hit
        for name in ("calm", "hit"):
            kept = sorted((root / f"{name}-{stage}").glob("checkpoint-*"))
            assert [each.name for each in kept] == ["checkpoint-4", "checkpoint-6"], kept
            assert len(Catalog(kept[0]).steps()) == 1, Catalog(kept[0]).steps()  # Trainer saves twice in stage 3
        say(f"trained {stage}")


if __name__ == "__main__":
    main()
