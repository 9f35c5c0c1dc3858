"""Tiers: where else checkpoints are carried to, and which of them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeAlias

from stillframe.errors import ConfigError
from stillframe.format import limits
from stillframe.format.epochs import TierNote
from stillframe.model import MAX_STEP, check_options
from stillframe.retention import Keep, check_policy, encode_policy
from stillframe.store import files, is_url, root_address, root_text, without_secrets
from stillframe.units import format_count, parse_rate

TierName: TypeAlias = "str | os.PathLike[str] | Tier"
"""How a tier is named: by its root, or itself."""


@dataclass(frozen=True, slots=True)
class Tier:
    """A place that checkpoints are copied to in the background, once they are committed.

    root: a directory, or ``s3://BUCKET/DIRECTORY``, that every rank sees.
    every: copy a checkpoint whenever the step has passed another multiple of this number, or this time has passed.
    keep: retention there, such as ``KeepEvery(1000)``; ``None`` keeps everything.
    limit: bandwidth of each rank, such as ``"500MB/s"``; ``None``: no limit.
    storage_options: as for a root.
    """

    root: str | os.PathLike[str]
    every: int | timedelta = 1
    keep: Keep | None = None
    limit: int | str | None = None
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Raises :class:`ConfigError`, where it is written and not where it is used."""
        _checked(self)


@dataclass(frozen=True, slots=True)
class TierConfig:
    """A tier as a keeper is told of it."""

    root: str
    every_steps: int
    """0: it goes by time."""
    every_s: float
    keep: str
    """Encoded."""
    bytes_per_s: float
    """0: no limit."""
    storage_options: dict[str, Any] | None = field(default=None, repr=False)

    def is_due(self, before: int, step: int) -> bool:
        """Whether a step is carried, if the save before it was of step ``before`` (-1: there was none).

        It is the first one past a multiple, or step 0.
        """
        return step // self.every_steps > max(before, 0) // self.every_steps or (before < 0 and step == 0)

    def note(self) -> TierNote:
        """What is put into the root for others: no storage options."""
        every = format_count(self.every_steps, "step") if self.every_steps else f"{self.every_s:g} s"
        return TierNote(self.root, every, self.keep, self.bytes_per_s)


def check_tiers(tiers: Sequence[Tier], root: str) -> tuple[TierConfig, ...]:
    """``root``: of the first tier.  Raises :class:`ConfigError`."""
    if isinstance(tiers, Tier) or not isinstance(tiers, Sequence) or isinstance(tiers, str):
        raise ConfigError(f"tiers={tiers!r}: give a list of Tier(…)")
    if len(tiers) > limits.MAX_TIERS:
        raise ConfigError(f"{len(tiers)} tiers are more than the {limits.MAX_TIERS} allowed")
    found: list[TierConfig] = []
    for tier in tiers:
        if not isinstance(tier, Tier):
            raise ConfigError(f"tiers=[{tier!r}]: give Tier(…)")
        found.append(_checked(tier))
    roots = [each if is_url(each) else files.real_path(each) for each in (root, *(each.root for each in found))]
    for at, one in enumerate(roots):
        for other in roots[at + 1 :]:
            if one == other or one.startswith(f"{other}/") or other.startswith(f"{one}/"):
                raise ConfigError(
                    f"{one} and {other} are the same place, or one lies in the other: give the root and each tier a "
                    "place of its own"
                )
    return tuple(found)


def _checked(tier: Tier) -> TierConfig:
    given = root_text(tier.root, "Tier: root")
    shown = f"Tier({without_secrets(given)!r}"
    if "{" in given:
        raise ConfigError(f"{shown}): every rank must see the same tier; {{node}} is for the root only")
    address = root_address(given)
    every_steps, every_s = 0, 0.0
    if isinstance(tier.every, timedelta):
        every_s = tier.every.total_seconds()
    elif isinstance(tier.every, int) and not isinstance(tier.every, bool):
        every_steps = tier.every
    if not 0 <= every_steps <= MAX_STEP or (every_steps == 0 and every_s <= 0):
        most = f"from 1 to {MAX_STEP}"
        raise ConfigError(f"{shown}, every={tier.every!r}): give a number of steps {most}, or a timedelta above 0")
    try:
        limit = 0 if tier.limit is None else parse_rate(tier.limit, "limit")
        keep, options = encode_policy(check_policy(tier.keep)), check_options(tier.storage_options)
    except ConfigError as error:
        raise ConfigError(f"{shown}, …): {error}") from None
    return TierConfig(address, every_steps, every_s, keep, limit, options)
