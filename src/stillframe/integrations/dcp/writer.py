"""How ``dcp.save`` and ``dcp.async_save`` write a checkpoint of stillframe."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from stillframe import ELSEWHERE, TensorBox
from stillframe.errors import ConfigError, UnsupportedStateError
from stillframe.integrations.dcp.place import Opaque, PathLike, Place
from stillframe.integrations.dcp.round import Carried, begin_round, end_round, this_round
from stillframe.integrations.open_roots import admit, close_root, seat


class Writer(Place, StorageWriter):
    """Writes to the stillframe root ``path``: each save is its next step, or ``step``.

    A save has succeeded when it is a checkpoint: every rank's bytes durable, the manifest published.  What pickle alone
    could hold is refused, with its path.  All ranks save together, or each alone (``no_dist=True``).  ``keep``:
    retention, such as ``KeepLast(3)``.

    The coordinator numbers the saves, so they may overlap (each in a process group of its own, as DCP asks), and one
    that fails on some rank leaves no trace in the next.
    """

    def __init__(self, path: PathLike, *, step: int | None = None, keep: Any = None) -> None:
        super().__init__(path, step=step)
        self.keep = keep

    def close(self) -> None:
        """Let go of the root, which stays open between saves; may be called again."""
        end_round()
        close_root(self.path)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.path)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        begin_round()
        if not kwargs.get("use_collectives", True):
            raise ConfigError("use_collectives=False: a stillframe checkpoint is one of all ranks; leave it out")

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: every rank's plan takes its admission along."""
        _, world_size = seat()
        if len(plans) not in (1, world_size):
            raise ConfigError(
                f"process_group: {len(plans)} of {world_size} ranks; save with a group of all ranks, or no_dist=True"
            )
        found = this_round()
        step = found.staging.step if found.staging is not None else self.step
        admissions = admit(self.path, len(plans), step=step, keep=self.keep)
        found.admission = admissions[0]
        return [
            dataclasses.replace(plan, storage_data=Carried(admission))
            for plan, admission in zip(plans, admissions, strict=True)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        found = this_round()
        try:
            root = found.enter(self.path, self.keep)
            assert found.admission is not None
            state = _state(plan, planner, has_gaps=found.admission.world_size > 1)
            found.save = root.save(found.admission.ticket, state)
        except BaseException as error:
            if found.staging is not None:
                found.staging.failed(error)
            found.give_up(error)
            raise
        if found.staging is not None:
            found.staging.requested(found.save)
        found.save.wait("sealed")
        if found.admission.rank != 0:
            found.over()  # the coordinator alone is called again
        written: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        written.set_result([WriteResult(item.index, item.tensor_storage_size() or 0, None) for item in plan.items])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        found = this_round()
        assert found.save is not None
        found.save.wait("committed")
        found.over()


def _state(plan: SavePlan, planner: SavePlanner, has_gaps: bool) -> dict[str, Any]:
    """What this rank writes, nested as it was before DCP flattened it.

    ``has_gaps``: other ranks may have items of the same lists.
    """
    flat: dict[str, Any] = {}
    for item in plan.items:
        name = item.index.fqn
        if name in flat:
            raise UnsupportedStateError(f"{name!r} has several boxes on one rank: give it as a DTensor")
        flat[name] = _bytes(item, planner) if item.type is WriteItemType.BYTE_IO else _tensor(item, planner)
    paths = plan.planner_data if isinstance(plan.planner_data, dict) else {}
    nest = _Nest()
    for name, value in flat.items():
        at = nest
        *above, last = paths.get(name, (name,))
        for key in above:
            at = at.setdefault(key, _Nest())
        at[last] = value
    return dict(nest.unfolded(has_gaps))


class _Nest(dict[Any, Any]):
    """A dict or list being rebuilt.  Only a list has integer keys: DCP turns all keys of dicts into text."""

    def unfolded(self, has_gaps: bool) -> Any:
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
    """The value itself if the planner would only pickle it; else the bytes that the planner makes of it."""
    own = DefaultSavePlanner.resolve_data, DefaultSavePlanner.transform_object
    if isinstance(planner, DefaultSavePlanner) and (type(planner).resolve_data, type(planner).transform_object) == own:
        return planner.lookup_object(item.index)
    data = planner.resolve_data(item)
    assert isinstance(data, io.BytesIO)
    return Opaque(data.getvalue())
