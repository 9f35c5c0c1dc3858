"""The nouns of stillframe that every layer shares: small immutable values, no behaviour of their own.

A save passes through the phases in order; ``failed`` and ``skipped`` end it early.
What each phase promises is written in docs/FAILURES.md.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from stillframe.errors import ConfigError
from stillframe.units import MIB

Phase = Literal["captured", "staged", "sealed", "committed", "failed", "skipped"]
PHASES: tuple[Phase, ...] = ("captured", "staged", "sealed", "committed")

CHUNK_BYTES = 16 * MIB
"""The unit of copy, checksum and I/O; also the size of one arena span."""

BLOCK_BYTES = 4096
"""Alignment of everything that O_DIRECT touches."""

MAX_STEP = 10**12 - 1
MAX_METADATA_CHARS = 32 * 1024


class SaveId(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """Which save a file belongs to: the step, the epoch (life of the run) that saved it, and which attempt of it.

    No two saves have the same one, and each owns one directory.
    """

    step: int
    epoch: int = 1
    attempt: int = 1

    def __str__(self) -> str:
        again = f", attempt {self.attempt}" if self.attempt > 1 else ""
        return f"step {self.step} of start {self.epoch}{again}"


class Ticket(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """The identity of a save before it is made: one rank issues it, and every rank saves under it.

    For callers that do not number their saves themselves; see :mod:`stillframe.spi`.
    """

    step: int
    attempt: int = 1


@dataclass(frozen=True)
class Label:
    """A directory, an alias of one save, that appears when the save is committed.

    For those who look for files by a name.  ``files``: this rank's, by name; each holds ``content``, and then a line of
    JSON that says whose alias it is: step, epoch, attempt, rank.  ``contents``: more files of this rank, by name, which
    hold just that.  ``segment``: this rank's segment has this name there, too; it is not copied, but linked.
    ``total``: the files of all ranks; if given, the directory appears only if it has as many.  ``is_latest``: the file
    ``latest`` in the root names it, as long as it is the newest on the branch.  Every rank gives the same ``name``, and
    names of files that no other rank gives.

    It appears in the root, or, seen from the root, in ``home``: in ``..``, the directory that the root lies in, or in
    one beside the root (``../checkpoints``).  So a root need not lie where others list what they find.

    A later save may have the same name: then it takes it over, and the earlier save is removed.  The directory goes
    when its checkpoint does.  If it is removed from the root while the run lives, the checkpoint goes after the next
    save with a label; renaming or copying it within the root does nothing.  If it is removed from a ``home``, nothing
    happens: other things come and go there.  A label that cannot be made costs a warning.
    """

    name: str
    files: tuple[str, ...] = ()
    content: bytes = b""
    is_latest: bool = False
    total: int | None = None
    contents: tuple[tuple[str, bytes], ...] = ()
    segment: str = ""
    home: str = ""

    def __post_init__(self) -> None:
        for name in (self.name, *self.names):
            check_label_name(name)
        check_label_home(self.home)
        if self.home and self.is_latest:
            raise ConfigError("Label: `latest` names a label in the root, not one in a home")

    @property
    def names(self) -> tuple[str, ...]:
        """Of all files of this rank."""
        return (*self.files, *(name for name, _ in self.contents), *((self.segment,) if self.segment else ()))


def check_label_home(home: str) -> None:
    """Raises :class:`ConfigError` if it is neither the root itself, nor beside or right above it."""
    above, _, name = home.partition("/")
    if above not in ("", "..") or (not above and name):
        raise ConfigError(f"{home!r} cannot be the home of labels: give '..', or '../NAME', as seen from the root")
    if "/" in home:
        check_label_name(name)


def check_label_name(name: object) -> None:
    """Raises :class:`ConfigError` if it is no plain name of a file, or one that stillframe uses itself."""
    is_plain = isinstance(name, str) and bool(re.fullmatch(r"[^/\x00-\x1f\x7f]{1,200}", name)) and name[0] != "."
    own = r"step-\d{12}-e.*|rank-\d{5}\.\w+|run|latest|label\.json|.*\.partial"
    if not is_plain or re.fullmatch(own, str(name)):
        raise ConfigError(
            f"{name!r} cannot name a label or tag: give a plain name, without '/', that is not stillframe's own"
        )


def check_metadata(metadata: object) -> dict[str, Any]:
    """The metadata as it will be stored.  Raises :class:`ConfigError` for what is not small and plain.

    JSON has no numbers that are not finite: they are stored as the texts ``nan``, ``inf`` and ``-inf``.
    """
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping) or not all(isinstance(key, str) for key in metadata):
        raise ConfigError(f"metadata={metadata!r}: give a dict whose keys are strings")
    plain = {key: _metadata_value(key, value) for key, value in metadata.items()}
    if sum(len(key) + len(str(value)) for key, value in plain.items()) > MAX_METADATA_CHARS:
        raise ConfigError(f"metadata is larger than {MAX_METADATA_CHARS} characters: put it into the state instead")
    return plain


def _metadata_value(key: str, value: Any) -> bool | int | float | str | None:
    try:
        plain = value.item() if callable(getattr(value, "item", None)) else value
    except (RuntimeError, TypeError, ValueError):  # a tensor or an array of several numbers
        plain = value
    if plain is not None and not isinstance(plain, bool | int | float | str):
        raise ConfigError(f"metadata[{key!r}]={value!r}: give a number, a string, a bool or None")
    return str(plain) if isinstance(plain, float) and not math.isfinite(plain) else plain


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


TierPhase = Literal["waiting", "carrying", "committed", "not carried"]
"""Of a save in a tier."""


@dataclass(frozen=True, slots=True)
class TierStats:
    """How a tier stands, as far as this rank knows."""

    root: str
    committed_step: int | None = None
    """The newest that is whole there."""
    committed_unix_s: float | None = None
    """When that was seen."""
    target_step: int | None = None
    """Being carried."""
    waiting_step: int | None = None
    """To be carried next."""
    carried_bytes: int = 0
    """Of the target, by this rank."""
    total_bytes: int = 0
    failures: int = 0
    """Attempts that have failed since the last one that succeeded."""
    trouble: str = ""
    """Why the last attempt failed; empty if it did not."""
    is_over: bool = False
    """Nothing more is carried there; ``trouble`` says why."""
    considered_step: int | None = None
    """The newest committed save of which it is known whether it is carried."""
    behind_steps: int = 0
    """How much older the newest whole step there is than the newest committed one."""
    behind_s: float | None = None
    """So much earlier was it committed in the root; ``None`` if it was before this checkpointer was made."""

    @property
    def is_idle(self) -> bool:
        """Nothing is to be carried for now."""
        return self.is_over or (self.target_step is None and self.waiting_step is None)


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
    """Fences that had to wait."""
    arena_bytes: int = 0
    arena_wait_s: float = 0.0
    """Time staging waited for room in the arena: storage is slower than the saves ask for."""
    keeper_starts: int = 0
    tiers: tuple[TierStats, ...] = ()

    @property
    def blocked_s(self) -> float:
        return self.blocked_save_s + self.blocked_fence_s


@dataclass(frozen=True, slots=True)
class SkippedStep:
    """A step that ``restore`` skipped: it is damaged, was removed, or was saved by another number of ranks."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What ``restore`` did.  True if a checkpoint was restored: ``if not report:`` is a fresh start."""

    step: int | None
    """The step that was restored; ``None`` if there is no checkpoint.  Step 0 is a step."""
    bytes: int = 0
    seconds: float = 0.0
    missing: tuple[str, ...] = ()
    """In the live state, not in the checkpoint: left as they were."""
    unexpected: tuple[str, ...] = ()
    """In the checkpoint, not in the live state: not read."""
    mismatched: tuple[str, ...] = ()
    """In both, with another shape or dtype: left as they were."""
    skipped: tuple[SkippedStep, ...] = ()
    """Newer than ``step``, but damaged."""
    source: str = ""
    """The root or tier that this rank has read it from."""
    replaced: tuple[str, ...] = ()
    """What was damaged or missing in nearer places, and was read from ``source`` instead."""

    def __bool__(self) -> bool:
        return self.step is not None

    @property
    def next_step(self) -> int:
        """Where a loop that counts its steps from 0 goes on: ``for step in range(report.next_step, steps)``."""
        return 0 if self.step is None else self.step + 1


def check_choice(name: str, given: str, choices: tuple[str, ...]) -> None:
    if given not in choices:
        raise ConfigError(f"{name}={given!r}: give one of {', '.join(map(repr, choices))}")


def check_options(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Options that can be told to another process.  Raises :class:`ConfigError`, which does not tell their values."""
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"storage_options= is a {type(given).__name__}: give a dict")
    for name, value in (given or {}).items():
        if not isinstance(name, str) or not isinstance(value, str | int | float | bool | None):
            raise ConfigError(f"storage_options[{name!r}] is a {type(value).__name__}: give a str, a number or a bool")
    return None if given is None else dict(given)


def check_deadline(deadline_s: float) -> float:
    if isinstance(deadline_s, bool) or not isinstance(deadline_s, int | float) or not 0 < deadline_s < math.inf:
        raise ConfigError(f"deadline_s={deadline_s!r}: give a number of seconds above 0")
    return float(deadline_s)
