"""Any box of any tensor of a checkpoint: for readers that bring a plan of their own, such as DCP's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch

from stillframe.checkpoint.catalog import Catalog
from stillframe.checkpoint.stored import Stored
from stillframe.errors import ConfigError
from stillframe.format.tree import ArrayNode, LeafNode, Node, Path, ShardedNode, TensorNode
from stillframe.restore.load import Builder, Later
from stillframe.restore.place import Placement, StoredTensor
from stillframe.state.boxes import Box


class PartReader:
    """A checkpoint of a step (the newest if none is given), open for reading in any parts.

    :attr:`outline` is its state, of all ranks as one, with every tensor on the meta device: those tensors are what
    :meth:`boxes` and :meth:`want` take.  Of what each rank kept for itself it is ``rank``'s.

    Raises: :class:`NotFoundError`, :class:`IntegrityError`, :class:`VersionError`.
    """

    def __init__(self, root: str | os.PathLike[str], step: int | None = None, *, rank: int = 0) -> None:
        self._checkpoint = Catalog(root).open(step)
        try:
            self.step = self._checkpoint.step
            self._stored = Stored(self._checkpoint, rank, is_merged=True)
            self._placement = Placement(self._stored)
            outline = _Outline(self._stored, self._placement)
            later = outline.build(self._stored.tree)
            assert later is not None  # only= is not used here
            self._placement.fill()
            self.outline: Any = later()
            self._nodes = outline.nodes
            self._placement = Placement(self._stored)
        except BaseException:
            self.close()
            raise

    def boxes(self, tensor: torch.Tensor) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """(offset, shape) of the parts in which a tensor of the outline is stored; they make it up."""
        node = self._node(tensor)
        if isinstance(node, TensorNode):
            return [((0,) * tensor.dim(), tuple(tensor.shape))]
        return [(piece.offset, piece.shape) for piece in self._stored.all_pieces(node)]

    def want(self, tensor: torch.Tensor, offset: Sequence[int], into: torch.Tensor) -> None:
        """The box of a tensor of the outline that starts there goes into this one, of its shape and dtype."""
        if into.dtype != tensor.dtype:
            raise ConfigError(f"want: the tensor is stored as {tensor.dtype}, not as {into.dtype}")
        shape = tuple(into.shape)
        self._placement.add_box(self._node(tensor), Box(tuple(offset), shape, (0,) * len(shape)), into.detach())

    def read(self) -> None:
        """Everything wanted so far, verified.  Blocks; raises :class:`IntegrityError`."""
        placement, self._placement = self._placement, Placement(self._stored)
        placement.fill()

    def close(self) -> None:
        """May be called again."""
        self._checkpoint.close()

    def __enter__(self) -> PartReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _node(self, tensor: torch.Tensor) -> StoredTensor:
        node = self._nodes.get(id(tensor))
        if node is None:
            raise ConfigError("that is no tensor of this reader's outline")
        return node


class _Outline(Builder):
    """Gives tensors without data, and knows which is which; arrays and registered leaves are read."""

    def __init__(self, stored: Stored, placement: Placement) -> None:
        super().__init__(stored, placement)
        self.nodes: dict[int, StoredTensor] = {}
        self._real = Builder(stored, placement)

    def build(self, node: Node, path: Path = ()) -> Later | None:
        if isinstance(node, LeafNode | ArrayNode):
            return self._real.build(node, path)
        if isinstance(node, TensorNode | ShardedNode):
            dtype, shape = self._placement.form(node)
            tensor = torch.empty(shape, dtype=dtype, device="meta")
            self.nodes[id(tensor)] = node
            return lambda: tensor
        return super().build(node, path)
