"""The strategies that ``dist_checkpointing.save`` and ``load`` take."""

from __future__ import annotations

import contextlib
import functools
import os
import time
import types
from collections.abc import Callable, Mapping
from typing import Any

import megatron.core
import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.strategies import base
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

from stillframe import Save, spi
from stillframe.errors import ConfigError, FormatError, NotFoundError
from stillframe.integrations.frameworks import check_version, here, together
from stillframe.integrations.megatron.directory import (
    BACKEND,
    COMMON,
    ROOT,
    VERSION,
    Publication,
    number_of,
    pointer_of,
)
from stillframe.integrations.megatron.layout import Filling, described, to_state
from stillframe.open_roots import How, OpenRoot, admitting, close_root, fence, seat
from stillframe.store import files, root_address

_TESTED = "0.16"
_LOOK_S = 0.05


def _check_version() -> None:
    found = types.SimpleNamespace(__name__="megatron-core", __version__=megatron.core.__version__)
    check_version(found, _TESTED, "save with Megatron's own strategies")


class SaveStrategy(base.AsyncSaveShardedStrategy):  # type: ignore[misc]  # mypy is told nothing of Megatron
    """For ``dist_checkpointing.save(…, sharded_strategy=SaveStrategy())``, synchronous or with ``async_sharded_save``.

    The state is copied while training goes on; every optimizer's update waits for that.  What no live parameter or
    optimizer owns is copied at once.  A save has succeeded when it is a checkpoint: every rank's bytes durable.

    root: where the data goes, a directory that all ranks see, or a URL; ``None``: ``_stillframe`` beside the
    directories.  arena: host memory lent for staging, as of :class:`stillframe.Checkpointer`.  storage_options: of an
    object store, as there.  There is no ``keep``: remove a directory, and its data goes after the next save, or when
    this is closed.

    Make one and use it for every save: it remembers whose memory the state is, and reuses its copies.
    Thread: the training thread's, on every rank.  Raises: :class:`ConfigError` for versions that were not tested.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        arena: int | str = "auto",
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        _check_version()
        super().__init__(BACKEND, VERSION)
        if "{node}" in str(root):
            raise ConfigError(
                f"SaveStrategy(root={str(root)!r}): all ranks need to see the root, as they see Megatron's "
                "directories; give a shared directory, or a URL"
            )
        self._root = None if root is None else root_address(root)
        self._how = How(arena, storage_options=storage_options)
        self._live = spi.LiveState()
        self._used: set[str] = set()
        self._last: tuple[Save, Callable[[Save], object]] | None = None
        """Rank 0's last save, and what removes the steps whose directories are gone."""

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        """Blocks until it is committed.  Raises, on every rank if on one: why it failed."""
        self._finish(*self._request(sharded_state_dict, checkpoint_dir))

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        """Request it now; the ``AsyncRequest`` is done when it is committed or has failed.

        Finalizing it raises, on every rank if on one, why it failed.
        """
        save, publication = self._request(sharded_state_dict, checkpoint_dir)
        is_over = torch.zeros(1, dtype=torch.uint8).share_memory_()
        spi.when_over(save, lambda _: is_over.fill_(1))
        return AsyncRequest(wait_over, (is_over, os.getpid()), [lambda: self._finish(save, publication)])

    def close(self) -> None:
        """Let go of the root, which stays open between saves; waits for what was requested.  May be called again."""
        if self._last is not None:
            save, tidy = self._last
            save.then(tidy)
        self._last = None
        while self._used:
            close_root(self._used.pop())

    def _request(self, sharded: Any, checkpoint_dir: Any) -> tuple[Save, Publication | None]:
        if "://" in str(checkpoint_dir):
            raise ConfigError(f"{checkpoint_dir}: give a directory, and SaveStrategy(root=…) the URL for the data")
        directory = os.path.abspath(checkpoint_dir)
        address = self._root or root_address(os.path.join(os.path.dirname(directory), ROOT))
        rank, world_size = seat()
        publication: Publication | None = None
        with contextlib.ExitStack() as stack:

            def begin() -> Any:
                nonlocal publication
                if rank != 0:
                    return None
                common = files.read_file(os.path.join(directory, COMMON))
                publication = Publication(directory, address, self._how.storage_options, common)
                return stack.enter_context(admitting(address, world_size, self._how, least=number_of(directory)))

            admission = together(begin)[0].of(rank)

            def requested() -> tuple[OpenRoot, Save]:
                root = stack.enter_context(admission.enter(address, self._how))
                fence()  # the copies of the state before have been copied away
                state = to_state(sharded, self._live)
                about = None if publication is None else publication.about()
                return root, root.save(admission.ticket, state, metadata=about)

            root, save = here(requested)
        self._used.add(address)
        if publication is not None:
            tidy = functools.partial(publication.tidy, root.run)
            save.then(publication.publish)
            save.then(tidy)
            self._last = save, tidy
        return save, publication

    def _finish(self, save: Save, publication: Publication | None) -> None:
        def finished() -> None:
            save.wait("committed")
            if publication is not None:
                publication.publish(save)  # at the latest; Megatron then writes metadata.json itself, and that is told

        here(finished)


