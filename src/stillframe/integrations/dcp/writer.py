"""How ``dcp.save`` and ``dcp.async_save`` write a checkpoint of stillframe."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from stillframe import Catalog
from stillframe.errors import ConfigError, ExistsError, StateError, UnsupportedStateError
from stillframe.integrations.dcp.place import Place, refuse_dcps_own
from stillframe.integrations.dcp.round import Carried, begin_round, current, end_left_rounds
from stillframe.integrations.pickled import Opaque, to_leaves
from stillframe.open_roots import How, admitting, close_root, close_roots
from stillframe.spi import ELSEWHERE, TensorBox, is_wrapper
from stillframe.store import root_address


@dataclass(eq=False, kw_only=True)
class Writer(Place, StorageWriter):
    """Writes to the stillframe root ``path``: each save is its next step, or ``step``.

    A save has succeeded when it is a checkpoint: every rank's bytes durable, the manifest published.  All ranks save
    together, or each alone (``no_dist=True``).

    keep: retention, such as ``KeepLast(3)``; a root that is open has one, until it is closed (:class:`ConfigError`).
    overwrite: ``False`` refuses a root that holds a checkpoint (:class:`ExistsError`).  Nothing is ever overwritten:
    each save is a step of its own, and the newest is the one that is read.
    allow_pickle: pickle what cannot be stored otherwise (``io.BytesIO``, objects); else it is refused, with its path.
    Who loads it runs code from the checkpoint, and needs ``Reader(allow_pickle=True)``.
    storage_options: of an object store, as for ``Checkpointer``; each rank uses its own.

    The coordinator numbers the saves, so they may overlap (each in a process group of its own, as DCP asks), and one
    that fails on some rank leaves no trace in the next.
    """

    keep: Any = None
    overwrite: bool = True
    _home: int = field(default_factory=os.getpid, init=False, repr=False)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset(checkpoint_id)
        current.reset = self, self.checkpoint_id if checkpoint_id is None else root_address(checkpoint_id)

    def __getstate__(self) -> dict[str, Any]:
        """DCP sends it to a process of its own, which is about to save: it finds the root free."""
        end_left_rounds()
        close_roots(lambda each: not each.users)
        return vars(self)

    def close(self) -> None:
        """Let go of the root, which stays open between saves; may be called again."""
        end_left_rounds()
        close_root(self.path)

    @property
    def _how(self) -> How:
        return How(keep=self.keep, storage_options=self.storage_options)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        writer, reset = current.reset
        path = reset if writer is self else self.checkpoint_id
        begin_round(kwargs.get("rank", 0), self.step, path, lets_go=self._home != os.getpid())
        if not kwargs.get("use_collectives", True):
            raise ConfigError("use_collectives=False: a stillframe checkpoint is one of all ranks; leave it out")
        if not is_coordinator:  # the last one may have been this rank: then the root is this one's
            close_roots(lambda each: each.path == path and each.is_first and not each.users)
            return
        refuse_dcps_own(path, "give another directory; a reader could not tell which of the two is meant")
        newest = None if self.overwrite else Catalog(path, storage_options=self.storage_options).latest()
        if newest is not None:
            raise ExistsError(f"Checkpoint already exists and overwrite=False: {path} holds step {newest}")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: every rank's plan takes its admission along.

        The coordinator begins the run, so it is the first of its ranks, whichever it is of DCP's.
        """
        found, count = current.round, len(plans)
        assert found.rank is not None
        first = found.admission = found.using.enter_context(admitting(found.path, count, self._how, step=found.step))
        ranks = ((rank - found.rank) % count for rank in range(count))
        return [replace(plan, storage_data=Carried(first.of(rank))) for plan, rank in zip(plans, ranks, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        found = current.round
        try:
            if found.admission is None:
                raise StateError(
                    "DCP called write_data without the plan that prepare_global_plan made, or on another thread: "
                    "stillframe needs both to tell this save from others"
                )
            root = found.using.enter_context(found.admission.enter(found.path, self._how))
            advice = None if self.allow_pickle else "give Writer(…, allow_pickle=True)"
            state = _state(plan, planner, advice, has_gaps=found.admission.world_size > 1)
            save = root.save(found.admission.ticket, state, since=found.versions)
            found.requested(save)
        except BaseException as error:
            found.end(error)
            raise
        self.save_id = str(save.id)
        if found.admission.rank != 0:
            found.end()  # the coordinator alone is called again
        written: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        written.set_result([WriteResult(item.index, item.tensor_storage_size() or 0, None) for item in plan.items])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        found = current.round
        assert found.save is not None
        found.save.wait("committed")
        found.end()
        metadata.storage_meta = StorageMeta(found.path, str(found.save.id))
        metadata.version = CURRENT_DCP_VERSION


def _state(plan: SavePlan, planner: SavePlanner, advice: str | None, has_gaps: bool) -> dict[str, Any]:
    """What this rank writes, nested as it was before DCP flattened it.

    ``advice``: as for :func:`to_leaves`.  ``has_gaps``: other ranks may have items of the same lists.
    """
    items: dict[str, list[WriteItem]] = {}
    for item in plan.items:
        data = item.tensor_data
        if data is None or 0 not in data.chunk.sizes or 0 in data.size:  # else other ranks have all that there is of it
            items.setdefault(item.index.fqn, []).append(item)
    paths = plan.planner_data if isinstance(plan.planner_data, dict) else {}
    values = []
    for name, found in items.items():
        path = tuple(paths.get(name, (name,)))
        if found[0].type is WriteItemType.BYTE_IO:
            values.append((path, to_leaves(_value(found[0], planner), advice, path)))
        else:
            values.append((path, TensorBox.of([_box(item, planner) for item in found])))
    return dict(_nested(values, has_gaps))


def _nested(values: list[tuple[tuple[Any, ...], Any]], has_gaps: bool, at: tuple[Any, ...] = ()) -> Any:
    """By their paths below ``at``.  Only a list has integer keys: DCP turns all keys of dicts into text."""
    if [path for path, _ in values] == [()]:
        return values[0][1]
    below: dict[Any, list[tuple[tuple[Any, ...], Any]]] = {}
    for path, value in values:
        if not path:
            raise UnsupportedStateError(f"{len(values)} values of DCP's plan have one place in the state dict: {at}")
        below.setdefault(path[0], []).append((path[1:], value))
    items = {key: _nested(found, has_gaps, (*at, key)) for key, found in below.items()}
    if not items or not all(isinstance(key, int) for key in items):
        return items
    return [items.get(at, ELSEWHERE) for at in range(max(items) + 1 + has_gaps)]


def _box(item: WriteItem, planner: SavePlanner) -> TensorBox:
    """Of a tensor, perhaps all of it: a ShardedTensor may have several on one rank."""
    tensor, whole = planner.resolve_data(item), item.tensor_data
    assert isinstance(tensor, torch.Tensor)
    assert whole is not None
    if is_wrapper(tensor):
        raise UnsupportedStateError(
            f"{item.index.fqn!r} is a {type(tensor).__qualname__}, a tensor that wraps others: DCP could not read "
            "it back. Give DCP its inner tensors, or save with a Checkpointer"
        )
    return TensorBox(tensor.detach(), whole.size, whole.chunk.offsets)


def _value(item: WriteItem, planner: SavePlanner) -> Any:
    """The value itself if the planner would only pickle it; else the bytes that the planner makes of it."""
    own = DefaultSavePlanner.resolve_data, DefaultSavePlanner.transform_object
    if isinstance(planner, DefaultSavePlanner) and (type(planner).resolve_data, type(planner).transform_object) == own:
        return planner.lookup_object(item.index)
    data: Any = planner.resolve_data(item)
    return Opaque(data.getvalue())
