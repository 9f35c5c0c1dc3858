"""list, show, diff, verify: what they say, in text, in JSON and by exit code."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from stillframe import Checkpointer, load
from stillframe.checkpoint.catalog import Catalog
from stillframe.cli.app import COMMANDS
from stillframe.cli.diff import measured
from tests import layout
from tests.cli.roots import COMMAND, STEPS, answer, environment, flip, stillframe
from tests.layout import segment
from tests.support import assert_same

# --- list ------------------------------------------------------------------------------------


def test_list_shows_every_step_and_marks_the_newest(single: Path) -> None:
    lines = stillframe("list", single).splitlines()
    assert lines[0].split() == ["step", "state", "when", "size", "ranks"]
    assert [line.split()[0] for line in lines[1:]] == ["10", "20", "*"]
    assert all("committed" in line for line in lines[1:])


def test_list_says_the_same_in_json(single: Path) -> None:
    found = answer("list", single)
    assert (found["root"], found["latest"], found["writers"]) == (str(single), 30, [])
    assert [each["step"] for each in found["steps"]] == list(STEPS)
    for each in found["steps"]:
        assert each["bytes"] == sum((single / name).stat().st_size for name in layout.files_of(single, each["step"]))
        assert each["state"] == "committed"
        assert each["save"] == {"step": each["step"], "epoch": 1, "attempt": 1}
        assert (each["parent"], each["metadata"], each["is_on_branch"]) == (None, {}, True)
        assert abs(each["saved_unix_s"] - time.time()) < 3600


def test_list_shows_the_newest_few_and_values_of_the_state(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {"w": torch.zeros(2), "metrics": {"loss": 1 / step, "note": "x" * 100}}).wait()
    lines = stillframe("list", tmp_path, "--last", "2", "--value", "metrics/loss").splitlines()
    assert lines[0].split()[-1] == "metrics/loss"
    assert [line.split()[-1] for line in lines[1:]] == ["0.5", "0.3333333333333333"]
    found = answer("list", tmp_path, "--last", "1", "--value", "metrics/loss", "--value", "metrics/note")
    assert [each["values"] for each in found["steps"]] == [{"metrics/loss": 1 / 3, "metrics/note": "x" * 100}]
    assert "no step that is listed has such a value" in stillframe("list", tmp_path, "--value", "w", code=2)
    stillframe("list", tmp_path, "--last", "0", code=2)


def test_a_step_is_named_by_number_or_from_the_end(single: Path) -> None:
    for name, step in {"20": 20, "latest": 30, "-1": 30, "-2": 20, "-3": 10, "latest~1": 20}.items():
        assert answer("show", single, name)["step"] == step
        assert answer("verify", single, name)["steps"][0]["step"] == step
    assert stillframe("diff", single, "-2", "latest", code=10).startswith("step 20 → step 30")
    assert "it has 3 checkpoints" in stillframe("show", single, "-4", code=3)
    for name in ("newest", "latest~", "latest~-1", "1.5", "-0"):
        stillframe("show", single, name, code=2)


def test_list_imports_no_torch_and_no_other_command(single: Path) -> None:
    code = "import sys; sys.argv[1:] = ['list', sys.argv[1]]\nfrom stillframe.cli import main\n"
    unwanted = {"torch", "numpy", "rich.console", "stillframe.cli.show", "stillframe.checkpoint.stored"}
    code += f"try:\n    main()\nfinally:\n    assert not {unwanted} & set(sys.modules)"
    subprocess.run([COMMAND[0], "-c", code, str(single)], check=True, env=environment(), capture_output=True)


def test_list_of_two_ranks(sharded: Path) -> None:
    found = answer("list", sharded)["steps"][-1]
    assert (found["step"], found["world_size"], found["ranks"]) == (2, 2, [0, 1])


def test_list_of_a_root_that_the_ranks_do_not_share(split: Path, half: Path) -> None:
    found = answer("list", split)["steps"][-1]
    assert (found["state"], found["ranks"], found["world_size"]) == ("committed", [0, 1], 2)
    found = answer("list", half)["steps"][-1]
    assert (found["state"], found["ranks"], found["world_size"]) == ("committed", [1], 2)
    assert "1 of 2" in stillframe("list", half)


def test_list_tells_the_states_apart(copy: Path) -> None:
    layout.set_aside(copy, 10)
    layout.uncommit(copy, 20)
    segment(copy, 30).unlink()
    found = {each["step"]: each for each in answer("list", copy, "--all")["steps"]}
    assert [found[step]["state"] for step in STEPS] == ["quarantined", "incomplete", "damaged"]
    assert "missing" in found[30]["reason"]
    text = stillframe("list", copy, "--all")
    assert "incomplete" in text
    assert "is missing" in text
    shown = answer("list", copy)
    assert ([each["step"] for each in shown["steps"]], shown["hidden"], shown["latest"]) == ([30], 2, None)
    assert "see --all" in stillframe("list", copy)


def test_list_shows_a_save_in_progress_and_who_writes(copy: Path) -> None:
    """A real training process that stands still in the middle of a save: its keeper is stopped."""
    code = (
        "import sys, os, signal, torch, stillframe\nfrom stillframe import spi\n"
        "c = stillframe.Checkpointer(sys.argv[1], arena='64MiB')\n"
        "c.save(40, {'w': torch.ones(1 << 20)}); c.wait('staged'); c.wait()\n"
        "os.kill(spi.keeper_pid(c), signal.SIGSTOP)\n"
        "c.save(50, {'w': torch.ones(1 << 20)}); print(spi.keeper_pid(c), flush=True); input()\n"
        "os.kill(spi.keeper_pid(c), signal.SIGCONT); c.close()\n"
    )
    child = subprocess.Popen(
        [COMMAND[0], "-c", code, str(copy)], env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        pid = int(child.stdout.readline())
        found = answer("list", copy)
        assert [each["pid"] for each in found["writers"]] == [pid]
        assert "a run is active here" in stillframe("list", copy)
        stillframe("prune", copy, "--keep-last", 1, code=7)
        assert "a run is active here" in stillframe("doctor", copy)
    finally:
        child.communicate("\n", timeout=60)
    assert answer("list", copy)["latest"] == 50


@pytest.mark.parametrize("columns", ["40", "80"])
def test_list_fits_a_terminal(single: Path, columns: str) -> None:
    lines = stillframe("list", single, COLUMNS=columns).splitlines()
    assert max(map(len, lines)) <= int(columns)
    assert "\x1b" not in "".join(lines)
    assert "…" not in "".join(lines), "columns are left out, cells are never cut"


def test_what_is_no_root_gets_advice(single: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    file = tmp_path / "file"
    file.touch()
    assert "no directory" in stillframe("list", tmp_path / "nowhere", code=3)
    assert "is empty" in stillframe("list", empty, code=3)
    assert "is a file" in stillframe("list", file, code=3)
    assert str(single) in stillframe("list", single.parent, code=3)
    assert f"give the root: {single}" in stillframe("list", layout.step_dir(single, 10), code=3)
    for command in ("show", "verify", "doctor", "watch", "trace", "report"):
        stillframe(command, tmp_path / "nowhere", code=3)


def test_a_newer_format_says_upgrade(copy: Path) -> None:
    layout.make_newer(layout.manifest(copy, 30))
    done = subprocess.run([*COMMAND, "list", str(copy)], env=environment(), capture_output=True, text=True)
    assert done.returncode == 5
    assert "newer format" in done.stdout
    assert "10" in done.stdout
    assert str(layout.NEWER) in done.stderr
    assert "upgrade" in stillframe("doctor", copy, code=11)
    stillframe("verify", copy, 30, code=5)


def test_a_step_that_is_not_there_suggests_the_nearest(single: Path) -> None:
    assert "nearest is step 20" in stillframe("show", single, 22, code=3)
    assert "nearest is step 30" in stillframe("verify", single, 1000, code=3)


def test_a_closed_pipe_is_no_error(single: Path) -> None:
    command = f"{' '.join(COMMAND)} show {single} --tree | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], env=environment(), capture_output=True, text=True)
    assert done.returncode in (0, 141)
    assert len(done.stdout.splitlines()) == 1
    assert not done.stderr


def test_the_shell_completes_commands() -> None:
    code = "import sys; sys.argv = ['stillframe']; from stillframe.cli import main; main()"
    env = environment(_STILLFRAME_COMPLETE="complete_bash", COMP_WORDS="stillframe ver", COMP_CWORD="1")
    done = subprocess.run([COMMAND[0], "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["verify"], done.stderr


def test_a_read_only_root_can_be_looked_at(copy: Path) -> None:
    if os.geteuid() == 0:
        mounted = subprocess.run(["mount", "--bind", str(copy), str(copy)], capture_output=True)
        if mounted.returncode:
            pytest.skip("nothing can be mounted here")
        subprocess.run(["mount", "-o", "remount,ro,bind", str(copy)], check=True)
    else:
        copy.chmod(0o555)
    try:
        stillframe("list", copy)
        stillframe("verify", copy)
        assert "read-only" in stillframe("doctor", copy) or "not writable" in stillframe("doctor", copy)
        stillframe("prune", copy, "--keep-last", 1, code=6)
    finally:
        if os.geteuid() == 0:
            subprocess.run(["umount", str(copy)], check=True)


# --- show ------------------------------------------------------------------------------------


def test_show_is_a_tree(single: Path) -> None:
    text = stillframe("show", single)
    assert text.startswith("step 30: ")
    assert "├─ model" in text
    assert "embed.weight" in text
    assert "= 30" in text
    assert "exp_avg" not in text
    assert "exp_avg" in stillframe("show", single, "--tree")


def test_show_in_json_has_every_leaf(single: Path) -> None:
    found = {each["path"]: each for each in answer("show", single, 20)["entries"]}
    assert found["step"] == {"path": "step", "kind": "value", "value": 20}
    assert found["model/embed.weight"]["shape"] == [50, 16]
    assert found["model/low"]["dtype"] == "BF16"
    assert found["array"]["kind"] == "array"
    assert found["model/head.weight"]["tied_to"] == "model/embed.weight"
    assert found["model/head.weight"]["bytes"] == 0


def test_show_knows_the_sharding(sharded: Path) -> None:
    found = {each["path"]: each for each in answer("show", sharded)["entries"]}
    weight = found["model/0.weight"]
    assert weight["sharding"] == "2 boxes by dim 0 on 2 ranks"
    assert [part["rank"] for part in weight["parts"]] == [0, 1]
    assert weight["bytes"] == 24 * 32 * 4
    assert found["mine/rank"]["value"] == 0
    assert {each["path"]: each for each in answer("show", sharded, "--rank", 1)["entries"]}["mine/rank"]["value"] == 1


def test_statistics_are_those_of_the_tensor(made: tuple[Path, dict[str, Any]]) -> None:
    root, state = made
    found = answer("show", root, "--tensor", "model/body.weight", "--stats")["entries"]
    weight = state["model"].body.weight.detach().double()
    assert len(found) == 1
    assert found[0]["min"] == pytest.approx(float(weight.min()))
    assert found[0]["mean"] == pytest.approx(float(weight.mean()))
    assert (found[0]["nan"], found[0]["inf"]) == (0, 0)


def test_statistics_count_what_is_not_finite(tmp_path: Path) -> None:
    odd = torch.tensor([1.0, float("nan"), float("inf"), -float("inf"), 3.0])
    with Checkpointer(tmp_path / "r", arena="64MiB") as checkpointer:
        checkpointer.save(
            1, {"odd": odd, "none": torch.empty(0), "c": torch.tensor([1 + 2j]), "b": torch.tensor([True])}
        )
    found = {each["path"]: each for each in answer("show", tmp_path / "r", "--stats")["entries"]}
    assert (found["odd"]["min"], found["odd"]["max"], found["odd"]["nan"], found["odd"]["inf"]) == (1.0, 3.0, 1, 2)
    assert found["none"]["min"] is None
    assert (found["c"]["min"], found["c"]["max"]) == (1.0, 2.0)
    assert found["b"]["mean"] == 1.0


def test_a_narrow_terminal_gets_fewer_columns_and_whole_cells(single: Path) -> None:
    wide, narrow = (stillframe("show", single, "--stats", COLUMNS=columns) for columns in ("200", "80"))
    assert "dtype" in wide
    assert "dtype" not in narrow
    assert "model/norm.num_batches_tracked" in narrow
    assert "…" not in wide + narrow


def test_a_glob_that_matches_nothing_says_what_there_is(single: Path) -> None:
    assert "model/embed.weight" in stillframe("show", single, "--tensor", "nothing*", code=3)


def test_show_of_a_split_root_shows_the_ranks_that_are_here(split: Path, half: Path) -> None:
    assert "2 ranks" in stillframe("show", split)
    found = {each["path"]: each for each in answer("show", split, "--rank", 1)["entries"]}
    assert found["mine/rank"]["value"] == 1
    stillframe("show", split, "--rank", 5, code=3)
    assert "rank 1 of 2" in stillframe("show", half)
    assert "here is the part of rank 1" in stillframe("show", half, "--rank", 0, code=3)


# --- verify ----------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["single", "sharded", "split", "half"])
def test_verify_reads_every_byte(which: str, request: pytest.FixtureRequest) -> None:
    root: Path = request.getfixturevalue(which)
    found = answer("verify", root, "--all")
    assert all(each["is_whole"] for each in found["steps"])
    for each in found["steps"]:
        files = layout.segments(root, each["step"])
        headers = [(path.stat().st_size, int.from_bytes(path.read_bytes()[:8], "little") + 8) for path in files]
        assert each["bytes"] == sum(size - header for size, header in headers)
    assert "nothing damaged" in stillframe("verify", root)


def test_verify_names_file_chunk_and_tensor(copy: Path) -> None:
    path = segment(copy, 20)
    flip(path, 4096 + 10)
    found = answer("verify", copy, "--all", code=4)
    assert [each["is_whole"] for each in found["steps"]] == [True, False, True]
    damage = found["steps"][1]["damages"][0]
    assert (damage["file"], damage["chunk"], damage["rank"]) == (str(path), 0, 0)
    assert "model/embed.weight" in damage["tensors"]
    assert "chunk 0 is damaged" in stillframe("verify", copy, 20, code=4)
    assert "whole" in stillframe("verify", copy, 10)


def test_verify_goes_on_after_damage(sharded_copy: Path) -> None:
    flip(segment(sharded_copy, 2, 0), 4096 + 1)
    flip(segment(sharded_copy, 2, 1), 20)
    layout.seal(sharded_copy, 1, rank=1).write_text("{}")
    found = answer("verify", sharded_copy, "--all", code=4)["steps"]
    assert [(each["rank"], each["chunk"]) for each in found[1]["damages"]] == [(0, 0), (1, None)]
    assert [each["rank"] for each in found[0]["damages"]] == [1]
    assert found[0]["bytes"] > 0, "rank 0's part was read all the same"


def test_verify_changes_nothing(copy: Path) -> None:
    flip(segment(copy, 30), 4096)
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    stillframe("verify", copy, "--all", code=4)
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*")} == before
    assert Catalog(copy).latest() == 30


def test_verify_takes_a_step_or_all(single: Path) -> None:
    stillframe("verify", single, 10, "--all", code=2)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["show", "ROOT", ""], ["latest", "30", "20", "10"]),
        (["pin", "ROOT", "2"], ["20"]),
        (["remove", "ROOT", "10", ""], ["latest", "30", "20", "10"]),
        (["show", "nowhere", ""], []),
        (["show", "s3://bucket/x", ""], []),
    ],
)
def test_the_shell_completes_steps(single: Path, words: list[str], expected: list[str]) -> None:
    words = [str(single) if word == "ROOT" else word for word in words]
    asked = {"_STILLFRAME_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(["stillframe", *words])}
    env = environment(**asked, COMP_CWORD=str(len(words)))
    found = subprocess.run(COMMAND, capture_output=True, text=True, env=env, timeout=60)
    assert (found.stdout.split(), found.stderr) == (expected, "")


# --- diff ------------------------------------------------------------------------------------


def test_diff_of_a_step_with_itself_is_nothing(single: Path, sharded: Path) -> None:
    assert "0 changed, 0 added, 0 removed" in stillframe("diff", single, 10, 10)
    assert "0 changed, 0 added, 0 removed" in stillframe("diff", sharded, 2, 2)


def test_diff_says_what_changed_and_by_how_much(single: Path) -> None:
    found = answer("diff", single, 10, 20, code=10)
    entries = {each["path"]: each for each in found["entries"]}
    before, after = load(single, 10), load(single, 20)
    one, other = before["model"]["body.weight"], after["model"]["body.weight"]
    apart = entries["model/body.weight"]["difference"]
    assert apart["max_abs"] == pytest.approx(float((one - other).abs().max()))
    assert apart["relative"] == pytest.approx(float((one - other).norm() / one.norm()), rel=1e-4)
    assert apart["different"] == int((one != other).sum())
    assert entries["step"] == {"path": "step", "outcome": "changed", "left": {"value": 10}, "right": {"value": 20}}
    assert "table" not in entries
    assert "array" not in entries
    assert found["equal"] >= 2


def test_diff_shows_what_appeared_and_went(single: Path, sharded: Path) -> None:
    found = answer("diff", single, sharded, code=10)
    outcomes = {each["path"]: each["outcome"] for each in found["entries"]}
    assert outcomes["model/0.weight"] == "added"
    assert outcomes["model/embed.weight"] == "removed"
    only = answer("diff", single, sharded, "--only", "added", code=10)["entries"]
    assert {each["outcome"] for each in only} == {"added"}


def test_diff_between_roots_takes_a_step(single: Path, copy: Path) -> None:
    assert answer("diff", single, copy, "--step", 10)["changed"] == 0
    assert answer("diff", single, copy)["equal"] > 0


def test_diff_reads_nothing_where_checksums_tell(copy: Path) -> None:
    """The data is gone but for its size: only checksums are left to compare."""
    shutil.copytree(copy, copy.parent / "other")
    path = segment(copy, 30)
    os.truncate(path, 0)
    os.truncate(path, segment(copy.parent / "other", 30).stat().st_size)
    assert answer("diff", copy, copy.parent / "other")["changed"] == 0


def test_diff_of_many_entries_is_summed_up_by_module(tmp_path: Path) -> None:
    layers = {f"layers.{layer}.{name}": torch.ones(4) for layer in range(20) for name in ("a", "b")}
    state = {"model": layers, "moments": {str(number): torch.ones(2) for number in range(40)}, "step": 1}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state).wait()
        layers["layers.3.a"][0] = 3.0
        for tensor in [*layers.values(), *state["moments"].values()]:  # type: ignore[attr-defined]
            tensor[1] = 0.5
        checkpointer.save(2, state | {"step": 2}).wait()
    lines = [line.split() for line in stillframe("diff", tmp_path, 1, 2, code=10).splitlines()]
    assert ["~", "model/layers.3", "2", "37.5", "%", "2", "1.03"] in lines
    assert ["~", "moments", "40", "50", "%", "0.5", "0.354"] in lines
    assert [line[1] for line in lines[2:-1]] == [*(f"model/layers.{each}" for each in range(20)), "moments", "step"]
    everything = stillframe("diff", tmp_path, 1, 2, "--all", code=10)
    assert "model/layers.3.a" in everything
    assert len(everything.splitlines()) == 2 + 81


@pytest.mark.parametrize("arguments", [["10"], ["ten", "20"]])
def test_diff_explains_its_arguments(single: Path, arguments: list[str]) -> None:
    assert "step" in stillframe("diff", single, *arguments, code=2)


def test_json_is_one_document(single: Path) -> None:
    for command in (["list"], ["show"], ["verify"], ["doctor"], ["watch"], ["prune", "--keep-last", "9", "--dry-run"]):
        json.loads(stillframe(command[0], single, *command[1:], "--json"))


# --- states that are odd ---------------------------------------------------------------------


def save(root: Path, step: int, state: Any) -> Path:
    with Checkpointer(root, arena="64MiB") as checkpointer:
        checkpointer.save(step, state)
    return root


ODD = [{}, torch.arange(3.0), 7, [], (torch.ones(2), {}), {"a/b": {"~": torch.ones(1)}}]


def test_any_state_can_be_looked_at(tmp_path: Path) -> None:
    root = tmp_path / "r"
    with Checkpointer(root, arena="64MiB") as checkpointer:
        for step, state in enumerate(ODD):
            checkpointer.save(step, state)
    stillframe("verify", root, "--all")
    for step, state in enumerate(ODD):
        stillframe("show", root, step, "--tree")
        if isinstance(state, torch.Tensor | tuple):
            stillframe("diff", root, step, step)
            stillframe("export", root, step, tmp_path / f"{step}.pt", "--all")
            assert_same(torch.load(tmp_path / f"{step}.pt", weights_only=True), state)


TUPLE = '{"$":"tuple","items":[1,2]}'
"""How a key (1, 2) is encoded."""
DIFFERENT: list[tuple[Any, Any]] = [
    ({"a": {}}, {}),
    ({"a": [1, 2]}, {"a": (1, 2)}),
    ({"a": [1, 2]}, {"a": [1, 2.0]}),
    ({"a": 0.0}, {"a": -0.0}),
    ({"a": True}, {"a": 1}),
    ({0: 1, "0": 2}, {0: 3, "0": 2}),
    ({0: torch.zeros(2), "0": torch.ones(2)}, {0: torch.full((2,), 3.0), "0": torch.ones(2)}),
    ({"a": torch.zeros(2)}, {"a": torch.zeros(2, 1)}),
    ({"a": torch.zeros(2)}, {"a": torch.zeros(2, dtype=torch.int32)}),
    ({"a": torch.tensor(float("nan"))}, {"a": torch.tensor(-float("nan"))}),
    ({"a": torch.zeros(2)}, {"a": -torch.zeros(2)}),
    ({"a": 1}, {"a": torch.tensor(1)}),
    ({(1, 2): torch.ones(2), TUPLE: torch.zeros(2)}, {(1, 2): torch.full((2,), 9.0), TUPLE: torch.zeros(2)}),
]


def test_whatever_differs_is_said_to_differ(tmp_path: Path) -> None:
    root = tmp_path / "r"
    with Checkpointer(root, arena="64MiB") as checkpointer:
        for step, state in enumerate(each for pair in DIFFERENT for each in pair):
            checkpointer.save(step, state)
    for number, pair in enumerate(DIFFERENT):
        with Catalog(root).open(2 * number) as one, Catalog(root).open(2 * number + 1) as other:
            assert any(row.outcome != "equal" for row in measured(one, other)), pair
            assert all(row.outcome == "equal" for row in measured(one, one)), pair


def test_what_each_rank_keeps_for_itself_is_compared(sharded: Path) -> None:
    """Only rank 1's differ: step 2's noise of rank 1 in place of step 1's."""
    names = {each["path"] for each in answer("diff", sharded, 1, 2, "--only", "equal", code=10)["entries"]}
    assert {"mine/noise", "mine/noise (rank 1)", "mine/rank", "mine/rank (rank 1)"} <= names


