"""``load``: a checkpoint as nested plain values and tensors, in one call."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from stillframe.catalog import Catalog
from stillframe.errors import NotFoundError
from stillframe.restore.build import Builder
from stillframe.restore.place import Placement
from stillframe.restore.stored import Stored


def load(
    root: str | os.PathLike[str],
    step: int | None = None,
    *,
    only: str | Sequence[str] | None = None,
    rank: int = 0,
    merge: bool = True,
) -> Any:
    """The state of a step (the newest if none is given), verified, on the CPU, with no live objects.

    An object that had a ``state_dict`` comes back as that dict.  ``only`` names the parts wanted, by path
    (``"model"``, ``"optimizer/state/0"``) or pattern (``"model/*.bias"``): only their chunks are read; an
    item of a list that is not wanted comes back as ``None``.

    A checkpoint of several ranks comes back as one state: sharded tensors are assembled; of what each rank kept for
    itself (a generator's state, a plain tensor) it is ``rank``'s.  ``merge=False``: only what that rank saved.

    Blocks until everything is read.
    Raises: :class:`NotFoundError`, :class:`IntegrityError`, :class:`VersionError`.
    """
    patterns = None if only is None else (only,) if isinstance(only, str) else tuple(only)
    with Catalog(root).open(step) as checkpoint:
        if rank not in checkpoint.ranks:
            raise NotFoundError(f"step {checkpoint.step} has no rank {rank}; it was saved by {checkpoint.world_size}")
        stored = Stored(checkpoint, rank, is_merged=merge)
        placement = Placement(stored)
        builder = Builder(stored, placement, patterns)
        later = builder.build(stored.tree)
        if later is None:
            some = ", ".join(builder.paths[:5]) or "nothing at all"
            raise NotFoundError(f"only={only!r} matches nothing in step {checkpoint.step}; it holds {some}, …")
        placement.fill()
        return later()
