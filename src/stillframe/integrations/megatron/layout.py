"""Megatron's sharded state, and how it lies in a checkpoint::

    tensors/<key>           a tensor; each main replica is a box of it
    tensors/<key>/<index>   the same where axes are prepended, as for layers: a tensor for each index
    objects/<unique key>    what the main replica of an object holds

So the whole tensors can be read without Megatron, and by ranks that divide them in another way.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica

from stillframe import spi
from stillframe.errors import MismatchError, NotFoundError, UnsupportedStateError
from stillframe.integrations.pickled import from_leaves, to_leaves

TENSORS, OBJECTS = "tensors", "objects"
_Boxes = dict[str, dict[str, list[Any]]]


def to_state(sharded: Any, live: spi.LiveState) -> dict[str, Any]:
    """What this rank writes, safe until the next update.  Raises :class:`UnsupportedStateError`, with the key."""
    boxes: _Boxes = {}
    objects: dict[str, Any] = {}
    for each in nested_values(sharded):
        if not is_main_replica(each.replica_id):
            continue
        if isinstance(each, ShardedObject):
            objects[each.unique_key] = to_leaves(each.data, None, (each.unique_key,))
        elif 0 not in each.local_shape or 0 in each.global_shape:
            if not spi.is_tensor(each.data):
                raise UnsupportedStateError(
                    f"{each.key!r} holds a {type(each.data).__qualname__}: give plain tensors; dequantize weights "
                    "before they are saved"
                )
            boxes.setdefault(each.key, {}).setdefault(_index(each), []).append(each)
    tensors = {key: {at: [each.data for each in found] for at, found in by.items()} for key, by in boxes.items()}
    still = live.state({TENSORS: tensors, OBJECTS: objects})
    return {TENSORS: _joined(boxes, still[TENSORS]), OBJECTS: still[OBJECTS]}


def _index(tensor: Any) -> str:
    return ".".join(map(str, tensor.global_offset[: tensor.prepend_axis_num]))


def _joined(boxes: _Boxes, tensors: dict[str, dict[str, list[torch.Tensor]]]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for key, by_index in boxes.items():
        found = {}
        for index, pieces in by_index.items():
            axes = pieces[0].prepend_axis_num
            shape = tuple(pieces[0].global_shape[axes:])
            made = [
                spi.TensorBox(tensor.detach(), shape, piece.global_offset[axes:])
                for piece, tensor in zip(pieces, tensors[key][index], strict=True)
            ]
            found[index] = spi.TensorBox.of(made)
        if "" in found and len(found) > 1:
            raise UnsupportedStateError(f"{key!r} has prepended axes in some of its parts and none in others")
        state[key] = found.get("", found)
    return state


class Filling:
    """Reads what a sharded state asks for out of an open checkpoint.  ``weights_only``: as ``torch.load`` takes it."""

    def __init__(self, reader: spi.BoxReader, weights_only: bool | None) -> None:
        outline = reader.outline if isinstance(reader.outline, dict) else {}
        self._tensors, self._objects = outline.get(TENSORS, {}), outline.get(OBJECTS, {})
        self._reader, self._weights_only = reader, weights_only

    def values(self, sharded: Sequence[Any]) -> list[Any]:
        """The value of each, verified.  A tensor is read into the memory that it comes with, if it comes with any.

        Raises: :class:`NotFoundError`, :class:`MismatchError`, :class:`IntegrityError`, :class:`UnsupportedStateError`.
        """
        found = [self._object(each) if isinstance(each, ShardedObject) else self._tensor(each) for each in sharded]
        self._reader.read()
        return [
            from_leaves(value, None, self._weights_only, "give LoadStrategy weights_only=False", (each.unique_key,))
            if isinstance(each, ShardedObject)
            else value
            for each, value in zip(sharded, found, strict=True)
        ]

    def _object(self, wanted: Any) -> Any:
        name = wanted.unique_key
        if name not in self._objects:
            others = sorted(each for each in self._objects if each.startswith(f"{wanted.key}/"))[:8]
            raise NotFoundError(
                f"no object {name!r} in the checkpoint, and another rank's does not take its place; of this key it has "
                f"{', '.join(others) or 'none'}"
            )
        return self._reader.want_all(self._objects[name])

    def _tensor(self, wanted: Any) -> torch.Tensor:
        if wanted.key not in self._tensors:
            raise NotFoundError(f"no tensor {wanted.key!r} in the checkpoint")
        stored, shape = self._tensors[wanted.key], shape_of(self._tensors[wanted.key])
        if tuple(wanted.global_shape) != shape and not wanted.allow_shape_mismatch:
            raise MismatchError(f"{wanted.key!r} is {shape} in the checkpoint, not {tuple(wanted.global_shape)}")
        if wanted.data is None:
            wanted.init_data("cpu")
        target: torch.Tensor = wanted.data.detach()
        if wanted.allow_shape_mismatch:
            target.zero_()  # as Megatron does: what is not stored is padding
        whole = target[(None,) * wanted.prepend_axis_num]  # a view
        self._want(wanted.key, stored, shape, tuple(wanted.global_offset), whole)
        return target

    def _want(self, key: str, stored: Any, shape: Sequence[int], offset: Sequence[int], into: torch.Tensor) -> None:
        """Note the part of a box that the stored tensor has; all of it, unless the global shapes differ."""
        for dim, (start, whole) in enumerate(zip(offset, shape, strict=True)):
            into = into.narrow(dim, 0, max(0, min(into.shape[dim], whole - start)))
        if 0 in into.shape:
            return
        axes = _axes(stored)
        for place in itertools.product(*(range(size) for size in into.shape[:axes])):
            at = ".".join(str(start + step) for start, step in zip(offset, place, strict=False))
            tensor = stored[at] if axes and at in stored else stored
            if isinstance(tensor, dict):
                raise NotFoundError(f"{key!r} lacks index {at} in the checkpoint")
            self._reader.check_filled(tensor)
            self._reader.want_as(tensor, offset[axes:], into[place])


def _axes(stored: Any) -> int:
    """How many prepended axes are in the names of its parts."""
    return len(next(iter(stored)).split(".")) if isinstance(stored, dict) else 0


def shape_of(stored: Any) -> tuple[int, ...]:
    """The global shape."""
    if not isinstance(stored, dict):
        return tuple(stored.shape)
    places = [tuple(map(int, name.split("."))) for name in stored]
    return (*(1 + max(each) for each in zip(*places, strict=True)), *next(iter(stored.values())).shape)


def described(reader: spi.BoxReader) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors, undivided, by key, and the objects, by unique key; all without data."""
    outline = reader.outline if isinstance(reader.outline, dict) else {}
    tensors = {}
    for key, stored in outline.get(TENSORS, {}).items():
        dtype = (next(iter(stored.values())) if isinstance(stored, dict) else stored).dtype
        whole = torch.empty(shape_of(stored), dtype=dtype, device="meta")
        tensors[key] = ShardedTensor.from_rank_offsets(key, whole).without_data()
    return tensors, {name: ShardedObject.empty_from_unique_key(name) for name in outline.get(OBJECTS, {})}
