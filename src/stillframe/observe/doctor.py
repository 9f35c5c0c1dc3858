"""What is wrong with a root, or will be soon, and what to do about it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stillframe.checkpoint.survey import Survey, survey
from stillframe.units import format_bytes, format_ranks

Level = Literal["fine", "note", "problem", "damage"]


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    what: str
    todo: str = ""
    """Empty if nothing is to be done."""


def examine(root: str | os.PathLike[str]) -> list[Finding]:
    """Raises only if it is no root at all."""
    found = survey(root)
    return [
        *_checkpoints(found),
        *_leftovers(found),
        *_runs(found),
        *_space(found),
        *_permissions(found.root),
    ]


def _checkpoints(found: Survey) -> list[Finding]:
    findings = []
    committed = found.with_state("committed")
    if committed:
        size = format_bytes(sum(each.bytes for each in committed))
        what = f"{len(committed)} checkpoints, {size}; the newest is step {found.latest}"
        what += " (by names and sizes; `verify` reads)"
        findings.append(Finding("fine", what))
    else:
        findings.append(Finding("note", "no checkpoint is committed here"))
    for each in found.with_state("damaged"):
        is_withdrawn = each.manifest is None
        todo = (
            "restore passes it over; retention removes it once there is a newer one. To look at it: its files are there"
            if is_withdrawn
            else "bring the files back, or remove the step's directory; restore will pass it over"
        )
        findings.append(Finding("damage", f"step {each.step} is damaged: {each.reason}", todo))
    for each in found.with_state("unreadable"):
        findings.append(Finding("problem", each.reason, "check the permissions, and the storage itself"))
    for each in found.with_state("newer format"):
        findings.append(Finding("problem", each.reason, "upgrade stillframe to read it"))
    return findings


def _leftovers(found: Survey) -> list[Finding]:
    findings = []
    incomplete = found.with_state("incomplete")
    if incomplete:
        steps = ", ".join(str(each.step) for each in incomplete[:10])
        size = format_bytes(sum(each.bytes for each in incomplete))
        what = f"{len(incomplete)} saves were never committed (steps {steps}), and take {size}"
        todo = f"the next run in this root removes them; or now: stillframe prune {found.root} --leftovers"
        findings.append(Finding("problem", what, todo))
    for each in found.with_state("in progress"):
        lagging = [rank for rank in found.holders if rank not in each.here]
        late = f"; not sealed yet by {format_ranks(lagging)}" if lagging and each.here else ""
        findings.append(Finding("note", f"step {each.step} is being saved right now{late}"))
    strangers = [
        file
        for each in found.with_state("committed")
        for file in each.files
        if each.manifest is not None and file.attempt not in (None, each.manifest.attempt)
    ]
    if strangers and not found.holders:
        size = format_bytes(sum(file.bytes for file in strangers))
        what = f"{len(strangers)} files of other tries at the same step lie beside checkpoints ({size})"
        findings.append(Finding("problem", what, f"stillframe prune {found.root} --leftovers"))
    if found.spare_bytes and not found.holders:
        what = f"spare segments of a run that was killed take {format_bytes(found.spare_bytes)}"
        findings.append(
            Finding("problem", what, f"the next run writes over them; or: stillframe prune {found.root} --leftovers")
        )
    return findings


def _runs(found: Survey) -> list[Finding]:
    findings = []
    if found.holders:
        rank, holder = next(iter(found.holders.items()))
        who = f"{format_ranks(found.holders)}; the keeper of rank {rank} is process {holder.pid} on {holder.host}"
        doing = "writes here" if holder.state == "training" else "has ended; its keeper still finishes a checkpoint"
        findings.append(Finding("note", f"a run {doing}: {who}"))
    for rank, holder in {**found.last_words, **found.holders}.items():
        if holder.failure:
            todo = "the next run says so, too; what it was is in the message"
            findings.append(Finding("problem", f"rank {rank}'s last save failed: {holder.failure}", todo))
    return findings


def _space(found: Survey) -> list[Finding]:
    disk = os.statvfs(found.root)
    free = disk.f_bavail * disk.f_frsize
    newest = next((each for each in reversed(found.steps) if each.state == "committed"), None)
    if newest is None or newest.manifest is None:
        return [Finding("fine", f"{format_bytes(free)} free")]
    need = newest.bytes
    if free >= 2 * need:
        return [
            Finding("fine", f"{format_bytes(free)} free: room for {free // max(need, 1)} more of {format_bytes(need)}")
        ]
    what = (
        f"{format_bytes(free)} free; a checkpoint takes {format_bytes(need)}, and old ones go only when the new one "
        "is there"
    )
    return [Finding("problem", what, f"make room: stillframe prune {found.root} --keep-last 1, or another disk")]


def _permissions(root: Path) -> list[Finding]:
    if os.statvfs(root).f_flag & os.ST_RDONLY:
        return [Finding("note", "the file system is mounted read-only: checkpoints can be restored, none can be saved")]
    if not os.access(root, os.W_OK):
        return [Finding("note", "this user can restore from here, but not save: the root is not writable")]
    return [Finding("fine", "readable and writable")]
