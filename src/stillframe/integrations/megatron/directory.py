"""The directories that Megatron names, each of which stands for a step of ours.

``stillframe.json`` in a directory names root and save, and holds a digest of Megatron's ``common.pt``.  It is written
when the save is committed, then ``metadata.json``, without which Megatron sees no checkpoint, then the tracker.
Directories decide what stays: a step that no directory names any more is removed after a later commit.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stillframe import Catalog, Save, spi
from stillframe.errors import ConfigError, FormatError, IntegrityError, NotFoundError
from stillframe.integrations.frameworks import agreed
from stillframe.integrations.megatron.places import Place
from stillframe.open_roots import How, find_root, settle_root
from stillframe.store import files, is_url, root_address

logger = logging.getLogger("stillframe")

ROOT, POINTER, CONFIG, COMMON, TRACKER = (
    "_stillframe", "stillframe.json", "metadata.json", "common.pt", "latest_checkpointed_iteration.txt",
)  # fmt: skip
BACKEND, VERSION = "stillframe", 1
_CONFIG = json.dumps(
    {
        "sharded_backend": BACKEND,
        "sharded_backend_version": VERSION,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
).encode()
_ITERATION = re.compile(r"iter_(\d{7,})")
_MAX_BYTES = 65536
_Named = tuple[int, int, int]
"""Step, epoch and attempt of a save; steps rise from save to save."""


@dataclass(frozen=True)
class Pointer:
    """What a directory stands for."""

    root: str
    """Seen from the directory, or absolute."""
    step: int
    epoch: int
    attempt: int
    common: str
    """A digest of ``common.pt``."""

    @property
    def save(self) -> _Named:
        return self.step, self.epoch, self.attempt

    def root_from(self, directory: str) -> str:
        return self.root if is_url(self.root) else os.path.normpath(os.path.join(directory, self.root))


def read_pointer(directory: str) -> Pointer | None:
    """``None`` if it has none.  Raises: :class:`FormatError`, :class:`StorageError`."""
    path = os.path.join(directory, POINTER)
    if files.kind_of(path) != "file":
        return None
    try:
        return files.read_json(path, Pointer, _MAX_BYTES)
    except ValueError as error:
        raise FormatError(f"{path} is damaged: {error}") from error


def pointer_of(directory: str) -> Pointer:
    """Of a directory that Megatron takes for one of ours, whose ``common.pt`` is what was saved.

    Raises: :class:`NotFoundError`, :class:`IntegrityError`, :class:`FormatError`, :class:`StorageError`.
    """
    found = read_pointer(directory)
    if found is None:
        raise NotFoundError(f"{directory} has no {POINTER}: it was not saved by stillframe, or never committed")
    if digest_of(files.read_file(os.path.join(directory, COMMON))) != found.common:
        raise IntegrityError(
            f"{os.path.join(directory, COMMON)} is not the one that was saved with step {found.step}: it is damaged, "
            "or another save to this directory has begun and did not end. Load another checkpoint"
        )
    return found


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def iteration_of(directory: str) -> int | None:
    """The number in the name that Megatron's training loop gives; it keeps a tracker for these."""
    found = _ITERATION.fullmatch(os.path.basename(directory))
    return int(found[1]) if found else None


_newest: dict[str, _Named] = {}
"""By the directory above: the newest save that the tracker was written for in this process."""


@dataclass
class Publication:
    """One save's, on rank 0.  Thread: any.

    ``common``: what Megatron wrote to ``common.pt``; it is written again, durably.
    """

    directory: str
    place: Place
    common: bytes
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_done: bool = False

    def about(self) -> dict[str, Any]:
        """For the metadata of the save: what a successor needs to publish it."""
        return {"directory": self._seen_from_root(), "common": digest_of(self.common)}

    def _seen_from_root(self) -> str:
        beside = os.path.join(os.path.dirname(self.directory), ROOT)
        return f"../{os.path.basename(self.directory)}" if self.place.root == beside else self.directory

    def _catalog(self) -> Catalog:
        return Catalog(self.place.root, storage_options=self.place.storage_options)

    def publish(self, save: Save) -> None:
        """Block until it is committed where all ranks see it; then let them.  May be called again.

        Raises why it is not committed there; :class:`StorageError`.
        """
        self.place.wait(save)
        assert save.epoch is not None
        with self._lock:
            if not self._is_done:
                files.write_file(os.path.join(self.directory, COMMON), self.common, is_forced=True)
                named = (save.step, save.epoch, save.attempt)
                publish(self.directory, self._catalog(), named, digest_of(self.common))
                self._is_done = True

    def tidy(self, save: Save) -> None:
        """Remove the earlier steps whose directory is gone, or names another one.  Thread: that of the commits."""
        above, catalog = os.path.dirname(self.directory), self._catalog()
        known = [read_pointer(os.path.join(above, name)) for name in files.names_in(above)]
        named = {each.save for each in known if each is not None}
        going = []
        for step in catalog.steps():
            if step < save.step:
                found = catalog.find(step)
                at = directory_of(catalog, found)
                if (step, found.epoch, found.attempt) not in named and at and os.path.dirname(at) == above:
                    going.append(step)
        if going:
            self.place.remove(catalog, going)


