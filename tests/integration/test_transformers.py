"""Hugging Face's Trainer on stillframe, in this process; kills, ranks, TRL and a full disk are in tests/loops."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import stillframe
from stillframe import Catalog, ConfigError, NotFoundError
from stillframe.integrations.transformers.install import TESTED
from tests.support import assert_same

transformers = pytest.importorskip("transformers")
REPOSITORY = Path(__file__).resolve().parent.parent.parent
STEPS = 5


def data(count: int = 8) -> list[dict[str, torch.Tensor]]:
    made = torch.Generator().manual_seed(0)
    texts = [torch.randint(32, (8,), generator=made) for _ in range(count)]
    return [{"input_ids": text, "labels": text} for text in texts]


def make_model(seed: int = 1) -> Any:
    torch.manual_seed(seed)
    shape: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 32, "attention_dropout": 0.2}
    shape |= {"num_hidden_layers": 1, "num_attention_heads": 2, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))


def make(place: Path, seed: int = 1, kind: Any = None, stop: int = 0, installed: bool = True, **options: Any) -> Any:
    """A trainer with stillframe; ``stop``: it ends after that step."""

    class Stop(transformers.TrainerCallback):  # type: ignore[name-defined,misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop |= state.global_step == stop

    plain: dict[str, Any] = {
        "max_steps": STEPS, "save_steps": 1, "per_device_train_batch_size": 2, "learning_rate": 0.01, "seed": 3,
        "report_to": [], "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False, "logging_steps": 1,
    }  # fmt: skip
    arguments = transformers.TrainingArguments(str(place), **{**plain, **options})
    trainer = (kind or transformers.Trainer)(
        model=make_model(seed), args=arguments, train_dataset=data(), callbacks=[Stop()], eval_dataset=data(2)
    )
    if installed:
        stillframe.integrations.transformers.install(trainer)
    return trainer


def outcome(trainer: Any) -> dict[str, Any]:
    state = trainer.optimizer.state_dict()["state"]
    return {
        "model": dict(trainer.model.state_dict()), "optimizer": state, "scheduler": trainer.lr_scheduler.state_dict(),
        "numbers": torch.rand(3), "loss": [each["loss"] for each in trainer.state.log_history if "loss" in each],
    }  # fmt: skip


def names(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir())


def test_it_trains_as_trainer_alone_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    alone = make(tmp_path / "alone", installed=False)
    alone.train()
    expected = outcome(alone)
    first = make(tmp_path / "ours", stop=3)
    first.train(resume_from_checkpoint=True)  # there is none yet
    second = make(tmp_path / "ours", seed=2, save_total_limit=2)
    assert second.train(resume_from_checkpoint=True).global_step == STEPS
    assert_same(outcome(second), expected)
    assert names(tmp_path / "ours") == ["_stillframe", "checkpoint-4", "checkpoint-5"]
    assert Catalog(tmp_path / "ours" / "_stillframe").steps() == [4, 5]


def test_a_checkpoint_opens_with_from_pretrained_and_is_no_copy(tmp_path: Path) -> None:
    trainer = make(tmp_path, save_steps=2)
    trainer.train()
    place = tmp_path / "checkpoint-4"
    assert names(place) == sorted(
        [
            "config.json",
            "generation_config.json",
            "label.json",
            "model.safetensors",
            "trainer_state.json",
            "training_args.bin",
        ]
    )
    assert json.loads((place / "trainer_state.json").read_text())["global_step"] == 4
    (segment,) = (tmp_path / "_stillframe").glob("step-000000000004-*/rank-00000.safetensors")
    assert os.path.samefile(segment, place / "model.safetensors")
    model, about = transformers.AutoModelForCausalLM.from_pretrained(place, output_loading_info=True)
    assert type(model) is transformers.LlamaForCausalLM
    assert not about["missing_keys"]
    assert all(name.startswith("trainer") for name in about["unexpected_keys"])
    saved = stillframe.load(tmp_path / "_stillframe", 4)
    assert_same(dict(model.state_dict()), {name: saved[name] for name in model.state_dict()})


def test_an_earlier_step_and_another_output_directory_are_gone_on_from(tmp_path: Path) -> None:
    whole = make(tmp_path / "a")
    whole.train()
    expected = outcome(whole)
    again = make(tmp_path / "a", seed=2)
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert_same(outcome(again), expected)
    other = make(tmp_path / "b", seed=3)
    other.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    assert_same(outcome(other), expected)
    assert Catalog(tmp_path / "b" / "_stillframe").steps() == [4, 5]
    (tmp_path / "b" / "_stillframe").rename(tmp_path / "gone")
    with pytest.raises(NotFoundError, match="is not in"):
        make(tmp_path / "b").train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-4"))


def test_a_run_that_saved_without_stillframe_is_taken_over(tmp_path: Path) -> None:
    first = make(tmp_path, stop=3, installed=False)
    first.train()
    second = make(tmp_path, seed=2)
    second.train(resume_from_checkpoint=True)
    whole = make(tmp_path / "whole", installed=False)
    whole.train()
    assert_same(outcome(second)["model"], outcome(whole)["model"])
    assert Catalog(tmp_path / "_stillframe").steps() == [4, 5]


def test_nothing_is_begun_over_what_is_there(tmp_path: Path) -> None:
    make(tmp_path, stop=2).train()
    with pytest.raises(ConfigError, match="newest of step 2: go on with"):
        make(tmp_path).train()


def test_overrides_of_the_trainers_class_stay_in_force(tmp_path: Path) -> None:
    called = []

    class Mine(transformers.Trainer):  # type: ignore[name-defined,misc]
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            called.append(self.state.global_step)
            super()._save_checkpoint(model, trial)

    trainer = make(tmp_path, kind=Mine, save_steps=2)
    stillframe.integrations.transformers.install(trainer, arena="64MiB")  # again
    assert isinstance(trainer, Mine)
    assert type(trainer).__name__ == "Mine"
    trainer.train()
    assert called == Catalog(tmp_path / "_stillframe").steps() == [2, 4, 5]


def test_what_goes_to_the_hub_are_plain_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub cannot be reached from here: what Trainer would have it upload is looked at instead."""
    from safetensors.torch import load_file

    uploads = []

    class Done:
        def is_done(self) -> bool:
            return True

        done, result = is_done, is_done

    class Hub:
        def upload_folder(self, folder_path: str, ignore_patterns: list[str] | None = None, **_: Any) -> Any:
            uploads.append((folder_path, ignore_patterns, sorted(load_file(Path(folder_path) / "model.safetensors"))))
            return Done()

    trainer = make(tmp_path, save_steps=2)
    trainer.args.push_to_hub, trainer.args.hub_strategy = True, "every_save"
    trainer.hub_model_id, trainer.push_in_progress = "me/model", None
    monkeypatch.setattr("transformers.trainer.hf_api", Hub)
    monkeypatch.setattr("transformers.trainer.PushInProgress", lambda jobs: Done())
    trainer.train()
    assert len(uploads) == 3
    for folder, ignored, weights in uploads:
        assert folder == str(tmp_path)
        assert "_*" in (ignored or []), "or the root would be uploaded"
        assert weights == sorted(trainer.model.state_dict())


