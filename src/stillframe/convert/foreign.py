"""Errors of torch's own formats, as ours."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from pathlib import Path

from stillframe.errors import StillframeError, StorageError, UnsupportedStateError


@contextlib.contextmanager
def dcp_errors(doing: str, kind: type[StillframeError] | None = None) -> Iterator[None]:
    """DCP wraps whatever happens, Ctrl-C too, in an exception that is no ``Exception``: take it out again.

    ``kind``: what everything is that has no meaning of its own.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        if isinstance(first, StillframeError | OSError | KeyboardInterrupt):
            raise first from None
        raise kind(f"{doing}: {first!r}") if kind else _translated(doing, first) from first


@contextlib.contextmanager
def refused_by_torch(path: Path) -> Iterator[None]:
    """What torch.load would not read again without running code is refused now."""
    try:
        yield
    except pickle.UnpicklingError as error:
        reason = next(
            (line.strip() for line in str(error).splitlines() if "GLOBAL" in line), str(error).splitlines()[0]
        )
        raise UnsupportedStateError(
            f"{path} would not be read by torch.load(…, weights_only=True): the state holds types it does not "
            f"know ({reason}); export the weights, or a part with --key"
        ) from None
    except RuntimeError as error:
        raise _translated(f"writing {path}", error) from error


def _translated(doing: str, error: BaseException) -> StillframeError:
    """torch's archive writer says nothing of the disk but that the file is shorter than it should be."""
    first = str(error).strip().splitlines()[0] if str(error).strip() else ""
    if "unexpected pos" in first or "PytorchStreamWriter" in first:
        return StorageError(f"{doing}: the file could not be written whole; is the disk full? ({first})")
    return UnsupportedStateError(f"{doing}: {type(error).__name__}: {first}")


def refusal(path: Path, error: Exception) -> UnsupportedStateError:
    """Of a file that only running code could read."""
    reason = str(error).strip().splitlines()[0]
    return UnsupportedStateError(
        f"{path} holds Python objects, which only running code from the file could make ({reason}). If you trust it: "
        "torch.load(…, weights_only=False) in Python, and Checkpointer.save what came out"
    )
