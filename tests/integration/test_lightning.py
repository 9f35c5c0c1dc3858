"""Lightning's Trainer and Fabric with stillframe's plugin, in this process; tests/loops has the lives of whole runs."""

from __future__ import annotations

import collections
import datetime
import importlib
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from stillframe import Catalog, ConfigError, ExistsError, StillframeError, UnsupportedStateError, spi
from stillframe.open_roots import find_root
from tests.support import assert_same, kill, pause

L: Any = pytest.importorskip("lightning", reason="lightning is not installed: `make test-loops` installs it")
ours: Any = importlib.import_module("stillframe.integrations.lightning")
ModelCheckpoint = L.pytorch.callbacks.ModelCheckpoint
pytestmark = pytest.mark.filterwarnings("default")  # Lightning's own

REPOSITORY = Path(__file__).resolve().parent.parent.parent
DATA: Any = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))


class Module(L.LightningModule):  # type: ignore[misc]
    def __init__(self, width: int = 8, **more: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, width), torch.nn.BatchNorm1d(width), torch.nn.Dropout(0.5), torch.nn.Linear(width, 1)
        )

    def training_step(self, batch: torch.Tensor, index: int) -> Any:
        self.log("score", abs(self.global_step - 4.0))
        return self.layers(batch).square().mean()

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("drawn", torch.rand(()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def trainer(place: Path, steps: int, *callbacks: Any, plugin: Any = None, **more: Any) -> Any:
    options: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options |= {"accelerator": "cpu", "max_steps": steps, "limit_val_batches": 1, "default_root_dir": place, **more}
    return L.Trainer(plugins=[plugin or ours.CheckpointIO()], callbacks=list(callbacks), **options)


def fit(made: Any, seed: int, source: Any = None, **more: Any) -> Module:
    random.seed(seed)
    torch.manual_seed(seed)
    module = Module(**more)
    loader: Any = DataLoader(DATA, 2, shuffle=True)
    made.fit(module, loader, DataLoader(DATA, 2), ckpt_path=source)
    return module


def saves(place: Path, **more: Any) -> Any:
    options: dict[str, Any] = {"dirpath": place, "filename": "{step}", "every_n_train_steps": 1, **more}
    return ModelCheckpoint(**options)


def names(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir() if path.name != "_stillframe")


@pytest.mark.parametrize("last", [True, "link"])
def test_top_k_and_last_are_kept_and_resumed_from_exactly(tmp_path: Path, last: Any) -> None:
    calm = fit(trainer(tmp_path / "calm", 11), 1)
    place = tmp_path / "run"
    first = trainer(tmp_path, 9, best := saves(place, monitor="score", save_top_k=2, save_last=last))
    fit(first, 1)
    assert names(place) == ["last.ckpt", "step=4.ckpt", "step=5.ckpt"] or last == "link"
    assert best.best_model_path == str(place / "step=5.ckpt")  # logged before the update
    assert len(Catalog(place / "_stillframe").steps()) == (3 if last is True else 2)
    assert (place / "last.ckpt").is_symlink() == (last == "link")
    loaded = Module.load_from_checkpoint(best.best_model_path)
    assert loaded.hparams["width"] == 8
    (result,) = first.validate(dataloaders=DataLoader(DATA, 2), ckpt_path="best", verbose=False)
    assert_same(dict(first.lightning_module.state_dict()), dict(loaded.state_dict()))
    assert "drawn" in result
    again = fit(trainer(tmp_path, 11, saves(place, monitor="score", save_last=last)), 2, "last")
    assert_same(dict(again.state_dict()), dict(calm.state_dict()))


def test_a_name_is_there_when_it_is_durable_and_goes_when_a_later_one_is(tmp_path: Path) -> None:
    plugin = ours.CheckpointIO()
    seen: list[list[str]] = []

    class Look(L.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, made: Any, *_: Any) -> None:
            plugin.wait()
            seen.append(names(tmp_path))
            if made.global_step > 1:  # this one is saved when all callbacks have been called
                found = plugin.load_checkpoint(tmp_path / f"step={made.global_step - 1}.ckpt")
                assert found["global_step"] == made.global_step - 1

    fit(trainer(tmp_path, 4, saves(tmp_path), Look(), plugin=plugin), 1)
    assert names(tmp_path) == ["step=4.ckpt"]
    assert all(1 <= len(each) <= 2 for each in seen[1:])
    module = Module()
    state = {"state_dict": module.state_dict(), "global_step": 9}
    plugin.save_checkpoint(state, tmp_path / "x.ckpt")
    plugin.remove_checkpoint(tmp_path / "x.ckpt")  # not committed yet, as a rule
    plugin.save_checkpoint(state, tmp_path / "y.ckpt")
    plugin.teardown()
    assert names(tmp_path) == ["step=4.ckpt", "y.ckpt"]
    assert len(Catalog(tmp_path / "_stillframe").steps()) == 2
    plugin.remove_checkpoint(tmp_path / "step=4.ckpt")
    plugin.remove_checkpoint(tmp_path / "step=4.ckpt")  # and again
    assert names(tmp_path) == ["y.ckpt"]


def test_two_of_one_name_at_one_step_get_two_names(tmp_path: Path) -> None:
    by_time = saves(tmp_path, every_n_train_steps=None, train_time_interval=datetime.timedelta(0))
    fit(trainer(tmp_path, 2, saves(tmp_path, every_n_train_steps=2), by_time), 1)
    assert names(tmp_path) == ["step=2-v1.ckpt", "step=2.ckpt"]


def test_a_link_to_itself_is_none_and_one_to_a_file_of_lightnings_is_lightnings(tmp_path: Path) -> None:
    made = trainer(tmp_path, 2, saves(tmp_path, filename="last", save_last="link", enable_version_counter=False))
    fit(made, 1)
    assert names(tmp_path) == ["last.ckpt"]
    assert ours.CheckpointIO().load_checkpoint(tmp_path / "last.ckpt")["global_step"] == 2
    (tmp_path / "file.ckpt").write_bytes(b"")
    ModelCheckpoint._link_checkpoint(made, str(tmp_path / "file.ckpt"), str(tmp_path / "link.ckpt"))
    assert (tmp_path / "link.ckpt").resolve() == tmp_path / "file.ckpt"


def test_weights_only_and_what_only_pickle_can_hold(tmp_path: Path) -> None:
    fit(trainer(tmp_path, 1, saves(tmp_path, save_weights_only=True)), 1, counts=collections.Counter("aab"))
    path = tmp_path / "step=1.ckpt"
    found = Module.load_from_checkpoint(path)
    assert found.hparams["counts"] == {"a": 2, "b": 1}
    plugin = ours.CheckpointIO()
    plugin.save_checkpoint({"made": datetime.date(2026, 1, 2)}, tmp_path / "date.ckpt")
    with pytest.raises(UnsupportedStateError, match=r"made is a datetime\.date"):
        plugin.load_checkpoint(tmp_path / "date.ckpt")
    assert plugin.load_checkpoint(tmp_path / "date.ckpt", weights_only=False) == {"made": datetime.date(2026, 1, 2)}
    with pytest.raises(UnsupportedStateError, match="hyper_parameters/f is a"):
        plugin.save_checkpoint({"hyper_parameters": {"f": lambda: 0}}, tmp_path / "f.ckpt")
    plugin.teardown()


def test_checkpoints_of_lightning_are_read_and_left_alone(tmp_path: Path) -> None:
    stock = trainer(tmp_path, 3, saves(tmp_path), plugin=L.pytorch.plugins.TorchCheckpointIO())
    fit(stock, 1)
    path = tmp_path / "step=3.ckpt"
    made = trainer(tmp_path, 5, saves(tmp_path / "more"))
    fit(made, 2, path)
    assert made.global_step == 5
    assert path.is_file()
    with pytest.raises(ExistsError, match="is a file that Lightning wrote"):
        made.save_checkpoint(path)
    with pytest.raises(FileNotFoundError):
        ours.CheckpointIO().load_checkpoint(tmp_path / "none.ckpt")


def test_a_failed_save_is_raised_when_the_fit_ends(tmp_path: Path) -> None:
    class Kill(L.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, made: Any, *_: Any) -> None:
            if made.global_step == 2:
                opened = find_root(tmp_path / "_stillframe")
                assert opened is not None
                pid = spi.keeper_pid(opened.run)
                assert pid is not None
                opened.run.wait()  # those before it are not lost with it
                pause(pid)
                made.save_checkpoint(tmp_path / "lost.ckpt")
                opened.run.fence(wait=True)
                kill(pid)

    made = trainer(tmp_path, 4, Kill(), saves(tmp_path, save_top_k=-1))
    with pytest.raises(StillframeError, match=r"lost.ckpt was not saved"):
        fit(made, 1)
    assert made.global_step == 4
    assert names(tmp_path) == ["step=1.ckpt", "step=2.ckpt", "step=3.ckpt", "step=4.ckpt"]


def test_what_was_to_go_for_a_save_that_failed_stays(tmp_path: Path) -> None:
    plugin = ours.CheckpointIO(on_error="warn")
    module = Module()
    state = {"state_dict": module.state_dict()}
    plugin.save_checkpoint(state, tmp_path / "old.ckpt")
    plugin.wait()
    opened = find_root(tmp_path / "_stillframe")
    assert opened is not None
    pid = spi.keeper_pid(opened.run)
    assert pid is not None
    pause(pid)
    plugin.save_checkpoint(state, tmp_path / "new.ckpt")
    plugin.remove_checkpoint(tmp_path / "old.ckpt")
    opened.run.fence(wait=True)
    kill(pid)
    plugin.teardown()
    assert names(tmp_path) == ["old.ckpt"]


def test_what_was_not_tried_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="on_error"):
        ours.CheckpointIO(on_error="ignore")
    plugin = ours.CheckpointIO()
    with pytest.raises(ConfigError, match="to a URL"):
        plugin.save_checkpoint({}, "s3://bucket/x.ckpt")
    with pytest.raises(ConfigError, match="storage_options"):
        plugin.save_checkpoint({}, tmp_path / "x.ckpt", storage_options={})
    wrapped = trainer(tmp_path, 1, saves(tmp_path), plugin=L.pytorch.plugins.io.AsyncCheckpointIO(plugin))
    with pytest.raises(ConfigError, match="itself to the Trainer"):
        fit(wrapped, 1)
    with pytest.raises(ConfigError, match="was not tried with FSDPStrategy"):  # without an accelerator it cannot begin
        ours.hooks._check_strategy(L.pytorch.strategies.FSDPStrategy())
    monkeypatch.setattr(L, "__version__", "2.9.0")
    with pytest.raises(ConfigError, match=r"2\.9\.0 was not tested"):
        ours.CheckpointIO()


def test_fabric_saves_and_loads(tmp_path: Path) -> None:
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=[ours.CheckpointIO()])
    module = torch.nn.Linear(4, 2)
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters()))
    fabric.backward(model(DATA).square().mean())
    optimizer.step()
    before = {name: each.clone() for name, each in module.state_dict().items()}
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 3}
    for _ in range(2):  # the second takes the name
        fabric.save(tmp_path / "state.ckpt", state)
    optimizer.step()
    assert fabric.load(tmp_path / "state.ckpt", state) == {}
    assert_same(dict(module.state_dict()), before)
    assert Catalog(tmp_path / "_stillframe").steps()[-1:] == [1]
    fabric.strategy.teardown()
    assert names(tmp_path) == ["state.ckpt"]


