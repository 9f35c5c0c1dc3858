"""Where everything lies in a root: the one place in the tests that knows it.

Tests say what they mean (the seal of step 2, a torn step, a step in whose place is something else), and get the path.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

import msgspec

from stillframe.checkpoint import epochs, events
from stillframe.checkpoint.catalog import Catalog, Checkpoint
from stillframe.checkpoint.lock import owner_of
from stillframe.format import names
from stillframe.format.envelope import wrap
from stillframe.format.epochs import (
    Aside,
    Target,
    TierNotes,
    decode_parent,
    encode_aside,
    encode_parent,
    encode_target,
    encode_tiers,
)
from stillframe.format.records import decode_seal
from stillframe.model import SaveId
from stillframe.tiers import Tier, check_tiers

MANIFEST = names.MANIFEST
LABEL = names.LABEL
RUN = names.RUN
NEWER = 99
"""The number of a format that is still to come."""
PARTIAL = ".0123abcd.partial"
"""What a store adds to the name of a file that is not finished."""
ALMOST_FILES = [
    "manifest.json.orig", "rank-00000.safetensors.bak", "rank-0.safetensors", "seal-0.json", "seal-00000.json~",
    "rank-00000.safetensors.partial", "aside.json.0123ABCD.partial",
]  # fmt: skip
"""Names in a step's directory that are not ours, and nearly are."""
ALMOST_STEPS = [
    "step-1", "step-00000000000x-e0001-1", "step--00000000001-e0001-1", "step-000000000003-e0001-1.partial",
    "step-０００００００００００３-e0001-1", "manifest.json", "step-000000000003-e0001-1\n",
    " step-000000000003-e0001-1", "step-000000000003", "step-000000000003-e1-1", "step-000000000003-e0000-1",
    "step-000000000003-e0001-0", "step-000000000003-e00001-1", "step-000000000003-e0001-01",
]  # fmt: skip
"""Names in a root that are no steps, and nearly are."""
TAKEN_NAMES = ["step-000000000001-e0001-1", "latest", "run", "rank-00000.spare", "label-000000000001-e0001-1.partial"]
"""Names in a root that no label can have."""
FREE_NAMES = ["step-100", "manifest-of-fate", "rank-0", "latest2", "running"]
"""Names that look taken, and can be labels."""
PLACE_GROUPS = [
    ["run"],
    ["lock", "epoch of the step", "next epoch"],
    ["lock of another rank", "claim", "next claim", "spare", "events", "latest", "label", "step", "label of a step"],
    [
        "unfinished spare", "events of the run", "unfinished latest", "file of the label", "unfinished label",
        "parent", "next parent", "manifest", "label of the next save",
    ],
    ["tombstone", "pin", "unfinished claim", "seal", "leftover of a dead run", "step to be saved"],
    ["segment"],
]  # fmt: skip
"""The keys of :func:`places`: those of a group do not hide one another."""


# --- steps -------------------------------------------------------------------------------------


def saves_of(root: Path, step: int) -> list[SaveId]:
    """Every save of a step that has a directory, or something in the place of one; the oldest first.

    A tombstone alone, which stays a day, is nothing.
    """
    return [save for save in _saves(root) if save.step == step]


def _saves(root: Path) -> list[SaveId]:
    names_there = os.listdir(root) if root.is_dir() else []
    found = sorted(save for name in names_there if (save := names.parse_step_dir(name)))
    return [save for save in found if not _is_tombstone(root / names.step_dir(save))]


def _is_tombstone(directory: Path) -> bool:
    return directory.is_dir() and not directory.is_symlink() and os.listdir(directory) == [names.aside()]


def save_of(root: Path, step: int) -> SaveId:
    """The save of a step: the one that is committed, or else the newest; fails if there is none."""
    found = saves_of(root, step)
    assert found, f"there is no directory of step {step} in {root}: {sorted(os.listdir(root))}"
    return max(found, key=lambda save: (_is_committed(root, save), save))


def _is_committed(root: Path, save: SaveId) -> bool:
    there = root / names.step_dir(save)
    return os.path.lexists(there / names.MANIFEST) and not os.path.lexists(there / names.aside())


def steps_there(root: Path) -> list[int]:
    """Every step that has a directory, committed or not, oldest first."""
    return sorted({save.step for save in _saves(root) if (root / names.step_dir(save)).is_dir()})


def has_step(root: Path, step: int) -> bool:
    """Whether anything is in the place of a step: its directory, or something else."""
    return bool(saves_of(root, step))


def step_dir(root: Path, step: int) -> Path:
    """The directory of a step, or what is in its place; fails if there is nothing."""
    return root / names.step_dir(save_of(root, step))


def next_dir(root: Path, step: int, is_running: bool = False) -> Path:
    """Where a first save of a step will go: by the next run, or by the one that has the root now."""
    return root / names.step_dir(SaveId(step, _newest_epoch(root) if is_running else _next_epoch(root)))


