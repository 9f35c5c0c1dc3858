"""Errors of torch's own formats, as ours."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from pathlib import Path

from stillframe.errors import FormatError, StillframeError, UnsupportedStateError


@contextlib.contextmanager
def dcp_errors(doing: str) -> Iterator[None]:
    """DCP wraps whatever happens, Ctrl-C too, in an exception that is no ``Exception``: take it out again."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        if isinstance(first, StillframeError | OSError | KeyboardInterrupt):
            raise first from None
        raise FormatError(f"{doing}: {type(first).__name__}: {first}") from first


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
            f"know ({reason}); export the weights, or a part with --below"
        ) from None
    except RuntimeError as error:
        if "share" not in str(error) and "type" not in str(error):
            raise
        raise UnsupportedStateError(f"torch.save cannot hold this state ({error}); export it as safetensors") from None


def refusal(path: Path, error: Exception) -> UnsupportedStateError:
    """Of a file that only running code could read."""
    reason = str(error).strip().splitlines()[0]
    return UnsupportedStateError(
        f"{path} holds Python objects, which only running code from the file could make ({reason}). If you trust it: "
        "torch.load(…, weights_only=False) in Python, and Checkpointer.save what came out"
    )
