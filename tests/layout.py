"""Where everything lies in a root: the one place in the tests that knows it.

Tests say what they mean (the seal of step 2, a torn step, a step in whose place is something else), and get the path.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from stillframe.checkpoint import events
from stillframe.checkpoint.catalog import Catalog
from stillframe.format import names
from stillframe.format.records import Manifest

STRANGER = "0123abcd"
"""A run that left something behind, and that nobody else knows of."""
MANIFEST = names.MANIFEST
LABEL = names.LABEL
NEWER = 99
"""The number of a format that is still to come."""
ALMOST_FILES = ["manifest.json.orig", "rank-00000-0123abcd.safetensors.bak", "rank-0-0123abcd.seal.json"]
"""Names in a step's directory that are not ours, and nearly are."""
ALMOST_STEPS = [
    "step-1", "step-00000000000x", "step--00000000001", "step-000000000003.partial", "step-０００００００００００３",
    "manifest.json", "step-000000000003\n", " step-000000000003",
]  # fmt: skip
"""Names in a root that are no steps, and nearly are."""
TAKEN_NAMES = ["step-000000000001", "latest", "events", "rank-00000.lock"]
"""Names in a root that no label can have."""
FREE_NAMES = ["step-100", "manifest-of-fate", "rank-0", "latest2"]
"""Names that look taken, and can be labels."""
PLACE_GROUPS = [
    ["lock"],
    ["lock of another rank", "spare", "events", "latest", "label", "step", "label of a step"],
    [
        "unfinished spare", "events of the run", "unfinished latest", "file of the label", "unfinished label",
        "manifest", "label of the next save",
    ],
    ["damaged manifest", "pruned manifest", "seal", "leftover of a dead run", "step to be saved"],
    ["segment"],
]  # fmt: skip
"""The keys of :func:`places`: those of a group do not hide one another."""


# --- steps -------------------------------------------------------------------------------------


def steps_there(root: Path) -> list[int]:
    """Every step that has a directory, committed or not, oldest first."""
    return Catalog(root).step_dirs()


def has_step(root: Path, step: int) -> bool:
    """Whether anything is in the place of a step: its directory, or something else."""
    return os.path.lexists(root / names.step_dir(step))


def step_dir(root: Path, step: int) -> Path:
    """The directory of a step, or what is in its place; fails if there is nothing."""
    assert has_step(root, step), f"there is no directory of step {step} in {root}: {os.listdir(root)}"
    return root / names.step_dir(step)


def next_dir(root: Path, step: int, is_running: bool = False) -> Path:
    """Where a first save of a step will go: by the next run, or by the one that has the root now."""
    return root / names.step_dir(step)


def torn_dir(root: Path, step: int) -> Path:
    """Where a run of the past would have saved a step that is not there."""
    return root / names.step_dir(step)


def make_torn_step(root: Path, step: int, rank: int = 0) -> Path:
    """What a run that was killed in a save leaves: a directory with a segment that was never finished."""
    path = torn_dir(root, step)
    path.mkdir(parents=True, exist_ok=True)
    unfinished(stray_segment(path, rank)).write_bytes(b"left over")
    return path


def copy_step(root: Path, step: int, to_root: Path, to_step: int) -> Path:
    """A copy under another number; its records still tell the old one."""
    return Path(shutil.copytree(step_dir(root, step), to_root / names.step_dir(to_step)))


def move_step(root: Path, step: int, to_root: Path) -> Path:
    """Into another root, where it is as good a checkpoint."""
    return step_dir(root, step).rename(to_root / names.step_dir(step))


# --- the files of a step -----------------------------------------------------------------------


def files_of(root: Path, step: int) -> list[str]:
    """Everything that there is of a step, whoever wrote it, by its path in the root; none if there is nothing."""
    top = root / names.step_dir(step)
    found = [Path(place, name) for place, _, files in os.walk(top) for name in files]
    return sorted(str(path.relative_to(root)) for path in found)


def bulk_of(root: Path, step: int) -> list[str]:
    """Everything of a step but the words on why it failed."""
    return [name for name in files_of(root, step) if not name.endswith(".failure.json")]


def has_begun(root: Path, step: int, rank: int) -> bool:
    """Whether there is any file of a rank in a step."""
    return any(Path(name).name.startswith(f"rank-{rank:05d}") for name in files_of(root, step))


def segment_name(rank: int = 0, attempt: str = STRANGER) -> str:
    """A name that a segment can have."""
    return names.segment(rank, attempt)


def seal_name(rank: int = 0, attempt: str = STRANGER) -> str:
    """A name that a seal can have."""
    return names.seal(rank, attempt)


def of_rank(name: str, rank: int) -> str:
    """The name of the same file of another rank."""
    found, count = re.subn(r"rank-\d{5}", f"rank-{rank:05d}", name)
    assert count == 1, name
    return found


def segment(root: Path, step: int, rank: int = 0) -> Path:
    """Of one rank; fails unless there is exactly one."""
    (found,) = step_dir(root, step).glob(f"rank-{rank:05d}-*.safetensors")
    return found


def segments(root: Path, step: int) -> list[Path]:
    """Of all ranks."""
    return sorted(step_dir(root, step).glob("rank-*.safetensors"))


def stray_segment(directory: Path, rank: int = 0) -> Path:
    """In a step's directory, where a segment of some other run would be, which no manifest names."""
    return directory / segment_name(rank)


