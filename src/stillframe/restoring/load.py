"""A checkpoint as nested plain values and tensors, with no live objects: all of it, or tensor by tensor."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import torch

from stillframe.checkpoint.catalog import Catalog, Checkpoint
from stillframe.checkpoint.stored import Located, Stored
from stillframe.errors import FormatError, IntegrityError, NotFoundError, UnsupportedStateError, text_of
from stillframe.format import tree, values
from stillframe.model import SaveId, check_step
from stillframe.restoring.place import Placement
from stillframe.state.codecs import codec_named
from stillframe.units import MIB

Later = Callable[[], Any]
"""Returns a value; called once the placement has been filled."""


class Builder:
    """Makes values of a stored tree: reserves their tensors at once, assembles the values after these were filled.

    Everything that can be refused is refused at once: values are decoded and registered types looked up.
    ``only``: names and globs of the leaves that are wanted; ``exclude``: of those that are not.
    """

    def __init__(
        self, stored: Stored, placement: Placement, only: Sequence[str] | None = None, exclude: Sequence[str] = ()
    ) -> None:
        self._stored = stored
        self._placement = placement
        self._only = only
        self._exclude = exclude
        self.given: dict[tree.Path, torch.Tensor] = {}
        """Tensors to use at these paths in place of new ones; somebody else fills them."""
        self.paths: list[str] = []
        """The leaves that ``only`` was compared with, for messages."""

    def build(self, located: Located, path: tree.Path = ()) -> Later | None:
        """``None`` if nothing in it is wanted."""
        node = located.node
        if tree.is_leaf(node):
            return self._leaf(located, path) if self._is_wanted(path) else None
        if isinstance(node, tree.ObjectNode):
            return self.build(located.content, path)
        if isinstance(node, tree.LeafNode):
            return self._registered(located, node, path) if self._is_wanted(path) else None
        if isinstance(node, tree.DictNode):
            return self._dict(located, node, path)
        if isinstance(node, tree.WrapperNode):
            return self._wrapper(located, node, path)
        return self._list(located, list if isinstance(node, tree.ListNode) else tuple, path)

    def whole(self, located: Located, path: tree.Path = ()) -> Later:
        """As :meth:`build`, for a builder without ``only``: everything is wanted."""
        later = self.build(located, path)
        assert later is not None
        return later

    def items(self, located: Located) -> list[tuple[Any, Located]]:
        """The items of a dict, by their keys as they were when saved."""
        assert isinstance(located.node, tree.DictNode)
        keys = [values.decode(key) for key in located.node.keys]
        try:
            if len(set(keys)) == len(keys):
                return list(zip(keys, located.children, strict=True))
        except TypeError:
            pass
        raise FormatError("a dict has keys that cannot be keys, or the same key twice")

    def value(self, leaf: Located) -> Any:
        return values.decode(self._stored.value(leaf))

    def array(self, leaf: Located) -> Later:
        return self._placement.fresh(leaf).numpy

    def _registered(self, located: Located, node: tree.LeafNode, path: tree.Path) -> Later:
        """Chosen as a whole: a part of it is no value of its class."""
        chosen, self._only, self._exclude = (self._only, self._exclude), None, ()
        item = self.whole(located.children[0], path)
        self._only, self._exclude = chosen
        return self.decoded(node, item, path)

    def decoded(self, node: tree.LeafNode, item: Later, path: tree.Path) -> Later:
        """What its class makes of it.  Raises: :class:`UnsupportedStateError`, here and later."""
        what = f"{tree.render(path) or 'the state'!r} was saved as a leaf named {node.name!r}"
        codec = codec_named(node.name)
        if codec is None:
            raise UnsupportedStateError(f"{what}; call register_leaf for that name before loading")

        def decode() -> Any:
            stored = item()
            try:
                return codec.decode(stored)
            except Exception as error:  # of the user's own code, or of a file that somebody has made
                raise UnsupportedStateError(
                    f"{what}, of which no {codec.kind.__qualname__} could be made: {type(error).__name__}: "
                    f"{text_of(error)}; register functions that can read it"
                ) from error

        return decode

    def _dict(self, located: Located, node: tree.DictNode, path: tree.Path) -> Later | None:
        found = [(key, self.build(item, (*path, key))) for key, item in self.items(located)]
        items = [(key, item) for key, item in found if item is not None]
        if not items and (found or not self._is_wanted(path)):
            return None
        kind = OrderedDict if node.is_ordered else dict
        return lambda: kind((key, item()) for key, item in items)

    def _list(self, located: Located, kind: type[list[Any]] | type[tuple[Any, ...]], path: tree.Path) -> Later | None:
        rows = [self.build(item, (*path, index)) for index, item in enumerate(located.children)]
        if not any(rows) and (rows or not self._is_wanted(path)):
            return None
        return lambda: kind(None if row is None else row() for row in rows)

    def _wrapper(self, located: Located, node: tree.WrapperNode, path: tree.Path) -> Later | None:
        """Its inner tensors and what was recorded with them, unless somebody gave a live one."""
        if path in self.given:
            given = self.given[path]
            return lambda: given
        named = zip(node.names, located.children, strict=True)
        found = [(name, self.build(item, (*path, name))) for name, item in named]
        rows = [(name, later) for name, later in found if later is not None]
        if not rows:
            return None
        about = {"wrapper": node.type, "dtype": node.dtype, "shape": node.shape, "context": node.context}
        if node.part_of is not None:
            boxes = [msgspec.structs.asdict(box) for box in node.part_of.boxes]
            about["part_of"] = {"shape": node.part_of.shape, "boxes": boxes}
        return lambda: {**about, "tensors": {name: later() for name, later in rows}}

    def _leaf(self, leaf: Located, path: tree.Path) -> Later:
        if isinstance(leaf.node, tree.ArrayNode):
            return self.array(leaf)
        if isinstance(leaf.node, tree.ValueNode):
            value = self.value(leaf)
        else:
            given = self.given.get(path) if self.given else None
            value = self._placement.fresh(leaf) if given is None else given
        return lambda: value

    def _is_wanted(self, path: tree.Path) -> bool:
        if self._only is None and not self._exclude:
            return True
        name = tree.render(path)
        self.paths.append(name)
        is_chosen = self._only is None or any(tree.is_match(name, pattern) for pattern in self._only)
        return is_chosen and not any(tree.is_match(name, pattern) for pattern in self._exclude)


def has_live_parts(node: tree.Node) -> bool:
    """Whether a stored tree holds tensors or objects, which are restored into live counterparts."""
    if isinstance(node, tree.DictNode | tree.ListNode | tree.TupleNode):
        return any(map(has_live_parts, node.items))
    return isinstance(node, tree.TensorNode | tree.ShardedNode | tree.ObjectNode | tree.WrapperNode)


def load(
    root: str | os.PathLike[str],
    step: int | None = None,
    *,
    only: str | Sequence[str] | None = None,
    rank: int = 0,
    storage_options: Mapping[str, Any] | None = None,
) -> Any:
    """The state of a step (the newest if none is given), verified, on the CPU, with no live objects.

    An object that had a ``state_dict`` comes back as that dict.  ``only`` names the parts wanted, by path
    (``"model"``, ``"optimizer/state/0"``) or pattern (``"model/*.bias"``): only their chunks are read; an
    item of a list that is not wanted comes back as ``None``.

    A checkpoint of several ranks comes back as one state, in which sharded tensors are assembled.  Where each rank
    stored a value of its own (RNG state, a plain tensor), that of ``rank`` is taken.

    A tensor that wraps others (a quantised weight) comes back as a dict: ``wrapper`` (the name of its class),
    ``dtype``, ``shape``, ``context`` (as stored) and ``tensors`` (its inner tensors by name).  Of a DTensor of such, it
    is what ``rank`` held, and ``part_of`` says which boxes of it these are.

    Blocks until everything is read.
    Raises: :class:`NotFoundError`, :class:`IntegrityError`, :class:`VersionError`.
    """
    return _load(Catalog(root, storage_options=storage_options), step, only, rank, is_merged=True)


def load_rank(
    root: str | os.PathLike[str],
    save: int | SaveId,
    rank: int,
    *,
    only: str | Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    storage_options: Mapping[str, Any] | None = None,
) -> Any:
    """As :func:`load`, only what this rank saved.  A ``SaveId``: exactly that save, on the branch or not.

    ``exclude``: parts that are not wanted, as of ``restore``.
    """
    return _load(Catalog(root, storage_options=storage_options), save, only, rank, exclude, is_merged=False)


def load_save(root: str | os.PathLike[str], save: SaveId, rank: int) -> Any:
    """As :func:`load`, exactly that save, on the branch or not.  A rank that it has not: ``rank`` modulo its ranks."""
    return read_while_it_is_there(Catalog(root), save, lambda found: _read(Stored(found, rank, is_merged=True)))


def _load(
    catalog: Catalog,
    step: int | SaveId | None,
    only: str | Sequence[str] | None,
    rank: int,
    exclude: Sequence[str] = (),
    *,
    is_merged: bool,
) -> Any:
    patterns = None if only is None else (only,) if isinstance(only, str) else tuple(only)

    def read(checkpoint: Checkpoint) -> Any:
        stored = Stored(checkpoint, _seen_by(checkpoint, rank), is_merged=is_merged)
        return _read(stored, patterns, exclude)

    return read_while_it_is_there(catalog, step, read)


def _read(stored: Stored, only: Sequence[str] | None = None, exclude: Sequence[str] = ()) -> Any:
    placement = Placement(stored)
    builder = Builder(stored, placement, only, exclude)
    later = builder.build(stored.tree)
    if later is None and only is None:
        return {}
    if later is None:
        some = ", ".join(builder.paths[:5]) or "nothing at all"
        raise NotFoundError(f"only={only!r} matches nothing in step {stored.checkpoint.step}; it holds {some}, …")
    placement.fill()
    return later()


def _seen_by(checkpoint: Checkpoint, rank: int) -> int:
    """The rank, if its part is here; rank 0 is the default, and may be on another node."""
    if rank in checkpoint.ranks or (rank == 0 and checkpoint.ranks):
        return rank if rank in checkpoint.ranks else checkpoint.ranks[0]
    raise NotFoundError(f"step {checkpoint.step} has no rank {rank}; it was saved by {checkpoint.world_size}")


_T = TypeVar("_T")
_TRIES = 10


def read_while_it_is_there(catalog: Catalog, step: int | SaveId | None, read: Callable[[Checkpoint], _T]) -> _T:
    """Open a step (the newest if none is given) and read it; if a run removes it meanwhile, take the next newest.

    Raises: what ``read`` raises; :class:`NotFoundError`, also if the step that was asked for is removed meanwhile.
    """
    save = SaveId(0)
    for _ in range(_TRIES):
        if isinstance(step, SaveId):
            found: SaveId | None = step
        else:
            found = catalog.newest() if step is None else catalog.find(check_step(step))
        if found is None:
            raise NotFoundError(f"there is no checkpoint in {catalog.root}")
        save = found
        try:
            with catalog.open_save(save) as checkpoint:
                return read(checkpoint)
        except (IntegrityError, NotFoundError):
            if catalog.is_committed(save):
                raise
        if step is not None:
            break
    if isinstance(step, SaveId):
        raise NotFoundError(f"{save} is not committed in {catalog.root}, or was removed while it was read")
    raise NotFoundError(f"step {save.step} was removed from {catalog.root} while it was read")


BATCH_BYTES = 256 * MIB
"""Small tensors are read together: they share chunks, and a chunk is read as a whole."""


def pull(stored: Stored, leaves: Sequence[Located]) -> Iterator[torch.Tensor]:
    """Each of these tensors and arrays as a tensor on the CPU, in this order.

    Blocks.  Raises: :class:`IntegrityError`.
    """
    at = 0
    while at < len(leaves):
        placement = Placement(stored)
        batch: list[torch.Tensor] = []
        size = 0
        while at < len(leaves) and (not batch or size + _bytes(placement, leaves[at]) <= BATCH_BYTES):
            size += _bytes(placement, leaves[at])
            batch.append(placement.fresh(leaves[at]))
            at += 1
        placement.fill()
        yield from batch


def _bytes(placement: Placement, leaf: Located) -> int:
    dtype, shape = placement.form(leaf)
    return torch.Size(shape).numel() * dtype.itemsize
