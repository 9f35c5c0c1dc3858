"""How the tiers of a run stand, as its events tell."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from stillframe.format.epochs import TierNote
from stillframe.observe.history import RankHistory
from stillframe.units import format_count, format_seconds


@dataclass(frozen=True, slots=True)
class Standing:
    """One tier."""

    root: str
    step: int | None
    """The newest that was committed there; ``None`` if no event tells."""
    behind_steps: int | None
    """How much older it is than the newest checkpoint of the root."""
    behind_s: float | None
    """So much earlier was it saved."""
    carried: int
    """Steps that the last run has carried."""
    carry_s: float | None
    """What one took, in the median."""
    bytes: int
    """That its ranks have sent."""
    failures: int
    """How often the tier began to fail for a rank, in the last run."""
    trouble: str
    """Why it fails now; empty if it does not."""
    is_over: bool = False
    """The last run carries nothing more there."""

    @property
    def text(self) -> str:
        """For people to read."""
        made = "nothing is there yet, as far as is known" if self.step is None else f"step {self.step}{self._lag}"
        failed = f"; has failed {format_count(self.failures, 'time')}" if self.failures and not self.trouble else ""
        return f"{made}{failed}{f'; fails: {self.trouble}' if self.trouble else ''}"

    @property
    def _lag(self) -> str:
        if not self.behind_steps:
            return "" if self.behind_steps is None else ", as new as the root"
        by = f" ({format_seconds(self.behind_s)})" if self.behind_s is not None else ""
        return f", {format_count(self.behind_steps, 'step')} behind{by}"


def standings(
    notes: Sequence[TierNote], every: Sequence[RankHistory], last: Sequence[RankHistory], latest: int | None
) -> list[Standing]:
    """Of each tier.  ``every``: all histories of the root, ``last``: of the last run; ``latest``: in the root."""
    return [_standing(note.root, every, last, latest) for note in notes]


def _standing(root: str, every: Sequence[RankHistory], last: Sequence[RankHistory], latest: int | None) -> Standing:
    all_carried = [event for each in every for event in each.carried if event.root == root]
    step = max(all_carried, key=lambda event: event.at_s).step if all_carried else None
    own = [event for each in last for event in each.carried if event.root == root]
    took_s: dict[int, float] = {}
    for event in own:
        took_s[event.step] = max(took_s.get(event.step, 0.0), event.seconds)
    troubles = [[event for event in each.tier_trouble if event.root == root] for each in last]
    well_s = max((event.at_s for event in own), default=0.0)  # a keeper that died did not say that it was well again
    failing = [of_rank[-1] for of_rank in troubles if of_rank and of_rank[-1].at_s > well_s and of_rank[-1].error]
    saved_s = {save.step: save.requested_s for each in every for save in each.committed}
    behind_s = None
    if step in saved_s and latest in saved_s:
        behind_s = max(saved_s[latest] - saved_s[step], 0.0)
    return Standing(
        root=root,
        step=step,
        behind_steps=None if step is None or latest is None else max(latest - step, 0),
        behind_s=behind_s,
        carried=len(took_s),
        carry_s=statistics.median(took_s.values()) if took_s else None,
        bytes=sum(event.bytes for event in own),
        failures=sum(bool(event.error) for of_rank in troubles for event in of_rank),
        trouble=next((each.error for each in failing), ""),
        is_over=any(each.is_over for each in failing),
    )
