"""What the commands show and make of tensors that wrap others, and of 4-bit numbers."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from stillframe import Checkpointer
from tests.cli.roots import answer, stillframe
from tests.wrapping import Layer


def changed(root: Path, left: int, right: int) -> list[str]:
    return [each["path"] for each in answer("diff", root, left, right, code=10)["entries"]]


def test_the_commands_know_them(tmp_path: Path) -> None:
    root = tmp_path / "run"
    model = Layer(1)
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, {"model": model})
        checkpointer.fence()
        model.weight.codes[0, 0] += 1  # type: ignore[attr-defined]
        checkpointer.save(2, {"model": model})
        checkpointer.fence()
        model.weight.context = 3  # type: ignore[attr-defined]
        checkpointer.save(3, {"model": model})
    shown = {each["path"]: each for each in answer("show", root)["entries"]}
    assert shown["model/weight/codes"]["dtype"] == "I8"
    assert "model/weight/scale" in shown
    assert changed(root, 1, 2) == ["model/weight/codes"]
    assert changed(root, 2, 3) == ["model/weight/codes", "model/weight/scale"], "the context is another"
    stillframe("verify", root)
    stillframe("export", root, tmp_path / "m.safetensors")
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("weight.codes"), model.weight.codes)  # type: ignore[attr-defined]
    stillframe("export", root, tmp_path / "m.pt")
    found = torch.load(tmp_path / "m.pt", weights_only=True)["weight"]
    assert found["wrapper"] == "tests.wrapping.Scaled"
    assert torch.equal(found["tensors"]["codes"], model.weight.codes)  # type: ignore[attr-defined]
