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
from tests.support import assert_same, run_fresh

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


SHARDED = """
import sys
from pathlib import Path
from tests.loops.sharding import allow_fsdp

allow_fsdp()
from tests.integration.test_transformers import make, outcome, transformers
from tests.loops.sharding import whole

for form, is_open in (("FULL_STATE_DICT", True), ("SHARDED_STATE_DICT", False)):
    place = Path(sys.argv[1], form)
    trainer = make(place, max_steps=2, fsdp=True, fsdp_config={"version": 2, "state_dict_type": form})
    trainer.train()
    assert trainer.accelerator.is_fsdp2
    assert (place / "checkpoint-2" / "model.safetensors").exists() == is_open
    if is_open:
        found = transformers.AutoModelForCausalLM.from_pretrained(place / "checkpoint-2").state_dict()
        assert all(whole(each).equal(found[name]) for name, each in trainer.model.state_dict().items())
"""


def test_with_fsdp2_a_checkpoint_opens_if_whole_weights_are_asked_for(tmp_path: Path) -> None:
    """On one rank; kills on two are in tests/loops."""
    run_fresh(SHARDED, tmp_path)


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


def test_a_checkpoint_of_weights_only_opens_and_is_not_gone_on_from(tmp_path: Path) -> None:
    trainer = make(tmp_path, save_only_model=True, save_total_limit=2)
    trainer.train()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-5")
    assert_same(dict(model.state_dict()), dict(trainer.model.state_dict()))
    assert sorted(stillframe.load(tmp_path / "_stillframe", 5)["trainer"]) == ["state"]
    for resume in (True, str(tmp_path / "checkpoint-4")):
        with pytest.raises(ConfigError, match="was saved with save_only_model"):
            make(tmp_path).train(resume_from_checkpoint=resume)
    assert Catalog(tmp_path / "_stillframe").steps() == [4, 5]


@pytest.mark.parametrize("option", ["save_on_each_node", "enable_jit_checkpoint"])
def test_what_cannot_work_is_refused(tmp_path: Path, option: str) -> None:
    trainer = make(tmp_path, installed=False)
    setattr(trainer.args, option, True)
    with pytest.raises(ConfigError, match=f"{option} is not supported by"):
        stillframe.integrations.transformers.install(trainer)
    with pytest.raises(ConfigError, match="the trainer's own arguments say that"):
        stillframe.integrations.transformers.install(trainer, keep=stillframe.KeepLast(2))
    with pytest.raises(ConfigError, match=r"give a transformers\.Trainer"):
        stillframe.integrations.transformers.install(object())  # type: ignore[arg-type]


REFUSED = """
import sys
from pathlib import Path
from tests.loops.sharding import allow_fsdp

allow_fsdp()
import pytest
import stillframe
from tests.integration.test_transformers import make

for wrong, version, form, asked in (
    ("FSDP1", 1, "FULL_STATE_DICT", {}),
    ("torch_compile with FSDP", 2, "FULL_STATE_DICT", {"torch_compile": True}),
    ("push_to_hub with SHARDED_STATE_DICT", 2, "SHARDED_STATE_DICT", {"push_to_hub": True}),
    (None, 2, "FULL_STATE_DICT", {"push_to_hub": True}),
):
    sharded = {"version": version, "state_dict_type": form}
    sharded |= {"sync_module_states": False, "cpu_ram_efficient_loading": False}  # FSDP1 would need a device for these
    trainer = make(Path(sys.argv[1]), installed=False, fsdp=True, fsdp_config=sharded)
    assert trainer.is_fsdp_enabled
    kind = type(trainer)
    for option, value in asked.items():
        setattr(trainer.args, option, value)
    if wrong is None:
        stillframe.integrations.transformers.install(trainer)
        continue
    with pytest.raises(stillframe.ConfigError, match=f"^{wrong} is not supported by"):
        stillframe.integrations.transformers.install(trainer)
    assert type(trainer) is kind
"""


def test_what_cannot_work_with_fsdp_is_refused(tmp_path: Path) -> None:
    run_fresh(REFUSED, tmp_path)


def test_a_batch_size_that_fits_is_found(tmp_path: Path) -> None:
    def hungry(at: int) -> type:
        class Hungry(transformers.Trainer):  # type: ignore[name-defined,misc]
            def training_step(self, model: Any, inputs: Any, *more: Any) -> Any:
                if self.state.global_step == at and len(inputs["input_ids"]) > 1:
                    raise RuntimeError("CUDA out of memory.")
                return super().training_step(model, inputs, *more)

        return Hungry

    alone = make(tmp_path / "alone", kind=hungry(0), auto_find_batch_size=True, installed=False)
    alone.train()
    expected = outcome(alone)
    first = make(tmp_path / "first", kind=hungry(0), auto_find_batch_size=True)
    first.train()
    assert_same(outcome(first), expected)

    make(tmp_path / "later", stop=2).train()
    again = make(tmp_path / "later", kind=hungry(4), auto_find_batch_size=True)
    again.train(resume_from_checkpoint=True)  # saves 3 and 4, and goes back to 2
    told = [json.loads((tmp_path / f"later/checkpoint-{step}/trainer_state.json").read_text()) for step in (2, 3, 5)]
    assert [each["epoch"] for each in told] == [2 / 4, 3 / 8, 5 / 8]
    assert Catalog(tmp_path / "later" / "_stillframe").steps() == [1, 2, 3, 4, 5]

    with pytest.raises(ConfigError, match=r"after step 3 was saved.*resume_from_checkpoint=True"):
        make(tmp_path / "anew", kind=hungry(3), auto_find_batch_size=True).train()
    assert Catalog(tmp_path / "anew" / "_stillframe").steps() == [1, 2, 3]


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
