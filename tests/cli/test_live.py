"""watch, trace and report, and the events they are made of."""

from __future__ import annotations

import html.parser
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from stillframe import Checkpointer
from stillframe.checkpoint.events import event_files, event_key, read_events
from stillframe.format import events
from stillframe.keeper import journal
from stillframe.observe.history import histories
from stillframe.observe.watch import Follower
from stillframe.store.posix import PosixStore
from tests import layout
from tests.cli.roots import COMMAND, answer, environment, flip, stillframe
from tests.ranks.launch import Launch
from tests.support import start_child

TRAINEE = """
import sys, torch, stillframe, time
from tests.cli.roots import make_state, train
state = make_state()
state["weight"] = torch.zeros(1 << 22)
with stillframe.Checkpointer(sys.argv[1], arena="64MiB", keep=stillframe.KeepLast(2)) as checkpointer:
    checkpointer.restore(state)
    for step in range(1, int(sys.argv[2]) + 1):
        train(state, step)
        checkpointer.save(step, state)
        print(step, flush=True)
        time.sleep(0.02)
    if len(sys.argv) > 3:
        checkpointer.wait(); print("wait", flush=True); time.sleep(100)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run of eight saves has left."""
    root = tmp_path_factory.mktemp("live") / "run"
    child = start_child(TRAINEE, root, 8)
    _out, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    return root


def test_a_run_records_what_happened(run: Path) -> None:
    (history,) = histories(run)
    assert [save.step for save in history.committed] == list(range(1, 9))
    assert history.started is not None
    assert (history.started.world_size, history.started.keep) == (1, "KeepLast(count=2)")
    assert history.end is not None
    assert history.end.is_closed
    assert len(history.updates) == 8
    for save in history.committed:
        times = [save.requested_s, save.returned_s, save.stage_begin_s, save.staged_s, save.sealed_s, save.committed_s]
        assert None not in times
        assert times == sorted(times), "in the order of a save's life"  # type: ignore[type-var]
        assert save.flush_begin_s is not None
        assert save.requested_s <= save.flush_begin_s <= (save.sealed_s or 0)
    assert abs(history.committed[-1].at_s - time.time()) < 600
    assert history.cost is not None
    assert 0 <= history.cost < 1


def test_two_ranks_record_for_themselves(sharded: Path) -> None:
    found = sorted(histories(sharded), key=lambda each: each.rank)
    assert [(each.rank, [save.step for save in each.committed]) for each in found] == [(0, [1, 2]), (1, [1, 2])]


def test_a_restart_is_another_attempt_and_its_restore_is_recorded(run: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(run, tmp_path / "run"))
    flip(layout.segment(root, 8), 4096)
    code = "import sys, warnings; warnings.simplefilter('ignore')\n" + TRAINEE.replace("range(1,", "range(9,")
    child = start_child(code, root, 10)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    found = histories(root)
    assert len({each.run for each in found}) == 2
    assert [(restore.step, restore.passed_over) for restore in found[-1].restores] == [(7, [8])]
    page = _page(root, tmp_path)
    assert "a restore found it damaged" in page


def test_a_failed_save_is_recorded_with_its_cause(run: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(run, tmp_path / "run"))
    code = (
        "import pathlib, sys, torch, stillframe\n"
        "from tests import layout\n"
        "c = stillframe.Checkpointer(sys.argv[1], arena='64MiB', on_error='warn')\n"
        "c.restore({}, strict=False)\n"
        "layout.next_dir(pathlib.Path(sys.argv[1]), 77, is_running=True).write_text('in the way')\n"
        "c.save(77, {'w': torch.ones(3)})\n"
        "try:\n    c.close()\nexcept stillframe.StillframeError: pass\n"
    )
    child = start_child(code, root)
    child.communicate(timeout=60)
    (failed,) = histories(root)[-1].failed
    assert failed.step == 77
    assert layout.step_dir(root, 77).name in failed.error
    assert layout.step_dir(root, 77).name in _page(root, tmp_path)


