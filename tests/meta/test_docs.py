"""What the documents show really runs, and what they name really exists."""

from __future__ import annotations

import inspect
import os
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


def names(model: torch.nn.Module, steps: int) -> dict[str, Any]:
    """What the loops of README and guides take for granted."""
    optimizer = torch.optim.AdamW(model.parameters())
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 32)), batch_size=4, shuffle=True)

    def train_forward_backward(_: object) -> Any:
        loss = model(torch.randn(4, 32)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        return loss

    return {
        "model": model, "optimizer": optimizer, "steps": steps, "loader_state": {"position": 0}, "loader": loader,
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer), "train_forward_backward": train_forward_backward,
    }  # fmt: skip


@pytest.mark.parametrize("document", ["README.md", "docs/index.md"])
def test_the_first_loop_trains_and_resumes(document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = re.findall(r"```python\n(.*?)```", (REPOSITORY / document).read_text(), re.DOTALL)[0]
    monkeypatch.chdir(tmp_path)
    exec(block, {**names(make_model(), 0), "epochs": 2})  # of two batches each
    assert stillframe.Catalog("runs/gpt").steps() == [1, 2, 3]
    second = {**names(make_model(), 0), "epochs": 3}
    exec(block, second)
    assert (second["step"], second["batches"].epoch) == (6, 3)
    assert stillframe.Catalog("runs/gpt").steps() == [3, 4, 5]


def test_the_lines_on_tiers_run(tmp_path: Path) -> None:
    text = (REPOSITORY / "docs/guides/tiers.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for place in ("/nvme/", "/lustre/", "s3://bucket/"):  # no such disks here
        blocks = [block.replace(f'"{place}', f'"{tmp_path}/{place.strip("/").split("/")[-1]}/') for block in blocks]
    begin, wait, back, stop = blocks
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


def end_by_signal(code: str, scope: dict[str, Any], before: str = "loss = ") -> object:
    """Runs it, with a SIGTERM in its first step; what it leaves with."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    code = re.sub(rf"^( +){re.escape(before)}", rf"\1os.kill(os.getpid(), 15)\n\1{before}", code, flags=re.MULTILINE)
    scope = {**scope, "os": os}
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
    assert stillframe.Catalog("runs/gpt").steps() == [0, 2]  # a multiple of 500, and the last one
    assert end_by_signal(block, names(make_model(), 1000)) == 143
    assert stillframe.Catalog("runs/gpt").steps() == [0, 2, 3]


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
