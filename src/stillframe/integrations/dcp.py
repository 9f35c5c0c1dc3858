"""torch.distributed.checkpoint on stillframe's storage::

    dcp.save(state_dict, storage_writer=Writer("runs/7b"))
    dcp.load(state_dict, storage_reader=Reader("runs/7b"))

    writer = Writer("runs/7b")
    dcp.async_save(state_dict, storage_writer=writer, async_stager=Stager(writer))   # returns at once

What is written is an ordinary checkpoint: the ``stillframe`` command, :func:`stillframe.load` and
``Checkpointer.restore`` read it, and :class:`Reader` reads any that a ``Checkpointer`` wrote.
"""

from __future__ import annotations

import dataclasses
import io
import os
import threading
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult

from stillframe import ELSEWHERE, PartReader, TensorBox, register_leaf
from stillframe.errors import ConfigError, StateError, UnsupportedStateError
from stillframe.integrations.lazy import Stager, take_staging
from stillframe.integrations.runs import close_run, open_run, seat
from stillframe.state.torch_internals import flatten_state_dict

__all__ = ["Reader", "Stager", "Writer"]

_PathLike = str | os.PathLike[str]
_thread = threading.local()


class _Place:
    """What DCP asks of readers and writers alike."""

    def __init__(self, path: _PathLike, *, step: int | None = None) -> None:
        super().__init__()
        self.path = os.path.abspath(os.fspath(path))
        self.step = step

    @property
    def checkpoint_id(self) -> str:
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: _PathLike) -> bool:
        return "://" not in os.fspath(checkpoint_id)

    def reset(self, checkpoint_id: _PathLike | None = None) -> None:
        if checkpoint_id is not None:
            self.path = os.path.abspath(os.fspath(checkpoint_id))

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan


class Opaque:
    """Bytes that a planner of its own made of something: only such a planner gets them back."""

    def __init__(self, data: bytes) -> None:
        self.data = data


register_leaf(
    Opaque,
    "dcp.bytes",
    lambda opaque: torch.frombuffer(bytearray(opaque.data or b"\0"), dtype=torch.uint8)[: len(opaque.data)],
    lambda tensor: Opaque(tensor.numpy().tobytes()),
)


class Writer(_Place, StorageWriter):
    """Writes to the stillframe root ``path``: each save is its next step, or ``step``.

    A save has succeeded when it is a checkpoint: every rank's bytes durable, the manifest published.  What pickle alone
    could hold is refused, with its path.  All ranks save together, or each alone (``no_dist=True``).  ``keep``:
    retention, such as ``KeepLast(3)``.

    Ranks count the steps each for itself: saves of DCP's own stagers that overlap need a ``step``.
    """

    def __init__(self, path: _PathLike, *, step: int | None = None, keep: Any = None) -> None:
        super().__init__(path, step=step)
        self.keep = keep

    def close(self) -> None:
        """Let go of the root, which stays open between saves; may be called again."""
        close_run(self.path)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.path)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise ConfigError("use_collectives=False: a stillframe checkpoint is one of all ranks; leave it out")

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        _, world_size = seat()
        if len(plans) not in (1, world_size):
            raise ConfigError(
                f"process_group: {len(plans)} of {world_size} ranks; save with a group of all ranks, or no_dist=True"
            )
        # Kept by plan caching, and still right then: who this rank is does not change.
        return [dataclasses.replace(plan, storage_data=(rank, len(plans))) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        staging = take_staging()
        try:
            rank, world_size = plan.storage_data
            run = open_run(self.path, rank, world_size, keep=self.keep)
            step = staging.step if staging is not None and staging.is_of(run) else run.take_step(self.step)
            save = run.save(step, _state(plan, planner))
        except BaseException as error:
            if staging is not None:
                staging.failed(error)
            raise
        if staging is not None:
            staging.requested(save, run)
        save.wait("sealed")
        _thread.save = save  # finish() comes on the same thread, and other saves may on others
        written: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        written.set_result([WriteResult(item.index, item.tensor_storage_size() or 0, None) for item in plan.items])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        _thread.save.wait("committed")


class Reader(_Place, StorageReader):
    """Reads a step (the newest if none is given) of the stillframe root ``path``, every byte verified.

    Written by :class:`Writer` or by a ``Checkpointer``, by any number of ranks: names are those that DCP gives to a
    nested state (``model.layers.0.weight``).
    """

    def __init__(self, path: _PathLike, *, step: int | None = None) -> None:
        super().__init__(path, step=step)
        self._reader: PartReader | None = None
        self._flat: dict[str, Any] = {}

    def read_metadata(self) -> Metadata:
        if os.path.exists(os.path.join(self.path, ".metadata")):
            raise ConfigError(
                f"{self.path} was written by DCP itself: read it with FileSystemReader, or convert it once with "
                "`stillframe import`"
            )
        if self._reader is not None:
            self._reader.close()
        self._reader = PartReader(self.path, self.step, rank=seat()[0])
        outline = self._reader.outline
        self._flat, paths = flatten_state_dict(outline if isinstance(outline, dict) else {"": outline})
        return Metadata({name: self._described(value) for name, value in self._flat.items()}, planner_data=paths)

    def _described(self, value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
        if not isinstance(value, torch.Tensor):
            return BytesStorageMetadata()
        assert self._reader is not None
        chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(shape)) for at, shape in self._reader.boxes(value)]
        return TensorStorageMetadata(TensorProperties(dtype=value.dtype), value.shape, chunks)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        assert self._reader is not None
        return dataclasses.replace(plan, storage_data=self._reader.step)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        steps = sorted({plan.storage_data for plan in plans})
        if len(steps) > 1:
            raise StateError(f"ranks see different newest steps in {self.path}, {steps}: load again, or give a step")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        assert self._reader is not None
        with self._reader as reader:
            tensors: list[tuple[ReadItem, torch.Tensor, torch.Tensor]] = []
            for item in plan.items:
                value = self._flat[item.storage_index.fqn]
                if item.type is LoadItemType.BYTE_IO:
                    planner.load_bytes(item, _as_bytes(item.storage_index.fqn, value, planner))
                    continue
                target = planner.resolve_tensor(item).detach()
                into = target if target.dtype == value.dtype else torch.empty_like(target, dtype=value.dtype)
                chunk = item.storage_index.offset or (0,) * value.dim()
                reader.want(value, [a + b for a, b in zip(chunk, item.storage_offsets, strict=True)], into)
                tensors.append((item, target, into))
            reader.read()
            for item, target, into in tensors:
                if into is not target:
                    target.copy_(into)
                planner.commit_tensor(item, target)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done


