"""Labels: directories that others look for, which appear, complete, when their step is committed.

``<root>/label-<step>-<attempt>.partial``   every rank puts its files there before it seals
``<root>/<name>``                           the same directory, once the step is committed
``<root>/latest``                           the name, if it asks for that
``<root>/step-…/label.json``                which label a step has, written before its manifest

A crash right after a commit leaves the partial name; the next run's sweep finishes it.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from stillframe.checkpoint.catalog import Catalog
from stillframe.errors import ConfigError, ExistsError, StillframeError
from stillframe.format import limits, names
from stillframe.format.records import decode_manifest
from stillframe.model import Label, check_label_name
from stillframe.store import durable


class _Kept(msgspec.Struct, frozen=True):
    """What of a label is written down."""

    name: str
    is_latest: bool


def check_free(catalog: Catalog, label: Label) -> None:
    if os.path.lexists(catalog.root / label.name):
        raise ExistsError(f"{catalog.root / label.name} exists already: choose another name, or remove it first")


def write(catalog: Catalog, step: int, attempt: str, label: Label, decides: bool) -> None:
    """This rank's files, durably; raises ``OSError``.  ``decides``: its keeper is the one that will commit."""
    path = catalog.root / names.label_partial(step, attempt)
    durable.make_dir(path)
    for name in label.files:
        durable.write_partial(path / name, label.content)
    kept = _Kept(label.name, label.is_latest)
    if decides:
        durable.write_partial(path / names.LABEL, _mark(step, attempt, kept))
    durable.sync_dir(path)
    if decides:
        mark = catalog.dir(step) / names.LABEL
        partial = mark.with_name(mark.name + names.PARTIAL)
        durable.write_partial(partial, msgspec.json.encode(kept))
        durable.publish(partial, mark)


def publish(catalog: Catalog, step: int, attempt: str, label: Label) -> None:
    """The step is committed: let the label appear; raises ``OSError``.  For the keeper that commits."""
    _publish(catalog, step, attempt, _Kept(label.name, label.is_latest))


def _publish(catalog: Catalog, step: int, attempt: str, kept: _Kept) -> None:
    if kept.is_latest:  # first: what a crash prevents from here on, the next run finishes
        partial = catalog.root / (names.LATEST + names.PARTIAL)
        durable.write_partial(partial, kept.name.encode())
        durable.publish(partial, catalog.root / names.LATEST)
    durable.publish(catalog.root / names.label_partial(step, attempt), catalog.root / kept.name)


def discard(catalog: Catalog, step: int, attempt: str) -> None:
    """The step will not be committed; best effort."""
    with contextlib.suppress(OSError):
        durable.remove(catalog.dir(step) / names.LABEL)
    with contextlib.suppress(OSError):
        durable.remove_whole(catalog.root / names.label_partial(step, attempt))


def finish(catalog: Catalog, attempt: str) -> None:
    """What runs before have left, for rank 0 alone in the root: a label of a committed step appears, others go."""
    for name in os.listdir(catalog.root):
        found = names.parse_label_partial(name)
        if found is None or found[1] == attempt:
            continue
        step, its_attempt = found
        kept = _kept(catalog, step)
        if kept is not None and _attempt_of(catalog, step) == its_attempt:
            with contextlib.suppress(OSError):
                _publish(catalog, step, its_attempt, kept)
        else:
            discard(catalog, step, its_attempt)


def remove(catalog: Catalog, step: int) -> None:
    """The step's label goes with it, before its manifest; best effort.

    Only the directory that was made for it: one of the same name that somebody has put there stays.
    """
    kept = _kept(catalog, step)
    if kept is not None:
        path = catalog.root / kept.name
        try:
            mark = durable.read_small(path / names.LABEL, limits.MAX_FAILURE_BYTES)
        except OSError:
            return
        if mark == _mark(step, _attempt_of(catalog, step), kept):
            with contextlib.suppress(OSError):
                durable.remove_whole(path)


def _mark(step: int, attempt: str, kept: _Kept) -> bytes:
    return msgspec.json.encode({"step": step, "attempt": attempt, "name": kept.name, "is_latest": kept.is_latest})


def _kept(catalog: Catalog, step: int) -> _Kept | None:
    try:
        data = durable.read_small(catalog.dir(step) / names.LABEL, limits.MAX_FAILURE_BYTES)
        kept = msgspec.json.decode(data, type=_Kept)
        check_label_name(kept.name)
    except (OSError, msgspec.MsgspecError, ConfigError):
        return None
    return kept


def _attempt_of(catalog: Catalog, step: int) -> str:
    path: Path = catalog.manifest_path(step)
    try:
        return decode_manifest(durable.read_small(path, limits.MAX_MANIFEST_BYTES), file=str(path)).attempt
    except (OSError, StillframeError):
        return ""
