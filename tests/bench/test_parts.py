"""The parts of the evaluation that must not lie: the check of what was written, limits, and the slowed disk."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import states
from benchmarks.case import Case, Outcome
from benchmarks.disk import Watched, build_library
from benchmarks.disk import written as disk_written
from benchmarks.harness import Cannot, Harness
from benchmarks.plots import bars
from benchmarks.questions import QUESTIONS
from benchmarks.questions.base import good
from benchmarks.questions.growth import fit
from benchmarks.report import failures
from benchmarks.systems import SYSTEMS
from benchmarks.systems.base import System, copy_into, map_tensors, tensors_of
from benchmarks.targets import targets
from benchmarks.tasks import one_loop
from matplotlib.figure import Figure
from rich.console import Console

SMALL = Case(task="loop", system="none", gib=0.002, iterations=3, compute_s=0.01)


class InMemory(System):
    """A right one, to spoil."""

    name = label = how = "memory"

    def __init__(self, directory: Path, state: Any, rank: int = 0) -> None:
        super().__init__(directory, state, rank)
        self.saved: dict[int, Any] = {}

    def save(self, step: int) -> None:
        self.saved[step] = map_tensors(self.state, torch.clone)

    def restore(self, step: int) -> None:
        copy_into(self.state, self.saved[step])


class Torn(InMemory):
    """Copies without a fence, half of it after the next update."""

    def save(self, step: int) -> None:
        for before in list(self.saved)[-1:]:
            self.saved[before]["optimizer"] = map_tensors(self.state["optimizer"], torch.clone)
        super().save(step)


class Forgetful(InMemory):
    def restore(self, step: int) -> None:
        pass


class Stale(InMemory):
    def restore(self, step: int) -> None:
        super().restore(min(self.saved))


@pytest.fixture(params=[InMemory, Torn, Forgetful, Stale])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[System]:
    monkeypatch.setitem(SYSTEMS, "memory", request.param)
    wrong: type[System] = request.param
    return wrong


def test_a_wrong_system_is_found_out(system: type[System], tmp_path: Path) -> None:
    case = Case(task="loop", system="memory", gib=0.002, iterations=3, compute_s=0.01)
    figures = one_loop(case, 1, tmp_path / "root")
    assert figures["is_right"] == (system is InMemory)


@pytest.mark.parametrize("shape", list(states.SHAPES))
def test_a_step_changes_every_tensor_and_the_digest_sees_each(shape: str) -> None:
    state = states.make_state(2 << 20, shape)
    before = {path: tensor.view(-1).view(torch.uint8).clone() for path, tensor in tensors_of(state)}
    states.set_step(state, 7)
    for path, tensor in tensors_of(state):
        assert not torch.equal(before[path], tensor.view(-1).view(torch.uint8)), path
    expected = states.digest_of(state)
    _, last = list(tensors_of(state))[-1]
    last.view(-1).view(torch.uint8)[-1] ^= 1
    assert states.digest_of(state) != expected
    last.view(-1).view(torch.uint8)[-1] ^= 1
    assert states.digest_of(state) == expected
    if "values" in state:
        state["values"]["sample3"]["at"][1] += 1
        assert states.digest_of(state) != expected


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path / "data", tmp_path / "log.txt", Console(quiet=True))


def test_a_run_that_hangs_is_ended_and_reported(harness: Harness) -> None:
    case = Case(task="loop", system="stillframe", gib=0.002, iterations=1000, compute_s=1, limit=6)
    began = time.monotonic()
    outcome = harness.run(case)
    assert outcome.error == "hangs: no result within 6 s"
    assert time.monotonic() - began < 200  # and not for the thousand seconds that it would take
    assert not list(harness.root.iterdir())


def test_a_run_that_fails_gives_the_reason_and_is_not_repeated(harness: Harness) -> None:
    case = Case(task="no such task", system="none", gib=0.002)
    outcomes = list(harness.turns([case], 3))
    assert [each.error for each in outcomes] == ["KeyError: 'no such task'"] * 3
    assert harness.log.read_text().count("=== ") == 1
    assert failures(outcomes) == ["**not saving** cannot: `KeyError: 'no such task'`"]


def test_a_process_that_dies_is_reported(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert harness.run(SMALL).error == "ended with exit code 1 and no result; log.txt has what it printed"


def test_too_little_memory_is_said_before(harness: Harness) -> None:
    case = Case(task="copy-rate", system="none", gib=500, iterations=-2)  # needs no disk
    with pytest.raises(Cannot, match="of memory are available, and none with 500 GiB needs"):
        harness.check_room([case])


def write(path: Path, size: int, environment: dict[str, str]) -> float:
    program = (
        "import os, sys, time\n"
        "fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)\n"
        "began = time.monotonic()\n"
        "for _ in range(16): os.write(fd, bytes(int(sys.argv[2]) // 16))\n"
        "os.fsync(fd); os.fsync(fd)\n"
        "os.fsync(os.open(os.path.dirname(sys.argv[1]), os.O_RDONLY))\n"
        "print(time.monotonic() - began)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, path, str(size)], env=environment, check=True, capture_output=True, text=True
    )
    return float(run.stdout)


def test_the_slowed_disk_takes_its_rate_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(build_library(tmp_path), tmp_path, rate=8e6)
    seconds = write(tmp_path / "file", 4 << 20, watched.environment)
    assert seconds > (4 << 20) / 8e6 * 0.99
    monkeypatch.setenv("BENCH_DISK", watched.environment["BENCH_DISK"])
    written = disk_written()
    assert written
    assert (written.bytes, written.file_syncs, written.directory_syncs) == (4 << 20, 2, 1)
    watched.close()
    assert not watched.page.exists()


def test_two_processes_share_the_slowed_disk(tmp_path: Path) -> None:
    watched = Watched(build_library(tmp_path), tmp_path, rate=8e6)
    threads = [threading.Thread(target=write, args=(tmp_path / f"{n}", 2 << 20, watched.environment)) for n in range(2)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - began > (4 << 20) / 8e6 * 0.99
    watched.close()


def test_a_line_is_fitted_through_the_medians() -> None:
    base, each = fit([(10, [3.0, 99.0, 3.0]), (20, [5.0]), (40, [9.0])])
    assert base == pytest.approx(1.0)
    assert each == pytest.approx(0.2)


def test_a_missing_figure_leaves_a_gap_in_the_bars() -> None:
    axes: Any = Figure().subplots()
    bars(axes, ["a", "b"], {"torch-save": [[1.0, 3.0, 2.0], []], "stillframe": [[], [4.0]]})
    assert sorted(bar.get_height() for bar in axes.patches) == [2.0, 4.0]


@pytest.mark.parametrize("name", list(QUESTIONS))
def test_tables_live_with_systems_that_failed(name: str, harness: Harness, tmp_path: Path) -> None:
    """A report must come out of any run, also if every peer failed in it."""
    question = QUESTIONS[name]
    outcome = Outcome(case=SMALL, turn=1, error="ModuleNotFoundError: no such package")
    from benchmarks.report import Results, write_report

    results = Results.new(name, True, 1, tmp_path, ["python -m benchmarks"])
    results.outcomes.append(outcome)
    results.write(tmp_path)
    write_report(tmp_path)
    report = (tmp_path / "BENCHMARKS.md").read_text()
    assert question.title in report
    assert "ModuleNotFoundError: no such package" in report


def test_a_report_comes_out_of_one_point_of_growth(tmp_path: Path) -> None:
    """As Ctrl-C in its first minutes leaves it."""
    from benchmarks.report import Results, write_report

    case = Case(task="save-cost", system="stillframe", gib=1 / 16, iterations=3, detail="dict 100")
    results = Results.new("growth", False, 1, tmp_path, ["python -m benchmarks"])
    results.outcomes.append(Outcome(case=case, turn=1, figures={"save_s": [0.001, 0.002, 0.003]}))
    results.write(tmp_path)
    write_report(tmp_path)
    assert "100: 2 (1–3)" in (tmp_path / "BENCHMARKS.md").read_text()
    assert (tmp_path / "growth.png").exists()


def test_the_report_that_is_kept_is_what_its_results_give() -> None:
    """Also where they are older than a question."""
    from benchmarks.report import read_results, text

    docs = Path(__file__).parents[2] / "docs"
    assert (
        text(read_results(docs / "bench"), docs / "bench", QUESTIONS, "bench") == (docs / "BENCHMARKS.md").read_text()
    )


def stalled(system: str, *blocked_ms: float, is_right: bool = True) -> Outcome:
    case = Case(task="loop", system=system, gib=1.5, iterations=3, compute_s=1)
    loop = {"every": 1, "blocked_s": [each / 1e3 for each in blocked_ms], "iteration_s": [1.0]}
    return Outcome(case=case, turn=1, figures={"loops": [loop], "is_right": is_right})


def test_targets_are_against_the_best_peer_that_is_right() -> None:
    outcomes = [
        stalled("none", 0.01, 0.01),
        stalled("torch-save", 900, 950, 1000),
        stalled("dcp-async", 40, 50, 60),
        stalled("nvrx", 1, 1, 1, is_right=False),
        stalled("stillframe", 0.4, 0.5, 0.6),
    ]
    table = targets({"stall": outcomes})
    assert table
    assert table.rows[0][2] == "100 ×, **missed**"
    assert table.rows[0][3] == "dcp.async_save: 50 ms; stillframe: 0.5 ms"


def test_a_case_that_is_once_wrong_has_no_figures() -> None:
    right, wrong = stalled("nvrx", 1), stalled("nvrx", 1, is_right=False)
    assert good([right]) == [right]
    assert good([right, wrong]) == []
    assert failures([right, wrong]) == ["**NVRx async** is WRONG: what it wrote did not restore bit for bit (1.5 GiB)"]