def test_the_lines_of_the_guide_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    guide = (REPOSITORY / "docs/guides/lightning.md").read_text()
    train, read, fabric = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    module = Module()
    loader = DataLoader(DATA, 2, shuffle=True)
    scope: dict[str, Any] = {"model": module, "loader": loader, "steps": 3, "Model": Module}
    exec(train.replace("max_steps=", "accelerator='cpu', logger=False, enable_progress_bar=False, max_steps="), scope)
    exec(read, scope)
    assert_same(dict(scope["model"].state_dict()), dict(module.state_dict()))
    plain = torch.nn.Linear(4, 2)
    exec(fabric, {**scope, "model": plain, "optimizer": torch.optim.AdamW(plain.parameters())})
    assert Catalog("runs/fabric/_stillframe").steps() == [0]


def test_the_example_runs_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    example = str(REPOSITORY / "examples/lightning_gpt.py")
    for steps in (10, 30):
        text = Path(example).read_text().replace('"runs/lightning_gpt", 30', f'"runs/lightning_gpt", {steps}')
        exec(compile(text, example, "exec"), {"__name__": "__main__"})
        assert f"at step {steps}" in capsys.readouterr().out
        assert Catalog("runs/lightning_gpt/_stillframe").steps() == [steps - 1, steps]
