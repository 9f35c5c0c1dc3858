"""How ``dcp.load`` reads a checkpoint of stillframe."""

from __future__ import annotations

import dataclasses
import io
import uuid
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader

from stillframe.errors import StateError, UnsupportedStateError
from stillframe.integrations.dcp.place import Place, refuse_dcps_own
from stillframe.integrations.pickled import Opaque, from_leaves
from stillframe.open_roots import seat
from stillframe.spi import BoxReader
from stillframe.state.torch_internals import flatten_state_dict

_ALLOW = "give Reader(…, allow_pickle=True)"


class Reader(Place, StorageReader):
    """Reads a step (the newest if none is given) of the stillframe root ``path``, every byte verified.

    Written by :class:`Writer` or by a ``Checkpointer``, by any number of ranks: names are those that DCP gives to a
    nested state (``model.layers.0.weight``), or, for planners with ``flatten_state_dict=False``, its top-level keys.
    ``allow_pickle``: unpickle what ``Writer(allow_pickle=True)`` pickled, which runs code from the checkpoint.
    ``storage_options``: of an object store, as for ``Checkpointer``.
    """

    _reader: BoxReader | None = None

    def read_metadata(self) -> dcp.Metadata:
        refuse_dcps_own(self.checkpoint_id, "read it with FileSystemReader, or convert it with `stillframe import`")
        if self._reader is not None:
            self._reader.close()
        reader = self._reader = BoxReader(self.path, self.step, rank=seat()[0], storage_options=self.storage_options)
        nested = reader.outline if isinstance(reader.outline, dict) else {"": reader.outline}
        self._flat, paths = flatten_state_dict(nested)
        self._whole = {str(key): value for key, value in nested.items()}
        described = Described({name: _described(value, reader) for name, value in self._flat.items()}, self._whole)
        self.load_id, self.save_id = uuid.uuid4().hex, str(reader.save)
        return dcp.Metadata(described, paths, storage_meta=self.storage_meta(), version=CURRENT_DCP_VERSION)

    def set_up_storage_reader(self, metadata: dcp.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return dataclasses.replace(plan, storage_data=self.save_id)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        seen = sorted({plan.storage_data for plan in plans})
        if len(seen) > 1:  # also of one step: a run may have gone back, and saved it again
            raise StateError(f"ranks see different checkpoints in {self.path}, {' and '.join(seen)}: load again")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[Any]:
        assert self._reader is not None
        named = self._flat if getattr(planner, "flatten_state_dict", True) else {**self._flat, **self._whole}
        with self._reader as reader:
            found: list[tuple[ReadItem, Any]] = []
            for item in plan.items:
                value = named[item.storage_index.fqn]
                if item.type is LoadItemType.BYTE_IO:
                    found.append((item, reader.want_all(value)))
                    continue
                target = planner.resolve_tensor(item).detach()
                chunk = item.storage_index.offset or (0,) * value.dim()
                reader.want_as(value, [a + b for a, b in zip(chunk, item.storage_offsets, strict=True)], target)
                found.append((item, target))
            reader.read()
            for item, value in found:
                if item.type is LoadItemType.BYTE_IO:
                    planner.load_bytes(item, self._bytes_of(item.storage_index.fqn, value, planner))
                else:
                    planner.commit_tensor(item, value)
        return torch.futures.collect_all([])  # done

    def _bytes_of(self, name: str, stored: Any, planner: LoadPlanner) -> io.BytesIO:
        """As the planner that saved it would have written it.  Raises :class:`UnsupportedStateError`."""
        value = from_leaves(stored, "cpu", not self.allow_pickle, _ALLOW, (name,))
        if not isinstance(value, Opaque):
            data = io.BytesIO()
            torch.save(value, data)
            return io.BytesIO(data.getvalue())
        is_default = type(planner).load_bytes is DefaultLoadPlanner.load_bytes
        if is_default or (isinstance(planner, DefaultLoadPlanner) and not self.allow_pickle):
            raise UnsupportedStateError(
                f"{name!r} holds bytes that a planner of its own wrote, which DCP's default planner would unpickle: "
                "load it with the planner that understands them, and if that one may hand them on to the default one, "
                f"{_ALLOW}"
            )
        return io.BytesIO(value.data)


def _described(value: Any, reader: BoxReader) -> dcp.TensorStorageMetadata | dcp.BytesStorageMetadata:
    if not isinstance(value, torch.Tensor):
        return dcp.BytesStorageMetadata()
    reader.check_filled(value)  # DCP would leave what is missing as it is
    chunks = [dcp.ChunkStorageMetadata(torch.Size(at), torch.Size(shape)) for at, shape in reader.boxes(value)]
    return dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=value.dtype), value.shape, chunks)


class Described(dict[str, Any]):
    """What each flat name stands for; a top-level key that stands for several of them can be looked up, too."""

    def __init__(self, flat: dict[str, Any], whole: dict[str, Any]) -> None:
        super().__init__(flat)
        self._whole = dict.fromkeys(whole, dcp.BytesStorageMetadata())

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self._whole

    def __missing__(self, name: str) -> dcp.BytesStorageMetadata:
        return self._whole[name]
