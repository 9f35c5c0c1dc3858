"""The checkpoint engine: collects the files that DeepSpeed hands over, and saves them as one step."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

import stillframe
from stillframe.errors import BusyError, ConfigError, ExistsError, StateError, StillframeError
from stillframe.integrations.deepspeed.files import write_object
from stillframe.integrations.deepspeed.pickled import from_leaves, to_leaf
from stillframe.integrations.deepspeed.pointers import follow, pointer
from stillframe.integrations.open_roots import OpenRoot, open_root, seat
from stillframe.store.files import is_taken, kind_of

logger = logging.getLogger("stillframe")

_KEY = "datastates_ckpt"
_ALLOW = f'put "allow_pickle": true into "{_KEY}" of the DeepSpeed config'
_FILES = "files"


class CheckpointEngine:
    """DeepSpeed calls it with the files of a tag; :meth:`finish` saves them.  Thread: the training thread's."""

    def __init__(self, deepspeed_config: Any, rank: int) -> None:
        config = deepspeed_config.datastates_config.config
        known = {"host_cache_size": 0, "keep_last": 0, "allow_pickle": False}
        given = {**known, **(config if isinstance(config, dict) else {})}
        size, count, self._allow_pickle = (given[name] for name in known)
        is_right = type(size) in (int, float) and size >= 0 and type(count) is int and count >= 0
        if not is_right or not isinstance(self._allow_pickle, bool) or given.keys() != known.keys():
            raise ConfigError(f'"{_KEY}": {config!r}: give "host_cache_size" (GiB), "keep_last", "allow_pickle"')
        if getattr(deepspeed_config, "use_node_local_storage", False):
            raise ConfigError('"use_node_local_storage": stillframe needs a save_dir that all ranks see')
        arena = f"auto:{int(size * 2**20)}KiB" if size else "auto"
        self._how: Any = arena, stillframe.KeepLast(count) if count else None
        self._info: Any = None
        self._files: dict[str, Any] = {}
        self._root: OpenRoot | None = None
        self._saves: dict[str, stillframe.Save] = {}
        """Saves whose end nobody has been told of, by the directory of their tag."""

    def create(self, info: Any) -> None:
        """A checkpoint begins: DeepSpeed will hand over the files of this rank, perhaps none."""
        self._info, self._files = info, {}

    def save(self, state_dict: Any, path: str) -> None:
        """Take a file of the tag that was begun; write any other (of ``save_16bit_model``) with ``torch.save``."""
        if self.is_of_tag(os.path.dirname(path)):
            self._files[os.path.basename(path)] = state_dict
        else:
            write_object(path, state_dict)

    def is_of_tag(self, directory: str) -> bool:
        info = self._info
        return info is not None and os.path.abspath(directory) == os.path.abspath(os.path.join(info.save_dir, info.tag))

    def drop(self) -> None:
        """Forget the checkpoint that was begun."""
        self._info, self._files = None, {}

    def finish(self) -> None:
        """Every rank has handed over everything: request the save.

        Raises, on every rank if on one: the error of a save before; :class:`ExistsError`; :class:`ConfigError`;
        :class:`UnsupportedStateError`.
        """
        info, files = self._info, self._files
        self.drop()
        directory = os.path.abspath(os.path.join(info.save_dir, info.tag))
        root = self._root = open_root(info.save_dir, *seat(), *self._how)
        root.checkpointer.fence()  # the copies of the state before have been copied away
        step = root.take_step(least=_number(info.tag))
        with _together():
            self._tell_failure()
            label = stillframe.Label(info.tag, tuple(files), pointer(step, root.seat[0]), bool(info.save_latest))
            if directory in self._saves or is_taken(directory):
                raise ExistsError(
                    f"the tag {info.tag!r} exists, or is being saved: choose another, or remove {directory}"
                )
            state = {"tag": info.tag, _FILES: root.live.state(files, self._encode)}
        with _together():  # of its own: a rank that saved would wait for the commit of one that could not even try
            save = root.save(step, state, label)
        self._saves[directory] = save

    def _encode(self, path: tuple[Any, ...], value: Any) -> Any:
        return to_leaf(path, value, self._allow_pickle, _ALLOW)

    def _tell_failure(self) -> None:
        """Raises the error of the first save that failed, once; forgets those that are committed."""
        for directory, save in list(self._saves.items()):
            if save.phase == "committed" or save.error is not None:
                del self._saves[directory]
            if save.error is not None:
                raise type(save.error)(f"{directory} was not saved: {save.error}") from save.error

    def load(self, path: str, map_location: Any = None) -> Any:
        """What was saved as this file, verified."""
        step, rank = follow(path)
        root, name = os.path.dirname(os.path.dirname(os.path.abspath(path))), os.path.basename(path)
        state = stillframe.load(root, step, only=f"{_FILES}/{name}", rank=rank, merge=False)[_FILES][name]
        device = torch.device(map_location) if isinstance(map_location, str | torch.device) else torch.device("cpu")
        return from_leaves(state, device, self._allow_pickle, _ALLOW, (name,))

    def wait(self, persist: bool = True) -> None:
        """Until everything is committed.  Raises: the error of a save that failed, once."""
        for save in self._saves.values():
            with contextlib.suppress(StillframeError):
                save.wait("committed" if persist else "staged")
        self._tell_failure()

    def fence(self) -> None:
        """DeepSpeed calls it before an update: it may change state before the hook of the optimizer is called."""
        if self._root is not None:
            self._root.checkpointer.fence()

    def settle(self, directory: str) -> None:
        """Before a load: wait, on every rank, until the saves to it are committed, also those of a run just killed."""
        try:
            self.wait()
        except StillframeError as error:
            logger.warning("%s", error)
        is_root = [kind_of(directory) == "directory" and bool(stillframe.Catalog(directory).step_dirs())]
        dist.broadcast_object_list(is_root)
        if is_root[0]:
            with contextlib.suppress(BusyError):  # another run trains there: its keepers are alive, and publish
                open_root(directory, *seat(), *self._how)
        dist.barrier()


@contextlib.contextmanager
def _together() -> Iterator[None]:
    """If the body fails on one rank, raise on all: the others would train on, and hang in their next collective."""
    own: Exception | None = None
    try:
        yield
    except Exception as error:
        own = error
    said: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(said, None if own is None else f"{type(own).__name__}: {own}")
    if own is not None:
        raise own
    for rank, word in enumerate(said):
        if word is not None:
            raise StateError(f"rank {rank} could not save: {word}")


def _number(tag: str) -> int:
    """The number at the end of a tag (``global_step100``), the least step for it; 0 if there is none."""
    found = re.search(r"(\d{1,11})$", tag)
    return int(found[1]) if found else 0