def test_boxes_that_lie_elsewhere_cannot_be_compared(split: Path, half: Path) -> None:
    assert "changed" in stillframe("diff", split, 1, 2, code=10)
    assert "did not share" in stillframe("diff", half, 1, 2, code=8)


def test_a_rank_that_was_not_there(sharded: Path) -> None:
    stillframe("show", sharded, "--rank", 2, code=3)


def test_verify_checks_the_header_of_a_segment_without_data(tmp_path: Path) -> None:
    root = save(tmp_path / "r", 1, {"only": "values"})
    stillframe("verify", root)
    flip(segment(root, 1), 30)
    assert "header is damaged" in stillframe("verify", root, code=4)


def test_verify_does_not_keep_quiet_about_what_it_cannot_read(copy: Path) -> None:
    layout.make_newer(layout.manifest(copy, 30))
    stillframe("verify", copy, "--all", code=5)
    flip(segment(copy, 10), 4096)
    stillframe("verify", copy, "--all", code=4)


def test_names_do_not_command_the_terminal(tmp_path: Path) -> None:
    root = save(tmp_path / "r", 1, {"red\x1b[31m\n": torch.ones(1), "v": "\x1b[2J"})
    for more in ([], ["--tree"], ["--stats"], ["--tensor", "*"]):
        text = stillframe("show", root, *more)
        assert "\x1b" not in text
        assert "\\x1b[31m\\n" in text


def test_a_terminal_without_letters(single: Path) -> None:
    assert "model" in stillframe("show", single, PYTHONIOENCODING="ascii")


def test_a_url_of_no_object_store_is_refused_by_every_command(tmp_path: Path) -> None:
    url = "ftp://bucket/run"
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    more: dict[str, list[object]] = {"import": ["a.pt", url, "--step", 1]}
    more |= {"diff": [url, 1, 2], "export": [url, 1, "out.safetensors"], "copy": [url, "there"]}
    more |= {name: [url, 1] for name in ("pin", "remove", "unpin")} | {"prune": [url, "--keep-last", 1]}
    for command in COMMANDS:
        said = stillframe(command, *more.get(command, [url]), code=2, cwd=tmp_path)
        assert "a URL that stillframe cannot write to" in " ".join(said.split()), (command, said)
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]
