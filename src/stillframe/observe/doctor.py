"""Problems of a root and of its tiers, those that are coming, and what to do about them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from stillframe.checkpoint.notes import read_tiers
from stillframe.checkpoint.survey import Step, Survey, survey
from stillframe.checkpoint.tiers import Held, TierView, do_not_count, look_at_tiers
from stillframe.model import SaveId
from stillframe.observe.history import histories
from stillframe.observe.tiers import Standing, standings
from stillframe.store import files, is_url, open_store
from stillframe.store.posix import PosixStore
from stillframe.units import format_bytes, format_count, format_ranks

Level = Literal["fine", "note", "problem", "damage"]


_PASSED = "restore takes another step"


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    what: str
    advice: str = ""
    """Empty if nothing is to be done."""


def examine(root: str | os.PathLike[str]) -> list[Finding]:
    """All findings about a root.  Raises :class:`NotFoundError` if it is none."""
    found = survey(root)
    findings = [*_checkpoints(found), *_leftovers(found), *_writers(found), *_tiers(found)]
    return findings if is_url(found.root) else [*findings, *_space(found), *_permissions(found.root)]


def _checkpoints(found: Survey) -> list[Finding]:
    committed = found.with_state("committed")
    if committed:
        what = f"{format_count(len(committed), 'checkpoint')}, {_size(committed)}; the newest is step {found.latest}"
        findings = [Finding("fine", f"{what} (names and sizes are right; `verify` also reads the data)")]
    else:
        findings = [Finding("note", "there is no committed checkpoint")]
    for each in found.with_state("damaged"):
        advice = f"bring the files back, or set it aside: stillframe doctor {found.root} --quarantine"
        findings.append(Finding("damage", f"step {each.step} is damaged: {each.reason}", f"{advice}; {_PASSED}"))
    for each in found.with_state("quarantined"):
        advice = f"stillframe remove {found.root} {each.step}; or repair it and remove aside.json in its directory"
        findings.append(Finding("damage", f"step {each.step} is quarantined: {each.reason}", f"{advice}; {_PASSED}"))
    for each in committed:
        if each.reason:
            advice = f"stillframe remove {found.root} {each.step}; {_PASSED}"
            findings.append(Finding("damage", f"step {each.step}: {each.reason}", advice))
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
            advice = "fix the cause; the next run reports this failure as well"
            findings.append(Finding("problem", f"the last save of rank {rank} failed: {owner.failure}", advice))
    return findings


def _tiers(found: Survey) -> list[Finding]:
    findings: list[Finding] = []
    troubles = _troubles(found)
    for view in look_at_tiers(found):
        findings += [_tier(view, found.latest), *_writing(view, found, troubles.get(view.root))]
        if view.left:
            advice = f"restore() goes on from there; is {found.root} the root of an older run?"
            findings.append(Finding("problem", do_not_count(view.left, found.root, view.root), advice))
        for save, held in sorted(view.held.items()):
            what = f"step {save.step} in {view.root} has {held.parts} of {held.of or '?'} parts"
            if held.state == "damaged":
                findings.append(
                    Finding("damage", f"{what}: it is damaged", f"stillframe doctor {view.root}; {_PASSED}")
                )
            elif held.state == "carrying":
                findings.append(Finding("note", f"{what}: it is being carried there now"))
            elif held.state == "partial" and found.owners:
                findings.append(Finding("note", f"{what}; the run that is active here finishes it, or removes it"))
            elif held.state == "partial":
                findings.append(Finding("problem", f"{what}, and nobody carries it", _advice(found, save, held)))
    return findings


def _tier(view: TierView, latest: int | None) -> Finding:
    if view.trouble:
        return Finding("note", f"the tier {view.root} cannot be read: {view.why}")
    if view.newest is None:
        return Finding("note", f"the tier {view.root} has no checkpoint")
    count = format_count(sum(held.state == "whole" for held in view.held.values()), "checkpoint")
    behind = max((latest or 0) - view.newest, 0)
    lag = f", {format_count(behind, 'step')} behind" if behind else ""
    return Finding("fine", f"the tier {view.root} has {count}; the newest is step {view.newest}{lag}")


def _troubles(found: Survey) -> dict[str, Standing]:
    """The tiers that the last run fails to write to, or did to its end, as its journal tells."""
    every = histories(found.root)
    last = [each for each in every if each.run == every[-1].run]
    notes = read_tiers(open_store(found.root))
    return {each.root: each for each in standings(notes, every, last, found.latest) if each.trouble}


def _writing(view: TierView, found: Survey, failing: Standing | None) -> list[Finding]:
    """What keeps checkpoints from getting to the tier, by the journal, and by a look if it is a directory."""
    findings = []
    if failing is not None:
        now = "nothing gets to" if found.owners else "the last run could not write to"
        advice = f"fix the cause; the next run carries on, or now: stillframe copy {found.root} {view.root}"
        if failing.is_over:
            advice = "give the run a tier of its own"
        elif found.owners:
            advice = "fix the cause: the run tries it again by itself"
        findings.append(Finding("problem", f"{now} the tier {view.root}: {failing.trouble}", advice))
    if view.trouble or is_url(view.root):
        return findings
    free, need = _free(view.root), _need(found)
    if free < need:
        advice = f"make room: stillframe prune {view.root} --keep-last 1; or give Tier(…, keep=…)"
        what = f"the tier {view.root} has {format_bytes(free)} free, but a checkpoint takes {format_bytes(need)}"
        findings.append(Finding("problem", what, advice))
    return [*findings, *(each for each in _permissions(view.root, f"the tier {view.root}") if each.level != "fine")]


def _advice(found: Survey, save: SaveId, held: Held) -> str:
    has_it = any(each.save == save for each in found.with_state("committed", "abandoned", "superseded"))
    if not has_it and held.parts != held.of:
        return "the root does not have it: retention of the next run with this tier removes it"
    nodes = "" if found.is_shared else ", on every node: each has parts of its own"
    return f"the next run finishes it, or removes it; or now: stillframe doctor {found.root} --finish{nodes}"


def _space(found: Survey) -> list[Finding]:
    free, need = _free(found.root), _need(found)
    if not need:
        return [Finding("fine", f"{format_bytes(free)} free")]
    if free >= 2 * need:
        return [Finding("fine", f"{format_bytes(free)} free: room for {free // need} more of {format_bytes(need)}")]
    what = (
        f"{format_bytes(free)} free, but a checkpoint takes {format_bytes(need)}, and an old one is removed only after "
        "the new one is committed"
    )
    return [Finding("problem", what, f"make room: stillframe prune {found.root} --keep-last 1, or use another disk")]


def _free(root: str) -> int:
    disk = PosixStore(root).space()
    return disk.f_bavail * disk.f_frsize


def _need(found: Survey) -> int:
    """What the next checkpoint takes, if it is as large as the newest."""
    return max((each.bytes for each in found.with_state("committed")[-1:]), default=0)


def _permissions(root: str, what: str = "the root") -> list[Finding]:
    if PosixStore(root).space().f_flag & os.ST_RDONLY:
        return [Finding("note", f"the file system of {what} is mounted read-only: restore works, save does not")]
    if not files.is_writable(root):
        return [Finding("note", f"{what} is not writable for this user: restore works, save does not")]
    return [Finding("fine", f"{what} is readable and writable")]
