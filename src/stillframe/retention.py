"""Which checkpoints to keep: small values that say it, and one function that decides.

    KeepLast(3)                     the three newest
    KeepEvery(1000)                 every step that is a multiple of 1000, and the newest
    KeepLast(3) | KeepEvery(1000)   what either of them keeps

The newest checkpoint is always kept, whatever the policy says; and, until the next commit, the one just committed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from stillframe.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Keep:
    """What to keep; ``None`` means that half of the rule is not asked for."""

    last: int | None = None
    every: int | None = None

    def __or__(self, other: Keep) -> Keep:
        if not isinstance(other, Keep):
            return NotImplemented
        for name in ("last", "every"):
            if getattr(self, name) is not None and getattr(other, name) is not None:
                raise ConfigError(
                    f"{self!r} | {other!r} gives two values for {name!r}; combine KeepLast with KeepEvery"
                )
        return Keep(
            self.last if self.last is not None else other.last,
            self.every if self.every is not None else other.every,
        )

    def keeps(self, steps: Iterable[int]) -> set[int]:
        """The steps, of these committed ones, that stay."""
        ordered = sorted(steps)
        kept = set(ordered[-1:])
        if self.last is not None:
            kept.update(ordered[-self.last :])
        if self.every is not None:
            kept.update(step for step in ordered if step % self.every == 0)
        return kept


def _positive(name: str, count: int) -> int:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigError(f"{name}({count!r}): give a whole number of at least 1")
    return count


def KeepLast(count: int) -> Keep:  # noqa: N802 - reads as the value it makes
    """Keep the ``count`` newest checkpoints."""
    return Keep(last=_positive("KeepLast", count))


def KeepEvery(steps: int) -> Keep:  # noqa: N802
    """Keep every checkpoint whose step is a multiple of ``steps``, and the newest."""
    return Keep(every=_positive("KeepEvery", steps))


def check_policy(keep: object) -> Keep:
    """The policy given, or one that keeps everything for ``None``.  Raises :class:`ConfigError`."""
    if keep is not None and not isinstance(keep, Keep):
        raise ConfigError(f"keep={keep!r}: give KeepLast(n), KeepEvery(k), both combined with |, or None")
    return keep or Keep()
