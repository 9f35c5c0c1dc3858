"""What the documents show really runs, and what they name really exists."""

from __future__ import annotations

import datetime
import importlib
import inspect
import re
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

import stillframe
from stillframe.cli.app import COMMANDS, load
from stillframe.cli.document import document
from tests.support import make_model

REPOSITORY = Path(__file__).resolve().parent.parent.parent
README = (REPOSITORY / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def names(model: torch.nn.Module, steps: int) -> dict[str, Any]:
    """What the README's loop takes for granted."""
    optimizer = torch.optim.AdamW(model.parameters())

    def train_forward_backward(_: object) -> Any:
        loss = model(torch.randn(4, 32)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        return loss

    return {
        "model": model, "optimizer": optimizer, "steps": steps, "loader_state": {"position": 0},
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer), "train_forward_backward": train_forward_backward,
    }  # fmt: skip


def test_the_loop_of_the_readme_trains_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(BLOCKS[0], names(make_model(), 3))
    assert stillframe.Catalog("runs/gpt").latest() == 2
    second = names(make_model(), 5)
    exec(BLOCKS[0], second)
    assert second["report"].step == 2
    assert stillframe.Catalog("runs/gpt").steps() == [2, 3, 4]


def test_the_everyday_lines_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    class Vocabulary:
        pass

    model = make_model()
    state = {"model": model}
    with stillframe.Checkpointer("runs/gpt") as checkpointer:
        checkpointer.save(1000, state).wait()
        scope = {
            "stillframe": stillframe, "checkpointer": checkpointer, "state": state, "step": 1001, "root": "other",
            "Vocabulary": Vocabulary, "encode": vars, "decode": Vocabulary, "loader": [1, 2],
        }  # fmt: skip
        (block,) = [each for each in BLOCKS if "register_leaf" in each]
        lines = block.replace("stillframe.Checkpointer(root", "made = stillframe.Checkpointer(root")
        exec(lines, scope)
        made = scope["made"]
        assert isinstance(made, stillframe.Checkpointer)
        made.close()


def test_the_dcp_lines_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = [each for each in BLOCKS if "Stager" in each]
    state = make_model().state_dict()
    dist: Any = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dcp = importlib.import_module("torch.distributed.checkpoint")
        scope: dict[str, Any] = {"dcp": dcp, "dist": dist, "state_dict": state, "stillframe": stillframe}
        exec(block, scope)
        scope["saved"].upload_completion.result()
    finally:
        dist.destroy_process_group()
    assert stillframe.Catalog("runs/7b").steps() == [0, 100, 101]


def test_the_lines_on_tiers_run(tmp_path: Path) -> None:
    text = (REPOSITORY / "docs/guides/tiers.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    blocks += [block for block in BLOCKS if "stillframe.Tier(" in block]
    for place in ("/nvme/", "/lustre/", "s3://bucket/"):  # no such disks here
        blocks = [block.replace(f'"{place}', f'"{tmp_path}/{place.strip("/").split("/")[-1]}/') for block in blocks]
    begin, wait, back, stop, readme = blocks
    node, lustre, bucket = (
        tmp_path / name for name in (f"nvme/{socket.gethostname()}/gpt", "lustre/gpt", "bucket/gpt")
    )
    scope = names(make_model(), 121)
    exec(begin, scope)
    assert stillframe.Catalog(node).steps() == [*range(10, 121, 10)]
    assert stillframe.Catalog(lustre).steps() == [0, 100]
    assert stillframe.Catalog(bucket).steps() == [0]
    with stillframe.Checkpointer(node, tiers=scope["tiers"]) as checkpointer:
        checkpointer.restore(scope["state"])
        exec(wait, {**scope, "checkpointer": checkpointer, "step": 200})
    assert stillframe.Catalog(lustre).steps() == [0, 100, 200]
    exec(back, scope)
    assert (scope["report"].step, scope["report"].source) == (200, str(node))
    assert end_by_signal(stop, {**scope, "steps": 1000}) == 143
    assert stillframe.Catalog(node).latest() == 201
    exec(readme, {**scope, "stillframe": stillframe, "datetime": datetime, "step": 300})
    assert stillframe.Catalog(lustre).latest() == 300


def end_by_signal(code: str, scope: dict[str, Any]) -> object:
    """Runs it, with a SIGTERM in its first step; what it leaves with."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    code = code.replace("loss = ", "__import__('os').kill(__import__('os').getpid(), 15)\n        loss = ")
    try:
        with pytest.raises(SystemExit) as left:
            exec(code, scope)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return left.value.code


def test_the_lines_on_jobs_that_end_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    block = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs/guides/preemption.md").read_text(), re.DOTALL)[0]
    exec(block, names(make_model(), 3))
    assert stillframe.Catalog("runs/gpt").steps() == [0]  # a multiple of 500
    assert end_by_signal(block, names(make_model(), 1000)) == 143
    assert stillframe.Catalog("runs/gpt").steps() == [0, 1]


def test_every_file_and_target_that_a_document_names_exists() -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    for path in [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *(REPOSITORY / "docs").rglob("*.md")]:
        text = path.read_text()
        for name in re.findall(r"\]\(([\w./-]+\.(?:md|png))\)", text):
            assert (path.parent / name).exists(), f"{path.name} links to {name}"
        for name in re.findall(r"`((?:tests|benchmarks|demo|docs)/[\w./]+)`", text):
            assert (REPOSITORY / name).exists(), f"{path.name} names {name}"
        for target in re.findall(r"`make ([\w-]+)`", text):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{path.name} names make {target}"


def test_the_document_of_the_commands_is_what_they_are() -> None:
    made = document()
    assert (REPOSITORY / "docs/CLI.md").read_text() == made, "make docs writes it"
    for name in COMMANDS:
        text = inspect.getdoc(load(name)) or ""
        assert "Example" in text, f"{name} shows no example"
        assert len(text.splitlines()[0]) < 60, f"{name}'s first line is cut in the list of commands"
