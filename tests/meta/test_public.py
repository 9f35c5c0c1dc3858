"""What users may rely on: the public names, and what a type checker says of right and wrong uses."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import stillframe
from stillframe import Checkpointer, spi

REPOSITORY = Path(__file__).resolve().parent.parent.parent

USES = """\
from pathlib import Path
import stillframe
from stillframe import Keep, KeepBest, KeepEvery, KeepFor, KeepLast, Phase, Save, spi
from stillframe.integrations.dcp import Reader, Stager, Writer

def last(keep: KeepLast) -> int:
    return keep.count

def opened(root: Path, keep: Keep | None = None) -> stillframe.Checkpointer:
    return stillframe.Checkpointer(root, keep=keep, on_error="warn", arena="2GiB")

def loop(state: dict[str, object], phase: Phase) -> None:
    keep = KeepLast(3) | KeepEvery(10) | KeepFor(hours=2) | KeepBest("loss", mode="max")
    with opened(Path("a"), keep) as checkpointer:
        checkpointer.restore(state)
        saved: Save = checkpointer.save(1, state, metadata={"loss": 0.5})
        saved.wait(phase)
        checkpointer.fence()
        steps: list[int] = stillframe.Catalog("a").steps()
        print(steps, last(KeepLast(3)), checkpointer.stats().committed, stillframe.load("a", only="model"))
    stillframe.Checkpointer("b", on_error=lambda error: print(error.args)).close()
    stillframe.integrations.deepspeed.install()
    stillframe.integrations.dcp.Writer("a", keep=KeepLast(3))
    spi.save(checkpointer, state, spi.issue(checkpointer), label=spi.Label("best"))
    Stager(Writer("a", step=1)), Reader("a")

stillframe.Chekpointer("a")  # no attribute "Chekpointer"
stillframe.integrations.deepsped.install()  # no attribute "deepsped"
from stillframe import Keeplast  # no attribute "Keeplast"
stillframe.Label("best")  # no attribute "Label"
opened(Path("a"), keep=3)  # incompatible type "int"
last(KeepLast(3) | KeepEvery(10))  # incompatible type "Keep"
KeepLast("3")  # incompatible type "str"
stillframe.Checkpointer("a", on_error="ignore")  # incompatible type "Literal['ignore']"
stillframe.Checkpointer("a").save({}, 1)  # incompatible type "dict
stillframe.Checkpointer("a").wait("done")  # incompatible type "Literal['done']"
stillframe.Checkpointer("a").keeper_pid  # no attribute "keeper_pid"
with stillframe.Checkpointer("a").fence():  # "None" has no attribute "__exit__"
    pass
stillframe.load("a", merge=False)  # Unexpected keyword argument "merge"
"""
"""A user's file: what it does right, and then, each with what a type checker says of it, what it does wrong."""


def test_a_type_checker_takes_right_uses_and_no_others(tmp_path: Path) -> None:
    sample = tmp_path / "sample.py"
    sample.write_text(USES)
    # In the repository, with its settings: there the answers for torch are cached, which takes long.
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", str(sample)],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert checked.returncode in (0, 1), checked.stdout + checked.stderr
    said = {int(line): text for line, text in re.findall(r"sample\.py:(\d+): error: (.*)", checked.stdout)}
    lines = enumerate(USES.splitlines(), 1)
    expected = {number: line.split("  # ")[1] for number, line in lines if "  # " in line}
    assert said.keys() == expected.keys(), checked.stdout
    for number, text in expected.items():
        assert text in said[number], checked.stdout


def test_the_public_names_are_what_we_think() -> None:
    assert stillframe.__all__ == [
        "RNG",
        "Batches",
        "BusyError",
        "Catalog",
        "Checkpoint",
        "Checkpointer",
        "ConfigError",
        "DeadlineError",
        "Every",
        "ExistsError",
        "FormatError",
        "IntegrityError",
        "Keep",
        "KeepBest",
        "KeepEvery",
        "KeepFor",
        "KeepLast",
        "KeeperError",
        "MismatchError",
        "NotFoundError",
        "Phase",
        "Preemption",
        "Progress",
        "RestoreReport",
        "Save",
        "SkippedStep",
        "StateError",
        "Stats",
        "StillframeError",
        "StorageError",
        "Tier",
        "TierStats",
        "Times",
        "TornError",
        "TrainState",
        "UnsupportedStateError",
        "VersionError",
        "load",
        "on_preemption",
        "register_leaf",
        "restore",
    ]
    assert spi.__all__ == [
        "ELSEWHERE",
        "BoxReader",
        "Label",
        "LiveState",
        "Meeting",
        "Path",
        "Run",
        "TensorBox",
        "Ticket",
        "UpdateGate",
        "Versions",
        "go_on",
        "has_saves",
        "hide",
        "is_tensor",
        "is_tier",
        "is_wrapper",
        "issue",
        "keeper_pid",
        "load_rank",
        "load_save",
        "mapped",
        "meeting",
        "path_text",
        "read_alias",
        "register_attributes",
        "remove",
        "save",
        "save_of",
        "settle",
        "settle_tier",
        "show_labels",
        "storable",
        "tensors_in",
        "versions_of",
        "wait_finished",
        "when_over",
        "withdraw",
    ]
    for module in (stillframe, spi):
        for name in module.__all__:
            assert getattr(module, name) is not None
    assert dir(stillframe) == sorted(stillframe.__all__)


def test_a_checkpointer_has_these_methods_and_no_others() -> None:
    public = [name for name in dir(Checkpointer) if not name.startswith("_")]
    assert public == ["close", "due", "fence", "quiesce", "restore", "rewind", "save", "stats", "wait"]
    options = {name: list(inspect.signature(getattr(stillframe, name)).parameters) for name in ("load", "Catalog")}
    assert options == {
        "load": ["root", "step", "only", "rank", "storage_options"],
        "Catalog": ["root", "rank", "storage_options"],
    }
    assert list(inspect.signature(Checkpointer.save).parameters) == ["self", "step", "state", "metadata"]


def test_a_misspelt_name_is_an_error() -> None:
    # For mypy too: it reports an ignore that it does not need.
    with pytest.raises(AttributeError, match="Chekpointer"):
        _ = stillframe.Chekpointer  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="deepsped"):
        _ = stillframe.integrations.deepsped  # type: ignore[attr-defined]


def test_policies_are_values() -> None:
    both = stillframe.KeepLast(3) | stillframe.KeepEvery(10)
    assert both == stillframe.KeepEvery(10) | stillframe.KeepLast(3) != stillframe.KeepLast(3)
    assert hash(both) == hash(stillframe.KeepLast(3) | stillframe.KeepEvery(10))
    assert repr(both) == "KeepLast(count=3) | KeepEvery(steps=10)"
    assert repr(stillframe.KeepBest("loss", 2)) == "KeepBest(metric='loss', count=2, mode='min')"
    assert repr(stillframe.KeepFor(hours=2)) == "KeepFor(hours=2.0)"
    for policy in (both, stillframe.KeepLast(3)):
        assert isinstance(policy, stillframe.Keep)
        with pytest.raises(AttributeError):
            policy.count = 4  # type: ignore[attr-defined]


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_another_system_is_told_what_is_needed(platform: str) -> None:
    """For every way in: a part, and the command, import the package first."""
    code = f"import sys; sys.platform = {platform!r}\nfrom stillframe.checkpointer import Checkpointer"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"ImportError: stillframe needs Linux (memfd, pidfd, O_DIRECT); this is '{platform}'" in ended.stderr