def wait_over(is_over: torch.Tensor, trainer: int) -> None:
    """What Megatron runs in a process of its own: it ends when the save does, or the trainer."""
    while not is_over.item() and os.getppid() == trainer:
        time.sleep(_LOOK_S)


class LoadStrategy(base.LoadShardedStrategy):  # type: ignore[misc]
    """For ``dist_checkpointing.load(…, sharded_strategy=LoadStrategy())``: by any number of ranks, every byte verified.

    weights_only: as ``torch.load`` takes it, for objects that only pickle can hold.  By default no code runs.
    storage_options: of an object store.  Raises: :class:`ConfigError` for versions that were not tested.
    """

    def __init__(self, *, weights_only: bool | None = None, storage_options: Mapping[str, Any] | None = None) -> None:
        _check_version()
        super().__init__()
        self._weights_only, self._storage_options = weights_only, storage_options

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def check_backend_compatibility(self, loaded_backend: Any) -> None:
        if loaded_backend != BACKEND:
            raise ConfigError(
                f"this checkpoint was written as {loaded_backend!r}, not by stillframe: leave sharded_strategy out"
            )

    def check_version_compatibility(self, loaded_version: Any) -> None:
        if loaded_version != VERSION:
            raise FormatError(f"this checkpoint has version {loaded_version!r}; this stillframe knows {VERSION}")

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        """Tensors are read into the memory that they come with.  Every rank calls it.

        Raises, on every rank if on one: :class:`NotFoundError`, :class:`MismatchError`, :class:`IntegrityError`,
        :class:`UnsupportedStateError`, :class:`StorageError`.  Part of the state may have been read then.
        """
        fence()  # what was requested is copied before the loaded values replace it
        wanted = list(nested_values(sharded_state_dict))

        def filled() -> list[Any]:
            with self._reader_of(checkpoint_dir) as reader:
                return Filling(reader, self._weights_only).values(wanted)

        found = {id(each): value for each, value in zip(wanted, here(filled, "load"), strict=True)}
        return dict_list_map_outplace(lambda each: found[id(each)], sharded_state_dict)

    def load_tensors_metadata(self, checkpoint_dir: Any) -> dict[str, Any]:
        with self._reader_of(checkpoint_dir) as reader:
            return described(reader)[0]

    def load_sharded_metadata(self, checkpoint_dir: Any) -> dict[str, Any]:
        with self._reader_of(checkpoint_dir) as reader:
            tensors, objects = described(reader)
            return {**objects, **tensors}

    def _reader_of(self, checkpoint_dir: Any) -> spi.BoxReader:
        directory = os.path.abspath(checkpoint_dir)
        pointer = pointer_of(directory)
        root = pointer.root_from(directory)
        lost = f"{directory} stands for step {pointer.step} in {root}"
        try:
            reader = spi.BoxReader(root, pointer.step, rank=seat()[0], storage_options=self._storage_options)
        except NotFoundError as error:
            raise NotFoundError(f"{lost}: was it moved without its root? ({error})") from error
        if (reader.save.step, reader.save.epoch, reader.save.attempt) != pointer.save:
            reader.close()
            raise NotFoundError(f"{lost}, which another save has taken since")
        return reader


def register() -> None:
    """Let Megatron find the strategies by their name, ``("stillframe", 1)``; then ``load`` needs none.

    May be called again.  Raises: :class:`ConfigError` for versions that were not tested.
    """
    for action, strategy in (
        (base.StrategyAction.SAVE_SHARDED, SaveStrategy()),
        (base.StrategyAction.LOAD_SHARDED, LoadStrategy()),
    ):
        base.register_default_strategy(action, BACKEND, VERSION, strategy)
