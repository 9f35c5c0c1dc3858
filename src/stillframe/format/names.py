"""The names of files in a root, made and recognised in one place.

A name read from a file is only ever used after it has matched here, so no manifest can
point outside its own directory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MANIFEST = "manifest.json"
PARTIAL = ".partial"
LABEL = "label.json"
LATEST = "latest"

_UNFINISHED = r"\.[0-9a-f]{8}\.partial"
"""What a store adds to a name while its file is written."""
_STEP = re.compile(r"step-(\d{12})", re.ASCII)
_RANK_FILE = re.compile(
    rf"rank-(\d{{5}})-([0-9a-f]{{8}})\.(safetensors|seal\.json|failure\.json)({_UNFINISHED})?", re.ASCII
)
_LOCK = re.compile(r"rank-(\d{5})\.lock", re.ASCII)
_LABEL = re.compile(r"label-(\d{12})-([0-9a-f]{8})\.partial", re.ASCII)
_SPARE = re.compile(rf"rank-(\d{{5}})\.spare({_UNFINISHED})?", re.ASCII)
_MANIFEST = re.compile(rf"manifest(?:-(\d{{5}}))?(\.damaged|\.pruned)?\.json({_UNFINISHED})?", re.ASCII)
_LABEL_MARK = re.compile(rf"label\.json({_UNFINISHED})?", re.ASCII)
_LATEST = re.compile(rf"latest{_UNFINISHED}", re.ASCII)


@dataclass(frozen=True, slots=True)
class RankFile:
    rank: int
    attempt: str
    kind: str
    is_partial: bool


def step_dir(step: int) -> str:
    return f"step-{step:012d}"


def parse_step_dir(name: str) -> int | None:
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None


def segment(rank: int, attempt: str) -> str:
    return f"rank-{rank:05d}-{attempt}.safetensors"


def seal(rank: int, attempt: str) -> str:
    return f"rank-{rank:05d}-{attempt}.seal.json"


def failure(rank: int, attempt: str) -> str:
    return f"rank-{rank:05d}-{attempt}.failure.json"


def manifest(rank: int | None = None) -> str:
    """The commit of all ranks; or of one alone, in a root that the others do not see."""
    return MANIFEST if rank is None else f"manifest-{rank:05d}.json"


def pruned_manifest() -> str:
    """What the manifest is called once retention has let it go, until every rank has seen that it was there."""
    return MANIFEST.replace(".json", ".pruned.json")


def damaged_manifest(rank: int | None = None) -> str:
    return manifest(rank).replace(".json", ".damaged.json")


def spare(rank: int) -> str:
    """A blob that retention let go, kept by the store to be written over by the next one."""
    return f"rank-{rank:05d}.spare"


def parse_spare(name: str) -> tuple[int, bool] | None:
    """Its rank, and whether it is one that a keeper was just setting aside."""
    found = _SPARE.fullmatch(name)
    return (int(found[1]), found[2] is not None) if found else None


def label_partial(step: int, attempt: str) -> str:
    """The directory of a label whose step is not committed yet."""
    return f"label-{step:012d}-{attempt}{PARTIAL}"


def is_label(name: str) -> bool:
    """What tells, in a step's directory, which label it has."""
    return _LABEL_MARK.fullmatch(name) is not None


def is_unfinished_latest(name: str) -> bool:
    return _LATEST.fullmatch(name) is not None


def parse_label_partial(name: str) -> tuple[int, str] | None:
    found = _LABEL.fullmatch(name)
    return (int(found[1]), found[2]) if found else None


def lock(rank: int) -> str:
    return f"rank-{rank:05d}.lock"


def parse_lock(name: str) -> int | None:
    found = _LOCK.fullmatch(name)
    return int(found[1]) if found else None


def parse_rank_file(name: str) -> RankFile | None:
    found = _RANK_FILE.fullmatch(name)
    return RankFile(int(found[1]), found[2], found[3], found[4] is not None) if found else None


@dataclass(frozen=True, slots=True)
class ManifestFile:
    rank: int | None
    is_pruned: bool
    is_damaged: bool
    is_partial: bool

    @property
    def is_published(self) -> bool:
        return not (self.is_pruned or self.is_damaged or self.is_partial)


def parse_manifest(name: str) -> ManifestFile | None:
    found = _MANIFEST.fullmatch(name)
    if found is None:
        return None
    rank = int(found[1]) if found[1] else None
    return ManifestFile(rank, found[2] == ".pruned", found[2] == ".damaged", bool(found[3]))
