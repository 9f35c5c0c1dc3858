"""torchtitan, where it is installed: what needs no training, and the example.

Kills, resharding, and the fields of its configuration: ``tests/engines/test_torchtitan.py``.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stillframe import Catalog, ConfigError
from tests.engines.processes import below
from tests.support import until

torchtitan: Any = pytest.importorskip(
    "torchtitan", reason="torchtitan is not installed: `make test-engines` installs it"
)
ours: Any = importlib.import_module("stillframe.integrations.torchtitan")

pytestmark = [pytest.mark.timeout(1200), pytest.mark.filterwarnings("ignore")]
REPOSITORY = Path(__file__).resolve().parent.parent.parent


def test_a_version_that_was_not_tried_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchtitan, "__version__", "0.9.1")
    with pytest.raises(ConfigError, match=r"torchtitan 0\.9\.1 was not tested .* install torchtitan 0\.3"):
        importlib.reload(ours)


@pytest.mark.parametrize("name", ["keep", "every", "rank", "world_size"])
def test_what_torchtitan_says_is_not_said_twice(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"options={{'{name}': …}}\): "):
        ours.Manager.Config(options={name: 1})


def test_a_folder_of_each_node_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"all ranks need to see the folder; give .* as root="):
        ours.Manager.Config(folder="/nvme/{node}/a")


def test_torchtitans_own_checks_are_made() -> None:
    with pytest.raises(ValueError, match="interval"):
        ours.Manager.Config(interval=0)


def test_the_example_runs_and_goes_on(tmp_path: Path) -> None:
    """Under torchrun, by torchtitan's own command; the first time a rank is killed."""
    assets(tmp_path)
    root = tmp_path / "outputs/checkpoint/_stillframe"
    said = tmp_path / "said"
    with example(tmp_path, 200, said) as first:
        until(lambda: first.poll() is not None or (Catalog(root).latest() or 0) >= 4, "four steps", 300)
        assert first.poll() is None, said.read_text()[-5000:]
        os.kill(below(first.pid, "tests.engines.titan")[-1], signal.SIGKILL)
        assert first.wait(100) != 0
    newest = Catalog(root).latest() or 0
    with example(tmp_path, newest + 5, said) as again:
        assert again.wait(400) == 0, said.read_text()[-5000:]
    begun = {int(step) for step in re.findall(r"Training starts at step (\d+)", said.read_text())}
    assert len(begun) == 1
    assert 4 < min(begun) <= newest + 6
    assert Catalog(root).latest() == newest + 5
    assert len(Catalog(root).steps()) == 3
    assert (tmp_path / f"outputs/checkpoint/step-{newest + 5}/model-00001-of-00001.safetensors").exists()


def assets(place: Path) -> None:
    """What torchtitan's checkout has: a tokenizer, and some texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [f"w{number}" for number in range(500)]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(["?", *words])}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    for name in ("tokenizer", "c4_test"):
        (place / "tests/assets" / name).mkdir(parents=True)
    tokenizer.save(str(place / "tests/assets/tokenizer/tokenizer.json"))
    texts = [{"text": " ".join(words[at:] + words[:at])} for at in range(0, 500, 7)]
    (place / "tests/assets/c4_test/data.json").write_text("\n".join(map(json.dumps, texts)))


@contextlib.contextmanager
def example(place: Path, steps: int, said: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Under way; what it says goes to a file."""
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(f"{REPOSITORY}{each}" for each in ("/src", "", "/examples")),
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(place / "hf"),
    }  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = {
        "--module": "torchtitan_llama", "--config": "llama3_stillframe", "--training.steps": str(steps),
        "--training.seq_len": "32", "--training.local_batch_size": "1", "--training.mixed_precision_param": "float32",
        "--parallelism.spmd_backend": "partial_dtensor",
    }  # fmt: skip
    words = [word for pair in arguments.items() for word in pair]
    with said.open("wb") as out:
        process = subprocess.Popen(
            [*command, "-m", "tests.engines.titan", *words, "--training.disable_cuda_graphs"], cwd=place,
            env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)
