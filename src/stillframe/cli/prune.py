"""``stillframe prune``: removes checkpoints by a policy, and what dead runs have left behind."""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Iterable
from typing import Annotated

import typer

from stillframe.checkpoint import requests
from stillframe.checkpoint.catalog import Catalog
from stillframe.checkpoint.cleaning import Plan, Wanted, plan
from stillframe.checkpoint.notes import read_tiers
from stillframe.checkpoint.survey import Step, Survey, survey
from stillframe.checkpoint.tiers import policy_text
from stillframe.cli import removed
from stillframe.cli.arguments import Json, Root
from stillframe.errors import ConfigError, StillframeError
from stillframe.keeper.prune import half_carried, remove_leftovers
from stillframe.model import SaveId
from stillframe.retention import Keep, KeepBest, KeepEvery, KeepFor, KeepLast, decode_policy, number_of


def command(
    root: Root,
    keep_last: Annotated[int | None, typer.Option(help="Keep the N newest.", metavar="N", min=1)] = None,
    keep_every: Annotated[
        int | None, typer.Option(help="Keep steps that are multiples of K.", metavar="K", min=1)
    ] = None,
    keep_for: Annotated[
        float | None, typer.Option(help="Keep those saved within the last HOURS.", metavar="HOURS")
    ] = None,
    keep_best: Annotated[
        list[str] | None,
        typer.Option(
            help="Keep the N (default: 1) with the lowest, or highest, METRIC in their metadata; repeatable.",
            metavar="METRIC[:N[:min|max]]",
        ),
    ] = None,
    leftovers: Annotated[
        bool, typer.Option("--leftovers", help="Also remove the files of saves that were never committed.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    json: Json = False,
) -> None:
    """Remove checkpoints that a policy does not keep.

    With several options, a checkpoint stays if any of them keeps it. The newest checkpoint of the branch always stays,
    and so does one that is pinned, or that somebody is reading. One that lacks files stays, and is not counted. Those
    off the branch are removed once the branch has reached their step.

    In a tier, --leftovers keeps incomplete steps newer than all complete ones: they may hold the only copy of a part.

    Nothing is removed from the run's tiers: each has a policy of its own; a dry run also shows what that would remove.

    A run that is active in the root is asked to do it; if it does not answer, nothing changes (exit code 7).

    Example: stillframe prune runs/gpt --keep-last 3 --keep-every 1000 --dry-run; stillframe prune runs/gpt --keep-best
    loss:2:min
    """
    keep = _policy(keep_last, keep_every, keep_for, keep_best or [])
    if keep is None and not leftovers:
        raise ConfigError(
            "say what to keep: --keep-last N, --keep-every K, --keep-for HOURS or --keep-best METRIC; "
            "--leftovers alone removes no checkpoint"
        )
    before = survey(root)
    catalog = Catalog(before.root)
    if keep is not None:
        requests.check_shared(catalog)
    _check_metrics(before, map(_best, keep_best or ()))
    if dry_run:
        done = Plan() if keep is None else plan(catalog, Wanted(keep=keep))
        left = _leftovers(before, half_carried(catalog)) if leftovers else []
        spare_bytes = before.spare_bytes if leftovers else 0
        removed.report(before, done, left, spare_bytes, is_dry=True, json=json, tiers=_in_tiers(catalog))
        return
    done = Plan() if keep is None else requests.prune(catalog, keep)
    left, spare_bytes = [], 0
    if leftovers:
        try:
            remove_leftovers(catalog)
        except StillframeError as error:  # some of it may be done
            done.error = done.error or error
        after = survey(root)
        still = {each.save for each in _leftovers(after)}
        left = [each for each in _leftovers(before) if each.save not in still]
        spare_bytes = before.spare_bytes - after.spare_bytes
    if done.error is not None and not done.gone and not left:
        raise done.error
    removed.report(before, done, left, spare_bytes, is_dry=False, json=json)
    if done.error is not None:
        raise done.error


def _check_metrics(found: Survey, policies: Iterable[KeepBest]) -> None:
    """A metric that no checkpoint has as a number would keep none of them: most likely it is misspelt.

    Raises :class:`ConfigError`.
    """
    stored = [each.manifest.metadata for each in found.saves if each.is_on_branch and each.manifest is not None]
    known = {name for each in stored for name in each}
    numbers = {name for each in stored for name in each if number_of(each[name]) is not None}
    there = f"the metadata has {', '.join(sorted(known))}" if known else "there is no metadata"
    for policy in policies:
        if stored and policy.metric not in numbers:
            what = "has a number in" if policy.metric in known else "has"
            raise ConfigError(
                f"--keep-best {policy.metric}: no checkpoint {what} this metric ({there}). Nothing was removed"
            )


def _in_tiers(catalog: Catalog) -> list[removed.InTier]:
    """What the policy of each tier would let go there, if it has one."""
    found = []
    for note in read_tiers(catalog.store):
        try:
            keep = decode_policy(note.keep)
            if keep is not None:
                tier = survey(note.root)
                found.append(removed.InTier(note.root, repr(keep), tier, plan(Catalog(tier.root), Wanted(keep=keep))))
        except StillframeError as error:
            found.append(removed.InTier(note.root, policy_text(note), None, Plan(error=error)))
    return found


def _leftovers(found: Survey, stays: Collection[SaveId] = ()) -> list[Step]:
    """What was never committed, and what is left of removals that were interrupted."""
    left = found.with_state("incomplete", "removed")
    return [each for each in left if not each.is_tombstone and each.save not in stays]


def _policy(last: int | None, every: int | None, hours: float | None, best: list[str]) -> Keep | None:
    parts: list[Keep] = [KeepLast(last)] if last is not None else []
    parts += [KeepEvery(every)] if every is not None else []
    parts += [KeepFor(hours)] if hours is not None else []
    parts += map(_best, best)
    return functools.reduce(operator.or_, parts) if parts else None


def _best(text: str) -> KeepBest:
    """``loss``, ``loss:2``, ``accuracy:2:max``.  A metric's name may have colons if all three parts are given."""
    metric, _, rest = text.partition(":")
    count, _, mode = rest.partition(":")
    if text.endswith((":min", ":max")) and text.count(":") > 2:
        metric, count, mode = text.rsplit(":", 2)
    if (rest and not count.isdecimal()) or mode not in ("", "min", "max"):
        raise ConfigError(f"--keep-best {text}: give METRIC, METRIC:N or METRIC:N:max, such as loss:2:min")
    return KeepBest(metric, int(count) if count else 1, "max" if mode == "max" else "min")
