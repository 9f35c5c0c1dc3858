"""``stillframe doctor --device`` where torch finds the device by itself, as it finds a vendor's: by an entry point."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from stillframe.save.stager import Stager
from stillframe.selftest import order, runner
from stillframe.selftest.checks import Check
from tests.device import queued
from tests.device.running import REPOSITORY, environment, need_device, on_device

CHECKS = [
    "machine", "pinning", "copies", "memory", "control: no mark", "order on the default stream",
    "order on a stream of its own", "control: no fence", "killed and restored",
]  # fmt: skip


@pytest.fixture
def with_device(tmp_path: Path) -> dict[str, str]:
    """The environment of a process in which ``import torch`` loads the device."""
    need_device()
    place = tmp_path / "installed" / "queued-0.dist-info"
    place.mkdir(parents=True)
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: queued\nVersion: 0\n")
    (place / "entry_points.txt").write_text("[torch.backends]\nqueued = tests.device.queued:load_slow\n")
    said = environment()
    return {**said, "PYTHONPATH": os.pathsep.join([str(place.parent), said["PYTHONPATH"]])}


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=150
    )


@pytest.mark.timeout(180)
def test_a_device_that_is_well(with_device: dict[str, str]) -> None:
    done = run(with_device, "-m", "stillframe", "doctor", "--device", "--json")
    said: dict[str, Any] = json.loads(done.stdout)
    checks = {each["name"]: each for each in said["checks"]}
    assert list(checks) == CHECKS, done
    by_figures = {"copies", "memory"}  # their verdicts tell of this machine
    assert {name for name, each in checks.items() if each["verdict"] != "pass"} <= by_figures, done.stdout
    assert said["verdict"] == ("fail" if checks["copies"]["verdict"] == "fail" else "pass")
    assert done.returncode == (13 if said["verdict"] == "fail" else 0)
    assert checks["machine"]["figures"]["device"] == "queued:0: queued 0, made of threads"
    assert checks["copies"]["figures"]["best_bytes_s"] > 0
    assert checks["pinning"]["figures"]["nbytes"] == 16 << 24
    assert "2.0]" in checks["control: no fence"]["said"]


@on_device
def test_a_fence_that_does_not_hold_fails(tmp_path: Path) -> None:
    """The checks can fail: here the fence is taken out of the process that runs them."""
    queued.set_rate(1e9)
    told: list[Check] = []
    with mock.patch.object(Stager, "fence"), mock.patch.object(order, "tell", told.append):
        order.check_order(str(tmp_path), torch.device("queued:0"))
    verdicts = {check.name: check.verdict for check in told}
    assert "fail" in (verdicts["order on the default stream"], verdicts["order on a stream of its own"]), told


def test_no_device() -> None:
    done = run(environment(), "-m", "stillframe", "doctor", "--device")
    assert done.returncode == 12, done
    assert "sees no accelerator" in done.stdout


def test_a_root_or_the_device() -> None:
    for arguments in ([], ["--device", "somewhere"], ["--device", "--finish"]):
        done = run(environment(), "-m", "stillframe", "doctor", *arguments)
        assert (done.returncode, done.stdout) == (2, "")


def test_a_part_that_dies_or_hangs_is_a_check_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(wrapper))
    for script, why in (
        ("echo broken driver >&2; kill -SEGV $$", "by signal SIGSEGV: broken driver"),
        ("echo no library >&2; exit 3", "with code 3: no library"),
        ("exec sleep 600", "not done by the deadline"),
    ):
        wrapper.write_text(f"#!/bin/sh\n{script}\n")
        wrapper.chmod(0o755)
        checks: list[Check] = list(runner.run_all(str(tmp_path), deadline_s=1.0 if "sleep" in script else 60.0))
        assert [check.verdict for check in checks] == ["fail", "fail"]
        assert why in checks[0].said
