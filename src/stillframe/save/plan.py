"""The plan of a save: where every tensor goes in the segment, and which copies put it there.

Made from a :class:`Walk` when the structure is new, and reused as long as it stays the same.  It is made in three
passes: which memory is written once (:func:`extents_of`); which boxes of it this rank writes (:class:`Division`); and
where these lie in the segment (:func:`_lay_out`).

Layout: shards by falling item size (so each starts at a multiple of its own), within one item size the captured ones
first (so they form at most four ranges), then what is small (so it goes in one copy).
"""

from __future__ import annotations

import gc
import itertools
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec

from stillframe.format.digest import digest_of
from stillframe.format.layout import Layout
from stillframe.format.records import Team, encode_shards, encode_tree
from stillframe.format.segment import Shard, encode_header, hide
from stillframe.format.tree import TensorNode, structure_of
from stillframe.save.copies import Capture, Chunk, Target, captures_of, chunks_of
from stillframe.save.device import Device, DeviceTable, Gathered
from stillframe.save.places import is_kept
from stillframe.save.signature import Signature
from stillframe.save.survey import Survey
from stillframe.save.targets import SMALL_BYTES, Division, steady_in
from stillframe.save.versions import Versions
from stillframe.state.dtypes import DTYPE_NAMES
from stillframe.state.forms import forms_of
from stillframe.state.forward import buffers_of, changes_in_forward
from stillframe.state.memory import extents_of, storage_of, storages_of
from stillframe.state.outline import Outline
from stillframe.state.spread import ALONE, Seat, Spread, find_spreads, parts_of, teams_of
from stillframe.state.torch_internals import versions_of
from stillframe.state.walk import Walk
from stillframe.units import MIB

MOVED_BYTES = 4 * MIB
"""So many bytes of tensors that are new at every save are captured: about a millisecond, less than another plan."""


@dataclass(slots=True)
class Plan:
    """Never changed once made.  Keeps those of its sources alive that lie in host memory."""

    layout: str
    """Equal for plans that put the same things in the same places, whenever they were made."""
    shards: list[Shard]
    header: bytes
    shards_json: msgspec.Raw
    tree_json: msgspec.Raw
    teams: list[Team]
    layouts: list[Layout]
    structure: str
    data_bytes: int
    chunks: list[Chunk]
    lazy: tuple[tuple[int, int], ...]
    captured_bytes: int
    devices: list[Device]
    slots: dict[int, int]
    """The tensors of the walk whose storages a save must hold until it is staged, those of accelerators: numbered."""
    _captures: list[Capture]
    _is_watched: list[bool] = field(repr=False)
    """For each tensor of the walk whether this rank stages bytes of it lazily, and its version tells if it changed."""
    _watched_outer: list[int] = field(repr=False)
    """Those of them that lie in a DTensor or a wrapper."""
    _watched_names: list[str] = field(repr=False)
    _tokens: list[tuple[object, ...]] = field(repr=False)
    _is_volatile: list[bool] = field(repr=False)
    _signature: Signature = field(repr=False)
    _may_move: list[int] = field(repr=False)
    _moved: frozenset[int]

    def fit(self, walk: Walk) -> Survey | None:
        """If the walk found the same structure in the same memory, so that this plan serves it too: its survey."""
        if walk.tokens != self._tokens or walk.is_volatile != self._is_volatile:
            return None
        return self._signature.fit(walk.tensors)

    def survey(self, walk: Walk) -> Survey:
        """Of the walk that this plan was made of."""
        return self._signature.survey(walk.tensors)

    def moved(self, walk: Walk) -> frozenset[int]:
        """If only other tensors stand where some stood (a dict of random states, made anew for each save): which.

        A plan that captures them serves the saves to come, too.  None if the structure is new, or they are large.
        """
        if walk.tokens != self._tokens or walk.is_volatile != self._is_volatile:
            return frozenset()
        try:
            found = self._moved | set(self._signature.moved(walk.tensors, self._may_move))
            counts = Counter(map(storage_of, walk.tensors)) if found else {}
            found = frozenset(index for index in found if counts[storage_of(walk.tensors[index])] == 1)
            return found if sum(walk.tensors[index].nbytes for index in found) <= MOVED_BYTES else frozenset()
        except RuntimeError:
            return frozenset()  # one became sparse: the next plan says so

    def versions(self, walk: Walk, survey: Survey) -> Versions:
        """Of what may not change before it is staged."""
        outer = [each for index in self._watched_outer for each in walk.outer[index]]  # operations on one count there
        at_save = [*itertools.compress(survey.versions, self._is_watched), *versions_of(outer)]
        return Versions([*itertools.compress(walk.tensors, self._is_watched), *outer], self._watched_names, at_save)

    def capture(self, walk: Walk, survey: Survey) -> dict[Device, Gathered]:
        """Copy what may change before the next update, in the order of each device's compute."""
        found = walk.tensors, survey.addresses
        return {each.device: each.device.gather(each.rows(*found), each.nbytes) for each in self._captures}


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Nothing that a plan is made of becomes garbage: looking for it took two fifths of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_without_garbage_collection()
def make_plan(
    walk: Walk, devices: DeviceTable, seat: Seat = ALONE, moved: frozenset[int] = frozenset(), hidden: str = ""
) -> Plan:
    """``moved``: tensors to be captured as if they were volatile.  ``hidden``: what the header does not name.

    Raises :class:`UnsupportedStateError`, naming the tensor that cannot be stored.
    """
    outline = Outline(walk.tokens)
    forms = forms_of(walk.tensors, outline.names)
    as_walked = walk.is_volatile
    # Looked for only here: the modules of a state are many, and if they change, the versions tell.
    changing = changes_in_forward(walk.tensors, outline.names, walk.owners)
    walk.is_volatile = list(map(operator.or_, as_walked, changing))
    spreads = find_spreads(walk, outline.names, seat)
    moved -= spreads.keys()  # what several ranks hold, all treat alike
    is_volatile = [found or index in moved for index, found in enumerate(walk.is_volatile)]
    extents = extents_of(walk.tensors, forms, _ties(walk, is_volatile, spreads))
    names = _unique_names(outline.names)
    division = Division(walk, is_volatile, names, spreads, devices, seat, steady_in(walk) - spreads.keys())
    division.divide(extents)
    is_watched = _watched(walk, division.is_lazy)
    order, data_bytes = _lay_out(division.targets)
    for target in order:
        for index, view in target.members:
            division.leaves[index] = TensorNode(target.number, view)
    shards = _shards(order)
    captures, captured_at = captures_of(order, walk.tensors)
    slots = _slots(order)
    header = encode_header(hide(shards, hidden) if hidden else shards, {"stillframe": "1"})
    nodes = outline.tree(division.leaves, parts_of(walk, outline.names))
    tree = encode_tree(nodes)
    return Plan(
        layout=digest_of([header, bytes(tree)]),
        shards=shards,
        header=header,
        shards_json=encode_shards(shards),
        tree_json=tree,
        teams=teams_of(
            (
                (target.name, DTYPE_NAMES[target.source.dtype], spread, target.is_volatile)
                for target, spread in division.shared
            ),
            seat,
        ),
        layouts=list(division.layouts),
        structure=structure_of(nodes, outline.elsewhere),
        data_bytes=data_bytes,
        chunks=chunks_of(order, captured_at, data_bytes),
        lazy=_merged((target.start, target.start + target.nbytes) for target in order if not target.is_captured),
        captured_bytes=sum(capture.nbytes for capture in captures),
        devices=list(dict.fromkeys(target.device for target in order)),
        slots=slots,
        _captures=captures,
        _is_watched=is_watched,
        _watched_outer=_outer_watched(walk, is_watched),
        _watched_names=[
            *itertools.compress(names, is_watched),
            *(names[index] for index in _outer_watched(walk, is_watched) for _ in walk.outer[index]),
        ],
        _tokens=walk.tokens,
        _is_volatile=as_walked,
        _signature=Signature(walk.tensors, forms, division.is_loose, as_walked, slots),
        _may_move=division.may_move,
        _moved=moved,
    )


