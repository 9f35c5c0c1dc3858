"""How a tensor is spread over the ranks: which boxes of it this rank holds, and which ranks hold the same ones.

Each rank finds this out alone, from placements, meshes and process groups; no rank asks another.  That all of them
found the same is checked when the step is committed (:class:`Team`).

The geometry is that of torch.distributed.  Only strided shards are worked out here: one rank holds several boxes of
such a tensor, and torch's own function gives the first.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import msgspec
import torch
from torch.nn.parallel import DistributedDataParallel

from stillframe.errors import FormatError, UnsupportedStateError
from stillframe.format.digest import digest
from stillframe.format.layout import Layout, check_layout, holders, make_layout
from stillframe.format.records import Team
from stillframe.format.segment import OF_TEAM
from stillframe.format.tree import PartBox, PartOf
from stillframe.format.values import Unencodable
from stillframe.state.boxes import Box, TensorBox, whole_box
from stillframe.state.dtypes import refusal
from stillframe.state.torch_internals import (
    communication_hooks,
    division_of,
    is_dtensor,
    local_shape_and_offset,
    local_tensor,
    own_rank,
    split_as,
)
from stillframe.state.train_state import innermost
from stillframe.state.walk import Walk


@dataclass(frozen=True, slots=True)
class Seat:
    """This rank among those that save together."""

    rank: int
    world_size: int
    knows_ranks: bool
    """Its number is the one that meshes and process groups use."""
    writes_once: bool
    """One rank writes what several ranks hold: all of them will be able to read it."""

    def global_name(self, name: str, team: tuple[int, ...]) -> str:
        """A tensor's name in the seals of all ranks.

        Another set of ranks may use the same path for another tensor.  So the name of a tensor that only some of the
        ranks hold ends with a digest of these.
        """
        if not self.knows_ranks or len(team) in (0, self.world_size):
            return name
        return f"{name}{OF_TEAM}{_digest_of(team)[:8]}"


ALONE = Seat(0, 1, knows_ranks=False, writes_once=False)


@dataclass(frozen=True, slots=True)
class Spread:
    """One tensor as this rank sees it."""

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    ranks: tuple[int, ...]
    """The ranks that hold exactly these boxes, this one among them; in order."""
    team: tuple[int, ...]
    """The ranks that hold any box of it; in order."""
    layout: str
    """What must be the same on all of the team, as text."""
    recorded: Layout | None = None
    """Who holds which boxes, for whoever reads them; ``None`` if that is not known."""


def spread_of(tensor: Any) -> Spread:
    """Of a DTensor.  Raises :class:`Unencodable` if its boxes do not make up a tensor."""
    mesh, placements = tensor.device_mesh, tensor.placements
    if any(placement.is_partial() for placement in placements):
        raise Unencodable("a DTensor with Partial placements, which are yet to be added up; redistribute it")
    shape = tuple(tensor.shape)
    coordinate = mesh.get_coordinate()
    kinds = tuple((type(placement), placement) for placement in placements)
    seats = _seats(mesh, own_rank(), kinds, None if coordinate is None else tuple(coordinate))
    if coordinate is None:
        return Spread(shape, (), (), seats.team, seats.layout, seats.recorded)  # others hold it
    boxes = _boxes(tensor, shape, coordinate)
    local = tuple(local_tensor(tensor).shape)
    extent = tuple(max((box.local[dim] + box.shape[dim] for box in boxes), default=0) for dim in range(len(shape)))
    if boxes and extent != local:
        raise Unencodable(f"a DTensor whose local tensor has shape {local}, where its placements make {extent}")
    return Spread(shape, boxes, seats.ranks, seats.team, seats.layout, seats.recorded)


@dataclass(frozen=True, slots=True)
class _Seats:
    """What of a spread is the same for all tensors with one mesh and placements."""

    ranks: tuple[int, ...]
    team: tuple[int, ...]
    layout: str
    recorded: Layout | None


@lru_cache(maxsize=64)
def _seats(mesh: Any, _rank: int, kinds: tuple[tuple[type, Any], ...], coordinate: tuple[int, ...] | None) -> _Seats:
    """Looked up once: of a mesh of thousands, each of thousands of tensors would look at every rank.

    Meshes that are equal need not have the same ranks: whose row of a larger mesh one is depends on the rank of the
    process, which may have another one after its group was made anew.  Placements that are equal need not be of one
    class.
    """
    members, placements = mesh.mesh, [placement for _, placement in kinds]
    all_ranks = members.flatten().tolist()
    layout = f"{tuple(map(str, placements))} on {tuple(members.shape)}"
    ranks: tuple[int, ...] = ()
    if coordinate is not None:
        pairs = zip(placements, coordinate, strict=True)
        same = tuple(slice(None) if placement.is_replicate() else at for placement, at in pairs)
        ranks = tuple(sorted(members[same].flatten().tolist()))
    cuts = [division_of(placement) for placement in placements]
    known = [cut for cut in cuts if cut is not None]
    recorded = None
    if len(known) == len(cuts):
        made = make_layout(tuple(members.shape), all_ranks, [dim for dim, _ in known], [factor for _, factor in known])
        with contextlib.suppress(FormatError):  # beyond the limits of the format: readers look at every seal
            check_layout(made, max(all_ranks) + 1)
            recorded = made
    return _Seats(ranks, tuple(sorted(all_ranks)), layout, recorded)


@lru_cache(maxsize=64)
def _replicated(ranks: tuple[int, ...]) -> Layout:
    return make_layout((len(ranks),), ranks, [None])


@lru_cache(maxsize=64)
def _digest_of(team: tuple[int, ...]) -> str:
    return digest(msgspec.json.encode(team))


def boxes_of(tensor: torch.Tensor) -> tuple[Box, ...]:
    """What of itself a live tensor holds here: all, or the boxes of a DTensor."""
    return spread_of(tensor).boxes if is_dtensor(tensor) else (whole_box(tensor.shape),)


def _boxes(tensor: Any, shape: tuple[int, ...], coordinate: Sequence[int]) -> tuple[Box, ...]:
    if any("Strided" in type(placement).__name__ for placement in tensor.placements):
        stretches = _strided_stretches(tensor, shape, coordinate)
    else:
        sizes, offsets = local_shape_and_offset(shape, tensor.device_mesh, tensor.placements)
        stretches = [[(at, size, 0)] for at, size in zip(offsets, sizes, strict=True)]
    boxes = (
        Box(*(tuple(stretch[field] for stretch in combination) for field in range(3)))
        for combination in itertools.product(*stretches)
    )
    return tuple(box for box in boxes if 0 not in box.shape)


def _strided_stretches(
    tensor: Any, shape: tuple[int, ...], coordinate: Sequence[int]
) -> list[list[tuple[int, int, int]]]:
    """For each dimension the stretches of it that this rank holds: (first index, length, position in the local one).

    Found by sharding the list of indexes as torch shards the dimension: from the first mesh dimension to the last.
    """
    found = []
    for dim, size in enumerate(shape):
        indexes = torch.arange(size)
        for mesh_dim, placement in enumerate(tensor.placements):
            if not placement.is_replicate() and placement.dim == dim:
                indexes = split_as(placement, indexes, tensor.device_mesh.size(mesh_dim))[coordinate[mesh_dim]]
        found.append(list(_stretches(indexes.tolist())))
    return found


def _stretches(indexes: list[int]) -> Iterable[tuple[int, int, int]]:
    start = 0
    for at in range(1, len(indexes) + 1):
        if at == len(indexes) or indexes[at] != indexes[at - 1] + 1:
            yield indexes[start], at - start, start
            start = at


# --- which tensors of a walk are spread ------------------------------------------------------


def find_spreads(walk: Walk, names: Sequence[str | None], seat: Seat) -> dict[int, Spread]:
    """Those tensors of the walk, by index, that other ranks hold too, or hold boxes of."""
    spreads: dict[int, Spread] = {}
    for index, tensor in walk.dtensors.items():
        try:
            spreads[index] = _checked(spread_of(tensor))
        except Unencodable as reason:
            raise UnsupportedStateError(refusal(reason, names[index])) from None
    for index, given in walk.boxes.items():
        spreads[index] = _given(index, given, seat)
    replicas = _replicas(walk) if seat.writes_once else {}
    for index, tensor in enumerate(walk.tensors) if replicas else ():
        ranks = replicas.get(id(tensor))
        if ranks is not None and not walk.is_volatile[index]:
            shape = tuple(tensor.shape)
            spreads[index] = Spread(shape, (whole_box(shape),), ranks, ranks, "replicated", _replicated(ranks))
    return spreads


def _checked(spread: Spread) -> Spread:
    """Without its layout if a reader who goes by it would not find this rank's boxes: then all seals will be read."""
    layout, shape = spread.recorded, spread.shape
    if layout is None or all(spread.ranks in holders(layout, shape, box.offset, box.shape) for box in spread.boxes):
        return spread
    return replace(spread, recorded=None)


