"""The checkpoint engine: collects the files that DeepSpeed hands over, and saves them as one step."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import stillframe
from stillframe.errors import ConfigError, ExistsError, StateError, StillframeError
from stillframe.integrations.deepspeed.files import write_object
from stillframe.integrations.deepspeed.pickled import from_leaves, to_leaf
from stillframe.integrations.deepspeed.pointers import CONTENT, follow
from stillframe.integrations.open_roots import OpenRoot, admit, fence, live_state, seat, settle_root
from stillframe.store.files import is_taken, kind_of

logger = logging.getLogger("stillframe")

_KEY = "datastates_ckpt"
_ALLOW = f'put "allow_pickle": true into "{_KEY}" of the DeepSpeed config'
_FILES = "files"
_T = TypeVar("_T")


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
        self._saves: list[tuple[str, stillframe.Save]] = []
        """Saves whose end nobody has been told of, each with the directory of its tag."""

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
        """Every rank has handed over everything: request the save.  The tag takes the place of one of the same name.

        Raises, on every rank if on one: the error of a save before; :class:`ExistsError`; :class:`ConfigError`;
        :class:`UnsupportedStateError`.
        """
        info, files = self._info, self._files
        self.drop()
        rank, world_size = seat()
        arena, keep = self._how
        directory = os.path.abspath(os.path.join(info.save_dir, info.tag))

        def begin() -> tuple[Any, int]:
            self._tell_failure()
            self._check_tag(info.tag, directory)
            least = _number(info.tag)
            admitted = admit(info.save_dir, world_size, least=least, arena=arena, keep=keep) if rank == 0 else None
            return admitted, len(files)

        said = _together(begin)
        admission = said[0][0][rank]
        total = sum(count for _, count in said)
        label = stillframe.Label(info.tag, tuple(files), CONTENT, bool(info.save_latest), total)
        with contextlib.ExitStack() as stack:

            def prepare() -> Any:
                self._root = stack.enter_context(admission.enter(info.save_dir, arena, keep))
                fence()  # the copies of the state before have been copied away
                return {"tag": info.tag, _FILES: live_state(info.save_dir).state(files, self._encode)}

            state = _here(prepare)  # before the save: a rank that saved would wait for one that could not even try
            root = self._root
            assert root is not None
            self._saves.append((directory, _here(lambda: root.save(admission.ticket, state, label))))

    def _check_tag(self, tag: str, directory: str) -> None:
        stillframe.Label(tag)
        if is_taken(directory) and not is_taken(os.path.join(directory, "label.json")):
            raise ExistsError(f"{directory} exists, and is not stillframe's: choose another tag, or remove it")

    def _encode(self, path: tuple[Any, ...], value: Any) -> Any:
        return to_leaf(path, value, self._allow_pickle, _ALLOW)

    def _tell_failure(self) -> None:
        """Raises the error of the first save that failed, once; forgets those that are committed."""
        for directory, save in list(self._saves):
            if save.phase == "committed" or save.error is not None:
                self._saves.remove((directory, save))
            if save.error is not None:
                raise type(save.error)(f"{directory} was not saved: {save.error}") from save.error

    def load(self, path: str, map_location: Any = None) -> Any:
        """What was saved as this file, verified."""
        save, rank = follow(path)
        root, name = os.path.dirname(os.path.dirname(os.path.abspath(path))), os.path.basename(path)
        state = stillframe.load(root, save, only=f"{_FILES}/{name}", rank=rank, merge=False)[_FILES][name]
        device = torch.device(map_location) if isinstance(map_location, str | torch.device) else torch.device("cpu")
        return from_leaves(state, device, self._allow_pickle, _ALLOW, (name,))

    def wait(self, persist: bool = True) -> None:
        """Until everything is committed.  Raises: the error of a save that failed, once."""
        for _, save in self._saves:
            with contextlib.suppress(StillframeError):
                save.wait("committed" if persist else "staged")
        self._tell_failure()

    def fence(self) -> None:
        """DeepSpeed calls it before an update: it may change state before the hook of the optimizer is called."""
        if self._root is not None:
            self._root.run.fence()

    def settle(self, directory: str) -> None:
        """Before a load: wait, on every rank, until the saves to it are committed, also those of a run just killed."""
        try:
            self.wait()
        except StillframeError as error:
            logger.warning("%s", error)
        with contextlib.suppress(StillframeError):  # another run trains there: its keepers are alive, and publish
            rank, world_size = seat()
            if rank == 0 and kind_of(directory) == "directory" and stillframe.Catalog(directory).look().saves:
                settle_root(directory, world_size, *self._how)
        dist.barrier()


def _together(work: Callable[[], _T]) -> list[_T]:
    """What it returns on every rank, in their order.

    If it fails on one rank, raises on all: the others would train on, and hang in their next collective.
    """
    own: Exception | None = None
    value: _T | None = None
    try:
        value = work()
    except Exception as error:
        own = error
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, (value, None if own is None else f"{type(own).__name__}: {own}"))
    if own is not None:
        raise own
    for rank, (_, word) in enumerate(said):
        if word is not None:
            raise StateError(f"rank {rank} could not save: {word}")
    return [each for each, _ in said]


def _here(work: Callable[[], _T]) -> _T:
    """What it returns on this rank; raises on all ranks if it fails on one."""
    found: list[_T] = []
    _together(lambda: found.append(work()))
    return found[0]


def _number(tag: str) -> int:
    """The number at the end of a tag (``global_step100``), the least step for it; 0 if there is none."""
    found = re.search(r"(\d{1,11})$", tag)
    return int(found[1]) if found else 0