@pytest.mark.parametrize("option", ["save_only_model", "auto_find_batch_size", "enable_jit_checkpoint"])
def test_what_cannot_work_is_refused(tmp_path: Path, option: str) -> None:
    trainer = make(tmp_path, installed=False)
    setattr(trainer.args, option, True)
    with pytest.raises(ConfigError, match=f"{option} is not supported by"):
        stillframe.integrations.transformers.install(trainer)
    with pytest.raises(ConfigError, match="the trainer's own arguments say that"):
        stillframe.integrations.transformers.install(trainer, keep=stillframe.KeepLast(2))
    with pytest.raises(ConfigError, match=r"give a transformers\.Trainer"):
        stillframe.integrations.transformers.install(object())  # type: ignore[arg-type]


def test_other_versions_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(tmp_path, installed=False)
    assert transformers.__version__.startswith(f"{TESTED['transformers']}.")
    monkeypatch.setattr(transformers, "__version__", "5.9.1")
    with pytest.raises(ConfigError, match=r"transformers 5\.9\.1 was not tested .* install transformers 5\.22"):
        stillframe.integrations.transformers.install(trainer)


def test_the_lines_of_the_guide_run(tmp_path: Path) -> None:
    text = (REPOSITORY / "docs/guides/transformers.md").read_text()
    begin, load = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    trainer = make(tmp_path, installed=False, max_steps=20, save_steps=20)
    scope = {"trainer": trainer, "output_dir": str(tmp_path), "AutoModelForCausalLM": transformers.AutoModelForCausalLM}
    exec(begin + load, scope)
    assert_same(dict(scope["model"].state_dict()), dict(trainer.model.state_dict()))
    for name, version in TESTED.items():
        assert re.search(rf"\| {name} \| [\d.]+ \| {re.escape(version)} \|", text), name
