"""How ``dcp.load`` reads a checkpoint of stillframe."""

from __future__ import annotations

import dataclasses
import io
import os
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader

from stillframe import BoxReader
from stillframe.errors import ConfigError, StateError, UnsupportedStateError
from stillframe.integrations.dcp.place import Opaque, PathLike, Place
from stillframe.integrations.open_roots import seat
from stillframe.state.torch_internals import flatten_state_dict
from stillframe.store import files


class Reader(Place, StorageReader):
    """Reads a step (the newest if none is given) of the stillframe root ``path``, every byte verified.

    Written by :class:`Writer` or by a ``Checkpointer``, by any number of ranks: names are those that DCP gives to a
    nested state (``model.layers.0.weight``).
    """

    def __init__(self, path: PathLike, *, step: int | None = None) -> None:
        super().__init__(path, step=step)
        self._reader: BoxReader | None = None
        self._flat: dict[str, Any] = {}

    def read_metadata(self) -> Metadata:
        if files.is_taken(os.path.join(self.path, ".metadata")):
            raise ConfigError(
                f"{self.path} was written by DCP itself: read it with FileSystemReader, or convert it once with "
                "`stillframe import`"
            )
        if self._reader is not None:
            self._reader.close()
        self._reader = BoxReader(self.path, self.step, rank=seat()[0])
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
