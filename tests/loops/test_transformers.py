"""Hugging Face's Trainer, TRL's SFTTrainer and PEFT on stillframe.  As a program: one life of a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stillframe import Catalog
from tests.loops.conformance import Conformance
from tests.loops.driving import BATCH, LIFE_S, SOURCE, Life, Wish, digest_of


def train(life: Life) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    import stillframe

    wish = life.wish

    class Told(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            life.saved(state.global_step)

    options: dict[str, Any] = {
        "max_steps": wish.steps, "save_steps": 1, "save_total_limit": wish.keep or None, "logging_steps": 3,
        "per_device_train_batch_size": BATCH, "dataloader_num_workers": 2, "learning_rate": 0.01, "seed": 3,
        "lr_scheduler_type": "cosine", "report_to": [], "disable_tqdm": True, "use_cpu": True,
        "dataloader_pin_memory": False, "gradient_accumulation_steps": 2 if wish.kind == "accumulated" else 1,
    }  # fmt: skip
    if life.ranks > 1:
        options["ddp_backend"] = "gloo"
    model, data = life.model(), life.data()
    if wish.kind == "sft":
        trainer = tuned(wish.place, model, data, options)
    elif wish.kind == "best":
        options |= {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}

        class Judged(Trainer):
            def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
                found = {"eval_loss": abs(self.state.global_step - 7.0)}
                self.log(found)
                return found

        trainer = Judged(
            model=model, args=TrainingArguments(wish.place, **options), train_dataset=data, eval_dataset=data
        )
    else:
        trainer = Trainer(model=model, args=TrainingArguments(wish.place, **options), train_dataset=data)
    stillframe.integrations.transformers.install(trainer)
    trainer.add_callback(Told())
    trainer.train(resume_from_checkpoint=True)
    life.ended(trainer.model, trainer.optimizer, trainer.lr_scheduler, best=trainer.state.best_model_checkpoint)


def tuned(place: str, model: Any, data: list[dict[str, Any]], options: dict[str, Any]) -> Any:
    """TRL's trainer with an adapter of PEFT's."""
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(WordLevel({str(number): number for number in range(64)}, unk_token="0"))
    made: Any = PreTrainedTokenizerFast
    tokenizer = made(tokenizer_object=words, eos_token="0", pad_token="1", unk_token="0")
    adapter = LoraConfig(r=4, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    return SFTTrainer(
        model=model, args=SFTConfig(place, max_length=16, **options), peft_config=adapter, processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"input_ids": each["input_ids"].tolist()} for each in data]),
    )  # fmt: skip


class TestTrainer(Conformance):
    module = "tests.loops.test_transformers"
    kinds = ("", "accumulated")

    @staticmethod
    def read(path: Path) -> str:
        from transformers import AutoModelForCausalLM

        return digest_of(AutoModelForCausalLM.from_pretrained(path).state_dict().values())

    def test_the_best_is_kept_and_loaded(self, tmp_path: Path) -> None:
        for limit, kept in ((1, [7]), (3, [7, 11, 12])):
            place = tmp_path / f"run-{limit}"
            result = self.live(Wish(str(place), keep=limit, kind="best"))
            assert result.more["best"] == str(place / "checkpoint-7")
            assert sorted(self.checkpoints(place)) == Catalog(self.root(place)).steps() == kept
            assert self.read(place / "checkpoint-7") == result.parameters


class TestTuning(Conformance):
    """SFTTrainer with LoRA: the adapter is saved."""

    module = "tests.loops.test_transformers"
    kinds = ("sft",)
    disk_kib = 600

    @staticmethod
    def read(path: Path) -> str:
        from safetensors.torch import load_file

        assert (path / "adapter_config.json").exists()
        assert (path / "tokenizer.json").exists()
        found = load_file(path / "adapter_model.safetensors")
        return digest_of(found[name] for name in sorted(found) if "lora_" in name)


@pytest.mark.timeout(1100)
def test_the_example_trains_and_goes_on(tmp_path: Path) -> None:
    path = {"PYTHONPATH": str(SOURCE / "src"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "ignore", str(SOURCE / "examples/hf_trainer.py"), str(tmp_path / "run")]
    for _ in range(2):
        ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **path}, timeout=LIFE_S)
        assert ended.returncode == 0, ended.stderr
        assert " opens; see" in ended.stdout


if __name__ == "__main__":
    train(Life())