def publish(directory: str, catalog: Catalog, save: _Named, common: str) -> None:
    """Write what makes a directory one of Megatron's checkpoints, each file whole and durable.

    In a tier, where a keeper prunes, it is pinned before anything names it.
    Raises: :class:`StorageError`; :class:`NotFoundError` if it is just being removed there.
    """
    above, root = os.path.dirname(directory), str(catalog.root)
    if spi.is_tier(catalog):
        catalog.pin(save[0])
    seen = f"../{ROOT}" if root == os.path.join(above, ROOT) else root
    text = {"root": seen, "step": save[0], "epoch": save[1], "attempt": save[2], "common": common}
    _put(os.path.join(directory, POINTER), json.dumps(text).encode())
    _put(os.path.join(directory, CONFIG), _CONFIG)
    iteration = iteration_of(directory)
    if iteration is not None and save >= _newest.get(above, save):
        _newest[above] = save
        _put(os.path.join(above, TRACKER), str(iteration).encode())


def _put(path: str, data: bytes) -> None:
    if not _holds(path, data):
        files.write_file(path, data, is_forced=True)


def _holds(path: str, data: bytes) -> bool:
    return files.kind_of(path) == "file" and files.read_file(path, _MAX_BYTES) == data


def _is_whole(directory: str) -> bool:
    """Whether Megatron sees what is published; a trainer may have died in between, or while Megatron wrote it."""
    return _holds(os.path.join(directory, CONFIG), _CONFIG)


def remove_unfinished(above: str) -> None:
    """What a trainer that was killed while it published has left."""
    files.remove_unfinished(above, [TRACKER])
    for name in files.names_in(above):
        directory = os.path.join(above, name)
        if name != ROOT and files.kind_of(directory) == "directory":
            files.remove_unfinished(directory, [COMMON, POINTER, CONFIG])


def directory_of(catalog: Catalog, save: Any) -> str | None:
    """Where a save of ours was made for; ``None`` if it is not one of ours."""
    found = catalog.manifest(save).metadata.get("directory")
    if not isinstance(found, str):
        return None
    return found if os.path.isabs(found) else os.path.normpath(os.path.join(str(catalog.root), found))


def latest(
    save_dir: str | os.PathLike[str],
    root: str | os.PathLike[str] | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> str | None:
    """The directory below ``save_dir`` of the newest checkpoint, on every rank the same; ``None`` if there is none.

    Blocks until the keepers of a run that was killed have committed what they hold.  What was committed after the death
    of its trainer gets its ``metadata.json`` now, and the tracker names what is returned.  ``root``: if
    :class:`SaveStrategy` was given one.  Every rank calls it.
    Raises, on every rank: :class:`StorageError`, :class:`BusyError`.
    """
    if "{node}" in str(root):
        raise ConfigError(
            f"latest(root={str(root)!r}): this is on the nodes' own disks; call SaveStrategy(…).latest(save_dir), or "
            "leave root out to find what is in the tier beside the directories"
        )
    above = os.path.abspath(save_dir)
    address = root_address(os.path.join(above, ROOT) if root is None else root)
    return agreed(lambda: _latest(above, address, storage_options))


def _latest(above: str, root: str, storage_options: Mapping[str, Any] | None) -> str | None:
    if not is_url(root) and files.kind_of(root) == "nothing":
        return None
    catalog = Catalog(root, storage_options=storage_options)
    if find_root(root) is not None:
        settle_root(root, How(storage_options=storage_options))
    elif not spi.is_tier(catalog) and spi.wait_finished(root, storage_options):
        remove_unfinished(above)
    return newest_in(catalog, above)


def newest_in(catalog: Catalog, above: str) -> str | None:
    """On rank 0: publish what is committed and is not published yet; the newest.  Raises: :class:`StorageError`."""
    newest = None
    for save in catalog.committed():
        directory, named = directory_of(catalog, save), (save.step, save.epoch, save.attempt)
        if directory is None or os.path.dirname(directory) != above or files.kind_of(directory) != "directory":
            continue
        found = read_pointer(directory)
        if found is not None and (found.save > named or (found.save == named and newest and _is_whole(directory))):
            continue
        common, path = str(catalog.manifest(save).metadata.get("common")), os.path.join(directory, COMMON)
        if files.kind_of(path) == "file" and digest_of(files.read_file(path)) == common:
            publish(directory, catalog, named, common)  # older ones, too: else they would go as those that nobody names
            newest = newest or directory
        else:
            logger.warning("step %d is skipped: %s is not the one that was saved with it", save.step, path)
    return newest
