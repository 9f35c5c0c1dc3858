"""Every error that stillframe raises, arranged by what the caller should do about it.

    StillframeError
    ├── ConfigError              the call is wrong: change an argument          (also a ValueError)
    ├── StateError               the state given is wrong: change what is in it
    │   ├── UnsupportedStateError    something in it cannot be stored exactly  (also a TypeError)
    │   ├── MismatchError            it does not fit the checkpoint
    │   └── TornError                it changed while it was copied: use a fence
    ├── ExistsError              the step is already a checkpoint: choose another
    ├── NotFoundError            there is no such checkpoint                    (also a LookupError)
    ├── IntegrityError           the bytes are not those written: use another step
    │   └── FormatError              they cannot even be parsed
    ├── VersionError             written by a newer stillframe: upgrade
    ├── StorageError             the storage refused: make room or repair it, then save again
    ├── KeeperError              the keeper process died: the next save starts another
    ├── BusyError                another run, or an earlier save, is in the way: wait or use another root
    └── DeadlineError            a wait took longer than allowed                (also a TimeoutError)

A message says what was being done, to what, what happened, and what to do.  Foreign
errors (``OSError`` and the like) are translated at the boundary that meets them and stay
attached as ``__cause__`` where there is one.
"""

from __future__ import annotations

__all__ = [
    "BusyError",
    "ConfigError",
    "DeadlineError",
    "ExistsError",
    "FormatError",
    "IntegrityError",
    "KeeperError",
    "MismatchError",
    "NotFoundError",
    "StateError",
    "StillframeError",
    "StorageError",
    "TornError",
    "UnsupportedStateError",
    "VersionError",
    "from_record",
    "to_record",
]


class StillframeError(Exception):
    """The root of the tree: catches everything stillframe raises on purpose."""


class ConfigError(StillframeError, ValueError):
    """The call itself is wrong; nothing was done."""


class StateError(StillframeError):
    """The state passed to ``save`` or ``restore`` is at fault."""


class UnsupportedStateError(StateError, TypeError):
    """A value that cannot be stored exactly; nothing was written."""


class MismatchError(StateError):
    """The checkpoint does not fit the live state; nothing was touched."""


class TornError(StateError):
    """A tensor changed between ``save`` and the fence; the save was given up."""


class ExistsError(StillframeError):
    """The step is already a checkpoint, or is being saved right now."""


class NotFoundError(StillframeError, LookupError):
    """No such checkpoint."""


class IntegrityError(StillframeError):
    """Stored bytes differ from those that were written."""


class FormatError(IntegrityError):
    """A stored file is not what ``docs/FORMAT.md`` describes."""


class VersionError(StillframeError):
    """A file of a newer format version."""


class StorageError(StillframeError):
    """The file system refused or failed an operation."""


class KeeperError(StillframeError):
    """The keeper process ended, or stopped making progress, with saves in flight."""


class BusyError(StillframeError):
    """Something else occupies the root or the arena."""


class DeadlineError(StillframeError, TimeoutError):
    """A wait ended before what it waited for."""


_BY_NAME: dict[str, type[StillframeError]] = {
    kind.__name__: kind
    for kind in (
        ConfigError, StateError, UnsupportedStateError, MismatchError, TornError, ExistsError, NotFoundError,
        IntegrityError, FormatError, VersionError, StorageError, KeeperError, BusyError, DeadlineError,
    )
}  # fmt: skip


def to_record(error: BaseException) -> tuple[str, str]:
    """An error as (kind, message), to cross from the keeper to the trainer."""
    if isinstance(error, StillframeError):
        kind = next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _BY_NAME), "StillframeError")
        return kind, text_of(error)
    if isinstance(error, OSError):
        return "StorageError", text_of(error)
    return "KeeperError", f"{type(error).__name__} in the keeper: {text_of(error)}"


_MAX_TEXT = 8000
"""Some libraries put a stack trace, or a whole tensor, into an error."""


def text_of(error: BaseException) -> str:
    """What it says, not too long, as text that can be encoded: a path may hold bytes that are none."""
    try:
        text = str(error)
    except Exception as problem:  # an exception class of somebody else's
        text = f"(its text cannot be allocated: {type(problem).__name__})"
    if len(text) > _MAX_TEXT:
        half = _MAX_TEXT // 2
        text = f"{text[:half]} […{len(text) - _MAX_TEXT} characters…] {text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode()


def from_record(kind: str, message: str) -> StillframeError:
    return _BY_NAME.get(kind, StillframeError)(message)
