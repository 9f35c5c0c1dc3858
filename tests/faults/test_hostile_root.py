"""Something hostile in the place of every file of a root: nothing outside changes, nothing hangs, errors are ours.

A run comes by (restore, save, retention, labels), then the commands that read and the one that removes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stillframe import Catalog, Checkpointer, KeepLast, StillframeError, load, spi
from stillframe.checkpoint import epochs
from stillframe.checkpoint.survey import survey
from stillframe.keeper.retention import Pruner
from stillframe.observe.doctor import examine
from stillframe.observe.history import histories
from stillframe.spi import Label
from tests import layout

NEXT = 3
"""The step that the run saves."""


def state() -> dict[str, Any]:
    return {"x": torch.zeros(300_000), "n": 1}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with two checkpoints, the first with a label, as a killed run leaves it: with a spare blob."""
    root = tmp_path_factory.mktemp("whole") / "root"
    with Checkpointer(root, keep=KeepLast(2)) as checkpointer:
        spi.save(checkpointer, state(), 1, label=Label("best", ("weights.pt",), b"x", is_latest=True)).wait()
        checkpointer.save(2, state()).wait()
    layout.spare(root).write_bytes(bytes(2 << 20))
    return root


def places(root: Path) -> dict[str, Path]:
    """Every file and directory that a run or a command touches in such a root, or would make."""
    return layout.places(root, 2, labelled=1, label="best", next_step=NEXT, next_label="next")


def device(path: Path, outside: Path) -> None:
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("making a device needs root")


THINGS: dict[str, Callable[[Path, Path], None]] = {
    "a link to a file": lambda path, outside: path.symlink_to(outside / "file"),
    "a link to a directory": lambda path, outside: path.symlink_to(outside / "directory"),
    "a link to nothing": lambda path, outside: path.symlink_to(outside / "nothing"),
    "a hard link": lambda path, outside: path.hardlink_to(outside / "file"),
    "a pipe": lambda path, outside: os.mkfifo(path),
    "a device": device,
    "a directory": lambda path, outside: (path / "inside").mkdir(parents=True),
}


def contents(place: Path) -> dict[str, tuple[Any, ...]]:
    found = {}
    for path in sorted(place.rglob("*")):
        about = path.lstat()
        data = path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(place))] = about.st_mode, about.st_mtime_ns, about.st_size, data
    return found


def live(root: Path) -> None:
    """A run that resumes, saves twice and prunes."""
    with Checkpointer(root, keep=KeepLast(1), on_error="warn") as checkpointer:
        with contextlib.suppress(StillframeError):
            checkpointer.restore(state())
        for step in (NEXT, NEXT + 1):
            with contextlib.suppress(StillframeError):
                label = Label("next", ("weights.pt",), b"x", is_latest=True) if step == NEXT else None
                spi.save(checkpointer, state(), step, label=label).wait()


def look(root: Path) -> None:
    for command in (survey, examine, histories, load, lambda place: load(place, 2)):
        with contextlib.suppress(StillframeError):
            command(root)
    for policy in (KeepLast(1), None):
        with contextlib.suppress(StillframeError):
            catalog = Catalog(root)
            epoch = epochs.claim(catalog, "ffffffff", 0)
            Pruner(catalog, policy, 0, True, lambda epoch=epoch: epoch).prune()  # type: ignore[misc]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("thing", THINGS)
def test_in_the_place_of_every_file(whole: Path, tmp_path: Path, thing: str) -> None:
    for number, group in enumerate(layout.PLACE_GROUPS):
        outside = tmp_path / f"outside-{number}"
        (outside / "directory").mkdir(parents=True)
        for name in ("file", f"directory/{layout.segment_name()}", f"directory/{layout.LABEL}"):
            (outside / name).write_bytes(b"precious")
        root = Path(shutil.copytree(whole, tmp_path / f"root-{number}"))
        found = places(root)
        for path in (found[place] for place in group):
            if path.is_dir():
                shutil.rmtree(path)
            path.unlink(missing_ok=True)
            path.parent.mkdir(exist_ok=True)
            THINGS[thing](path, outside)
        before = contents(outside)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            look(root)
            live(root)
            look(root)
        assert contents(outside) == before, f"{thing} in the place of one of {group}"


def test_every_place_is_in_one_group(whole: Path) -> None:
    assert sorted(place for group in layout.PLACE_GROUPS for place in group) == sorted(places(whole))
