"""How ``dcp.load`` reads a checkpoint of stillframe."""

from __future__ import annotations

import dataclasses
import io
import uuid
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader

from stillframe.errors import StateError, UnsupportedStateError
from stillframe.integrations.dcp.place import PathLike, Place, id_of
from stillframe.integrations.pickled import Opaque, from_leaves
from stillframe.open_roots import seat
from stillframe.spi import BoxReader, mapped
from stillframe.state.torch_internals import flatten_state_dict

_ALLOW = "give Reader(…, allow_pickle=True)"


class Reader(Place, StorageReader):
    """Reads a step (the newest if none is given) of the stillframe root ``path``, every byte verified.

    Written by :class:`Writer` or by a ``Checkpointer``, by any number of ranks: names are those that DCP gives to a
    nested state (``model.layers.0.weight``), or, for planners with ``flatten_state_dict=False``, its top-level keys.
    ``allow_pickle``: unpickle what ``Writer(allow_pickle=True)`` pickled, which runs code from the checkpoint.
    ``storage_options``: of an object store, as for ``Checkpointer``.
    """

    def __init__(
        self,
        path: PathLike,
        *,
        step: int | None = None,
        allow_pickle: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(path, step, storage_options)
        self.allow_pickle = allow_pickle
        self.load_id: str | None = None
        self._reader: BoxReader | None = None
        self._flat: dict[str, Any] = {}
        self._whole: dict[str, Any] = {}

    def read_metadata(self) -> Metadata:
        self.refuse_dcps_own("read it with FileSystemReader, or convert it once with `stillframe import`")
        if self._reader is not None:
            self._reader.close()
        self._reader = BoxReader(self.path, self.step, rank=seat()[0], storage_options=self.storage_options)
        outline = self._reader.outline
        nested = outline if isinstance(outline, dict) else {"": outline}
        self._flat, paths = flatten_state_dict(nested)
        self._whole = {str(key): value for key, value in nested.items()}
        described = Described({name: self._described(value) for name, value in self._flat.items()}, self._whole)
        self.load_id = uuid.uuid4().hex
        about = StorageMeta(self.path, save_id=id_of(self._reader.save), load_id=self.load_id)
        return Metadata(described, planner_data=paths, storage_meta=about, version=CURRENT_DCP_VERSION)

    def _described(self, value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
        if not isinstance(value, torch.Tensor):
            return BytesStorageMetadata()
        assert self._reader is not None
        self._reader.check_filled(value)  # DCP would leave what is missing as it is
        chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(shape)) for at, shape in self._reader.boxes(value)]
        return TensorStorageMetadata(TensorProperties(dtype=value.dtype), value.shape, chunks)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        assert self._reader is not None
        return dataclasses.replace(plan, storage_data=id_of(self._reader.save))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        seen = sorted({plan.storage_data for plan in plans})
        if len(seen) > 1:  # also of one step: a run may have gone back, and saved it again
            raise StateError(f"ranks see different checkpoints in {self.path}, {', '.join(seen)}: load again")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        assert self._reader is not None
        is_flat = getattr(planner, "flatten_state_dict", True)
        named = self._flat if is_flat else {**self._flat, **self._whole}
        with self._reader as reader:
            tensors: list[tuple[ReadItem, torch.Tensor, torch.Tensor]] = []
            values: list[tuple[ReadItem, Any]] = []
            for item in plan.items:
                value = named[item.storage_index.fqn]
                if item.type is LoadItemType.BYTE_IO:
                    values.append((item, _filled(value, reader)))
                    continue
                target = planner.resolve_tensor(item).detach()
                into = target if target.dtype == value.dtype else torch.empty_like(target, dtype=value.dtype)
                chunk = item.storage_index.offset or (0,) * value.dim()
                reader.want(value, [a + b for a, b in zip(chunk, item.storage_offsets, strict=True)], into)
                tensors.append((item, target, into))
            reader.read()
            for item, value in values:
                name = item.storage_index.fqn
                value = from_leaves(value, "cpu", not self.allow_pickle, _ALLOW, (name,))
                planner.load_bytes(item, _as_bytes(name, value, planner, self.allow_pickle))
            for item, target, into in tensors:
                if into is not target:
                    target.copy_(into)
                planner.commit_tensor(item, target)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done


class Described(dict[str, Any]):
    """What each flat name stands for; a top-level key that stands for several of them can be looked up, too."""

    def __init__(self, flat: dict[str, Any], whole: dict[str, Any]) -> None:
        super().__init__(flat)
        self._whole = set(whole)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self._whole

    def __missing__(self, name: str) -> BytesStorageMetadata:
        if name not in self._whole:
            raise KeyError(name)
        return BytesStorageMetadata()


def _filled(node: Any, reader: BoxReader) -> Any:
    """The same nesting; its tensors, which are without data in the outline, get theirs when ``reader`` reads."""

    def leaf(_path: Any, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_meta:
            return value
        into = torch.empty(value.shape, dtype=value.dtype)
        reader.want(value, (0,) * value.dim(), into)
        return into

    return mapped(node, leaf)


def _as_bytes(name: str, value: Any, planner: LoadPlanner, allow_pickle: bool) -> io.BytesIO:
    if isinstance(value, Opaque):
        if type(planner).load_bytes is DefaultLoadPlanner.load_bytes:
            raise UnsupportedStateError(
                f"{name!r} holds bytes that a planner of its own wrote: load it with the planner that understands them "
                "(DCP's default one would unpickle them)"
            )
        if isinstance(planner, DefaultLoadPlanner) and not allow_pickle:
            raise UnsupportedStateError(
                f"{name!r} holds bytes that a planner of its own wrote, and {type(planner).__name__} may hand them on "
                f"to DCP's default planner, which would unpickle them: to allow that, {_ALLOW}"
            )
        return io.BytesIO(value.data)
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data
