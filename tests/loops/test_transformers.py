"""Hugging Face's Trainer, TRL's SFTTrainer and PEFT on stillframe.  As a program: one life of a run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from stillframe import Catalog
from tests.loops.conformance import Conformance, OnOtherRanks, assert_goes_on
from tests.loops.driving import BATCH, LIFE_S, SOURCE, STEPS, Life, Living, Wish, digest_of, standing
from tests.loops.sharding import allow_fsdp


def train(life: Life) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    import stillframe

    wish = life.wish
    more: dict[str, Any] = {}

    class Told(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **its: Any) -> None:
            more["begun"] = standing(its["model"], its["optimizer"], its["lr_scheduler"])

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            life.saved(state.global_step)

    options: dict[str, Any] = {
        "max_steps": wish.steps, "save_steps": 1, "save_total_limit": wish.keep or None, "logging_steps": 3,
        "per_device_train_batch_size": BATCH, "dataloader_num_workers": 2, "learning_rate": 0.01, "seed": 3,
        "lr_scheduler_type": "cosine", "report_to": [], "disable_tqdm": True, "use_cpu": True,
        "dataloader_pin_memory": False, "gradient_accumulation_steps": 2 if "accumulated" in wish.kind else 1,
    }  # fmt: skip
    if life.ranks > 1:
        options["ddp_backend"] = "gloo"
    kind, _, form = wish.kind.partition(" as ")
    if form:
        allow_fsdp()
        options["fsdp"], options["fsdp_config"] = True, {"version": 2, "state_dict_type": form}
    if kind == "pushed":
        options |= {"push_to_hub": True, "hub_model_id": "me/model", "hub_strategy": "every_save"}
        stand_in_for_the_hub(f"{wish.place}-hub/rank-{life.rank}")
    model, data = life.model(), life.data()
    if kind == "sft":
        trainer = tuned(wish.place, model, data, options)
    elif kind == "best":
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
    assert trainer.accelerator.is_fsdp2 == bool(form)
    if kind == "pushed":
        trainer.push_to_hub()
    parts = trainer.model, trainer.optimizer, trainer.lr_scheduler
    life.ended(*parts, ended=standing(*parts), best=trainer.state.best_model_checkpoint, **more)


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


def stand_in_for_the_hub(place: str) -> None:
    """The Hub cannot be reached from here: what it would be sent is copied, at once, to a directory of each commit."""
    import transformers.trainer
    from huggingface_hub.utils._paths import filter_repo_objects

    class Hub:
        def create_repo(self, repo_id: str, **_: Any) -> Any:
            return SimpleNamespace(repo_id=repo_id)

        def upload_folder(
            self, folder_path: str, commit_message: str, ignore_patterns: list[str] | None = None, **_: Any
        ) -> Future[None]:
            paths = {str(path.relative_to(folder_path)): path for path in Path(folder_path).rglob("*")}
            for name in filter_repo_objects(paths, ignore_patterns=ignore_patterns):
                if paths[name].is_file():
                    copy = Path(place, commit_message, name)
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(paths[name], copy)
            sent = Future[None]()
            sent.set_result(None)
            return sent

    transformers.trainer.hf_api = Hub  # type: ignore[assignment,attr-defined]


class TestTrainer(Conformance):
    module = "tests.loops.test_transformers"
    kinds = ("", "accumulated")
    best: ClassVar[str] = "best"

    @staticmethod
    def read(path: Path) -> str:
        from transformers import AutoModelForCausalLM

        return digest_of(AutoModelForCausalLM.from_pretrained(path).state_dict().values())

    def test_the_best_is_kept_and_loaded(self, tmp_path: Path) -> None:
        for limit, kept in ((1, [7]), (3, [7, 11, 12])):
            place = tmp_path / f"run-{limit}"
            result = self.live(Wish(str(place), keep=limit, kind=self.best))
            assert result.more["best"] == str(place / "checkpoint-7")
            assert sorted(self.checkpoints(place)) == Catalog(self.root(place)).steps() == kept
            assert self.read(place / "checkpoint-7") == result.parameters


class TestSharded(OnOtherRanks, TestTrainer):
    """The same with FSDP2, on two ranks."""

    kinds = ("plain as FULL_STATE_DICT", "accumulated as SHARDED_STATE_DICT")
    turns = ((2, "plain as SHARDED_STATE_DICT"), (1, kinds[0]), (2, kinds[0]), (1, "plain"))
    best = "best as FULL_STATE_DICT"
    kills = (3, 4)
    ranks = 1
    test_a_run_that_is_killed_again_and_again_ends_alike = None  # type: ignore[assignment]
    test_a_full_disk_costs_saves_and_neither_training_nor_older_ones = None  # type: ignore[assignment]

    def living(self, wish: Wish, ranks: int = 1) -> Living:
        return Living(self.module, wish, 2)

    def test_an_adapter_is_one_file_and_goes_on(self, tmp_path: Path) -> None:
        place, kind = tmp_path / "run", "sft as FULL_STATE_DICT"
        self.die(Wish(str(place), kill_at=5, kind=kind))
        assert_goes_on(self.live(Wish(str(place), seed=2, kind=kind)), self.calm(kind))
        assert TestTuning.read(place / f"checkpoint-{STEPS}")

    def test_sharded_checkpoints_are_exported_and_gone_on_from_in_the_other_form(self, tmp_path: Path) -> None:
        """As with Trainer alone, they do not open themselves."""
        place, last = tmp_path / "run", tmp_path / f"run/checkpoint-{STEPS}"
        result = self.live(Wish(str(place), kind="plain as SHARDED_STATE_DICT"))
        with pytest.raises(OSError, match=r"no file named model\.safetensors"):
            self.read(last)
        command = [sys.executable, "-m", "stillframe", "export", str(self.root(place)), str(STEPS)]
        subprocess.run([*command, str(tmp_path / "out")], check=True, timeout=100)
        shutil.copy(last / "config.json", tmp_path / "out")
        assert self.read(tmp_path / "out") == result.parameters
        longer = self.live(Wish(str(place), STEPS + 2, kind="plain as FULL_STATE_DICT", seed=2))
        assert longer.order == self.live(Wish(str(tmp_path / "calm"), STEPS + 2)).order[-2:]
        assert self.read(place / f"checkpoint-{STEPS + 2}") == longer.parameters


@pytest.mark.timeout(LIFE_S + 30)
@pytest.mark.parametrize("kind", ["pushed", "pushed as FULL_STATE_DICT"])
def test_of_two_ranks_the_first_uploads_and_what_it_uploads_is_whole(tmp_path: Path, kind: str) -> None:
    place, hub, steps = tmp_path / "run", tmp_path / "run-hub", 4
    with Living(TestTrainer.module, Wish(str(place), steps, kind=kind), 2) as living:
        living.wait()
    assert [each.name for each in hub.iterdir()] == ["rank-0"]
    commits = {f"Training in progress, step {step}": step for step in range(1, steps + 1)} | {"End of training": steps}
    assert {each.name for each in hub.glob("rank-0/*")} == set(commits)
    for commit, step in commits.items():
        sent = hub / "rank-0" / commit
        assert {"config.json", "model.safetensors", "training_args.bin"} <= {each.name for each in sent.iterdir()}
        assert not [each for each in sent.iterdir() if each.is_dir()], "neither the root nor checkpoints"
        assert TestTrainer.read(sent) == TestTrainer.read(place / f"checkpoint-{step}")


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