def parts_of(walk: Walk, names: Sequence[str | None]) -> list[PartOf]:
    """Which boxes of a DTensor each wrapper is that is one's local tensor; in the order of the walk.

    How these boxes lie in the inner tensors only the wrapper's class knows, and replicas of a wrapper may differ (some
    round at random).  So every rank stores the inner tensors that it holds, and no spread is found for them.
    """
    found = []
    for index, dtensor in walk.wrapped:
        try:
            found.append(part_of(spread_of(dtensor)))
        except Unencodable as reason:
            raise UnsupportedStateError(refusal(reason, names[index])) from None
    return found


def part_of(spread: Spread) -> PartOf:
    return PartOf(spread.shape, [PartBox(box.offset, box.shape, box.local) for box in spread.boxes])


def _given(index: int, given: TensorBox, seat: Seat) -> Spread:
    """A box that the user gave.  The user guarantees that the boxes of all ranks tile the tensor, so no team digest is
    written and no alias is detected."""
    return Spread(given.shape, given.boxes, (seat.rank,), (), f"part {index}")


def _replicas(walk: Walk) -> dict[int, tuple[int, ...]]:
    """The tensors that data parallelism keeps the same on several ranks, by identity, with these ranks.

    They are the parameters of a DDP module, and what an optimizer keeps of the same shape for each of them.  Buffers
    are not among them: they may differ between two forwards.
    """
    found: dict[int, tuple[int, ...]] = {}
    modules = [each for owner in walk.owners if isinstance(owner, torch.nn.Module) for each in innermost(owner)]
    for owner in modules:
        if isinstance(owner, DistributedDataParallel) and not _may_diverge(owner):
            ranks = tuple(sorted(torch.distributed.get_process_group_ranks(owner.process_group)))
            ignored = owner.parameters_to_ignore
            for name, parameter in owner.module.named_parameters():
                if len(ranks) > 1 and name not in ignored and type(parameter) is torch.nn.Parameter:
                    found[id(parameter)] = ranks
    optimizers = [owner for owner in walk.owners if isinstance(owner, torch.optim.Optimizer)]
    for optimizer in optimizers if found else ():
        if not type(optimizer).__module__.startswith("torch.distributed"):  # those keep a share of the state each
            for parameter, state in optimizer.state.items():
                ranks = found.get(id(parameter), ())
                for each in state.values() if ranks else ():
                    if isinstance(each, torch.Tensor) and each.shape == parameter.shape:
                        found[id(each)] = ranks
    return found


def _may_diverge(module: DistributedDataParallel) -> bool:
    """Whether the replicas may differ between two averages (post-local SGD)."""
    return any("local" in getattr(hook, "__name__", "").lower() for hook in communication_hooks(module))


def teams_of(tensors: Iterable[tuple[str, str, Spread, bool]], seat: Seat) -> list[Team]:
    """What this rank's seal says of the tensors that it holds together with others.

    Each tensor is given by its name, its dtype, its spread, and whether it is volatile.
    """
    lines: dict[tuple[int, ...], list[tuple[object, ...]]] = defaultdict(list)
    for name, dtype, spread, is_volatile in tensors:
        if seat.knows_ranks and seat.rank in spread.team and len(spread.team) > 1:
            lines[spread.team].append((name, dtype, spread.shape, spread.layout, is_volatile))
    return [
        Team(_digest_of(team), len(team), digest(msgspec.json.encode(sorted(each))))
        for team, each in sorted(lines.items())
    ]
