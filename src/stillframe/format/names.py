"""The names of files in a root, made and recognised in one place.

    run/e0007/claim.json                       an epoch, claimed
    run/e0007/parent.json                      what it goes on from
    run/e0007/outcomes.json                    how its last saves ended
    run/seen-0007                              empty: put by a writer before it lists the epochs
    run/target.json                            in a tier: which save is being carried there
    run/tiers.json                             which tiers the run has
    run/carrying-00003.json                    what a rank's keeper carries to them
    run/request-0123abcd.json                  what somebody asks of the run
    run/answer-0123abcd.json                   what has come of it
    run/rank-00003.lock                        a rank's lock
    rank-00003.spare                           a removed blob, kept to be written over
    step-000000001000-e0007-1/                 one save
      rank-00003.safetensors                   a rank's segment
      seal-00003.json                          its seal
      failure-00003.json                       its word that it will not seal
      progress-00003.json                      in a tier: how far its part is carried
      manifest.json                            the commit
      aside.json, aside-00003.json             a tombstone: of all, or of one rank in a root that ranks do not share
      pin.json                                 retention leaves it alone

A name is only recognised if it is the one that would be made, so no two names stand for the same thing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from stillframe.model import MAX_STEP, SaveId

MANIFEST = "manifest.json"
PIN = "pin.json"
LABEL = "label.json"
LATEST = "latest"
RUN = "run"
TARGET = "run/target.json"
TIERS = "run/tiers.json"
MAX_EPOCH = 9_999_999
MAX_ATTEMPT = 9_999

Kind = Literal["segment", "seal", "failure", "progress", "aside"]

_UNFINISHED = r"\.[0-9a-f]{8}\.partial"
"""What a store adds to a name while its file is written."""
_STEP = re.compile(r"step-(\d{12})-e(\d{4,7})-([1-9]\d{0,3})", re.ASCII)
_EPOCH = re.compile(r"e(\d{4,7})", re.ASCII)
_RANK_FILE = re.compile(
    rf"(?:rank-(\d{{5}})\.safetensors|(seal|failure|progress|aside)-(\d{{5}})\.json)({_UNFINISHED})?", re.ASCII
)
_RUN_FILE = re.compile(rf"rank-(\d{{5}})\.(lock|spare)({_UNFINISHED})?", re.ASCII)
_SAVE_FILE = re.compile(rf"(manifest|aside|pin|label)\.json({_UNFINISHED})?", re.ASCII)
_CARRYING = re.compile(r"carrying-\d{5}\.json", re.ASCII)
_ASKED = re.compile(r"(request|answer)-([0-9a-f]{8})\.json", re.ASCII)
_LABEL = re.compile(r"label-(\d{12}-e\d{4,7}-[1-9]\d{0,3})\.partial", re.ASCII)
_PARTIAL = re.compile(rf"{_UNFINISHED}\Z", re.ASCII)
_LATEST = re.compile(rf"latest{_UNFINISHED}", re.ASCII)


@dataclass(frozen=True, slots=True)
class RankFile:
    """A file of one rank, in the directory of a save."""

    rank: int
    kind: Kind
    is_partial: bool


def step_dir(save: SaveId) -> str:
    return f"step-{save.step:012d}-e{save.epoch:04d}-{save.attempt}"


def parse_step_dir(name: str) -> SaveId | None:
    found = _STEP.fullmatch(name)
    save = SaveId(int(found[1]), int(found[2]), int(found[3])) if found else None
    return save if save is not None and save.epoch > 0 and step_dir(save) == name else None


def is_id(save: SaveId) -> bool:
    """Whether a directory can be named for it."""
    return 0 <= save.step <= MAX_STEP and 1 <= save.epoch <= MAX_EPOCH and 1 <= save.attempt <= MAX_ATTEMPT


def key(save: SaveId, name: str) -> str:
    """Of a file in the directory of a save."""
    return f"{step_dir(save)}/{name}"


def segment(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def seal(rank: int) -> str:
    return f"seal-{rank:05d}.json"


def failure(rank: int) -> str:
    return f"failure-{rank:05d}.json"


def progress(rank: int) -> str:
    return f"progress-{rank:05d}.json"


def aside(rank: int | None = None) -> str:
    return "aside.json" if rank is None else f"aside-{rank:05d}.json"


def parse_rank_file(name: str) -> RankFile | None:
    found = _RANK_FILE.fullmatch(name)
    if found is None:
        return None
    kinds: dict[str, Kind] = {"seal": "seal", "failure": "failure", "progress": "progress", "aside": "aside"}
    return RankFile(int(found[1] or found[3]), kinds[found[2]] if found[2] else "segment", found[4] is not None)


def is_ours(name: str) -> bool:
    """Whether a file in the directory of a save is stillframe's, finished or not: nothing else is ever removed."""
    return parse_rank_file(name) is not None or _SAVE_FILE.fullmatch(name) is not None


