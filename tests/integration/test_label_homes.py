"""Labels with files of their own, with a link to the segment, and beside the root."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import stillframe
from stillframe import Catalog, Checkpointer, ConfigError, KeepLast, spi
from stillframe.format import names
from stillframe.spi import Label
from tests import layout
from tests.support import assert_same, kill, start_child, until

WEIGHTS = torch.arange(12.0).reshape(3, 4)
FILES = (("config.json", b'{"a": 1}'), ("big.bin", bytes(range(256)) * 2000))


def label(name: str, home: str = "..") -> Label:
    return Label(name, contents=FILES, segment="model.safetensors", home=home)


def entries(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_it_has_the_files_as_they_are_and_the_segment_without_a_copy(tmp_path: Path) -> None:
    root = tmp_path / "out" / "_root"
    with Checkpointer(root) as checkpointer:
        spi.save(checkpointer, {"layer.weight": WEIGHTS, "more": {"n": 3}}, 5, label=label("checkpoint-5")).wait()
        alias = tmp_path / "out" / "checkpoint-5"
        assert entries(alias) == ["big.bin", "config.json", layout.LABEL, "model.safetensors"]
        assert [(alias / name).read_bytes() for name, _ in FILES] == [data for _, data in FILES]
        (segment,) = root.glob("step-*/rank-00000.safetensors")
        assert os.path.samefile(segment, alias / "model.safetensors")
        found = load_file(alias / "model.safetensors")
        assert torch.equal(found["layer.weight"], WEIGHTS)
        assert spi.save_of(alias) == Catalog(root).find(5)
        assert spi.save_of(tmp_path) is None
        assert entries(tmp_path / "out") == ["_root", "checkpoint-5"]
        shutil.rmtree(alias)  # what comes and goes outside the root decides nothing
        spi.save(checkpointer, {"layer.weight": WEIGHTS}, 6, label=label("checkpoint-6")).wait()
    assert Catalog(root).steps() == [5, 6]
    assert entries(tmp_path / "out") == ["_root", "checkpoint-6"]
    assert not layout.unfinished_files(root)


def test_what_is_hidden_is_bytes_in_the_file_and_the_same_to_us(tmp_path: Path) -> None:
    more = {"a": torch.ones(3), "b": [torch.arange(4), torch.ones(2, dtype=torch.float16)]}
    state = {"w": WEIGHTS, "more": more, "x": torch.zeros(2), "moreover": torch.ones(1)}
    with Checkpointer(tmp_path / "root") as checkpointer:
        spi.hide(checkpointer, "more")
        spi.save(checkpointer, state, 1, label=label("checkpoint-1")).wait()
    found = load_file(tmp_path / "checkpoint-1" / "model.safetensors")
    assert {*found} == {"w", "x", "moreover", "more", "more~2", "more~3"}
    assert torch.equal(found["w"], WEIGHTS)
    assert {found[name].dtype for name in ("more", "more~2", "more~3")} == {torch.uint8}
    assert_same(stillframe.load(tmp_path / "root"), state)
    into = {"w": torch.zeros(3, 4), "more": {"a": torch.zeros(3)}}
    stillframe.restore(tmp_path / "root", into, only=["w", "more/a"])
    assert_same(into, {"w": WEIGHTS, "more": {"a": torch.ones(3)}})


@pytest.mark.parametrize("home", ["", "..", "../checkpoints"])
def test_it_goes_with_its_checkpoint(tmp_path: Path, home: str) -> None:
    root = tmp_path / "out" / "root"
    place = root / home
    with Checkpointer(root, keep=KeepLast(1)) as checkpointer:
        for step in (1, 2, 3):
            spi.save(checkpointer, {"w": WEIGHTS}, step, label=label(f"tag{step}", home)).wait()
            assert (place / f"tag{step}" / "model.safetensors").exists()
        until(lambda: not (place / "tag2").exists(), "the labels of removed checkpoints are gone")
    assert (place / "tag3").exists()
    assert not (place / "tag1").exists()
    Catalog(root).delete(3, force=True)
    assert not (place / "tag3").exists()


def test_a_name_is_replaced_and_the_earlier_checkpoint_goes(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with Checkpointer(root) as checkpointer:
        for step in (1, 2, 3):
            spi.save(
                checkpointer, {"n": step}, step, label=Label("last", contents=(("n", b"%d" % step),), home="..")
            ).wait()
            assert (tmp_path / "last" / "n").read_bytes() == b"%d" % step
        spi.save(checkpointer, {"n": 4}, 4, label=label("other")).wait()
    assert Catalog(root).steps() == [3, 4]
    assert not layout.unfinished_files(root)


def test_what_others_have_there_stays_and_costs_no_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mine = tmp_path / "checkpoint-1"
    mine.mkdir()
    (mine / "notes").write_text("mine")
    with Checkpointer(tmp_path / "a") as checkpointer:
        spi.save(checkpointer, {"n": 1}, 1, label=label("checkpoint-1")).wait()
        spi.save(checkpointer, {"n": 2}, 2, label=label("checkpoint-2")).wait()
    with Checkpointer(tmp_path / "b") as checkpointer:  # another root of the same home
        spi.save(checkpointer, {"n": 2}, 2, label=label("checkpoint-2")).wait()
    assert caplog.text.count("no label of this root") == 2
    assert entries(mine) == ["notes"]
    assert spi.save_of(tmp_path / "checkpoint-2") == Catalog(tmp_path / "a").find(2)
    assert os.path.samefile(
        next((tmp_path / "a").glob("step-*2-*/rank-*")), tmp_path / "checkpoint-2/model.safetensors"
    )
    assert (Catalog(tmp_path / "a").steps(), Catalog(tmp_path / "b").steps()) == ([1, 2], [2])
    Catalog(tmp_path / "b").delete(2, force=True)
    assert (tmp_path / "checkpoint-2").exists()


def test_a_crash_before_it_appeared_is_made_up_for(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with Checkpointer(root) as checkpointer:
        spi.save(checkpointer, {"w": WEIGHTS}, 1, label=label("checkpoint-1")).wait()
    save = Catalog(root).find(1)
    (tmp_path / "checkpoint-1").rename(root / names.label_partial(save))
    with Checkpointer(root) as checkpointer:
        checkpointer.save(2, {"w": WEIGHTS}).wait()
    assert spi.save_of(tmp_path / "checkpoint-1") == save


@pytest.mark.parametrize("home", ["/tmp", "../..", "a", "../a/b", "../", "./", "../.hidden"])
def test_only_what_is_beside_or_above_the_root_can_be_a_home(home: str) -> None:
    with pytest.raises(ConfigError, match="cannot"):
        Label("x", home=home)
    with pytest.raises(ConfigError, match="latest"):
        Label("x", home="..", is_latest=True)


@pytest.mark.parametrize("home", ['"/etc"', '"../../x"', "3"])
def test_a_note_that_leads_elsewhere_is_no_label(tmp_path: Path, home: str) -> None:
    root = tmp_path / "a" / "b" / "root"
    with Checkpointer(root) as checkpointer:
        spi.save(checkpointer, {"w": WEIGHTS}, 1, label=label("checkpoint-1")).wait()
    victim = tmp_path / "a" / "b" / "checkpoint-1"
    (note,) = root.glob(f"step-*/{layout.LABEL}")
    for path in (note, victim / layout.LABEL):
        path.write_text(path.read_text().replace('"home":".."', f'"home":{home}'))
    shutil.copytree(victim, tmp_path / "x" / "checkpoint-1")
    Catalog(root).delete(1, force=True)
    assert (tmp_path / "x" / "checkpoint-1").exists()
    assert victim.exists()


def test_steps_are_removed_beside_the_run_in_one_request(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        for step in range(1, 8):
            checkpointer.save(step, {"n": step})
        checkpointer.wait()
        Catalog(tmp_path).pin(2)
        spi.remove(checkpointer, [1, 2, 3, 4, 99, 7])
        assert Catalog(tmp_path).steps() == [2, 5, 6, 7]
        checkpointer.save(8, {"n": 8}).then(lambda save: spi.remove(checkpointer, [5, 6, 7]))
    assert Catalog(tmp_path).steps() == [2, 8]


CODE = """
import sys, torch
from stillframe import Checkpointer, spi
checkpointer = Checkpointer(sys.argv[1])
data = b"x" * 300_000
for step in range(1, 40):
    label = spi.Label(f"checkpoint-{step}", contents=(("data", data),), segment="model.safetensors", home="..")
    save = spi.save(checkpointer, {"w": torch.full((50_000,), float(step))}, step, label=label)
    save.then(lambda save: print(save.step, flush=True))
    save.wait("sealed")
sys.stdin.readline()
"""


def test_a_reader_never_sees_a_part_of_one(tmp_path: Path) -> None:
    """Every directory that has the name is whole, at any moment of a run that is killed."""
    child = start_child(CODE, tmp_path / "root")
    assert child.stdout is not None
    seen: set[str] = set()
    for _ in range(12):
        child.stdout.readline()
        for path in [path for path in tmp_path.glob("checkpoint-*") if path.name not in seen]:
            seen.add(path.name)
            assert entries(path) == ["data", layout.LABEL, "model.safetensors"]
            step = float(path.name.rpartition("-")[2])
            assert torch.equal(load_file(path / "model.safetensors")["w"], torch.full((50_000,), step))
    kill(child.pid)
    child.communicate(timeout=60)
    assert spi.wait_finished(tmp_path / "root")
    steps = Catalog(tmp_path / "root").steps()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == sorted(f"checkpoint-{step}" for step in steps)
    assert len(seen) >= 10
