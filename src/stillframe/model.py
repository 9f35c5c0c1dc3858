"""The nouns of stillframe that every layer shares: small immutable values, no behaviour of their own.

A save passes through the phases in order; ``failed`` and ``skipped`` end it early.
What each phase promises is written in docs/FAILURES.md.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Literal

from stillframe.errors import ConfigError
from stillframe.units import MIB

Phase = Literal["captured", "staged", "sealed", "committed", "failed", "skipped"]
PHASES: tuple[Phase, ...] = ("captured", "staged", "sealed", "committed")

CHUNK_BYTES = 16 * MIB
"""The unit of copy, checksum and I/O; also the size of one arena span."""

BLOCK_BYTES = 4096
"""Alignment of everything that O_DIRECT touches."""

MAX_STEP = 10**12 - 1


@dataclass(frozen=True)
class Label:
    """A directory in the root that appears, complete, when the step is committed: for those who look for files.

    ``files``: this rank's, by name; all hold ``content``.  ``is_latest``: the file ``latest`` in the root names it.
    Every rank gives the same ``name``, and names of files that no other rank gives.  The directory is removed when the
    checkpoint is pruned; removing, renaming or copying it does nothing to the checkpoint.
    """

    name: str
    files: tuple[str, ...] = ()
    content: bytes = b""
    is_latest: bool = False

    def __post_init__(self) -> None:
        for name in (self.name, *self.files):
            check_label_name(name)


def check_label_name(name: object) -> None:
    """Raises :class:`ConfigError` if it is no plain name of a file, or one that stillframe uses itself."""
    is_plain = isinstance(name, str) and bool(re.fullmatch(r"[^/\x00-\x1f\x7f]{1,200}", name)) and name[0] != "."
    own = r"step-\d{12}|rank-\d{5}\.\w+|label-\d{12}-\w{8}\.partial|events|latest(\.partial)?|label\.json(\.partial)?"
    if not is_plain or re.fullmatch(own, str(name)):
        raise ConfigError(
            f"{name!r} cannot name a label or tag: give a plain name, without '/', that is not stillframe's own"
        )


def check_step(step: object) -> int:
    """The step as an int.  numpy integers count as ints, bools do not.  Raises :class:`ConfigError`."""
    if isinstance(step, bool) or not hasattr(step, "__index__"):
        raise ConfigError(f"step must be an int, not {step!r}")
    number: int = step.__index__()
    if not 0 <= number <= MAX_STEP:
        raise ConfigError(f"step must be between 0 and {MAX_STEP}, not {number}")
    return number


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the bytes of one save have come."""

    total_bytes: int
    staged_bytes: int
    flushed_bytes: int

    @property
    def fraction(self) -> float:
        return self.flushed_bytes / self.total_bytes if self.total_bytes else 1.0


@dataclass(frozen=True, slots=True)
class Times:
    """When a save reached what, in seconds of ``time.monotonic()``; ``None`` if it has not."""

    requested_s: float
    returned_s: float | None = None
    stage_begin_s: float | None = None
    staged_s: float | None = None
    flush_begin_s: float | None = None
    sealed_s: float | None = None
    committed_s: float | None = None


@dataclass(frozen=True, slots=True)
class Stats:
    """Counters of one checkpointer since it was made (``Checkpointer.stats()``)."""

    saves: int = 0
    committed: int = 0
    committed_step: int | None = None
    """The step of the last commit that this checkpointer has heard of."""
    committed_unix_s: float | None = None
    """When it heard of it."""
    failed: int = 0
    skipped: int = 0
    in_flight: int = 0
    unchanged: int = 0
    """Saves whose lazily staged bytes were all the same as those of the save before."""
    captured_bytes: int = 0
    """Copied by ``save()`` itself, on the training thread."""
    staged_bytes: int = 0
    flushed_bytes: int = 0
    blocked_save_s: float = 0.0
    blocked_fence_s: float = 0.0
    fences: int = 0
    """Fences that really had to wait."""
    arena_bytes: int = 0
    arena_wait_s: float = 0.0
    """Time staging waited for room in the arena: storage is slower than the saves ask for."""
    keeper_starts: int = 0

    @property
    def blocked_s(self) -> float:
        return self.blocked_save_s + self.blocked_fence_s


@dataclass(frozen=True, slots=True)
class SkippedStep:
    """A step that ``restore`` found damaged and passed over."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What the last ``restore`` did (``Checkpointer.last_restore``)."""

    step: int | None
    bytes: int = 0
    seconds: float = 0.0
    missing: tuple[str, ...] = ()
    """In the live state, not in the checkpoint: left as they were."""
    unexpected: tuple[str, ...] = ()
    """In the checkpoint, not in the live state: not read."""
    mismatched: tuple[str, ...] = ()
    """In both, with another shape or dtype: left as they were."""
    skipped: tuple[SkippedStep, ...] = field(default=())


def check_choice(name: str, given: str, choices: tuple[str, ...]) -> None:
    if given not in choices:
        raise ConfigError(f"{name}={given!r}: give one of {', '.join(map(repr, choices))}")


def check_deadline(deadline_s: float) -> float:
    if isinstance(deadline_s, bool) or not isinstance(deadline_s, int | float) or not 0 < deadline_s < math.inf:
        raise ConfigError(f"deadline_s={deadline_s!r}: give a number of seconds above 0")
    return float(deadline_s)
