"""The evaluation as people start it: real processes, small states."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

REPOSITORY = Path(__file__).parents[2]
SYSTEMS = ("none", "torch-save", "stillframe")


def start(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks", "--root", str(tmp_path / "data"), "--out", str(tmp_path / "out")]
    return subprocess.Popen(
        [*command, *arguments], cwd=REPOSITORY, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src")},
    )  # fmt: skip


def asked(question: str) -> list[str]:
    systems = [f"--system={each}" for each in SYSTEMS]
    return ["--short", "--turns", "1", "--max-gib", "0.01", "--question", question, *systems]


@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    "question",
    ["persist", *(pytest.param(each, marks=pytest.mark.torture) for each in ("ranks", "clients"))],
)
def test_a_question_gives_results_a_table_and_plots(tmp_path: Path, question: str) -> None:
    process = start(tmp_path, *asked(question))
    told, _ = process.communicate(timeout=250)
    assert process.returncode == 0, told
    results = json.loads((tmp_path / f"out/{question}.json").read_text())
    peer = "default" if question == "clients" else "torch-save"
    assert {outcome["case"]["system"] for outcome in results["outcomes"]} >= {peer, "stillframe"}
    assert [outcome["error"] for outcome in results["outcomes"]] == [None] * len(results["outcomes"])
    assert all(outcome["figures"].get("is_right", True) for outcome in results["outcomes"])
    report = (tmp_path / "out/BENCHMARKS.md").read_text()
    assert "| **stillframe** |" in report or question == "clients"
    assert "Too little was measured" not in report
    for suffix in ("png", "svg"):
        assert (tmp_path / f"out/{question}.{suffix}").stat().st_size > 5_000
    assert not list((tmp_path / "data").iterdir()), "data is left behind"


@pytest.mark.timeout(280)
def test_the_changed_bit_is_refused_only_where_there_are_checksums(tmp_path: Path) -> None:
    process = start(tmp_path, *asked("restore"))
    told, _ = process.communicate(timeout=250)
    assert process.returncode == 0, told
    outcomes = json.loads((tmp_path / "out/restore.json").read_text())["outcomes"]
    flipped = {each["case"]["system"]: each["figures"].get("flipped") for each in outcomes}
    assert flipped["stillframe"] == "refused: IntegrityError"
    assert flipped["torch-save"] == "not noticed"


@pytest.mark.parametrize(("option", "what"), [("--question", "question"), ("--system", "system")])
def test_an_unknown_name_is_refused_with_those_there_are(tmp_path: Path, option: str, what: str) -> None:
    process = start(tmp_path, option, "quux")
    told, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert f"no {what} is called 'quux'; there are" in told
    assert "stillframe" in told or "stall" in told


def test_no_turns_are_refused(tmp_path: Path) -> None:
    process = start(tmp_path, "--turns", "0")
    told, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "--turns: at least 1" in told


def test_too_little_room_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    """A file system of 8 MiB, where it may be mounted."""
    small = tmp_path / "data"
    small.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", small], check=False, capture_output=True
    ).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        process = start(tmp_path, *asked("stall"))
        told, _ = process.communicate(timeout=60)
        assert process.returncode == 2
        assert "free, and" in told
        assert "make room, give another --root" in told
        assert not (tmp_path / "out/stall.json").exists()
        assert not list(small.iterdir())
    finally:
        subprocess.run(["umount", small], check=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_the_results_and_nothing_else(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, *asked("stall"), "--turns", "50")
    deadline = time.monotonic() + 60
    while not (tmp_path / "out/stall.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(2.5)
    while not (below := psutil.Process(process.pid).children(recursive=True)):  # now it is in the middle of a run
        assert time.monotonic() < deadline + 30
        time.sleep(0.05)
    process.send_signal(number)
    told, _ = process.communicate(timeout=60)
    assert process.returncode == 130, told
    assert "keeps what was measured so far" in told
    assert json.loads((tmp_path / "out/stall.json").read_text())["outcomes"]
    assert (tmp_path / "out/BENCHMARKS.md").exists()
    assert not list((tmp_path / "data").iterdir()), "data is left behind"
    assert not psutil.wait_procs(below, timeout=10)[1], "processes are left behind"


def test_a_report_of_nothing_says_what_to_do(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.report", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
    run = subprocess.run(command, cwd=REPOSITORY, text=True, capture_output=True, check=False, env=environment)
    assert run.returncode == 2
    assert "has no results" in run.stderr
