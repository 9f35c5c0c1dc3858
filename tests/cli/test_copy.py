"""copy: the same checkpoint in another root, whole or not at all, and what it says about it."""

from __future__ import annotations

import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stillframe import Catalog, Checkpointer
from stillframe.checkpoint import removal
from stillframe.format import names
from stillframe.format.epochs import Aside, encode_aside
from tests import layout
from tests.cli.roots import COMMAND, STEPS, answer, environment, flip, make_root, make_state, stillframe
from tests.support import assert_same, until


def files(root: Path, step: int) -> dict[str, bytes]:
    return {name: (root / name).read_bytes() for name in layout.files_of(root, step)}


def everything(root: Path) -> dict[str, bytes]:
    found = [Path(place, name) for place, _, inside in os.walk(root) for name in inside]
    return {str(path.relative_to(root)): path.read_bytes() for path in found}


def test_the_newest_checkpoint_is_copied(made: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    source, state = made
    to = tmp_path / "new" / "to"
    lines = stillframe("copy", source, to).splitlines()
    assert lines[0].startswith("step 30: sent ")
    assert lines[1].startswith(f"{to} has 1 checkpoint of 1; sent ")
    assert Catalog(to).steps() == [30]
    assert files(to, 30) == files(source, 30)
    assert "nothing damaged" in stillframe("verify", to)
    into = make_state()
    with Checkpointer(to, arena="64MiB") as checkpointer:
        assert checkpointer.restore(into).step == 30
    assert_same(dict(into["model"].state_dict()), dict(state["model"].state_dict()))
    assert stillframe("copy", source, to).startswith("step 30: was there already, ")


def test_steps_can_be_chosen_and_all(single: Path, tmp_path: Path) -> None:
    told = answer("copy", single, tmp_path, 20, 10, 20)
    size = Catalog(single).manifest(Catalog(single).find(10)).bytes
    assert (told["from"], told["to"], told["sent_bytes"]) == (str(single), str(tmp_path), 2 * size)
    assert [(each["step"], each["state"], each["sent_bytes"]) for each in told["steps"]] == [
        (10, "copied", size),
        (20, "copied", size),
    ]
    assert told["steps"][0]["save"] == {"step": 10, "epoch": 1, "attempt": 1}
    told = answer("copy", single, tmp_path, "--all")
    assert [(each["step"], each["state"], each["sent_bytes"]) for each in told["steps"]] == [
        (10, "there", 0),
        (20, "there", 0),
        (30, "copied", size),
    ]
    assert Catalog(tmp_path).steps() == list(STEPS)
    for step in STEPS:
        assert files(tmp_path, step) == files(single, step)


def test_what_an_interrupted_copy_has_sent_is_not_sent_again(single: Path, tmp_path: Path) -> None:
    stillframe("copy", single, tmp_path)
    before = files(tmp_path, 30)
    layout.manifest(tmp_path, 30).unlink()
    told = answer("copy", single, tmp_path)
    assert (told["sent_bytes"], told["steps"][0]["state"]) == (0, "copied")
    assert files(tmp_path, 30) == before
    layout.manifest(tmp_path, 30).unlink()
    layout.seal(tmp_path, 30).unlink()
    assert "step 30: sent 0 bytes, 17.3 KiB were there already" in stillframe("copy", single, tmp_path)
    assert files(tmp_path, 30) == before


def test_after_a_rewind_the_copy_has_the_same_branch(copy: Path, tmp_path: Path) -> None:
    """Also if the run has saved nothing since."""
    stillframe("copy", copy, tmp_path / "to", "--all")
    with Checkpointer(copy, arena="64MiB") as checkpointer:
        checkpointer.rewind(20)
    assert answer("copy", copy, tmp_path / "to")["steps"][0]["state"] == "there"
    assert Catalog(tmp_path / "to").steps() == Catalog(copy).steps() == [10, 20]
    assert answer("copy", copy, tmp_path / "to2", 30)["steps"][0]["state"] == "copied", "off the branch, if asked for"
    assert Catalog(tmp_path / "to2").steps() == [30]


def test_parts_that_are_in_the_roots_of_other_ranks_are_told(copy: Path, tmp_path: Path) -> None:
    layout.unshare(copy, 30, world_size=4)
    told = answer("copy", copy, tmp_path / "to", code=11)["steps"][0]
    assert (told["step"], told["state"], told["missing"]) == (30, "incomplete", [1, 2, 3])
    assert Catalog(tmp_path / "to").steps() == []
    again = stillframe("copy", copy, tmp_path / "to", code=11)
    assert "ranks 1-3 missing still: copy from the roots that have them" in again
    assert "has 0 checkpoints of 1" in again
    assert "some ranks only" in stillframe("copy", copy, shutil.copytree(copy, tmp_path / "other"), code=9)


# --- what is refused ---------------------------------------------------------------------------


def test_wrong_arguments_say_what_to_do(single: Path, tmp_path: Path) -> None:
    to = tmp_path / "to"
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(single)
    assert "the same root" in stillframe("copy", single, f"{single}/", code=2)
    assert "the same root" in stillframe("copy", single, tmp_path / "link", code=2)
    assert "inside the other" in stillframe("copy", single, single / "to", code=2)
    assert "inside the other" in stillframe("copy", single, single.parent, code=2)
    assert "is a file" in stillframe("copy", single, tmp_path / "file", code=9)
    assert (tmp_path / "file").read_text() == "mine"
    assert "no directory" in stillframe("copy", tmp_path / "nowhere", to, code=3)
    assert "is empty" in stillframe("copy", tmp_path / "empty", to, code=3)
    assert "the nearest is step 10" in stillframe("copy", single, to, 30, 11, code=3)
    assert "not both" in stillframe("copy", single, to, 10, "--all", code=2)
    assert "not a size" in stillframe("copy", single, to, "--limit", "fast", code=2)
    assert "nothing would ever arrive" in stillframe("copy", single, to, "--limit", "0MB/s", code=2)
    assert "cannot write to" in stillframe("copy", single, "ftp://host/run", code=2)
    assert "same root" in stillframe("copy", single, f"{tmp_path}/../{tmp_path.name}/link", code=2)
    assert not to.exists()
    stillframe("copy", single, tmp_path / "file" / "to", code=6)


def test_a_root_without_a_checkpoint_is_said_to_be_so(copy: Path, tmp_path: Path) -> None:
    for step in STEPS:
        shutil.rmtree(layout.step_dir(copy, step))
    for more in ([], ["--all"]):
        assert "there is no checkpoint" in stillframe("copy", copy, tmp_path / "to", *more, code=3)
    assert not (tmp_path / "to").exists()


def test_the_root_of_another_run_is_not_changed(single: Path, tmp_path: Path) -> None:
    make_root(tmp_path)
    before = everything(tmp_path)
    for more in ([], ["--all"]):
        assert "another run" in stillframe("copy", single, tmp_path, *more, code=9)
        assert everything(tmp_path) == before


def test_damage_is_not_copied_and_all_goes_on_behind_it(copy: Path, tmp_path: Path) -> None:
    flip(layout.segment(copy, 20), 4096 + 100)
    assert "checksum" in stillframe("copy", copy, tmp_path / "to", 20, code=4)
    assert Catalog(tmp_path / "to").steps() == []
    told = answer("copy", copy, tmp_path / "to", "--all", code=4)
    assert [each["state"] for each in told["steps"]] == ["copied", "damaged", "copied"]
    assert "checksum" in told["steps"][1]["why"]
    assert Catalog(tmp_path / "to").steps() == [10, 30]
    assert "step 20: not copied, DAMAGED" in stillframe("copy", copy, tmp_path / "to", "--all", code=4)


def test_what_was_removed_there_is_not_copied_again(single: Path, tmp_path: Path) -> None:
    stillframe("copy", single, tmp_path, "--all")
    target = Catalog(tmp_path)
    save = target.find(20)
    target.store.put(target.aside_key(save), encode_aside(Aside("removed", True, save.epoch, time.time())))
    removal.remove_all(target, save, keeps_tombstone=True)
    assert "Choose another step" in stillframe("copy", single, tmp_path, 20, code=7)
    told = answer("copy", single, tmp_path, "--all")
    assert [each["state"] for each in told["steps"]] == ["there", "removed", "there"]
    assert target.steps() == [10, 30]
    assert "step 20: not copied, it was removed there" in stillframe("copy", single, tmp_path, "--all")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system with no room."""
    path = tmp_path / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_full_or_read_only_disk_is_said_to_be_so(single: Path, small: Path) -> None:
    assert "space" in stillframe("copy", single, small / "to", code=6)
    assert Catalog(small / "to").steps() == []
    assert layout.unfinished_files(small) == []
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
    assert "ead-only" in stillframe("copy", single, small / "other", code=6)


# --- how it runs -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of three chunks; not to be changed."""
    root = tmp_path_factory.mktemp("cli") / "large"
    with Checkpointer(root, arena="64MiB") as checkpointer:
        checkpointer.save(1, {"w": torch.arange(10 << 20, dtype=torch.float32)})
    return root


def test_ctrl_c_leaves_no_checkpoint_and_the_next_one_completes_it(large: Path, tmp_path: Path) -> None:
    """At a rate at which it would take minutes."""
    to = tmp_path / "to"
    arguments = [*COMMAND, "copy", str(large), str(to), "--limit", "100kB/s"]
    child = subprocess.Popen(arguments, env=environment(), stderr=subprocess.PIPE, text=True)
    until(lambda: [each for each in layout.unfinished_files(to) if "step-" in str(each)], "it has begun")
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    assert "Traceback" not in err
    assert Catalog(to).steps() == []
    assert layout.unfinished_files(to) == []
    stillframe("copy", large, to)
    assert files(to, 1) == files(large, 1)


def test_the_rate_is_limited(large: Path, tmp_path: Path) -> None:
    told = answer("copy", large, tmp_path, "--limit", "20MB/s")
    assert told["seconds"] > 1.1


def test_a_terminal_shows_progress(large: Path, tmp_path: Path) -> None:
    master, slave = pty.openpty()
    arguments = [*COMMAND, "copy", str(large), str(tmp_path / "to"), "--limit", "50MB/s"]
    child = subprocess.Popen(arguments, env=environment(TERM="xterm"), stdout=subprocess.PIPE, stderr=slave, text=True)
    os.close(slave)
    shown = b""
    while True:
        try:
            data = os.read(master, 4096)
        except OSError:  # the other end is closed
            break
        shown += data
        if not data:
            break
    os.close(master)
    out, _ = child.communicate(timeout=60)
    assert child.returncode == 0
    assert b"step 1" in shown
    assert b"MB/s" in shown
    assert out.startswith("step 1: sent 40.0 MiB")


def test_copy_imports_no_torch(single: Path, tmp_path: Path) -> None:
    code = "import sys; sys.argv[1:] = ['copy', *sys.argv[1:]]\nfrom stillframe.cli import main\n"
    code += "try:\n    main()\nfinally:\n    assert not {'torch', 'numpy', 'rich.console'} & set(sys.modules)"
    subprocess.run(
        [sys.executable, "-c", code, str(single), str(tmp_path / names.RUN)], check=True, env=environment(),
        capture_output=True,
    )  # fmt: skip
    assert Catalog(tmp_path / names.RUN).steps() == [30]


def test_a_root_that_was_pruned_by_hand_takes_what_comes_later(single: Path, tmp_path: Path) -> None:
    stillframe("copy", single, tmp_path, 10, 20)
    stillframe("prune", tmp_path, "--keep-last", 1)
    stillframe("copy", single, tmp_path, 30)
    assert Catalog(tmp_path).steps() == [20, 30]
