"""Of the tensors that are spread over ranks: the parts that this one writes, and where the others are.

Every rank works this out alone and all come to the same result, because it depends only on what those ranks have
in common; that they do have it in common is checked when the step is committed (:class:`Team`).

What several ranks hold alike is written once.  The tensors that a set of ranks holds are laid end to end, by name, and
cut into equal shares, one for each rank; a tensor that lies across a cut is cut itself, at a row.  So at most as many
tensors are cut as there are ranks, and the shares are even to within a row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch.nn.parallel import DistributedDataParallel

from stillframe.errors import UnsupportedStateError
from stillframe.format.digest import digest
from stillframe.format.records import Team
from stillframe.format.segment import OF_TEAM
from stillframe.format.tree import Path
from stillframe.format.values import Unencodable
from stillframe.state.boxes import Box, Spread, TensorBox, replicated, spread_of
from stillframe.state.dtypes import DTYPE_NAMES
from stillframe.state.memory import Base
from stillframe.state.train_state import innermost
from stillframe.state.walk import Walk, refusal

_FINE = 64
"""A dimension of at least this size is fine enough to be cut."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A stretch of one tensor, along its cut dimension, that the holder with this number writes."""

    holder: int
    start: int
    end: int


def cut_dimension(shape: Sequence[int]) -> int:
    """The first dimension that is fine enough (its parts lie together in memory), else the largest."""
    for dim, size in enumerate(shape):
        if size >= _FINE:
            return dim
    return max(range(len(shape)), key=lambda dim: shape[dim], default=0)