def _watched(walk: Walk, is_lazy: list[bool]) -> list[bool]:
    """Those lazy tensors whose version tells whether they changed.

    Views of one storage share a version: beside something that forward may change, it tells nothing.
    """
    moving = storages_of(itertools.compress(walk.tensors, walk.is_volatile)) | storages_of(buffers_of(walk.owners))
    if not moving:
        return is_lazy
    pairs = zip(is_lazy, walk.tensors, strict=True)
    return [lazy and storage_of(tensor) not in moving for lazy, tensor in pairs]


def _outer_watched(walk: Walk, is_watched: list[bool]) -> list[int]:
    return [index for index in walk.outer if is_watched[index]]


def _ties(walk: Walk, is_volatile: list[bool], spreads: dict[int, Spread]) -> dict[int, object]:
    """The tensors that are aliases only of their exact equals, each with what else must be equal.

    Where this rank holds nothing of two DTensors, only their identity tells whether they are one.
    """
    ties: dict[int, object] = {}
    for index in itertools.chain(itertools.compress(itertools.count(), is_volatile), spreads):
        if walk.tensors[index].numel():
            ties[index] = spreads.get(index)
        elif index in spreads and index in walk.dtensors:
            ties[index] = id(walk.dtensors[index])
    return ties


def _lay_out(targets: Iterable[Target]) -> tuple[list[Target], int]:
    """The third pass: the targets in the order of the segment, each with its place, and how long the data is."""
    order = sorted(targets, key=lambda each: (-each.item_bytes, not each.is_captured, each.nbytes > SMALL_BYTES))
    at = 0
    for number, target in enumerate(order):
        target.number, target.start = number, at
        at += target.nbytes
    return order, at


def _shards(order: Iterable[Target]) -> list[Shard]:
    return [
        Shard(
            target.name,
            DTYPE_NAMES[target.source.dtype],
            tuple(target.source.shape),
            target.start,
            target.start + target.nbytes,
            target.source.device.type,
            target.box_of,
        )
        for target in order
    ]


def _slots(targets: Iterable[Target]) -> dict[int, int]:
    lazy = (target for target in targets if target.nbytes and not target.is_captured and not is_kept(target.source))
    return {index: slot for slot, index in enumerate(sorted({target.index for target in lazy}))}


def _unique_names(names: Sequence[str | None]) -> list[str]:
    """Where two paths read alike (``0`` and ``"0"``), the later one gets a number."""
    taken = {"__metadata__"}
    unique: list[str] = []
    for plain in names:
        name = plain = plain or "~"
        if name in taken:
            numbered = (f"{plain}~{number}" for number in itertools.count(2))  # no path reads so: a ~ is written ~0
            name = next(each for each in numbered if each not in taken)
        taken.add(name)
        unique.append(name)
    return unique


def _merged(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    merged: list[tuple[int, int]] = []
    for start, end in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = merged[-1][0], end
        elif start < end:
            merged.append((start, end))
    return tuple(merged)
