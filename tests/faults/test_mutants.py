"""Mutated files of a real root: a short form of the campaign in ``tests/torture``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from stillframe import Checkpointer, FormatError, load
from stillframe.format import names
from stillframe.format.digest import digest
from stillframe.model import SaveId
from stillframe.spi import TensorBox
from tests.faults import mutants

SOURCE = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE / "src"), str(SOURCE)])}


def run_campaign(seed: int, count: int, at_once: int, timeout_s: float) -> None:
    """In a process of its own, whose memory is limited.  Fails the test, with the first mutant of each kind."""
    done = subprocess.run(
        [sys.executable, "-m", mutants.__name__, *map(str, (seed, count, at_once))],
        capture_output=True, text=True, timeout=timeout_s, check=False, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout)
    assert not told["failures"], "\n\n".join(told["failures"])
    assert told["refused"] > count // 5
    assert told["grown_bytes"] < mutants.GROWTH_BYTES


@pytest.mark.timeout(300)
def test_a_mutated_file_is_refused_or_read_and_nothing_else() -> None:
    run_campaign(seed=1, count=1_000, at_once=2, timeout_s=280)


def forge(root: Path, name: str, node: dict[str, Any]) -> None:
    """Put a node in the place of that of one tensor of step 1, with right checksums."""
    directory = root / names.step_dir(SaveId(1))
    seal, manifest = (json.loads((directory / file).read_bytes()) for file in ("seal-00000.json", "manifest.json"))
    tree = seal["body"]["tree"]
    tree["items"][tree["keys"].index(name)] = node
    for record, file in ((seal, "seal-00000.json"), (manifest, "manifest.json")):
        record["xxh3_128"] = digest(json.dumps(record["body"]).encode())
        (directory / file).write_bytes(json.dumps(record).encode())
        manifest["body"]["ranks"][0]["seal_digest"] = seal["xxh3_128"]


HUGE: list[dict[str, Any]] = [
    {"kind": "tensor", "shard": 0, "view": {"dtype": "F32", "shape": [100_000] * 2, "stride": [0, 0], "offset": 0}},
    {"kind": "tensor", "shard": 0, "view": {"dtype": "F32", "shape": [2**31] * 2, "stride": [0, 0], "offset": 0}},
    {"kind": "sharded", "tensor": "box", "dtype": "F32", "shape": [100_000] * 2, "parts": []},
    {"kind": "sharded", "tensor": "none", "dtype": "F32", "shape": [2**30] * 2, "parts": []},
]


@pytest.mark.parametrize("node", HUGE, ids=["view", "huge view", "tensor with too few boxes", "tensor without any"])
def test_a_few_bytes_do_not_ask_for_any_amount_of_memory(tmp_path: Path, node: dict[str, Any]) -> None:
    root = tmp_path / "root"
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(128), "box": TensorBox(torch.ones(4), (4,), (0,))})
    forge(root, "w", node)
    with pytest.raises(FormatError):  # and no RuntimeError of an allocator that was asked for 40 GB
        load(root)
    with pytest.raises(FormatError):
        mutants.show(root)
    for to in ("out.safetensors", "out.pt"):
        command = [sys.executable, "-m", "stillframe", "export", "--all", str(root), str(tmp_path / to)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment())
        assert done.returncode != 0
        assert "Traceback" not in done.stderr
        assert not (tmp_path / to).exists()


def test_a_tensor_that_repeats_its_memory_very_often_is_stored_by_itself(tmp_path: Path) -> None:
    base = torch.arange(4.0)
    state = {"base": base, "often": base.expand(1000, 4), "too_often": base.expand(5_000_000, 4)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
    found = load(tmp_path)
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor)
    assert found["often"].untyped_storage().data_ptr() == found["base"].untyped_storage().data_ptr()