def _state(plan: SavePlan, planner: SavePlanner) -> dict[str, Any]:
    """What this rank writes, nested as it was before DCP gave every leaf a name of its own."""
    flat: dict[str, Any] = {}
    for item in plan.items:
        name = item.index.fqn
        if name in flat:
            raise UnsupportedStateError(f"{name!r} lies on one rank in several pieces: give it as a DTensor")
        flat[name] = _bytes(item, planner) if item.type is WriteItemType.BYTE_IO else _tensor(item, planner)
    paths = plan.planner_data if isinstance(plan.planner_data, dict) else {}
    _, world_size = plan.storage_data
    nest = _Nest()
    for name, value in flat.items():
        at = nest
        *above, last = paths.get(name, (name,))
        for key in above:
            at = at.setdefault(key, _Nest())
        at[last] = value
    return dict(nest.unfolded(has_gaps=world_size > 1))


class _Nest(dict[Any, Any]):
    """A dict or a list in the making: DCP makes text of all keys but a list's indexes."""

    def unfolded(self, has_gaps: bool) -> Any:
        """``has_gaps``: other ranks may have items of the same lists."""
        items = {key: value.unfolded(has_gaps) if isinstance(value, _Nest) else value for key, value in self.items()}
        if not items or not all(isinstance(key, int) for key in items):
            return items
        return [items.get(at, ELSEWHERE) for at in range(max(items) + 1 + has_gaps)]


def _tensor(item: WriteItem, planner: SavePlanner) -> torch.Tensor | TensorBox:
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, torch.Tensor)
    assert item.tensor_data is not None
    tensor, whole, chunk = tensor.detach(), item.tensor_data.size, item.tensor_data.chunk
    return tensor if tuple(tensor.shape) == tuple(whole) else TensorBox(tensor, whole, chunk.offsets)


def _bytes(item: WriteItem, planner: SavePlanner) -> Any:
    """The value itself where the planner would only pickle it; else what the planner made of it."""
    own = DefaultSavePlanner.resolve_data, DefaultSavePlanner.transform_object
    if isinstance(planner, DefaultSavePlanner) and (type(planner).resolve_data, type(planner).transform_object) == own:
        return planner.lookup_object(item.index)
    data = planner.resolve_data(item)
    assert isinstance(data, io.BytesIO)
    return Opaque(data.getvalue())


def _as_bytes(name: str, value: Any, planner: LoadPlanner) -> io.BytesIO:
    if isinstance(value, Opaque):
        if type(planner).load_bytes is DefaultLoadPlanner.load_bytes:
            raise UnsupportedStateError(
                f"{name!r} holds bytes that a planner of its own wrote: load it with the planner that understands them "
                "(DCP's default one would unpickle them)"
            )
        return io.BytesIO(value.data)
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data
