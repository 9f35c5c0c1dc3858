"""``load``: a checkpoint as nested plain values and tensors, in one call."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from stillframe.catalog import Catalog
from stillframe.errors import NotFoundError
from stillframe.restore.build import Builder
from stillframe.restore.place import Placement


def load(root: str | os.PathLike[str], step: int | None = None, *, only: str | Sequence[str] | None = None) -> Any:
    """The state of a step (the newest if none is given), verified, on the CPU, with no live objects.

    An object that had a ``state_dict`` comes back as that dict.  ``only`` names the parts wanted, by path
    (``"model"``, ``"optimizer/state/0"``) or pattern (``"model/*.bias"``): only their chunks are read; an
    item of a list that is not wanted comes back as ``None``.

    Blocks until everything is read.
    Raises: :class:`NotFoundError`, :class:`IntegrityError`, :class:`VersionError`.
    """
    patterns = None if only is None else (only,) if isinstance(only, str) else tuple(only)
    with Catalog(root).open(step) as checkpoint:
        placement = Placement(checkpoint)
        builder = Builder(checkpoint, placement, patterns)
        later = builder.build(checkpoint.seal.tree)
        if later is None:
            some = ", ".join(builder.paths[:5]) or "nothing at all"
            raise NotFoundError(f"only={only!r} matches nothing in step {checkpoint.step}; it holds {some}, …")
        placement.fill()
        return later()
