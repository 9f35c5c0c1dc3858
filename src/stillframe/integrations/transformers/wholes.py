"""Weights that FSDP2 has divided, each made whole on the one rank that saves it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from stillframe import spi
from stillframe.integrations.frameworks import here

_TURN_BYTES = 256 << 20
"""So much of a model is exchanged at once.  On a device a turn takes two buffers, each of this divided by the ranks."""


class Wholes:
    """Of one model, for one save after the other.  Every rank calls the same, in the same order."""

    def __init__(self) -> None:
        self.owners: dict[str, int] = {}
        """By weight, the largest first: the rank that saves it as a whole."""
        self._here: dict[str, torch.Tensor] = {}
        """Those of this rank, in host memory; written over by the next save."""
        self._forms: dict[str, Any] = {}
        """Of the weights that these were shared out for."""

    def make(self, divided: Mapping[str, DTensor], *, is_one_file: bool) -> dict[str, spi.TensorBox]:
        """Blocks until the rows of all ranks are where they are saved.  A collective.

        ``is_one_file``: rank 0 saves all.  Raises on all ranks if one has no room for what it saves.
        """
        forms = {name: (each.shape, each.dtype, is_one_file) for name, each in divided.items()}
        if forms != self._forms:
            owners = _shared_out(divided, 1 if is_one_file else dist.get_world_size())
            self.owners, self._here, self._forms = {}, {}, {}  # there may not be room for both
            self._here = here(
                lambda: _room({name: divided[name] for name in owners if owners[name] == dist.get_rank()})
            )
            self.owners, self._forms = owners, forms
        for names in _turns({name: divided[name] for name in self.owners}):
            turn = {name: divided[name] for name in names}
            if _is_by_rows(divided[names[0]]):
                self._exchange(turn)
            else:
                self._gather(turn)
        return {
            name: spi.TensorBox(
                self._here.get(name, torch.empty((0, *each.shape[1:]), dtype=each.dtype, device="cpu")),
                each.shape,
                (0,) * each.ndim,
            )
            for name, each in divided.items()
        }

    def _exchange(self, divided: dict[str, DTensor]) -> None:
        """Every rank sends its rows of each weight to the rank that saves it, and to no other.  All of one dtype."""
        mesh, ranks = next(iter(divided.values())).device_mesh, range(dist.get_world_size())
        own = {name: _reachable(each).to_local().reshape(-1) for name, each in divided.items()}
        to = [[own[name] for name in divided if self.owners[name] == rank] for rank in ranks]
        mine = [self._here[name].chunk(len(ranks)) for name in divided if name in self._here]
        of = [[part for parts in mine for part in parts[rank : rank + 1]] for rank in ranks]  # the last may have none
        sent = torch.cat([row for rows in to for row in rows])
        found = torch.empty(sum(map(_nbytes, of)), dtype=torch.uint8, device=sent.device)
        sizes = list(map(_nbytes, of)), list(map(_nbytes, to))
        dist.all_to_all_single(found, sent.view(torch.uint8), *sizes, group=mesh.get_group())  # gloo knows few dtypes
        values, at = found.view(sent.dtype), 0
        for part in (part for parts in of for part in parts):
            part.copy_(values[at : at + part.numel()].view(part.shape))
            at += part.numel()

    def _gather(self, divided: dict[str, DTensor]) -> None:
        """However they are divided: every rank gets all of each."""
        for name, each in divided.items():
            whole = _reachable(each).full_tensor()
            if name in self._here:
                self._here[name].copy_(whole)


def _room(divided: Mapping[str, DTensor]) -> dict[str, torch.Tensor]:
    """In host memory, for the whole of each."""
    return {name: torch.empty(each.shape, dtype=each.dtype, device="cpu") for name, each in divided.items()}


def _shared_out(divided: Mapping[str, DTensor], ranks: int) -> dict[str, int]:
    """The largest first, each to the rank that has least."""
    given = [0] * ranks
    owners = {}
    for name, each in sorted(divided.items(), key=lambda item: -item[1].nbytes):
        owners[name] = given.index(min(given))
        given[owners[name]] += each.nbytes
    return owners


def _turns(divided: dict[str, DTensor]) -> list[list[str]]:
    """What is exchanged together, the same on every rank: alike in dtype, and no more than is to be held at once."""
    turns: list[list[str]] = []
    nbytes, kind = 0, None
    for name, each in divided.items():
        last, kind = kind, (each.dtype, _is_by_rows(each))
        if kind == last and nbytes + each.nbytes <= _TURN_BYTES:
            turns[-1].append(name)
            nbytes += each.nbytes
        else:
            turns.append([name])
            nbytes = each.nbytes
    return turns


def _is_by_rows(divided: DTensor) -> bool:
    """Whether all ranks hold its rows, in their order, as ``torch.chunk`` divides them: FSDP2's own way."""
    mesh = divided.device_mesh
    is_all = mesh.ndim == 1 and mesh.mesh.tolist() == list(range(dist.get_world_size()))
    return is_all and tuple(divided.placements) == (Shard(0),)


def _reachable(divided: DTensor) -> Any:
    """Where the ranks can exchange it: weights may be kept in host memory."""
    return divided.detach().to(divided.device_mesh.device_type)


def _nbytes(tensors: list[torch.Tensor]) -> int:
    return sum(each.nbytes for each in tensors)
