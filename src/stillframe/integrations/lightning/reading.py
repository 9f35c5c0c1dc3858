"""Reading what a name in a directory of Lightning's stands for: as a dict, or into live objects that are sharded."""

from __future__ import annotations

import os
from typing import Any

import torch

import stillframe
from stillframe import Catalog, spi
from stillframe.errors import NotFoundError
from stillframe.integrations.frameworks import agreed, here
from stillframe.integrations.lightning.directory import ROOT, SHARDED, wanted
from stillframe.integrations.pickled import from_leaves
from stillframe.open_roots import seat
from stillframe.store import files

_ADVICE = "give weights_only=False"


def settle(path: str) -> None:
    """Block until the keeper of a run that was killed has committed what it holds here; then move that run's links.

    Every rank may call it.  Raises :class:`StorageError`.
    """
    spi.wait_finished(os.path.join(path, ROOT))
    links = files.links_in(path)
    for wish, to in links.items():
        name = wanted(wish)
        if name is not None and links.get(name) != to and spi.save_of(os.path.join(path, to)) is not None:
            files.point(os.path.join(path, name), to)


def find(path: str) -> tuple[str, Any] | None:
    """The root, and the save that a path stands for; ``None`` if it is not of ours.  Raises :class:`StorageError`."""
    if "://" in path or files.kind_of(path) != "directory":
        return None
    place = files.real_path(path)
    save = spi.save_of(place)
    return None if save is None else (os.path.join(os.path.dirname(place), ROOT), save)


def read(path: str, found: tuple[str, Any], map_location: Any, weights_only: bool | None) -> Any:
    """The checkpoint, verified, with whole tensors; a part that only pickle can hold as ``torch.load`` takes it.

    Raises: :class:`NotFoundError`, :class:`IntegrityError`, :class:`UnsupportedStateError`.
    """
    root, save = found
    try:
        state = spi.load_save(root, save, seat()[0])
    except NotFoundError as error:
        raise NotFoundError(f"{path} refers to {save} in {root}: was it moved without its root? ({error})") from error
    return from_leaves(state, map_location, weights_only, _ADVICE)


def restore(path: str, found: tuple[str, Any], live: dict[str, Any], strict: bool, weights_only: bool | None) -> Any:
    """Put a checkpoint into live objects, each rank its part, and return the rest of it.  Every rank calls it.

    ``live``: by their keys; ``None`` for what is neither restored nor returned.  ``strict``: of modules; state of
    optimizers that does not fit is always an error.
    Raises: :class:`MismatchError`, :class:`NotFoundError`, :class:`IntegrityError`, :class:`UnsupportedStateError`.
    """
    root, save = found
    ranks, sharded = agreed(lambda: _about(path, root, save))
    wanted_parts = {key: each for key, each in live.items() if each is not None}
    lenient = {} if strict else {key: each for key, each in wanted_parts.items() if isinstance(each, torch.nn.Module)}
    for parts, is_strict in ((wanted_parts.keys() - lenient.keys(), True), (lenient.keys(), False)):
        if parts:
            state = {key: wanted_parts[key] for key in sorted(parts)}
            stillframe.restore(root, state, save.step, strict=is_strict, only=sorted(parts))
    others = sorted({*live, *sharded})
    rest = here(lambda: spi.load_rank(root, save, seat()[0] % ranks, exclude=others), "load")
    return from_leaves(rest, None, weights_only, _ADVICE)


def _about(path: str, root: str, save: Any) -> tuple[int, list[str]]:
    """How many ranks have saved it, and the keys of what was sharded."""
    catalog = Catalog(root)
    if save.step not in catalog.steps() or catalog.find(save.step) != save:
        raise NotFoundError(f"{path} refers to {save}, which is not in {root}: was it moved without its root?")
    manifest = catalog.manifest(save)
    return manifest.world_size, str(manifest.metadata.get(SHARDED, "")).split("\n")
