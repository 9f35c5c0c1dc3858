"""The strategies that ``dist_checkpointing.save`` and ``load`` take."""

from __future__ import annotations

import atexit
import os
import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import megatron.core
import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.strategies import base
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

from stillframe import Catalog, Keep, Save, Tier, spi
from stillframe.errors import ConfigError, FormatError, NotFoundError
from stillframe.integrations.frameworks import agreed, check_version, here, save_together
from stillframe.integrations.megatron.directory import (
    BACKEND,
    COMMON,
    ROOT,
    VERSION,
    Publication,
    latest,
    newest_in,
    pointer_of,
    remove_unfinished,
)
from stillframe.integrations.megatron.layout import Filling, described, to_state
from stillframe.integrations.megatron.places import OwnDisks, Place, SharedPlace, check_disks, fence
from stillframe.open_roots import How, seat
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
    directories.  There is no ``keep`` for it: remove a directory, and its data goes after the next save, or when this
    is closed.  On the nodes' own disks (``{node}`` in it, or ``shared=False``) a save has succeeded when the first of
    the ``tiers`` has it; without ``tiers``, that is ``_stillframe`` beside the directories.
    tiers, keep, deadline_s: for such disks only, as of :class:`stillframe.Checkpointer`; ``keep`` is ``KeepLast(2)``.
    arena: host memory lent for staging, and storage_options: of an object store, as there.

    Make one and use it for every save: it remembers whose memory the state is, and reuses its copies.
    Thread: the training thread's, on every rank.  Raises: :class:`ConfigError`, also for versions that were not tested.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        tiers: Sequence[Tier] = (),
        keep: Keep | None = None,
        shared: bool | None = None,
        deadline_s: float = 600.0,
        arena: int | str = "auto",
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        _check_version()
        super().__init__(BACKEND, VERSION)
        of_disks = {"arena": arena, "storage_options": storage_options, "deadline_s": deadline_s}
        self._disks = check_disks(root, shared, tiers, keep, of_disks)
        self._root = None if root is None or self._disks is not None else root_address(root)
        self._how = How(arena, storage_options=storage_options)
        self._live = spi.LiveState()
        self._places: dict[str, Place] = {}
        """Those in use, by what they are beside; on disks of the nodes' own there is one."""
        self._last: tuple[Save, Publication] | None = None
        """Rank 0's: it removes the steps whose directories are gone."""

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def latest(self, save_dir: str | os.PathLike[str]) -> str | None:
        """As :func:`latest`, of what this saves.  On the nodes' own disks it first lets the tier have what they have.

        Every rank calls it, before training.  Raises also what a ``Checkpointer`` and its ``restore`` raise.
        """
        above = os.path.abspath(save_dir)
        if self._disks is None:
            return latest(above, self._root, storage_options=self._how.storage_options)
        place = self._place(above)
        assert isinstance(place, OwnDisks)
        place.settle()

        def find() -> str | None:
            if files.kind_of(above) == "nothing":
                return None
            remove_unfinished(above)
            return newest_in(Catalog(place.root, storage_options=place.storage_options), above)

        return agreed(find)

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        """Blocks until it is committed.  Raises, on every rank if on one: why it failed."""
        self._finish(*self._request(sharded_state_dict, checkpoint_dir))

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        """Request it now; the ``AsyncRequest`` is done when it is committed or has failed.

        Finalizing it raises, on every rank if on one, why it failed.
        """
        save, published = self._request(sharded_state_dict, checkpoint_dir)
        is_over = torch.zeros(1, dtype=torch.uint8).share_memory_()
        _awaited[save] = is_over
        spi.when_over(save, _end_wait)
        return AsyncRequest(wait_over, (is_over, os.getpid()), [lambda: self._finish(save, published)])

    def close(self) -> None:
        """Let go of the root, which stays open between saves; waits for what was requested.  May be called again."""
        if self._last is not None:
            save, publication = self._last
            save.then(publication.tidy)
        self._last = None
        while self._places:
            self._places.popitem()[1].close()

    def _place(self, above: str) -> Place:
        """Where the data of the directories in ``above`` goes.  Every rank asks.  Blocks if it has to be opened."""
        beside = root_address(os.path.join(above, ROOT))
        if self._disks is None:
            address = self._root or beside
            return self._places.setdefault(address, SharedPlace(address, self._how))
        address = beside if not self._disks.tiers else ""
        if self._places and address not in self._places:
            raise ConfigError(
                f"the data of {above} and that of {os.path.dirname(next(iter(self._places)))} cannot share "
                f"{self._disks.root}: give each a SaveStrategy with a root of its own, or all of them tiers=…"
            )
        if address not in self._places:
            self._places[address] = OwnDisks(self._disks, beside)
        return self._places[address]

    def _request(self, sharded: Any, checkpoint_dir: Any) -> tuple[Save, Callable[[Save], object]]:
        """The save, and what waits until it stands for a checkpoint; on rank 0 that makes it one."""
        if "://" in str(checkpoint_dir):
            raise ConfigError(f"{checkpoint_dir}: give a directory, and SaveStrategy(root=…) the URL for the data")
        directory = os.path.abspath(checkpoint_dir)
        place = self._place(os.path.dirname(directory))
        place.make_room()
        publication: Publication | None = None

        def begin() -> None:
            nonlocal publication
            if seat()[0] == 0:
                publication = Publication(directory, place, files.read_file(os.path.join(directory, COMMON)))

        def state(_word: Any, _begun: list[None]) -> tuple[Any, dict[str, Any]]:
            fence()  # the copies of the state before have been copied away
            return to_state(sharded, self._live), {"metadata": None if publication is None else publication.about()}

        save = save_together(place, directory, begin, state)
        published = place.wait if publication is None else publication.publish
        save.then(published)
        if publication is not None:
            save.then(publication.tidy)
            self._last = save, publication
        return save, published

    def _finish(self, save: Save, published: Callable[[Save], object]) -> None:
        here(lambda: published(save))  # at the latest; Megatron then writes metadata.json itself, and that is told


_awaited: dict[Save, torch.Tensor] = {}
"""What the processes of :func:`wait_over` look at."""
os.register_at_fork(after_in_child=_awaited.clear)


def _end_wait(save: Save) -> None:
    is_over = _awaited.pop(save, None)
    if is_over is not None:
        is_over.fill_(1)


@atexit.register  # after multiprocessing has registered that it waits for these processes, so it is called before
def _end_waits() -> None:
    for save in list(_awaited):
        _end_wait(save)


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