def shares(sizes: Sequence[tuple[int, int]], count: int) -> list[list[Cut]]:
    """For each tensor, given as (bytes, rows), who writes which rows; ``rows`` 1 if it must stay whole."""
    total = sum(nbytes for nbytes, _ in sizes)
    at = 0
    found: list[list[Cut]] = []
    for nbytes, rows in sizes:
        if rows <= 1 or nbytes == 0:
            middle = at + nbytes // 2
            holder = min(middle * count // total, count - 1) if total else 0
            found.append([Cut(holder, 0, rows)])
        else:
            found.append(_cuts(at, nbytes, rows, total, count))
        at += nbytes
    return found


def _cuts(at: int, nbytes: int, rows: int, total: int, count: int) -> list[Cut]:
    cuts: list[Cut] = []
    row = 0
    for holder in range(at * count // total, count):
        border = total * (holder + 1) // count
        end = rows if holder == count - 1 else min(max(round((border - at) * rows / nbytes), row), rows)
        if end > row:
            cuts.append(Cut(holder, row, end))
            row = end
        if row == rows:
            break
    return cuts


@dataclass(frozen=True, slots=True)
class Seat:
    """This rank among those that save together."""

    rank: int
    world_size: int
    knows_ranks: bool
    """Its number is the one that meshes and process groups use."""
    writes_once: bool
    """What several ranks hold is written by one of them: all will be able to read it."""


ALONE = Seat(0, 1, knows_ranks=False, writes_once=False)


@dataclass(frozen=True, slots=True)
class SpreadBase:
    """Memory to be written that is this rank's part of a tensor."""

    base: Base
    spread: Spread
    is_captured: bool
    is_loose: bool

    def tensor(self, seat: Seat) -> str:
        """The tensor's name among all seals; what a part of the ranks holds is not what others hold under that name."""
        team = self.spread.team
        if not seat.knows_ranks or len(team) in (0, seat.world_size):
            return self.base.name
        return f"{self.base.name}{OF_TEAM}{digest(msgspec.json.encode(team))[:8]}"

    @property
    def is_whole(self) -> bool:
        """It is not cut: what is captured is small, or may be another object at the next save."""
        return self.is_captured


@dataclass(frozen=True, slots=True)
class Assigned:
    """A part of a tensor and the rank that writes it."""

    rank: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    local: tuple[int, ...]
    number: int
    """Which of the parts in this rank's memory, for its name."""

    @property
    def where(self) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        return self.rank, self.offset, self.shape


def find_spreads(walk: Walk, paths: Sequence[Path], seat: Seat) -> dict[int, Spread]:
    """Which tensors of the walk other ranks hold, too, or hold parts of."""
    spreads: dict[int, Spread] = {}
    for index, tensor in walk.dtensors.items():
        try:
            spreads[index] = spread_of(tensor)
        except Unencodable as reason:
            raise UnsupportedStateError(refusal(reason, paths[index])) from None
    for index, part in walk.parts.items():
        spreads[index] = _given(index, part, seat)
    if seat.writes_once:
        replicas = _replicas(walk)
        for index, tensor in enumerate(walk.tensors):
            ranks = replicas.get(id(tensor))
            if ranks is not None and not walk.is_volatile[index] and tensor.layout is torch.strided:
                spreads[index] = replicated(tensor, ranks)
    return spreads


def _given(index: int, part: TensorBox, seat: Seat) -> Spread:
    """A box by itself: who gave it answers for the others', so no team is checked, and none is tied to another."""
    shape = tuple(part.tensor.shape)
    boxes = () if 0 in shape else (Box(part.offset, shape, (0,) * len(shape)),)
    return Spread(part.shape, boxes, (seat.rank,), (), f"part {index}")


def _replicas(walk: Walk) -> dict[int, tuple[int, ...]]:
    """By identity, the tensors that data parallelism keeps the same on several ranks, and these ranks.

    The parameters of a DDP module, and what an optimizer keeps of the same shape for each of them.  Buffers are not
    among them: they may differ between two forwards.
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
    """Whether the replicas are let go their own ways between averages (post-local SGD)."""
    return any("local" in getattr(hook, "__name__", "").lower() for hook, _ in getattr(module, "_comm_hooks", []))


def assign(bases: Iterable[SpreadBase], seat: Seat) -> Iterator[tuple[SpreadBase, list[Assigned]]]:
    """Of each, which rank writes which part of what this rank holds."""
    by_holders: dict[tuple[int, ...], list[SpreadBase]] = defaultdict(list)
    for each in bases:
        by_holders[each.spread.ranks if seat.writes_once else (seat.rank,)].append(each)
    for holders, members in by_holders.items():
        members.sort(key=lambda each: each.base.name)
        boxes = [(each, number, box) for each in members for number, box in enumerate(each.spread.boxes)]
        sizes = [(_nbytes(each, box), 1 if each.is_whole else _rows(box)) for each, _, box in boxes]
        parts: dict[int, list[Assigned]] = {id(each): [] for each in members}
        for (each, number, box), cuts in zip(boxes, shares(sizes, max(len(holders), 1)), strict=True):
            for cut in cuts:
                rank = holders[cut.holder] if holders else seat.rank
                parts[id(each)].append(_assigned(rank, box, cut.start, cut.end, number, each.is_whole))
        for each in members:
            yield each, parts[id(each)]


def _nbytes(each: SpreadBase, box: Box) -> int:
    return each.base.source.element_size() * torch.Size(box.shape).numel()


def _rows(box: Box) -> int:
    return box.shape[cut_dimension(box.shape)] if box.shape else 1


def _assigned(rank: int, box: Box, start: int, end: int, number: int, is_whole: bool) -> Assigned:
    if is_whole or not box.shape:
        return Assigned(rank, box.offset, box.shape, box.local, number)
    dim = cut_dimension(box.shape)

    def moved(place: tuple[int, ...], to: int) -> tuple[int, ...]:
        return (*place[:dim], to, *place[dim + 1 :])

    return Assigned(
        rank,
        moved(box.offset, box.offset[dim] + start),
        moved(box.shape, end - start),
        moved(box.local, box.local[dim] + start),
        number,
    )


def teams_of(bases: Iterable[Base], spreads: dict[int, Spread], seat: Seat) -> list[Team]:
    """What this rank's seal says of the tensors that it holds together with others."""
    lines: dict[tuple[int, ...], list[tuple[object, ...]]] = defaultdict(list)
    for base in bases:
        spread = spreads.get(base.leaves[0][0])
        if spread is not None and seat.knows_ranks and seat.rank in spread.team and len(spread.team) > 1:
            dtype = DTYPE_NAMES[base.source.dtype]
            lines[spread.team].append((base.name, dtype, spread.shape, spread.layout, base.is_volatile))
    return [
        Team(digest(msgspec.json.encode(team)), len(team), digest(msgspec.json.encode(sorted(each))))
        for team, each in sorted(lines.items())
    ]
