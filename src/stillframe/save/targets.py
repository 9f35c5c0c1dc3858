"""The second pass of a plan: what this rank writes of each extent, and whether ``save`` captures it.

Captured is what may change before the next update; and what is small, since nobody can tell a counter from a weight by
its size.  One kind of counter is known to change in the update only: the steps of torch's own optimizers.  On an
accelerator, where a capture takes launches in the compute queue, these are staged lazily (:func:`steady_in`).
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from stillframe.format.layout import Layout, writers_of
from stillframe.format.segment import BoxOf
from stillframe.format.tree import RankBox, ShardedNode, TensorNode
from stillframe.save.copies import Target
from stillframe.save.device import DeviceTable
from stillframe.save.places import is_kept
from stillframe.state.boxes import Box
from stillframe.state.division import HeldBox, assign
from stillframe.state.dtypes import DTYPE_NAMES
from stillframe.state.forward import buffers_of
from stillframe.state.memory import Extent, is_plain, storage_of, storages_of
from stillframe.state.owners import step_counts
from stillframe.state.spread import Seat, Spread
from stillframe.state.walk import Walk

SMALL_BYTES = 64
"""Tensors up to this size are captured by ``save`` itself, unless they are steady (:func:`steady_in`)."""
_OPEN = TensorNode(-1)


def steady_in(walk: Walk) -> set[int]:
    """The tensors of a walk that change in the update only, and lie in an accelerator's memory.

    Their memory is theirs alone: not another tensor's of the state, nor a buffer's, which may change at any time.
    """
    counts = set(map(id, step_counts(walk.owners)))
    found = [index for index, each in enumerate(walk.tensors) if id(each) in counts and not is_kept(each)]
    if not found:
        return set()
    users = Counter(map(storage_of, walk.tensors))
    users.update(storages_of(buffers_of(walk.owners)))
    return {index for index in found if users[storage_of(walk.tensors[index])] == 1}


class Division:
    """What this rank writes of each extent.  ``steady``: tensors of this rank only, each alone in its memory, that are
    staged lazily although they are small."""

    def __init__(
        self,
        walk: Walk,
        is_volatile: list[bool],
        names: Sequence[str],
        spreads: dict[int, Spread],
        devices: DeviceTable,
        seat: Seat,
        steady: Collection[int],
    ) -> None:
        self._is_volatile = is_volatile
        self._steady = steady
        self._names = names
        self._spreads = spreads
        self._devices = devices
        self._seat = seat
        self.targets: list[Target] = []
        self.leaves: list[TensorNode | ShardedNode] = [_OPEN] * len(walk.tensors)
        """For each tensor of the walk where it is stored; open until its target has a place."""
        self.is_loose = [False] * len(walk.tensors)
        self.may_move: list[int] = []
        """Tensors that are alone in their memory, and of this rank only: each could be captured as well."""
        self.is_lazy = [False] * len(walk.tensors)
        self.shared: list[tuple[Target, Spread]] = []
        """The extents that other ranks hold too, or hold boxes of."""
        self.layouts: dict[Layout, int] = {}
        """Numbered as they come."""

    def divide(self, extents: Iterable[Extent]) -> None:
        for extent in extents:
            target = self._target(extent)
            spread = self._spreads.get(extent.index)
            if spread is None:
                self.targets.append(target)
                if len(extent.members) == 1 and not target.is_captured:
                    self.may_move.append(extent.index)
                self._note_lazy(target)
            else:
                self.shared.append((target, spread))
        by_ranks: dict[tuple[int, ...], list[tuple[Target, Spread]]] = defaultdict(list)
        for target, spread in self.shared:
            by_ranks[spread.ranks if self._seat.writes_once else (self._seat.rank,)].append((target, spread))
        for ranks, members in by_ranks.items():
            members.sort(key=lambda each: each[0].name)  # all of these ranks know this order
            # What is captured stays whole: it is small, or may be another object at the next save.
            boxes = [
                HeldBox(box, target.item_bytes, not target.is_captured)
                for target, spread in members
                for box in spread.boxes
            ]
            assigned = iter(assign(boxes, writers_of(ranks)))
            for target, spread in members:
                self._write_boxes(target, spread, list(itertools.islice(assigned, len(spread.boxes))))

    def _target(self, extent: Extent) -> Target:
        first = extent.index
        source = extent.source
        nbytes = source.nbytes
        is_volatile = self._is_volatile[first]
        is_captured = is_volatile or (nbytes <= SMALL_BYTES and first not in self._steady)
        # A small tensor may be another object at the next save, unless it has aliases: then all of them would be.  A
        # tensor whose memory is not its content is straightened anew at each save.
        is_loose = is_captured and (is_volatile or len(extent.members) == 1 or not is_plain(source))
        if is_loose:
            for index, _ in extent.members:
                self.is_loose[index] = True
        return Target(
            source,
            self._devices.of(source),
            self._names[first] + "~memory" if extent.cover is None else self._names[extent.cover],
            source.element_size(),
            nbytes,
            extent.members,
            is_captured,
            is_volatile,
            first,
            first if is_loose else None,
        )

    def _note_lazy(self, target: Target) -> None:
        """This rank writes of it; each of its aliases may have a version of its own."""
        if not target.is_captured:
            for index, _ in target.members:
                self.is_lazy[index] = True

    def _write_boxes(self, target: Target, spread: Spread, assigned: list[list[tuple[int, Box]]]) -> None:
        """Of a tensor of which this rank holds boxes: those that it writes, and who writes the others."""
        tensor = self._seat.global_name(target.name, spread.team)
        local = target.source.detach()
        for number, boxes in enumerate(assigned):
            for rank, box in boxes:
                if rank == self._seat.rank:
                    source = box.of(local)
                    own = replace(
                        target,
                        source=source,
                        name=target.name if number == 0 else f"{target.name}~{number + 1}~box",
                        nbytes=source.nbytes,
                        members=(),
                        loose=target.members[0][0] if target.is_captured else None,
                        box=box if source.shape != local.shape else None,
                        box_of=BoxOf(tensor, spread.shape, box.offset),
                    )
                    self.targets.append(own)
                    self._note_lazy(target)
        written = [RankBox(rank, box.offset, box.shape) for boxes in assigned for rank, box in boxes]
        layout = None
        if spread.recorded is not None and self._seat.knows_ranks:
            layout = self.layouts.setdefault(spread.recorded, len(self.layouts))
        node = ShardedNode(tensor, DTYPE_NAMES[target.source.dtype], spread.shape, written, layout)
        for index, _ in target.members:
            self.leaves[index] = node
