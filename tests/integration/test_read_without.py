"""What docs/FORMAT.md says is enough: a program without stillframe reads the same tensors."""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from stillframe import Catalog, Checkpointer, load
from stillframe.checkpoint import removal
from stillframe.format import names
from stillframe.model import SaveId
from tests.golden import make
from tests.ranks.launch import run_ranks
from tests.support import bytes_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "read_without_stillframe.py"


@pytest.fixture(scope="module")
def reader() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sharded") / "root"
    run_ranks(2, "cli_worker.py", root)
    return root


def tensors(state: Any, path: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """Every tensor and array of a loaded state, by its path."""
    if isinstance(state, make.Point):
        state = [state.name, state.at]
    if isinstance(state, torch.Tensor | numpy.ndarray):
        return {"/".join(path): torch.as_tensor(state)}
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list | tuple) else ()
    return {
        name: found
        for key, item in items
        for name, found in tensors(item, (*path, str(key).replace("~", "~0").replace("/", "~1"))).items()
    }


def assert_same_tensors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bytes_of(found[name]) == bytes_of(tensor), name


def test_every_tensor_of_one_rank_is_read(reader: dict[str, Any]) -> None:
    found = reader["load"](reader["newest"](make.ROOT))
    assert_same_tensors(found, tensors(load(make.ROOT)))
    assert len(found) > 30
    found["tied/weight"][2, 3] = -1.0
    assert found["tied/transposed"][3, 2] == found["tied/part"][0, 3] == -1.0


def test_every_tensor_of_two_ranks_is_read_and_put_together(reader: dict[str, Any], sharded: Path) -> None:
    found = reader["load"](reader["newest"](sharded))
    own = [tensors(load(sharded, rank=rank)) for rank in (0, 1)]
    alone = {f"{name}@{rank}": own[rank][name] for rank in (0, 1) for name in own[rank] if f"{name}@{rank}" in found}
    whole = {name: tensor for name, tensor in own[0].items() if f"{name}@0" not in alone}
    assert_same_tensors(found, {**whole, **alone})
    assert found["model/0.weight"].shape == (32, 24)
    assert found["mine/noise@1"].tolist() == [1, 1, 1]


def test_it_runs_where_there_is_no_stillframe(sharded: Path) -> None:
    code = "import runpy, sys; sys.modules['stillframe'] = None; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    command = [sys.executable, "-c", code, str(EXAMPLE), str(sharded)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[0] == "step-000000000002-e0001-1"
    assert "model/0.weight: torch.float32 [32, 24]" in done.stdout


@pytest.mark.parametrize("with_run", [True, False], ids=["", "steps alone"])
def test_it_finds_the_newest_of_the_branch(reader: dict[str, Any], tmp_path: Path, with_run: bool) -> None:
    root = tmp_path / "root"
    with Checkpointer(root) as checkpointer:
        for step in (1, 2, 3, 4):
            checkpointer.save(step, {"n": torch.tensor(step)}).wait()
        checkpointer.rewind(2)
        checkpointer.save(3, {"n": torch.tensor(33)}).wait()
    if not with_run:
        shutil.rmtree(root / "run")
    newest: Callable[[Path], Path] = reader["newest"]
    assert newest(root).name == names.step_dir(SaveId(3, 2))
    assert reader["load"](newest(root))["n"] == load(root)["n"] == 33
    removal.set_aside(Catalog(root), SaveId(3, 2), "removed", epoch=2)
    if with_run:
        assert newest(root).name == names.step_dir(SaveId(2))


@pytest.mark.parametrize(
    ("file", "after"),
    [
        ("manifest.json", b'"segment_bytes":'), ("manifest.json", b'"xxh3_128":"'), ("seal-00001.json", b'"start":'),
        ("seal-00001.json", b'"xxh3_128":"'), ("rank-00001.safetensors", b'"data_offsets":['),
        ("rank-00001.safetensors", b" " * 8),
    ],
)  # fmt: skip
def test_it_notices_a_changed_byte(
    reader: dict[str, Any], sharded: Path, tmp_path: Path, file: str, after: bytes
) -> None:
    directory = Path(shutil.copytree(reader["newest"](sharded), tmp_path / "step"))
    data = bytearray((directory / file).read_bytes())
    at = data.index(after) + len(after)
    data[at] = ord("2") if data[at] != ord("2") else ord("3")
    (directory / file).write_bytes(data)
    with pytest.raises(SystemExit, match="is damaged"):
        reader["load"](directory)


def test_it_notices_a_changed_bit_of_the_data(reader: dict[str, Any], sharded: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(reader["newest"](sharded), tmp_path / "step"))
    data = bytearray((directory / "rank-00000.safetensors").read_bytes())
    data[-1] ^= 1
    (directory / "rank-00000.safetensors").write_bytes(data)
    with pytest.raises(SystemExit, match="is damaged"):
        reader["load"](directory)
