"""Problems of a root, those that are coming, and what to do about them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stillframe.checkpoint.survey import Step, Survey, survey
from stillframe.store import files
from stillframe.store.posix import PosixStore
from stillframe.units import format_bytes, format_count, format_ranks

Level = Literal["fine", "note", "problem", "damage"]


_PASSED = "restore takes another step"


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    what: str
    todo: str = ""
    """Empty if nothing is to be done."""


def examine(root: str | os.PathLike[str]) -> list[Finding]:
    """All findings about a root.  Raises :class:`NotFoundError` if it is none."""
    found = survey(root)
    return [*_checkpoints(found), *_leftovers(found), *_writers(found), *_space(found), *_permissions(found.root)]


def _checkpoints(found: Survey) -> list[Finding]:
    committed = found.with_state("committed")
    if committed:
        what = f"{format_count(len(committed), 'checkpoint')}, {_size(committed)}; the newest is step {found.latest}"
        findings = [Finding("fine", f"{what} (names and sizes are right; `verify` also reads the data)")]
    else:
        findings = [Finding("note", "there is no committed checkpoint")]
    for each in found.with_state("damaged"):
        todo = f"bring the files back, or set it aside: stillframe doctor {found.root} --quarantine"
        findings.append(Finding("damage", f"step {each.step} is damaged: {each.reason}", f"{todo}; {_PASSED}"))
    for each in found.with_state("quarantined"):
        todo = f"stillframe remove {found.root} {each.step}; or repair it and remove aside.json in its directory"
        findings.append(Finding("damage", f"step {each.step} is quarantined: {each.reason}", f"{todo}; {_PASSED}"))
    for each in committed:
        if each.reason:
            todo = f"stillframe remove {found.root} {each.step}; {_PASSED}"
            findings.append(Finding("damage", f"step {each.step}: {each.reason}", todo))
    beside = found.with_state("abandoned", "superseded")
    if beside:
        what = f"{format_count(len(beside), 'checkpoint')} off the branch ({_size(beside)}): see `list --all`"
        findings.append(Finding("note", f"{what}; retention removes them once the branch has reached their steps"))
    for each in found.with_state("unreadable"):
        findings.append(Finding("problem", each.reason, "check the permissions and the storage"))
    for each in found.with_state("newer format"):
        findings.append(Finding("problem", each.reason, "upgrade stillframe to read it"))
    return findings


def _leftovers(found: Survey) -> list[Finding]:
    findings = []
    prune = f"stillframe prune {found.root} --leftovers"
    incomplete = found.with_state("incomplete")
    if incomplete:
        steps = ", ".join(str(each.step) for each in incomplete[:10])
        count = format_count(len(incomplete), "save")
        what = f"{count} never committed (steps {steps}): {_size(incomplete)} of files"
        findings.append(Finding("problem", what, f"the next run in this root removes them; or now: {prune}"))
    for each in found.with_state("in progress"):
        lagging = [rank for rank in found.owners if rank not in each.here]
        late = f"; not sealed yet by {format_ranks(lagging)}" if lagging and each.here else ""
        findings.append(Finding("note", f"step {each.step} is being saved now{late}"))
    if found.owners:
        return findings
    removed = [each for each in found.with_state("removed") if not each.is_tombstone]
    if removed:
        what = f"the removal of {format_count(len(removed), 'save')} was interrupted: {_size(removed)} of files"
        findings.append(Finding("problem", what, f"the next run in this root removes them; or now: {prune}"))
    if found.spare_bytes:
        what = f"spare segments of a run that was killed take {format_bytes(found.spare_bytes)}"
        findings.append(Finding("problem", what, f"the next run in this root reuses them; or now: {prune}"))
    return findings


def _size(steps: list[Step]) -> str:
    return format_bytes(sum(each.bytes for each in steps))


def _writers(found: Survey) -> list[Finding]:
    findings = []
    if found.owners:
        rank, owner = next(iter(found.owners.items()))
        who = f"{format_ranks(found.owners)}; the keeper of rank {rank} is process {owner.pid} on {owner.host}"
        findings.append(Finding("note", f"{owner.doing}: {who}"))
    for rank, owner in {**found.last_words, **found.owners}.items():
        if owner.failure:
            todo = "remove the cause; the next run reports this failure as well"
            findings.append(Finding("problem", f"the last save of rank {rank} failed: {owner.failure}", todo))
    return findings


def _space(found: Survey) -> list[Finding]:
    disk = PosixStore(found.root).space()
    free = disk.f_bavail * disk.f_frsize
    need = max((each.bytes for each in found.with_state("committed")[-1:]), default=0)
    if not need:
        return [Finding("fine", f"{format_bytes(free)} free")]
    if free >= 2 * need:
        return [Finding("fine", f"{format_bytes(free)} free: room for {free // need} more of {format_bytes(need)}")]
    what = (
        f"{format_bytes(free)} free, but a checkpoint takes {format_bytes(need)}, and an old one is removed only after "
        "the new one is committed"
    )
    return [Finding("problem", what, f"make room: stillframe prune {found.root} --keep-last 1, or use another disk")]


def _permissions(root: Path) -> list[Finding]:
    if PosixStore(root).space().f_flag & os.ST_RDONLY:
        return [Finding("note", "the file system is mounted read-only: restore works, save does not")]
    if not files.is_writable(root):
        return [Finding("note", "the root is not writable for this user: restore works, save does not")]
    return [Finding("fine", "the root is readable and writable")]
