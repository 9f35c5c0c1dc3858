"""Any box of any tensor of a checkpoint: for readers that bring a plan of their own, such as DCP's."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from stillframe.checkpoint.catalog import Catalog
from stillframe.checkpoint.stored import Located, Stored
from stillframe.errors import ConfigError
from stillframe.format import tree
from stillframe.restoring.load import Builder, Later
from stillframe.restoring.place import Placement
from stillframe.state.boxes import Box
from stillframe.state.live import mapped


class BoxReader:
    """The checkpoint of a step (the newest if none is given), open for reading box by box.

    :attr:`outline` is the state of all ranks as one, with every tensor on the meta device.  These tensors are what
    :meth:`boxes`, :meth:`want` and the others take.  Where each rank stored a value of its own, that of ``rank`` is
    taken; if its part is not here, because the ranks did not share the root, that of the first rank that is.

    Raises: :class:`NotFoundError`, :class:`IntegrityError`, :class:`VersionError`.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        step: int | None = None,
        *,
        rank: int = 0,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._checkpoint = Catalog(root, storage_options=storage_options).open(step)
        try:
            self.step, self.save = self._checkpoint.step, self._checkpoint.save
            ranks = self._checkpoint.ranks
            is_here = rank in ranks or rank % self._checkpoint.world_size in ranks
            self._stored = Stored(self._checkpoint, rank if is_here else ranks[0], is_merged=True)
            self._placement = Placement(self._stored)
            outline = _Outline(self._stored, self._placement)
            later = outline.whole(self._stored.tree)
            self._placement.fill()
            self.outline: Any = later()
            self._leaves = outline.leaves
            self._conversions: list[tuple[torch.Tensor, torch.Tensor]] = []
            self._placement = Placement(self._stored)
        except BaseException:
            self.close()
            raise

    def boxes(self, tensor: torch.Tensor) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """(offset, shape) of the boxes in which a tensor of the outline is stored."""
        leaf = self._leaf(tensor)
        if leaf.view is not None:
            return [((0,) * tensor.dim(), tuple(tensor.shape))]
        return [(box.offset, box.shape) for box in self._stored.boxes(leaf)]

    def check_filled(self, tensor: torch.Tensor) -> None:
        """Raises :class:`FormatError`, :class:`MismatchError` if the boxes of a tensor do not make it up."""
        self._placement.check_filled(self._leaf(tensor))

    def want(self, tensor: torch.Tensor, offset: Sequence[int], into: torch.Tensor) -> None:
        """Note that the box of a tensor at ``offset``, of the shape and dtype of ``into``, is to be read into that."""
        if into.dtype != tensor.dtype:
            raise ConfigError(f"want: the tensor is stored as {tensor.dtype}, not as {into.dtype}")
        shape = tuple(into.shape)
        self._placement.add_box(self._leaf(tensor), Box(tuple(offset), shape, (0,) * len(shape)), into.detach())

    def want_as(self, tensor: torch.Tensor, offset: Sequence[int], into: torch.Tensor) -> None:
        """As :meth:`want`, into a tensor of any dtype: what is read is converted."""
        read = into if into.dtype == tensor.dtype else torch.empty(into.shape, dtype=tensor.dtype)
        self.want(tensor, offset, read)
        if read is not into:
            self._conversions.append((into.detach(), read))

    def want_all(self, outline: Any) -> Any:
        """A part of the outline with memory for its tensors, which are to be read into it."""

        def leaf(_path: Any, value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.is_meta:
                return value
            into = torch.empty(value.shape, dtype=value.dtype)
            self.want(value, (0,) * value.dim(), into)
            return into

        return mapped(outline, leaf)

    def read(self) -> None:
        """Read and verify everything wanted so far.  Blocks.  Raises: :class:`IntegrityError`."""
        placement, self._placement = self._placement, Placement(self._stored)
        conversions, self._conversions = self._conversions, []
        placement.fill()
        for into, read in conversions:
            into.copy_(read)

    def close(self) -> None:
        """May be called again."""
        self._checkpoint.close()

    def __enter__(self) -> BoxReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _leaf(self, tensor: torch.Tensor) -> Located:
        leaf = self._leaves.get(id(tensor))
        if leaf is None:
            raise ConfigError("that is no tensor of this reader's outline")
        return leaf


class _Outline(Builder):
    """Makes tensors without data, and knows what each stands for; arrays and registered types are read."""

    def __init__(self, stored: Stored, placement: Placement) -> None:
        super().__init__(stored, placement)
        self.leaves: dict[int, Located] = {}
        self._real = Builder(stored, placement)

    def build(self, located: Located, path: tree.Path = ()) -> Later | None:
        if isinstance(located.node, tree.LeafNode | tree.ArrayNode):
            return self._real.build(located, path)
        if not located.is_tensor:
            return super().build(located, path)
        dtype, shape = self._placement.form(located)
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        self.leaves[id(tensor)] = located
        return lambda: tensor