def test_events_that_cannot_be_read_are_passed_over(run: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(run, tmp_path / "run"))
    ((_, (key,)),) = event_files(PosixStore(root)).items()
    with (root / key).open("ab") as file:
        file.write(b'{"kind":"of tomorrow"}\n' + b"[" * 100_000 + b'\n\xff\xfe\n{"kind":"save","at_s":')
    assert len(histories(root)[0].committed) == 8
    (layout.events_dir(root) / "notes.txt").write_text("mine")
    assert len(histories(root)) == 1


def test_events_do_not_grow_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MAX_BYTES", 5000)
    monkeypatch.setattr(journal, "_LEAST_BYTES", 0)
    run = events.KeeperStarted(0.0, 0, 1, "0123abcd", "here", 1, "0")
    store = PosixStore(tmp_path)
    log = journal.EventLog(store, event_key(0, "0123abcd"), run)
    layout.torn_dir(tmp_path, 1).mkdir()
    follower = Follower(tmp_path)
    for at in range(200):
        log.write(events.Save(float(at), at, "committed", 0, 0.0))
        if at % 20 == 0:
            log.write(events.Restore(float(at), at, 0, 0.0))
            time.sleep(0.02)
            follower.look()
    log.close()
    assert follower.look().saves == 200, "nothing is counted twice when a file gets another name"
    ((_, keys),) = event_files(store).items()
    assert [(tmp_path / key).stat().st_size <= 5000 for key in keys] == [True, True]
    for key in keys:
        assert isinstance(next(iter(read_events(store, [key]))), events.KeeperStarted), "every file tells whose it is"
    steps = [event.step for event in read_events(store, keys) if isinstance(event, events.Save)]
    assert steps == list(range(steps[0], 200))
    assert len(steps) > 20


def test_a_root_that_takes_no_events_takes_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    layout.block_events(tmp_path / "r")
    child = start_child(TRAINEE, tmp_path / "r", 2)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    assert answer("list", tmp_path / "r")["latest"] == 2


def test_old_runs_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MAX_RUNS", 2)
    store = PosixStore(tmp_path)
    for at in range(6):
        for rank in (0, 1):
            run = events.KeeperStarted(float(at), rank, 2, f"{5 - at:08x}", "here", 1, "0")  # the names tell no order
            store.append(event_key(rank, run.run), msgspec.json.encode(run) + b"\n")
    journal.forget(store, "00000005")
    assert {run for _, run in event_files(store)} == {"00000000", "00000001", "00000005"}
    assert {rank for rank, _ in event_files(store)} == {0, 1}


def test_a_wait_is_told_however_many_updates_follow(tmp_path: Path) -> None:
    """The fence that waits is the first after a save, and thousands may come before the next."""
    code = (
        "import sys, torch, stillframe\n"
        "import time\n"
        "w = torch.zeros(1 << 24); c = stillframe.Checkpointer(sys.argv[1], arena='64MiB'); waited = 0.0\n"
        "for step in (1, 2):\n"
        "    c.save(step, {'w': w})\n"
        "    began = time.monotonic(); c.fence(); waited += time.monotonic() - began\n"
        "    for _ in range(3000): c.fence()\n"
        "    w += 1\n"
        "print(waited); c.close()\n"
    )
    child = start_child(code, tmp_path / "r")
    out, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    (history,) = histories(tmp_path / "r")
    told = sum(sorted(update.waited_s for update in history.updates)[-2:])
    assert told == pytest.approx(float(out), rel=0.05)
    assert len(history.updates) < 1100