def _next_epoch(root: Path) -> int:
    return epochs.next_epoch(Catalog(root))


def _newest_epoch(root: Path) -> int:
    return max(Catalog(root).epochs(), default=1)


def torn_dir(root: Path, step: int) -> Path:
    """Where a run of the past would have saved a step that is not there."""
    return root / names.step_dir(SaveId(step, _newest_epoch(root)))


def make_torn_step(root: Path, step: int, rank: int = 0) -> Path:
    """What a run that was killed in a save leaves: a directory with a segment that was never finished."""
    path = torn_dir(root, step)
    path.mkdir(parents=True, exist_ok=True)
    unfinished(stray_segment(path, rank)).write_bytes(b"left over")
    return path


def copy_step(root: Path, step: int, to_root: Path, to_step: int) -> Path:
    """A copy under another number; its records still tell the old one.  What is told of its epoch comes along."""
    save = save_of(root, step)
    epoch = names.epoch_dir(save.epoch)
    if (root / epoch).is_dir() and not (to_root / epoch).is_dir():
        shutil.copytree(root / epoch, to_root / epoch)
    to = SaveId(to_step, save.epoch, save.attempt)
    return Path(shutil.copytree(root / names.step_dir(save), to_root / names.step_dir(to)))


def move_step(root: Path, step: int, to_root: Path) -> Path:
    """Into another root, where it is as good a checkpoint."""
    found = step_dir(root, step)
    return found.rename(to_root / found.name)


# --- the files of a step -----------------------------------------------------------------------


def files_of(root: Path, step: int) -> list[str]:
    """Everything that there is of a step, whoever wrote it, by its path in the root; none if there is nothing."""
    tops = [root / names.step_dir(save) for save in saves_of(root, step)]
    found = [Path(place, name) for top in tops for place, _, files in os.walk(top) for name in files]
    return sorted(str(path.relative_to(root)) for path in found)


def bulk_of(root: Path, step: int) -> list[str]:
    """Everything of a step but the words on why it failed or is no checkpoint."""
    return [name for name in files_of(root, step) if not Path(name).name.startswith(("failure-", "aside"))]


def has_begun(root: Path, step: int, rank: int) -> bool:
    """Whether there is any file of a rank in a step."""
    files = [names.parse_rank_file(Path(name).name) for name in files_of(root, step)]
    return any(file is not None and file.rank == rank for file in files)


def segment_name(rank: int = 0) -> str:
    """The name of a segment."""
    return names.segment(rank)


def seal_name(rank: int = 0) -> str:
    """The name of a seal."""
    return names.seal(rank)


def of_rank(name: str, rank: int) -> str:
    """The name of the same file of another rank."""
    found, count = re.subn(r"(rank|seal|failure)-\d{5}", rf"\g<1>-{rank:05d}", name)
    assert count == 1, name
    return found


def segment(root: Path, step: int, rank: int = 0) -> Path:
    """Of one rank; fails unless it is there."""
    return _there(step_dir(root, step) / names.segment(rank))


def _there(path: Path) -> Path:
    assert os.path.lexists(path), f"there is no {path.name} in {path.parent}: {sorted(os.listdir(path.parent))}"
    return path


def segments(root: Path, step: int) -> list[Path]:
    """Of all ranks."""
    return sorted(step_dir(root, step).glob("rank-*.safetensors"))


def stray_segment(directory: Path, rank: int = 0) -> Path:
    """In a step's directory, where the segment of a rank would be that no manifest names."""
    return directory / segment_name(rank)


def seal(root: Path, step: int, rank: int = 0) -> Path:
    """Of one rank; fails unless it is there."""
    return _there(step_dir(root, step) / names.seal(rank))


def manifest(root: Path, step: int) -> Path:
    """Where it is published, whether it is or not."""
    return step_dir(root, step) / names.MANIFEST


def file(root: Path, step: int, kind: str, rank: int = 0) -> Path:
    """The ``segment``, ``seal`` or ``manifest`` of a step."""
    return manifest(root, step) if kind == "manifest" else {"segment": segment, "seal": seal}[kind](root, step, rank)


def aside(root: Path, step: int) -> Path:
    """The tombstone, which tells that a step is no checkpoint, whether it is there or not."""
    return step_dir(root, step) / names.aside()


def unfinished(path: Path) -> Path:
    """The name that a file has while somebody writes it."""
    return path.with_name(f"{path.name}{PARTIAL}")


def unfinished_files(root: Path) -> list[Path]:
    """All files and directories that somebody writes, or died while writing."""
    found = [Path(place, name) for place, below, files in os.walk(root) for name in (*below, *files)]
    return sorted(path for path in found if path.name.endswith(".partial"))


def assert_of_one_save(checkpoint: Checkpoint) -> None:
    """Every seal that the manifest names was written for the save that it commits."""
    for rank in checkpoint.ranks:
        seal = checkpoint.of(rank).seal
        assert (seal.save, seal.parent) == (checkpoint.save, checkpoint.manifest.parent)


