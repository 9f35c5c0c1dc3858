"""Which checkpoints to keep: policies, and the one function that decides what may go.

    KeepLast(3)                     the three newest
    KeepEvery(1000)                 every step that is a multiple of 1000
    KeepFor(hours=24)               those of the last day
    KeepBest("loss", 2)             the two with the lowest metadata["loss"]
    KeepLast(3) | KeepEvery(1000)   what either of them keeps

Every policy also keeps the newest checkpoint.  Policies judge by what the manifests say, never by the times of files.
Nothing here looks at storage or at a clock: the same arguments always give the same answer.  In doubt a save stays.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from stillframe.errors import ConfigError
from stillframe.model import SaveId


class Known(msgspec.Struct, frozen=True):
    """What a policy judges a committed save by; all of it comes from the manifest."""

    save: SaveId
    saved_unix_s: float = 0.0
    metadata: dict[str, Any] = {}


class Keep(msgspec.Struct, frozen=True, tag_field="keep", forbid_unknown_fields=True):
    """The base of all policies; ``a | b`` keeps what either of them keeps, in whatever order they are combined."""

    def keeps(self, found: Sequence[Known], now_s: float) -> set[int]:
        """The steps that stay, always with the newest.  ``found``: one for each step, in any order."""
        newest = {max(known.save.step for known in found)} if found else set()
        return newest | self._picks(found, now_s)

    def __or__(self, other: Keep) -> Keep:
        if not isinstance(other, Keep):
            return NotImplemented
        both = KeepAny(_parts(self) + _parts(other))
        return both if len(both.policies) > 1 else both.policies[0]

    def _picks(self, found: Sequence[Known], now_s: float) -> set[int]:
        """The steps that this policy asks for."""
        raise NotImplementedError

    def _reason(self) -> str:
        """What is true of every step that it does not ask for."""
        raise NotImplementedError


class KeepLast(Keep, frozen=True, tag="last"):
    """Keep the ``count`` newest checkpoints: those with the greatest steps."""

    count: int

    def __post_init__(self) -> None:
        _check_whole("KeepLast", self.count)

    def _picks(self, found: Sequence[Known], now_s: float) -> set[int]:
        return set(sorted({known.save.step for known in found})[-self.count :])

    def _reason(self) -> str:
        return "older than the newest" if self.count == 1 else f"older than the {self.count} newest"


class KeepEvery(Keep, frozen=True, tag="every"):
    """Keep every checkpoint whose step is a multiple of ``steps``, and the newest."""

    steps: int

    def __post_init__(self) -> None:
        _check_whole("KeepEvery", self.steps)

    def _picks(self, found: Sequence[Known], now_s: float) -> set[int]:
        return {known.save.step for known in found if known.save.step % self.steps == 0}

    def _reason(self) -> str:
        return f"not a multiple of {self.steps}"


class KeepFor(Keep, frozen=True, tag="for"):
    """Keep the checkpoints saved within the last ``hours``, and the newest.

    A save from the future counts as young: a clock was set back.
    """

    hours: float

    def __post_init__(self) -> None:
        try:
            is_time = not isinstance(self.hours, bool) and isinstance(self.hours, int | float)
            hours = float(self.hours) if is_time else math.nan
        except OverflowError:  # an int beyond all floats
            hours = math.inf
        if not 0 < hours < math.inf:
            raise ConfigError(f"KeepFor({self.hours!r}): give a number of hours above 0")
        msgspec.structs.force_setattr(self, "hours", hours)

    def _picks(self, found: Sequence[Known], now_s: float) -> set[int]:
        return {known.save.step for known in found if not now_s - known.saved_unix_s > self.hours * 3600}

    def _reason(self) -> str:
        return f"saved more than {self.hours:g} {'hour' if self.hours == 1 else 'hours'} ago"


class KeepBest(Keep, frozen=True, tag="best"):
    """Keep the ``count`` checkpoints with the lowest ``metadata[metric]``, and the newest; ``mode="max"``: the highest.

    Of two that are equally good, the newer is the better.  A save whose metadata has no such number, or NaN, is never
    among the best.
    """

    metric: str
    count: int = 1
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric or not _is_text(self.metric):
            raise ConfigError(f'KeepBest({self.metric!r}): give the name of a number in the metadata, such as "loss"')
        _check_whole("KeepBest", self.count, f"{self.metric!r}, count=")
        if not isinstance(self.mode, str) or self.mode not in ("min", "max"):
            raise ConfigError(f"KeepBest({self.metric!r}, mode={self.mode!r}): give 'min' or 'max'")

    def _picks(self, found: Sequence[Known], now_s: float) -> set[int]:
        sign = 1 if self.mode == "max" else -1
        numbers = [(number_of(known.metadata.get(self.metric)), known.save) for known in found]
        ranked = sorted((sign * number, save) for number, save in numbers if number is not None)
        return {save.step for _, save in ranked[-self.count :]}

    def _reason(self) -> str:
        which = "the one" if self.count == 1 else f"among the {self.count}"
        return f"not {which} with the {'highest' if self.mode == 'max' else 'lowest'} {self.metric!r}"


_Single: TypeAlias = KeepLast | KeepEvery | KeepFor | KeepBest
_SINGLE: tuple[type[_Single], ...] = (KeepLast, KeepEvery, KeepFor, KeepBest)


class KeepAny(Keep, frozen=True, tag="any"):
    """Keep what any of these keeps; ``|`` makes it.  Each policy is there once, in one fixed order."""

    policies: tuple[_Single, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.policies, Collection) or isinstance(self.policies, str) or not self.policies:
            raise ConfigError(f"KeepAny({self.policies!r}): give a tuple of policies, at least one")
        parts = {part for policy in self.policies for part in _parts(policy)}
        ordered = sorted(parts, key=lambda part: (_SINGLE.index(type(part)), msgspec.structs.astuple(part)))
        msgspec.structs.force_setattr(self, "policies", tuple(ordered))

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.policies))

    def _picks(self, found: Sequence[Known], now_s: float) -> set[int]:
        return {step for policy in self.policies for step in policy._picks(found, now_s)}

    def _reason(self) -> str:
        return " and ".join(policy._reason() for policy in self.policies)


_DECODER: msgspec.json.Decoder[_Single | KeepAny | None] = msgspec.json.Decoder(_Single | KeepAny | None)


def _parts(policy: object) -> tuple[_Single, ...]:
    """The policies that it combines.  A class derived from ours is refused: no other process could know its rule."""
    if type(policy) is KeepAny:
        return policy.policies
    if type(policy) in _SINGLE:
        return (policy,)  # type: ignore[return-value]  # mypy does not narrow by a tuple of types
    raise ConfigError(
        f"keep={policy!r}: give KeepLast(n), KeepEvery(k), KeepFor(hours=h), KeepBest(metric), "
        "several of them combined with |, or None"
    )


def _check_whole(name: str, count: object, before: str = "") -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigError(f"{name}({before}{count!r}): give a whole number of at least 1")


def _is_text(name: str) -> bool:
    """Whether JSON can hold it: half a surrogate pair is no text."""
    return name.encode("utf-8", "replace").decode() == name


def number_of(value: object) -> float | None:
    """The value if it is a number; NaN and bools are none."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) and value == value else None


