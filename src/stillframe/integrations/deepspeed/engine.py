"""The checkpoint engine: collects the files that DeepSpeed hands over, and saves them as one step."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Any

import torch

from stillframe import KeepLast, Save, spi
from stillframe.errors import ConfigError, ExistsError, FormatError, NotFoundError, StillframeError
from stillframe.integrations.deepspeed.pointers import FILES, RUN, content_of, read
from stillframe.integrations.frameworks import SharedRoot, here, save_together
from stillframe.integrations.pickled import to_leaves
from stillframe.open_roots import Admission, How, fence, seat, settle_root
from stillframe.store import directory_address
from stillframe.store.files import is_taken, kind_of, replacing

logger = logging.getLogger("stillframe")


class CheckpointEngine:
    """DeepSpeed calls it with the files of a tag; :meth:`finish` saves them.  Thread: the training thread's."""

    def __init__(self, deepspeed_config: Any, rank: int) -> None:
        config = deepspeed_config.datastates_config.config
        known = {"host_cache_size": 0, "keep_last": 0, "allow_pickle": False}
        given = {**known, **(config if isinstance(config, dict) else {})}
        size, count, allows = (given[name] for name in known)
        is_right = type(size) in (int, float) and size >= 0 and type(count) is int and count >= 0
        if not is_right or not isinstance(allows, bool) or given.keys() != known.keys():
            raise ConfigError(f'datastates_ckpt: {config!r}: give "host_cache_size" (GiB), "keep_last", "allow_pickle"')
        if getattr(deepspeed_config, "use_node_local_storage", False):
            raise ConfigError('"use_node_local_storage": stillframe needs a save_dir that all ranks see')
        self._advice = None if allows else 'put "allow_pickle": true into "datastates_ckpt" of the DeepSpeed config'
        arena = f"auto:{int(size * 2**20)}KiB" if size else "auto"
        self._how = How(arena, KeepLast(count) if count else None)
        self._live = spi.LiveState()
        self._saves: dict[Save, str] = {}
        """Saves whose end nobody has been told of, each with the directory of its tag."""
        self.drop()

    def drop(self) -> None:
        """Forget the checkpoint that was begun."""
        self.info: Any = None
        """What DeepSpeed says of that checkpoint: ``save_dir``, ``tag``, ``save_latest``."""
        self._directory = ""
        self._files: dict[str, Any] = {}
        self.error: Exception | None = None
        """Why this rank cannot hand over its part of the checkpoint that was begun."""

    def create(self, info: Any) -> None:
        """A checkpoint begins: DeepSpeed will hand over the files of this rank, perhaps none."""
        directory_address(info.save_dir)
        self.info, self._directory, self._files = info, os.path.join(info.save_dir, info.tag), {}

    def save(self, state_dict: Any, path: str) -> None:
        """Take a file of the tag that was begun; write any other (of ``save_16bit_model``) with ``torch.save``."""
        if self.is_of_tag(os.path.dirname(path)):
            self._files[os.path.basename(path)] = state_dict
        else:
            with replacing(Path(path)) as partial:
                torch.save(state_dict, partial)

    def is_of_tag(self, directory: str) -> bool:
        return self.info is not None and os.path.abspath(directory) == os.path.abspath(self._directory)

    def finish(self) -> None:
        """Every rank has handed over everything: request the save.  The tag takes the place of one of the same name.

        Raises, on every rank if on one: the error of a save before; :class:`ExistsError`; :class:`ConfigError`;
        :class:`UnsupportedStateError`.
        """
        info, files, error, directory = self.info, self._files, self.error, os.path.abspath(self._directory)
        self.drop()

        def begin() -> int:
            if error is not None:
                raise error
            self._tell_failure()
            spi.Label(info.tag)
            if is_taken(directory) and not is_taken(os.path.join(directory, "label.json")):
                raise ExistsError(f"{directory} exists, and is not stillframe's: choose another tag, or remove it")
            return len(files)

        def state(admission: Admission, counts: list[int]) -> tuple[Any, dict[str, Any]]:
            fence()  # the copies of the state before have been copied away
            label = spi.Label(info.tag, tuple(files), content_of(admission.run), bool(info.save_latest), sum(counts))
            contents = self._live.state(to_leaves(files, self._advice))
            return {"tag": info.tag, RUN: admission.run, FILES: contents}, {"label": label}

        save = save_together(SharedRoot(info.save_dir, self._how), info.tag, begin, state)
        self._saves[save] = directory

    def _tell_failure(self) -> None:
        """Raises the error of the first save that failed, once; forgets those that are committed."""
        for save, directory in list(self._saves.items()):
            if save.phase == "committed" or save.error is not None:
                del self._saves[save]
            if save.error is not None:
                raise type(save.error)(f"{directory} was not saved: {save.error}") from save.error

    def commit(self, info: Any) -> bool:
        """Only ``save_16bit_model`` comes here, and has written its file."""
        error = self.error
        self.drop()
        if error is not None:
            raise error
        return True

    def get_commit_info(self) -> None:
        """DeepSpeed asks right before an update: it may change state before the hook of the optimizer is called."""
        fence()

    def load(self, path: str, map_location: Any = None) -> Any:
        """What was saved as this file, verified; also a file of DeepSpeed's own, if pickle is allowed."""
        return read(path, map_location, self._advice)

    def cleanup(self) -> None:
        """Wait until everything is committed; may be called again.  Raises: the error of a save that failed, once."""
        for save in self._saves:
            with contextlib.suppress(StillframeError):
                save.wait("committed")
        self._tell_failure()

    def settle(self, directory: str, tag: str | None, is_universal: bool) -> None:
        """Before a load: wait, on every rank, until the saves to it are committed: of this engine, of any other of this
        process, and of a run just killed.

        Raises, on every rank: :class:`NotFoundError` if there is no such tag; :class:`StorageError` if that, or whether
        there is a ``latest``, cannot be determined: DeepSpeed would take it for a fresh start; :class:`FormatError` for
        a universal checkpoint, which DeepSpeed itself unpickles, unless pickle is allowed.
        """
        if is_universal and self._advice is not None:
            raise FormatError(f"loading a universal checkpoint runs code from it: if you trust it, {self._advice}")
        directory_address(directory)

        def settled() -> None:
            with contextlib.suppress(StillframeError):  # it has been logged
                self.cleanup()
            try:
                if seat()[0] == 0:
                    settle_root(directory, self._how)
            except StillframeError as error:  # of one who may not write there, say: what is there can be read
                logger.warning("what was saved to %s was not waited for: %s", directory, error)

        def looked() -> None:
            if kind_of(os.path.join(directory, tag or "latest")) == "nothing" and tag is not None:
                raise NotFoundError(f"there is no tag {tag!r} in {directory}")

        here(settled, "load")
        here(looked, "load")