# --- run/ ----------------------------------------------------------------------------------


def epoch_dir(epoch: int) -> str:
    return f"{RUN}/e{epoch:04d}"


def parse_epoch(name: str) -> int | None:
    """Of a name in ``run/``."""
    found = _EPOCH.fullmatch(name.rstrip("/"))
    number = int(found[1]) if found else 0
    return number if number and f"e{number:04d}" == name.rstrip("/") else None


def claim(epoch: int) -> str:
    return f"{epoch_dir(epoch)}/claim.json"


def parent(epoch: int) -> str:
    return f"{epoch_dir(epoch)}/parent.json"


def outcomes(epoch: int) -> str:
    return f"{epoch_dir(epoch)}/outcomes.json"


def seen(epoch: int) -> str:
    """Put by a writer of an epoch before it lists the epochs."""
    return f"{RUN}/seen-{epoch:04d}"


def request(ticket: str) -> str:
    """``ticket``: eight hexadecimal digits, made up by whoever asks."""
    return f"{RUN}/request-{ticket}.json"


def answer(ticket: str) -> str:
    return f"{RUN}/answer-{ticket}.json"


def parse_asked(name: str) -> tuple[Literal["request", "answer"], str] | None:
    """A request or an answer, by its name in ``run/``, and its ticket."""
    found = _ASKED.fullmatch(name)
    return ("request" if found[1] == "request" else "answer", found[2]) if found else None


def lock(rank: int) -> str:
    return f"{RUN}/rank-{rank:05d}.lock"


def carrying(rank: int) -> str:
    return f"{RUN}/carrying-{rank:05d}.json"


def is_carrying(name: str) -> bool:
    """Of a name in ``run/``."""
    return _CARRYING.fullmatch(name) is not None


def spare(rank: int) -> str:
    """A blob that retention let go, kept by the store to be written over by the next one."""
    return f"rank-{rank:05d}.spare"


def parse_lock(name: str) -> int | None:
    """The rank of a lock, by its name in ``run/``."""
    found = _RUN_FILE.fullmatch(name)
    return int(found[1]) if found and found[2] == "lock" and not found[3] else None


def parse_spare(name: str) -> tuple[int, bool] | None:
    """The rank of a spare, by its name in the root, and whether a keeper was just setting it aside."""
    found = _RUN_FILE.fullmatch(name)
    return (int(found[1]), found[3] is not None) if found and found[2] == "spare" else None


# --- labels --------------------------------------------------------------------------------


def label_partial(save: SaveId) -> str:
    """The directory of a label whose save is not committed yet."""
    return f"label-{step_dir(save).removeprefix('step-')}.partial"


def parse_label_partial(name: str) -> SaveId | None:
    found = _LABEL.fullmatch(name)
    return parse_step_dir(f"step-{found[1]}") if found else None


def is_unfinished(name: str) -> bool:
    """Whether a store was writing a file under this name."""
    return _PARTIAL.search(name) is not None


def is_unfinished_latest(name: str) -> bool:
    return _LATEST.fullmatch(name) is not None