def check_policy(keep: object) -> Keep | None:
    """The policy given; ``None`` keeps everything.  Raises :class:`ConfigError` for anything else."""
    if keep is None:
        return None
    _parts(keep)
    assert isinstance(keep, Keep)
    return keep


def encode_policy(keep: Keep | None) -> str:
    """The policy as JSON, to hand to another process.  Raises :class:`ConfigError` for a policy that is not ours."""
    return msgspec.json.encode(check_policy(keep)).decode()


def decode_policy(text: str) -> Keep | None:
    """The policy that :func:`encode_policy` wrote.  Raises :class:`ConfigError` if it is none."""
    try:
        return _DECODER.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ConfigError(f"{text[:200]!r} is not a retention policy: {error}") from error


def judges_by_manifest(keep: Keep | None) -> bool:
    """Whether it judges by time or metadata, so that manifests must be read; otherwise the steps suffice."""
    return keep is not None and any(isinstance(part, KeepFor | KeepBest) for part in _parts(keep))


def garbage(
    branch: Sequence[Known], off_branch: Sequence[SaveId], keep: Keep | None, pins: Collection[SaveId], now_s: float
) -> dict[SaveId, str]:
    """Committed saves that may go, each with the reason, for people to read; in the order of their steps.

    A save of ``branch`` goes if ``keep`` does not keep its step; the greatest step always stays.  A save of
    ``off_branch`` goes once the branch has reached its step.  None of ``pins`` goes.  Nothing goes if ``keep`` is
    ``None`` or the branch is empty.
    """
    if keep is None or not branch:
        return {}
    reached = max(known.save.step for known in branch)
    steps = {known.save.step for known in branch}
    stays = keep.keeps(branch, now_s) | {reached}
    protected = {known.save for known in branch if known.save.step in stays} | set(pins)
    why = keep._reason()
    going = {known.save: why for known in branch if known.save not in protected}
    for save in off_branch:
        if save.step <= reached and save not in protected and save not in going:
            going[save] = _left_behind(save.step in steps, reached)
    return dict(sorted(going.items()))


def _left_behind(is_replaced: bool, reached: int) -> str:
    if is_replaced:
        return "left behind: the branch has another save of this step"
    return f"left behind: training went on from an earlier step and has reached step {reached}"
