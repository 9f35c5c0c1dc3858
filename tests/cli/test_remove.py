"""prune by any policy, remove, pin and unpin: without a run, and beside one that lives."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stillframe import BusyError, Catalog, Checkpointer, ConfigError, NotFoundError
from stillframe.format import names
from tests import layout
from tests.cli.roots import COMMAND, answer, environment, stillframe
from tests.support import pause

LIVING = """
import sys, torch, stillframe
from stillframe import spi
c = stillframe.Checkpointer(sys.argv[1], arena="64MiB")
w = torch.zeros(1000)
print(c.restore({"w": w}).step, flush=True)
for line in sys.stdin:
    if line.startswith("save"):
        w += 1
        c.save(int(line.split()[1]), {"w": w}); c.wait()
        print("saved", flush=True)
    elif line.startswith("keeper"):
        print(spi.keeper_pid(c), flush=True)
c.close()
"""


class Run:
    """A real training process that does what it is told."""

    def __init__(self, root: Path) -> None:
        self._child = subprocess.Popen(
            [COMMAND[0], "-c", LIVING, str(root)], env=environment(PYTHONWARNINGS="ignore"),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.restored = self._answer()

    def _answer(self) -> str:
        assert self._child.stdout is not None
        return self._child.stdout.readline().strip()

    def tell(self, what: str) -> str:
        assert self._child.stdin is not None
        self._child.stdin.write(what + "\n")
        self._child.stdin.flush()
        return self._answer()

    def close(self) -> int:
        self._child.communicate(timeout=60)
        return self._child.returncode


@pytest.fixture(scope="module")
def ten(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("remove") / "ten"
    with Checkpointer(root, arena="64MiB") as checkpointer:
        for step in range(100, 1100, 100):
            loss = abs(step - 450)
            checkpointer.save(step, {"w": torch.full((1000,), float(step))}, metadata={"loss": loss})
            checkpointer.wait()
    return root


@pytest.fixture
def root(ten: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(ten, tmp_path / "ten"))


@pytest.fixture
def run(root: Path) -> Iterator[Run]:
    made = Run(root)
    yield made
    made.close()


def ranges(text: str, verb: str) -> list[str]:
    return [line.removeprefix(verb) for line in text.splitlines() if line.startswith(f"{verb} step")]


# --- prune -----------------------------------------------------------------------------------

POLICIES: list[tuple[list[object], list[int]]] = [
    (["--keep-last", 3], [800, 900, 1000]),
    (["--keep-every", 500], [500, 1000]),
    (["--keep-last", 1, "--keep-every", 400], [400, 800, 1000]),
    (["--keep-for", 1], list(range(100, 1100, 100))),
    (["--keep-for", 1e-9], [1000]),
    (["--keep-best", "loss"], [500, 1000]),
    (["--keep-best", "loss:3"], [400, 500, 600, 1000]),
    (["--keep-best", "loss:2:max"], [900, 1000]),
    (["--keep-best", "loss:1", "--keep-best", "loss:2:max"], [500, 900, 1000]),
]


@pytest.mark.parametrize(("policy", "stay"), POLICIES)
def test_a_dry_run_prints_exactly_what_prune_does(root: Path, policy: list[object], stay: list[int]) -> None:
    said = stillframe("prune", root, *policy, "--dry-run")
    wanted = answer("prune", root, *policy, "--dry-run")
    assert Catalog(root).steps() == list(range(100, 1100, 100))
    done = stillframe("prune", root, *policy)
    assert done == said.replace("would remove", "removed").replace("would free", "freed").replace("would keep", "kept")
    assert Catalog(root).steps() == stay == wanted["kept"]
    assert [each["step"] for each in wanted["removed"]] == sorted(set(range(100, 1100, 100)) - set(stay))
    assert not layout.leftovers(root)
    stillframe("verify", root, "--all")


def test_what_goes_is_told_in_ranges_with_reasons(root: Path) -> None:
    text = stillframe("prune", root, "--keep-last", 1, "--keep-every", 500, "--dry-run")
    lines = ranges(text, "would remove")
    assert [re.sub(r", [\d.]+ KiB", "", line) for line in lines] == [
        " steps 100–400 (4): older than the newest and not a multiple of 500",
        " steps 600–900 (4): older than the newest and not a multiple of 500",
    ]
    assert "would keep 2 checkpoints: 500, 1000" in text


@pytest.mark.parametrize("options", [[], ["--dry-run"], ["--json"]])
def test_a_metric_that_no_checkpoint_has_is_refused(root: Path, options: list[str]) -> None:
    """A misspelt name would remove all but the newest."""
    text = stillframe("prune", root, "--keep-best", "los", "--keep-best", "loss", *options, code=2)
    assert "--keep-best los: no checkpoint has this metric (the metadata has loss)" in text
    assert len(Catalog(root).steps()) == 10


@pytest.mark.parametrize("loss", ["0.5", float("nan")])
def test_a_metric_that_is_a_number_in_no_checkpoint_is_refused(tmp_path: Path, loss: object) -> None:
    """Also if those that training has gone back from have one."""
    with Checkpointer(tmp_path, arena="64MiB") as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {"w": torch.ones(10)}, metadata={"loss": 0.5 if step == 3 else loss})
            checkpointer.wait()
        checkpointer.rewind(2)
    text = stillframe("prune", tmp_path, "--keep-best", "loss", code=2)
    assert "--keep-best loss: no checkpoint has a number in this metric (the metadata has loss)" in text
    assert Catalog(tmp_path).steps() == [1, 2]


@pytest.mark.parametrize(
    "wrong", [["--keep-best", "loss:x"], ["--keep-best", "loss:2:most"], ["--keep-best", ""], ["--keep-for", "-1"], []]
)
def test_a_policy_that_is_none_changes_nothing(root: Path, wrong: list[str]) -> None:
    stillframe("prune", root, *wrong, code=2)
    assert len(Catalog(root).steps()) == 10


def test_prune_takes_what_was_left_behind(root: Path) -> None:
    with Checkpointer(root, arena="64MiB") as checkpointer:
        checkpointer.rewind(300)
        for step in (400, 450):
            checkpointer.save(step, {"w": torch.ones(1000)})
            checkpointer.wait()
    text = stillframe("prune", root, "--keep-last", 2)
    assert "removed steps 100–300 (3)" in text
    assert re.search(r"removed step 400 of start 1, .*: left behind: the branch has another", text)
    assert [each["step"] for each in answer("list", root, "--all")["steps"]] == [
        400,
        450,
        500,
        600,
        700,
        800,
        900,
        1000,
    ]


def test_a_run_goes_on_after_prune(root: Path) -> None:
    stillframe("prune", root, "--keep-last", 2)
    run = Run(root)
    assert run.restored == "1000"
    assert run.tell("save 1100") == "saved"
    assert run.close() == 0
    assert Catalog(root).steps() == [900, 1000, 1100]


# --- remove, pin -----------------------------------------------------------------------------


def test_remove_takes_single_steps(root: Path) -> None:
    assert "removed step 300, " in stillframe("remove", root, 300, 700)
    assert Catalog(root).steps() == [100, 200, 400, 500, 600, 800, 900, 1000]
    assert not layout.has_step(root, 300)
    assert "nearest is step 200" in stillframe("remove", root, 300, code=3)


def test_remove_of_the_newest_wants_force(root: Path) -> None:
    text = stillframe("remove", root, 300, 1000, code=2)
    assert "training would go on from step 900" in text
    assert "--force" in text
    assert len(Catalog(root).steps()) == 10, "nothing went"
    stillframe("remove", root, 1000, "--force")
    assert Catalog(root).latest() == 900


def test_remove_takes_every_save_of_a_step(root: Path) -> None:
    with Checkpointer(root, arena="64MiB") as checkpointer:
        checkpointer.rewind(300)
        for step in (400, 450):
            checkpointer.save(step, {"w": torch.ones(1000)})
            checkpointer.wait()
    stillframe("remove", root, 400)
    assert 400 not in [each["step"] for each in answer("list", root, "--all")["steps"]]


def test_what_is_pinned_stays(root: Path) -> None:
    stillframe("pin", root, 300)
    assert "committed, pinned" in stillframe("list", root)
    assert "pinned" in stillframe("remove", root, 300, 400, code=2)
    assert len(Catalog(root).steps()) == 10
    wanted = stillframe("prune", root, "--keep-last", 1, "--dry-run")
    assert "step 300 stays: it is pinned" in wanted
    assert "would remove steps 100–200 (2)" in wanted
    assert "step 300 stays: it is pinned" in stillframe("prune", root, "--keep-last", 1)
    assert Catalog(root).steps() == [300, 1000]
    stillframe("unpin", root, 300)
    assert "was not pinned" in stillframe("unpin", root, 300)
    stillframe("prune", root, "--keep-last", 1)
    assert Catalog(root).steps() == [1000]
    stillframe("pin", root, 300, code=3)
    stillframe("unpin", root, 300, code=3)


def test_the_catalog_does_the_same(root: Path) -> None:
    catalog = Catalog(root)
    catalog.pin(100)
    with pytest.raises(ConfigError, match="pinned"):
        catalog.delete(100)
    catalog.unpin(100)
    catalog.delete(100)
    with pytest.raises(NotFoundError):
        catalog.delete(100)
    with pytest.raises(ConfigError, match="newest"):
        catalog.delete(1000)
    with catalog.open(200), pytest.raises(BusyError, match="reading"):
        catalog.delete(200)
    catalog.delete(1000, force=True)
    assert catalog.steps() == list(range(200, 1000, 100))


def test_a_run_does_not_prune_what_is_pinned(root: Path) -> None:
    from stillframe import KeepLast

    Catalog(root).pin(200)
    with Checkpointer(root, arena="64MiB", keep=KeepLast(1)) as checkpointer:
        checkpointer.save(1100, {"w": torch.ones(1000)})
    assert Catalog(root).steps() == [200, 1100]


def test_a_node_removes_its_own_parts(split: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(split, tmp_path / "split"))
    assert "did not share" in stillframe("prune", root, "--keep-last", 1, code=2)
    stillframe("remove", root, 1)
    assert Catalog(root).steps() == [2]
    assert not layout.has_step(root, 1)
    stillframe("verify", root)


# --- beside a living run ---------------------------------------------------------------------


def test_a_living_run_carries_it_out(root: Path, run: Run) -> None:
    said = stillframe("prune", root, "--keep-last", 2, "--dry-run")
    epochs = Catalog(root).epochs()
    began = time.monotonic()
    done = stillframe("prune", root, "--keep-last", 2)
    assert time.monotonic() - began < 8
    assert done == said.replace("would remove", "removed").replace("would free", "freed").replace("would keep", "kept")
    assert Catalog(root).steps() == [900, 1000]
    assert Catalog(root).epochs() == epochs, "nobody has taken the run's place"
    assert run.tell("save 1100") == "saved"
    stillframe("remove", root, 900)
    assert Catalog(root).steps() == [1000, 1100]
    assert "newest" in stillframe("remove", root, 1100, code=2)
    assert run.tell("save 1200") == "saved"
    assert Catalog(root).steps() == [1000, 1100, 1200]
    assert not list((root / names.RUN).glob("*request*")) + list((root / names.RUN).glob("*answer*"))


def test_what_is_read_or_pinned_stays_beside_a_run(root: Path, run: Run) -> None:
    stillframe("pin", root, 300)
    with Catalog(root).open(500):
        text = stillframe("prune", root, "--keep-last", 1)
    assert "step 300 stays: it is pinned" in text
    assert "step 500 stays: somebody is reading it" in text
    assert Catalog(root).steps() == [300, 500, 1000]
    assert run.tell("save 1100") == "saved"


def test_a_run_that_does_not_answer_is_left_alone(root: Path, run: Run) -> None:
    keeper = int(run.tell("keeper"))
    pause(keeper)
    try:
        text = stillframe("prune", root, "--keep-last", 2, code=7)
        assert f"process {keeper}" in text
        assert "has not answered" in text
        assert len(Catalog(root).steps()) == 10
        assert not list((root / names.RUN).glob("*request*"))
    finally:
        os.kill(keeper, signal.SIGCONT)
    assert run.tell("save 1100") == "saved", "it was not superseded"
    assert len(Catalog(root).steps()) == 11


def test_leftovers_are_the_runs_own_business(root: Path, run: Run) -> None:
    assert "by itself" in stillframe("prune", root, "--leftovers", code=7)
    assert run.tell("save 1100") == "saved"


def test_a_range_stands_for_the_steps_that_are_there(root: Path) -> None:
    stillframe("remove", root, "250-450", 300)
    assert Catalog(root).steps() == [100, 200, *range(500, 1001, 100)]
    assert "no step from 250 to 450" in stillframe("remove", root, "250-450", code=3)
    assert "not a step" in stillframe("pin", root, "100-200", code=2)
