"""Ray Train, where it is installed: what needs no cluster, and the example, which starts one.

Kills, restarts and retention: ``tests/engines/test_ray.py``.
"""

from __future__ import annotations

import importlib
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from stillframe import Catalog, Checkpointer, ConfigError, NotFoundError
from tests.engines.processes import below

ray: Any = pytest.importorskip("ray", reason="ray is not installed: `make test-engines` installs it")
pytest.importorskip("ray.train.v2", reason="ray is installed without ray[train]: `make test-engines` installs it")
ours: Any = importlib.import_module("stillframe.integrations.ray")

pytestmark = [pytest.mark.timeout(1200), pytest.mark.filterwarnings("ignore")]
REPOSITORY = Path(__file__).resolve().parent.parent.parent
EXAMPLE = REPOSITORY / "examples/ray_fsdp2.py"


def test_a_version_that_was_not_tried_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "__version__", "2.99.1")
    with pytest.raises(ConfigError, match=r"ray 2\.99\.1 was not tested .* install ray\[train\] 2\.60"):
        ours.checkpointer({})


def test_outside_a_worker_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="call it in train_loop_per_worker"):
        ours.checkpointer({})


@pytest.mark.parametrize("name", ["keep", "rank", "world_size"])
def test_what_ray_says_is_not_said_twice(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"checkpointer\({name}=…\): "):
        ours.checkpointer({}, **{name: 1})


def test_a_checkpoint_that_stands_for_nothing_is_told_apart(tmp_path: Path) -> None:
    foreign = ray.train.Checkpoint.from_directory(tmp_path)
    with pytest.raises(NotFoundError, match="no checkpoint that stillframe has reported"):
        ours.locate(foreign)
    said = {"root": str(tmp_path / "root"), "beside": False, "step": 3, "save": [1, 1]}
    foreign.set_metadata({"stillframe": said})
    with pytest.raises(NotFoundError, match=r"stands for step 3 in .*: it is gone"):
        ours.locate(foreign)
    with Checkpointer(tmp_path / "root") as checkpointer:
        checkpointer.save(3, {"a": torch.ones(3)})
    assert ours.locate(foreign) == (str(tmp_path / "root"), 3)
    foreign.set_metadata({"stillframe": {**said, "save": [2, 1]}})  # another save of this step
    with pytest.raises(NotFoundError, match="it is gone"):
        ours.locate(foreign)


def test_the_example_runs_and_goes_on(tmp_path: Path) -> None:
    """Twice; and the second time a worker is killed."""
    environment = {
        **os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    root = tmp_path / "runs/ray_fsdp2/_stillframe"
    first = example(tmp_path, environment, 20)
    said = first.communicate(timeout=400)[0]
    assert first.returncode == 0, said[-5000:]
    assert "begins at step 0" in said
    assert "step 19, loss" in said
    again = example(tmp_path, environment, 150)
    kill_a_worker(again, root)
    said = again.communicate(timeout=400)[0]
    assert again.returncode == 0, said[-5000:]
    begun = {int(step) for step in re.findall(r"begins at step (\d+)", said)}
    assert min(begun) == 20
    assert max(begun) > 40
    assert "step 149, loss" in said
    assert len(Catalog(root).steps()) == 2
    assert Catalog(root).latest() == 149


def example(place: Path, environment: dict[str, str], steps: int) -> subprocess.Popen[str]:
    text = EXAMPLE.read_text().replace('abspath("runs"), 40', f'abspath("runs"), {steps}')
    (place / "example.py").write_text(text)
    return subprocess.Popen(
        [sys.executable, "example.py"], cwd=place, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def kill_a_worker(driver: subprocess.Popen[str], root: Path) -> None:
    """One of this driver's own workers, when some steps are committed."""
    while (Catalog(root).latest() or 0) < 40:
        assert driver.poll() is None
        time.sleep(0.1)
    os.kill(below(driver.pid, "RayTrainWorker")[0], signal.SIGKILL)
