"""What ``show``, ``diff`` and ``export`` share: a checkpoint opened with the trees of all its ranks merged."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from stillframe.checkpoint import survey
from stillframe.checkpoint.catalog import Checkpoint
from stillframe.checkpoint.contents import Entry
from stillframe.checkpoint.stored import Stored
from stillframe.cli.steps import step_of


@contextlib.contextmanager
def open_stored(root: str, step: str | None, rank: int | None) -> Iterator[Stored]:
    """Open a step (the newest if ``None``); per-rank values are those of ``rank`` (the first if ``None``)."""
    with survey.open_checkpoint(root, step_of(root, step), rank) as checkpoint:
        yield merged(checkpoint, rank)


def merged(checkpoint: Checkpoint, rank: int | None = None) -> Stored:
    return Stored(checkpoint, checkpoint.ranks[0] if rank is None else rank, is_merged=True)


def tensors(stored: Stored, entries: Sequence[Entry]) -> Iterator[Any]:
    """Read and verify tensors and arrays, in the order of the entries; all are torch tensors."""
    from stillframe.restoring.load import pull

    return pull(stored, [each.leaf for each in entries])