def test_a_report_of_a_run_that_saves_too_often_says_how_often_is_cheap(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with Checkpointer(tmp_path / "root", arena="64MiB") as checkpointer:
        for step in range(12):
            weight.grad = torch.ones(1000)
            optimizer.step()
            checkpointer.save(step, {"weight": weight, "optimizer": optimizer})
    stillframe("report", tmp_path / "root", "-o", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "more than 5 % as dear" in page
    assert re.search(r"with one save in [\d,]+ iterations, or fewer, it is cheap", page)


def test_a_run_without_saves_has_a_report(tmp_path: Path) -> None:
    code = (
        "import sys, torch, stillframe\n"
        "c = stillframe.Checkpointer(sys.argv[1], arena='64MiB'); c.restore({})\n"
        "[c.fence() for _ in range(3)]; c.close()\n"
    )
    child = start_child(code, tmp_path / "r")
    _, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    assert "is not known" in _page(tmp_path / "r", tmp_path)
    stillframe("trace", tmp_path / "r", cwd=tmp_path)
    assert "no checkpoint yet" in stillframe("list", tmp_path / "r")


# --- watch -----------------------------------------------------------------------------------


def test_watch_sees_a_living_run(tmp_path: Path) -> None:
    root = tmp_path / "run"
    child = start_child(TRAINEE, root, 3, "stay")
    assert child.stdout is not None
    try:
        while "wait" not in child.stdout.readline():
            assert child.poll() is None
        frame = answer("watch", root)
        assert (frame["is_running"], frame["state"], frame["step"], frame["committed"]) == (True, "training", 3, 3)
        assert (frame["saves"], frame["failed"], frame["moving"]) == (3, 0, [])
        assert 0 < frame["at_risk_s"] < 60
        assert frame["arena_bytes"] == 64 << 20
        assert [each["step"] for each in frame["last"]] == [3, 2, 1]
        assert all(0 < each["seconds"] < 60 for each in frame["last"])
        assert frame["checkpoint_bytes"] == sum(each.stat().st_size for each in layout.step_dir(root, 3).iterdir())
        assert frame["iterations_per_s"] is None or frame["iterations_per_s"] > 0
        disk = os.statvfs(root)
        assert frame["free_bytes"] == pytest.approx(disk.f_bavail * disk.f_frsize, rel=0.2)
        text = stillframe("watch", root)
        assert "would cost" in text
        assert re.search(r"last saves   step 3 in .*, step 2 in .*, step 1 in ", text)
        assert re.search(r"disk         .* left, room for [\d,]+ more", text)
    finally:
        child.kill()
        child.communicate()
    deadline = time.monotonic() + 20
    while answer("watch", root)["state"] != "ended":
        assert time.monotonic() < deadline
    assert "no run is active" in stillframe("watch", root)


def test_watch_shows_a_save_that_waits_for_a_rank(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with Launch(2, "cli_worker.py", root, "stuck") as launch:
        deadline = time.monotonic() + 60
        while "sealed" not in launch.output:
            assert launch.process.poll() is None, launch.output
            assert time.monotonic() < deadline
            time.sleep(0.1)
        while not (moving := answer("watch", root)["moving"]) or not moving[0]["sealed"]:
            assert time.monotonic() < deadline
        assert (moving[0]["step"], moving[0]["sealed"], moving[0]["lagging"]) == (5, 1, [1])
        assert "waiting for rank 1" in stillframe("watch", root)
        assert [each["state"] for each in answer("list", root)["steps"]] == ["in progress"]
        assert "not sealed yet by rank 1" in stillframe("doctor", root)


def test_watch_on_a_terminal_goes_on_until_ctrl_c(run: Path) -> None:
    master, slave = os.openpty()
    command = [*COMMAND, "watch", str(run), "--every", "0.1"]
    child = subprocess.Popen(command, stdout=slave, stderr=slave, env=environment(TERM="xterm", COLUMNS="40"))
    os.close(slave)
    seen = b""
    while seen.count(b"last commit") < 3:
        seen += os.read(master, 4096)
    child.send_signal(signal.SIGINT)
    assert child.wait(20) == 0
    os.close(master)


# --- trace -----------------------------------------------------------------------------------


def test_a_trace_has_the_life_of_every_save(run: Path, tmp_path: Path) -> None:
    stillframe("trace", run, "-o", tmp_path / "t.json")
    made = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    slices = [event for event in made if event["ph"] == "X"]
    for name in ("stage", "flush", "commit"):
        assert {event["name"] for event in slices} >= {f"{name} {step}" for step in range(1, 9)}
    assert sum(event["name"] == "iteration" for event in slices) == 7
    assert all(event["dur"] >= 0 and event["ts"] >= -1e6 for event in slices)
    rows = [(event["pid"], event["tid"]) for event in slices]
    for row in set(rows):
        if row[1] >= 100:  # nothing on a row overlaps
            spans = sorted(
                (event["ts"], event["ts"] + event["dur"]) for event in slices if (event["pid"], event["tid"]) == row
            )
            assert all(one[1] <= after[0] + 1e-3 for one, after in itertools.pairwise(spans))


def test_a_trace_is_not_written_over(run: Path, tmp_path: Path) -> None:
    stillframe("trace", run, cwd=tmp_path)
    assert (tmp_path / "run.trace.json").exists()
    stillframe("trace", run, code=9, cwd=tmp_path)
    stillframe("trace", run, "--force", cwd=tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["run.trace.json"]


def test_a_trace_without_events_says_so(single: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(single, tmp_path / "gpt"))
    layout.remove_events(root)
    assert "no run has left events" in stillframe("trace", root, code=3, cwd=tmp_path)
    assert "is not known" in _page(root, tmp_path)


# --- report ----------------------------------------------------------------------------------


class _Checker(html.parser.HTMLParser):
    """Every tag that is opened is closed; nothing is fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "line", "rect"):
            self.open.append(tag)
        if tag == "rect":
            self.open.append(tag)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "data")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def _page(root: Path, out: Path) -> str:
    stillframe("report", root, "-o", out / "report.html", "--force")
    return (out / "report.html").read_text()


def test_the_report_is_one_whole_page(run: Path, tmp_path: Path) -> None:
    page = _page(run, tmp_path)
    checker = _Checker()
    checker.feed(page)
    assert checker.open == []
    assert checker.fetched == []
    assert "<script" not in page
    assert "http" not in page
    assert re.search(r"Training was blocked .* of the time", page)
    assert "8 checkpoints in" in page
    assert "policy: KeepLast(count=2); 6 of the checkpoints of the last run" in page


def test_the_report_of_two_ranks_has_both(sharded: Path, tmp_path: Path) -> None:
    assert "Ranks, those blocked longest first" in _page(sharded, tmp_path)


def test_names_in_the_report_are_text(run: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(run, tmp_path / "<script>alert(1)</script>".replace("/", "_")))
    assert "<script" not in _page(root, tmp_path)


CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
def test_a_browser_draws_the_report(run: Path, tmp_path: Path) -> None:
    """A real browser lays the page out: the drawings have their slices, and nothing is wider than the page."""
    page = _page(run, tmp_path)
    probe = (
        "<script>addEventListener('load', () => { const of = (kind) => [...document.querySelectorAll(kind)]"
        ".map(each => each.getBoundingClientRect()); document.title = JSON.stringify({"
        "verdict: of('.verdict')[0].height, tiles: of('.tile').length, wide: document.documentElement.scrollWidth,"
        "stage: of('rect.stage').filter(each => each.width > 0).length,"
        "flush: of('rect.flush').filter(each => each.width > 0).length, bars: of('rect.bar').length }) })</script>"
    )
    (tmp_path / "probed.html").write_text(page.replace("</body>", probe + "</body>"))
    assert CHROMIUM is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'browser'}"]
    done = subprocess.run(
        [CHROMIUM, *flags, "--window-size=1000,1400", "--dump-dom", f"file://{tmp_path / 'probed.html'}"],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None, done.stderr
    seen: dict[str, Any] = json.loads(title[1].replace("&quot;", '"'))
    assert seen["verdict"] > 20
    assert seen["tiles"] == 5
    assert seen["stage"] == seen["flush"] == 6
    assert seen["bars"] == 8 + 8 + 8
    assert seen["wide"] <= 1000
