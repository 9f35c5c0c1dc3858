"""Which part of a state is exported, and under what names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from stillframe.checkpoint.contents import Entry, entries, items_of
from stillframe.checkpoint.stored import Located, Stored
from stillframe.errors import ConfigError, NotFoundError
from stillframe.format import tree

_MODEL = "model"
_TRAINER = "trainer"
"""Beside weights that lie at the top of a state: all else that Hugging Face's Trainer has."""
_ALONE = "tensor"
"""The name of a state that is one tensor."""
_RESERVED = "__metadata__"


@dataclass(frozen=True, slots=True)
class Named:
    """A leaf and the name it gets."""

    name: str
    entry: Entry


@dataclass(frozen=True, slots=True)
class Choice:
    """A part of the state: the node at its top, and its leaves."""

    top: Located
    leaves: list[Named]

    @property
    def tensors(self) -> list[Named]:
        return [each for each in self.leaves if each.entry.kind != "value"]


def chosen(stored: Stored, is_everything: bool, below: str | None, is_any_rank: bool) -> Choice:
    """Everything, or the weights.

    ``is_any_rank``: of tensors that every rank stored for itself, take this rank's; else they are refused.  Of
    everything, only those are refused that are parts of larger ones.
    """
    if not is_everything:
        return weights(stored, below, is_any_rank)
    found = _choice(stored, stored.tree, ())
    if not is_any_rank:
        _check_no_part(found)
    return found


def weights(stored: Stored, below: str | None, is_any_rank: bool) -> Choice:
    """What lies below a path: the one given, else ``model``, else the whole state if it holds nothing but tensors, or
    nothing but tensors and ``trainer``, which is left out.

    ``is_any_rank``: of tensors that every rank stored for itself, take this rank's; else they are refused.
    """
    found = entries(stored)
    tops = list(dict.fromkeys(str(entry.path[0]) if entry.path else "~" for entry in found))
    if below is None and _MODEL in tops:
        below = _MODEL
    others = {str(entry.path[0]) for entry in found if entry.path and (entry.kind == "value" or len(entry.path) > 1)}
    is_trainers = below is None and others == {_TRAINER} != {*tops}
    if below is None and not is_trainers and not all(entry.kind != "value" and len(entry.path) <= 1 for entry in found):
        raise ConfigError(
            f"which part are the weights? The state holds {', '.join(tops[:8])}; give --key PATH, or --all"
        )
    keys = [] if below is None else [part.replace("~1", "/").replace("~0", "~") for part in below.strip("/").split("/")]
    top, path = _descend(stored.tree, keys, below or "")
    chosen = _choice(stored, top, path)
    if is_trainers:
        chosen = Choice(_without(top, _TRAINER), [each for each in chosen.leaves if each.entry.path[0] != _TRAINER])
    if not is_any_rank:
        _check_no_part(chosen)
        _check_one_for_all(stored, chosen)
    return chosen


def _choice(stored: Stored, top: Located, path: tree.Path) -> Choice:
    """Leaves are named by the keys below the path, joined with dots, as ``state_dict()`` does."""
    found = [entry for entry in entries(stored) if entry.path[: len(path)] == path]
    leaves = [Named(".".join(map(str, entry.path[len(path) :])) or _last(entry), entry) for entry in found]
    return Choice(top, leaves)


def _without(top: Located, left_out: str) -> Located:
    """A dict, less one item."""
    node = top.node
    assert isinstance(node, tree.DictNode)
    kept = [(key, item) for key, (name, item) in zip(node.keys, items_of(top), strict=True) if name != left_out]
    items = [item for _, item in kept]
    shown = tree.DictNode([key for key, _ in kept], [item.node for item in items], is_ordered=node.is_ordered)
    return Located(top.rank, shown, items)


def _last(entry: Entry) -> str:
    return str(entry.path[-1]) if entry.path else _ALONE


def check_names(tensors: Sequence[Named]) -> None:
    """Refuse equal names, for formats that have one flat list of them."""
    twice = [name for name, count in Counter(each.name for each in tensors).items() if count > 1 or name == _RESERVED]
    if twice:
        raise ConfigError(
            f"{twice[0]!r} would be the name of two tensors, or is reserved: export as *.pt, or a part with --key"
        )


def _descend(top: Located, keys: Sequence[str], below: str) -> tuple[Located, tree.Path]:
    path: list[object] = []
    for key in keys:
        while isinstance(top.node, tree.ObjectNode | tree.LeafNode):
            top = top.children[0]
        known: dict[str, list[tuple[object, Located]]] = {}
        for each, item in items_of(top):
            known.setdefault(str(each), []).append((each, item))
        if key not in known:
            where = f"below {'/'.join(map(str, path))!r}" if path else "at the top"
            some = ", ".join([*known][:8]) or "none"
            raise NotFoundError(f"there is no {below!r} in the state; {where} there are {some}")
        if len(known[key]) > 1:
            raise ConfigError(f"{below!r} may be one of {len(known[key])}, whose keys read alike: export more of it")
        found, top = known[key][0]
        path.append(found)
    return top, tuple(path)


def _check_no_part(chosen: Choice) -> None:
    """Refuse wrappers that are what one rank held of a larger tensor: they would be taken for all of it."""
    for node in tree.nodes(chosen.top.node, tree.WrapperNode):
        if node.part_of is not None and node.part_of.shape != node.shape:
            raise ConfigError(
                f"a {node.type} of shape {list(node.part_of.shape)} is divided over the ranks, and only its class "
                "knows how to put the parts together: say whose part you want with --rank, or leave it out with --key"
            )


def _check_one_for_all(stored: Stored, chosen: Choice) -> None:
    """Refuse tensors that each rank stored for itself: none of them is the whole of anything."""
    own = {each.entry.key: each.entry for each in chosen.tensors if not each.entry.is_sharded}
    for rank in stored.checkpoint.ranks if own else ():
        if rank == stored.rank:
            continue
        others = entries(Stored(stored.checkpoint, rank, is_merged=False))
        shared = [each for each in others if each.key in own and each.kind != "value" and not each.is_sharded]
        double = [each for each in shared if own[each.key].boxes != each.boxes]
        if double:
            raise ConfigError(
                f"{double[0].name!r} and {len(double) - 1} more are each rank's own (plain tensors, no DTensors), "
                "so there is no whole to export: say whose you want with --rank"
            )