def leftovers(root: Path) -> list[str]:
    """What is in the root and belongs to no committed checkpoint; tombstones, which stay a day, are no leftovers."""
    found: list[str] = []
    for save in _saves(root):
        files = [f"{names.step_dir(save)}/{name}" for name in os.listdir(root / names.step_dir(save))]
        if _is_committed(root, save):
            found += [name for name in files if name.endswith(".partial")]
        else:
            found += files or [names.step_dir(save)]
    return sorted(found)


# --- what befalls a step -----------------------------------------------------------------------


def uncommit(root: Path, step: int) -> None:
    """As if it had never been committed."""
    manifest(root, step).unlink()


def set_aside(root: Path, step: int) -> None:
    """As a person leaves a step that was found damaged: quarantined."""
    told = Aside("quarantined", was_committed=True, epoch=_newest_epoch(root), unix_s=time.time())
    aside(root, step).write_bytes(encode_aside(told))


def unshare(root: Path, step: int, world_size: int = 2) -> None:
    """As if rank 0 had saved it as one of several that did not share the root: sealed, and without a manifest."""
    parent = root / names.parent(save_of(root, step).epoch)
    told = decode_parent(parent.read_bytes(), file=str(parent))
    parent.write_bytes(encode_parent(msgspec.structs.replace(told, is_shared=False)))
    manifest(root, step).unlink()
    path = seal(root, step)
    whole, _ = decode_seal(path.read_bytes(), file=str(path))
    whole = msgspec.structs.replace(whole, world_size=world_size)
    path.write_bytes(wrap("seal", whole, whole.brief)[0])


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
    events_dir(root).parent.mkdir(parents=True, exist_ok=True)
    events_dir(root).write_text("in the way")


def tiers_record(root: Path) -> Path:
    """Where the run says which tiers it has."""
    return root / names.TIERS


def say_tiers(root: Path, *tiers: Tier) -> None:
    """As a run with these tiers does."""
    notes = [each.note() for each in check_tiers(tiers, str(root))]
    tiers_record(root).write_bytes(encode_tiers(TierNotes("0123abcd", notes)))


def say_target(tier: Path, root: Path, step: int) -> None:
    """As rank 0 of the run that has the root, or had it last: this step is being carried."""
    owner = owner_of(Catalog(root).store, 0)
    word = Target(owner.run if owner is not None else "", save_of(root, step))
    (tier / names.TARGET).write_bytes(encode_target(word))


def remove_events(root: Path) -> None:
    """Of all runs."""
    shutil.rmtree(events_dir(root))


def unfinished_label(root: Path, step: int) -> Path:
    """The directory of a label whose step is not committed yet."""
    save = save_of(root, step) if saves_of(root, step) else SaveId(step, _newest_epoch(root))
    return root / names.label_partial(save)


def unpublish_label(root: Path, step: int, name: str) -> None:
    """As a run leaves it that died after its commit, right before the label got its name."""
    (root / name).rename(unfinished_label(root, step))
    (root / names.LATEST).unlink(missing_ok=True)


# --- all of it ---------------------------------------------------------------------------------


def places(root: Path, step: int, labelled: int, label: str, next_step: int, next_label: str) -> dict[str, Path]:
    """Every file and directory that a run or a command touches in a root, or would make.

    ``step`` is committed, and so is ``labelled``, which has the label; ``next_step`` will be saved with ``next_label``.
    """
    save = save_of(root, step)
    directory = step_dir(root, step)
    following = _next_epoch(root)
    return {
        "run": root / names.RUN,
        "lock": lock(root),
        "lock of another rank": lock(root, 1),
        "epoch of the step": root / names.epoch_dir(save.epoch),
        "claim": root / names.claim(save.epoch),
        "unfinished claim": unfinished(root / names.claim(save.epoch)),
        "parent": root / names.parent(save.epoch),
        "next epoch": root / names.epoch_dir(following),
        "next claim": root / names.claim(following),
        "next parent": root / names.parent(following),
        "spare": spare(root),
        "unfinished spare": unfinished(spare(root)),
        "events": events_dir(root),
        "events of the run": next(events_dir(root).iterdir()),
        "latest": root / names.LATEST,
        "unfinished latest": unfinished(root / names.LATEST),
        "label": root / label,
        "file of the label": root / label / names.LABEL,
        "unfinished label": unfinished_label(root, step),
        "label of the next save": root / next_label,
        "step": directory,
        "step to be saved": next_dir(root, next_step),
        "manifest": manifest(root, step),
        "tombstone": aside(root, step),
        "pin": directory / names.PIN,
        "seal": seal(root, step),
        "segment": segment(root, step),
        "label of a step": step_dir(root, labelled) / names.LABEL,
        "leftover of a dead run": unfinished(stray_segment(directory)),
    }
