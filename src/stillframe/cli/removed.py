"""What ``prune`` and ``remove`` print: what went, or would go, as ranges with reasons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from stillframe.checkpoint.cleaning import Plan
from stillframe.checkpoint.survey import Step, Survey
from stillframe.cli import output
from stillframe.format.epochs import Gone
from stillframe.model import SaveId
from stillframe.units import format_bytes, format_count

_BRANCH = 0
"""No epoch's number."""


class InTier(NamedTuple):
    """What the policy of a tier would let go there."""

    root: str
    policy: str
    before: Survey | None
    """``None``: the tier cannot be read."""
    plan: Plan


def report(
    before: Survey,
    done: Plan,
    leftovers: Sequence[Step],
    spare_bytes: int,
    *,
    is_dry: bool,
    json: bool,
    tiers: Sequence[InTier] = (),
) -> None:
    """``leftovers``: of saves that were never committed; ``spare_bytes``: of spare segments that went, or would go.

    ``tiers``: of a dry run.
    """
    gone = {each.save for each in done.gone}
    kept = [each.step for each in before.with_state("committed") if each.save not in gone]
    total = sum(each.bytes for each in done.gone) + sum(each.bytes for each in leftovers) + spare_bytes
    if json:
        unfinished = [{"step": each.step, "save": each.save, "bytes": each.bytes} for each in leftovers]
        stays = [{"step": each.save.step, "save": each.save, "why": each.why} for each in done.stays]
        output.print_json(
            {
                "root": before.root, "dry_run": is_dry, "removed": _listed(done.gone), "leftovers": unfinished,
                "stays": stays, "bytes": total, "kept": kept,
                **({"tiers": [_tier_json(tier) for tier in tiers]} if is_dry else {}),
            }
        )  # fmt: skip
        return
    verb = "would remove" if is_dry else "removed"
    for line in ranges(before, done.gone):
        output.say(f"{verb} {line}")
    for left in leftovers:
        output.say(f"{verb} what was left of step {left.step} ({format_bytes(left.bytes)}): never committed")
    if spare_bytes > 0:
        output.say(f"{verb} spare segments ({format_bytes(spare_bytes)})")
    for each in done.stays:
        output.say(f"step {each.save.step} stays: {each.why}")
    freeing, keeping = ("would free", "would keep") if is_dry else ("freed", "kept")
    which = f": {_some(kept)}" if kept else ""
    output.say(f"{freeing} {format_bytes(total)}; {keeping} {format_count(len(kept), 'checkpoint')}{which}")
    for tier in tiers:
        for line in _tier_lines(tier):
            output.say(f"{tier.root}: {line}")


def _listed(gone: Sequence[Gone]) -> list[dict[str, object]]:
    return [{"step": each.save.step, "save": each.save, "why": each.why, "bytes": each.bytes} for each in gone]


def _tier_json(tier: InTier) -> dict[str, object]:
    error = tier.plan.error
    return {
        "root": tier.root, "policy": tier.policy, "removed": _listed(tier.plan.gone), "trouble": error and str(error),
    }  # fmt: skip


def _tier_lines(tier: InTier) -> list[str]:
    if tier.before is None:
        return [f"cannot be read: {tier.plan.error}"]
    lines = ranges(tier.before, tier.plan.gone) or ["nothing"]
    return [f"{tier.policy} would let go {line}" for line in lines]


def ranges(before: Survey, gone: Sequence[Gone]) -> list[str]:
    """One line for neighbours that go for the same reason: no checkpoint between the first and the last stays."""
    places: dict[SaveId, tuple[int, int]] = {}
    counts: dict[int, int] = {}
    for each in before.saves:
        epoch = _BRANCH if each.state == "committed" else each.save.epoch
        places[each.save] = epoch, counts.setdefault(epoch, 0)
        counts[epoch] += 1
    groups: list[list[Gone]] = []
    for one in sorted(gone, key=lambda one: places.get(one.save, (_BRANCH, 0))):
        last = groups[-1][-1] if groups else None
        epoch, at = places.get(one.save, (_BRANCH, 0))
        if last is not None and last.why == one.why and places.get(last.save) == (epoch, at - 1):
            groups[-1].append(one)
        else:
            groups.append([one])
    return [_line(group, places.get(group[0].save, (_BRANCH, 0))[0] == _BRANCH) for group in groups]


def _line(group: Sequence[Gone], is_on_branch: bool) -> str:
    first, last = group[0].save, group[-1].save
    size = format_bytes(sum(each.bytes for each in group))
    steps = f"step {first.step}" if len(group) == 1 else f"steps {first.step}–{last.step}"
    start = "" if is_on_branch else f" of start {first.epoch}"
    count = f" ({len(group)})" if len(group) > 1 else ""
    why = f": {group[0].why}" if group[0].why else ""
    return f"{steps}{start}{count}, {size}{why}"


def _some(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps)) if len(steps) <= 8 else f"{', '.join(map(str, steps[:4]))}, …, {steps[-1]}"