def seal(root: Path, step: int, rank: int = 0) -> Path:
    """Of one rank; fails unless there is exactly one."""
    (found,) = step_dir(root, step).glob(f"rank-{rank:05d}-*.seal.json")
    return found


def manifest(root: Path, step: int) -> Path:
    """Where it is published, whether it is or not."""
    return step_dir(root, step) / names.MANIFEST


def file(root: Path, step: int, kind: str, rank: int = 0) -> Path:
    """The ``segment``, ``seal`` or ``manifest`` of a step."""
    return manifest(root, step) if kind == "manifest" else {"segment": segment, "seal": seal}[kind](root, step, rank)


def aside(root: Path, step: int) -> Path:
    """What tells that a step is no checkpoint any more, because it was found damaged."""
    return step_dir(root, step) / names.damaged_manifest()


def unfinished(path: Path) -> Path:
    """The name that a file has while somebody writes it."""
    return path.with_name(f"{path.name}.{STRANGER}{names.PARTIAL}")


def unfinished_files(root: Path) -> list[Path]:
    """All files and directories that somebody writes, or died while writing."""
    found = [Path(place, name) for place, below, files in os.walk(root) for name in (*below, *files)]
    return sorted(path for path in found if path.name.endswith(names.PARTIAL))


def assert_of_one_save(manifest: Manifest) -> None:
    """Every file that the manifest names was written for the save that it commits."""
    for entry in manifest.ranks:
        assert entry.segment == names.segment(entry.rank, manifest.attempt)
        assert entry.seal == names.seal(entry.rank, manifest.attempt)


def leftovers(root: Path) -> list[str]:
    """What is in the root and belongs to no committed checkpoint."""
    catalog = Catalog(root)
    found: list[str] = []
    for step in catalog.step_dirs():
        if not catalog.is_committed(step):
            found += files_of(root, step) or [names.step_dir(step)]
        else:
            found += [name for name in files_of(root, step) if name.endswith(names.PARTIAL)]
    return found


# --- what befalls a step -----------------------------------------------------------------------


def uncommit(root: Path, step: int) -> None:
    """As if it had never been committed."""
    manifest(root, step).unlink()


def set_aside(root: Path, step: int) -> None:
    """As a restore leaves a step that it found damaged."""
    manifest(root, step).rename(aside(root, step))


def commit_alone(root: Path, step: int, rank: int) -> None:
    """As if it had been committed by one rank of several that did not share the root."""
    manifest(root, step).rename(step_dir(root, step) / names.manifest(rank))


def make_newer(record: Path) -> None:
    """A seal or manifest now says that it is of a format to come."""
    data, count = re.subn(rb'"stillframe":\d+', b'"stillframe":%d' % NEWER, record.read_bytes())
    assert count == 1, record
    record.write_bytes(data)


# --- beside the steps --------------------------------------------------------------------------


def lock(root: Path, rank: int = 0) -> Path:
    """What a rank's keeper holds as long as it lives."""
    return root / names.lock(rank)


def spare(root: Path, rank: int = 0) -> Path:
    """A blob that retention let go, for the next save to write over."""
    return root / names.spare(rank)


def events_dir(root: Path) -> Path:
    """Where the runs write down what happens."""
    return root / events.DIRECTORY


def block_events(root: Path) -> None:
    """The next run can write no events there."""
    events_dir(root).write_text("in the way")


def remove_events(root: Path) -> None:
    """Of all runs."""
    shutil.rmtree(events_dir(root))


def unfinished_label(root: Path, step: int, attempt: str = STRANGER) -> Path:
    """The directory of a label whose step is not committed yet."""
    return root / names.label_partial(step, attempt)


def unpublish_label(root: Path, step: int, name: str) -> None:
    """As a run leaves it that died after its commit, right before the label got its name."""
    (root / name).rename(unfinished_label(root, step, Catalog(root).manifest(step).attempt))
    (root / names.LATEST).unlink(missing_ok=True)


# --- all of it ---------------------------------------------------------------------------------


def places(root: Path, step: int, labelled: int, label: str, next_step: int, next_label: str) -> dict[str, Path]:
    """Every file and directory that a run or a command touches in a root, or would make.

    ``step`` is committed, and so is ``labelled``, which has the label; ``next_step`` will be saved with ``next_label``.
    """
    attempt = Catalog(root).manifest(step).attempt
    directory = step_dir(root, step)
    return {
        "lock": lock(root),
        "lock of another rank": lock(root, 1),
        "spare": spare(root),
        "unfinished spare": unfinished(spare(root)),
        "events": events_dir(root),
        "events of the run": next(events_dir(root).iterdir()),
        "latest": root / names.LATEST,
        "unfinished latest": unfinished(root / names.LATEST),
        "label": root / label,
        "file of the label": root / label / names.LABEL,
        "unfinished label": unfinished_label(root, step, attempt),
        "label of the next save": root / next_label,
        "step": directory,
        "step to be saved": next_dir(root, next_step),
        "manifest": manifest(root, step),
        "damaged manifest": aside(root, step),
        "pruned manifest": directory / names.pruned_manifest(),
        "seal": seal(root, step),
        "segment": segment(root, step),
        "label of a step": step_dir(root, labelled) / names.LABEL,
        "leftover of a dead run": unfinished(stray_segment(directory)),
    }
