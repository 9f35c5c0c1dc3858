"""A rank that serves the tests of resharding: it gets orders through a socket, carries them out, and answers.

One world of ranks lives as long as the tests of a module, so that an order costs milliseconds and Hypothesis can
shrink.  An order is the name of a function in ``ORDERS`` and its arguments; every rank of a world gets the same
orders.  Single-process tests call the same functions directly.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import random
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

import stillframe
import stillframe.checkpoint.read
from stillframe import Checkpointer, TrainState
from stillframe.checkpoint.catalog import Checkpoint, RankPart
from tests.ranks.updates_worker import save_changed_by_hand, save_sound_loops
from tests.support import bytes_of

DEADLINE_S = 30.0
LAST_STEP = 3
PR_SET_PDEATHSIG = 1


def checkpointer_of(root: Path) -> Checkpointer:
    return Checkpointer(root, arena="64MiB", deadline_s=DEADLINE_S)


def this_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


# --- tensors under any layout --------------------------------------------------------------


class Layout(NamedTuple):
    """How a tensor lies over the ranks of a mesh, given as nested tuples; no mesh: it is plain, and on every rank."""

    ranks: Any = None
    placements: tuple[Placement, ...] = ()
    is_transposed: bool = False
    """The local part lies in memory in another order than its dimensions."""


class Drawn(NamedTuple):
    """A tensor, how it is saved, and how it is restored."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    seed: int
    saved: Layout
    restored: Layout


def blank(like: torch.Tensor) -> torch.Tensor:
    """Not every dtype can be filled."""
    return torch.zeros(like.nbytes, dtype=torch.uint8).view(like.dtype).view(like.shape)


def content(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bytes as a tensor: the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return (data & 1 if dtype is torch.bool else data).view(dtype).reshape(shape)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same with one dimension more, of bytes: torch gathers bytes of any dtype."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).reshape(*tensor.shape, tensor.element_size())


@functools.cache
def mesh_of(ranks: Any) -> DeviceMesh:
    return DeviceMesh("cpu", ranks)


def spread(full: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The tensor under a layout; split by torch itself, without communication."""
    if layout.is_transposed and full.dim() > 1:
        full = full.mT.contiguous().mT
    if layout.ranks is None:
        return full.clone()
    made: torch.Tensor = distribute_tensor(full, mesh_of(layout.ranks), layout.placements, src_data_rank=None)
    return made


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor, gathered by torch from the ranks of its mesh."""
    if not isinstance(tensor, DTensor):
        return as_bytes(tensor)
    form = as_bytes(torch.empty(tensor.shape, dtype=tensor.dtype))
    parts = DTensor.from_local(
        as_bytes(tensor.to_local()), tensor.device_mesh, tensor.placements,
        run_check=False, shape=form.shape, stride=form.stride(),
    )  # fmt: skip
    return parts.full_tensor()


def can_gather(tensor: torch.Tensor) -> bool:
    """Whether torch itself can: it waits forever where strided shards are uneven, and it gathers by rank's number."""
    if not isinstance(tensor, DTensor):
        return True
    mesh = tensor.device_mesh
    is_ordered = all(torch.equal(mesh.mesh, mesh.mesh.sort(dim).values) for dim in range(mesh.ndim))
    is_strided = any(isinstance(each, _StridedShard) for each in tensor.placements)
    return mesh.get_coordinate() is not None and is_ordered and not is_strided


@functools.cache
def drawing(root: Path) -> Checkpointer:
    """One checkpointer for all drawn tensors of this world."""
    return checkpointer_of(root)


def save_drawn(root: Path, step: int, drawn: list[Drawn]) -> None:
    state = [spread(content(each.shape, each.dtype, each.seed), each.saved) for each in drawn]
    drawing(root).save(step, state).wait(timeout_s=DEADLINE_S)


def restore_drawn(root: Path, step: int, drawn: list[Drawn]) -> None:
    """Into tensors full of other bytes; then every rank has its part, and all parts make up the whole."""
    wholes = [content(each.shape, each.dtype, each.seed) for each in drawn]
    state = [spread(blank(full), each.restored) for full, each in zip(wholes, drawn, strict=True)]
    assert drawing(root).restore(state, step=step).step == step
    for full, each, live in zip(wholes, drawn, state, strict=True):
        expected = local_of(spread(full, each.restored))
        assert local_of(live).shape == expected.shape, each
        assert bytes_of(local_of(live)) == bytes_of(expected), each
        if can_gather(live):
            assert bytes_of(gathered(live)) == bytes_of(full), each


def end_drawing(root: Path) -> None:
    drawing(root).close()


def save_some(root: Path, layout: Layout) -> None:
    """A tensor that only the ranks of its mesh have at all; all have one of their own."""
    full = content((7, 5), torch.float32, 1)
    mesh = mesh_of(layout.ranks)
    state: dict[str, Any] = {"own": torch.full((20,), float(this_rank()))}
    if mesh.get_coordinate() is not None:
        state["some"] = spread(full, layout)
    with checkpointer_of(root) as checkpointer:
        checkpointer.save(1, state).wait(timeout_s=DEADLINE_S)


def restore_some(root: Path, layout: Layout) -> None:
    full = content((7, 5), torch.float32, 1)
    mesh = mesh_of(layout.ranks)
    state: dict[str, Any] = {"own": torch.zeros(20)}
    if mesh.get_coordinate() is not None:
        state["some"] = spread(blank(full), layout)
    with checkpointer_of(root) as checkpointer:
        assert checkpointer.restore(state).step == 1
    assert state["own"].unique().tolist() == [float(this_rank())]
    if "some" in state:
        assert bytes_of(local_of(state["some"])) == bytes_of(local_of(spread(full, layout)))


# --- models --------------------------------------------------------------------------------


class Net(torch.nn.Module):
    """Rows that no number of ranks divides, fewer rows than ranks, a buffer, and a pair for tensor parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.up = torch.nn.Linear(8, 10)
        self.down = torch.nn.Linear(10, 8)
        self.head = torch.nn.Linear(8, 3)
        self.scale = torch.nn.Parameter(torch.tensor([1.0]))
        self.register_buffer("table", torch.randn(6))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        inner = self.norm(self.embed(tokens))
        result: torch.Tensor = self.head(inner + self.down(self.up(inner).relu())) * self.scale
        return result


@functools.cache
def named_mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def tensor_parallel(model: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def fully_sharded(model: Net, mesh: DeviceMesh) -> Net:
    fully_shard([model.up, model.down], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def wrap(model: Any, kind: str) -> torch.nn.Module:
    """``kind``: wrappers from the inside out, such as ``tp fsdp`` or ``ddp compile``."""
    if kind == "tp fsdp":
        mesh = named_mesh((2, dist.get_world_size() // 2), ("dp", "tp"))
        tensor_parallel(model, mesh["tp"])
        return fully_sharded(model, mesh["dp"])
    made: Any = model
    for wrapper in kind.split():
        if wrapper == "compile":
            with warnings.catch_warnings():  # of what it imports
                warnings.simplefilter("ignore")
                made = torch.compile(made)
        elif wrapper == "ddp":
            made = DistributedDataParallel(made)
        elif wrapper == "fsdp":
            made = fully_sharded(made, named_mesh((dist.get_world_size(),), ("dp",)))
        elif wrapper == "hsdp":
            made = fully_sharded(made, named_mesh((2, dist.get_world_size() // 2), ("copy", "dp")))
        elif wrapper == "tp":
            made = tensor_parallel(made, named_mesh((dist.get_world_size(),), ("tp",)))
        else:
            assert wrapper == "plain", wrapper
    module: torch.nn.Module = made
    return module


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        tokens = torch.randint(0, 11, (16,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(tokens).square().mean().backward()
        optimizer.step()


def make(kind: str, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = wrap(Net(), kind)
    decayed = [each for each in model.parameters() if each.dim() > 1]
    others = [each for each in model.parameters() if each.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=0.01)


def state_of(form: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return TrainState(model, optimizer) if form == "TrainState" else {"model": model, "optimizer": optimizer}


def reference(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything as full tensors, gathered and named by torch, flat."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        states = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    return dict(flat(dict(zip(("model", "optimizer"), states, strict=True))))


def flat(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from flat(value, f"{path}/{key}")
    elif isinstance(node, list) and node and isinstance(node[0], dict):
        for index, value in enumerate(node):
            yield from flat(value, f"{path}/{index}")
    else:
        yield path, node.detach() if isinstance(node, torch.Tensor) else node


def assert_alike(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """The same entries with the same bits, in any order."""
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
            assert bytes_of(found[name]) == bytes_of(value), f"{name} differs"
        else:
            assert found[name] == value, name


def save_model(root: Path, kind: str, form: str) -> None:
    """Train a little, save, and put what must come back beside the root."""
    model, optimizer = make(kind, seed=1)
    train(model, optimizer, LAST_STEP)
    expected = reference(model, optimizer)
    if this_rank() == 0:
        torch.save(expected, reference_path(root))
    with checkpointer_of(root) as checkpointer:
        checkpointer.save(LAST_STEP, state_of(form, model, optimizer))


def reference_path(root: Path) -> Path:
    return root.with_suffix(".reference")


def restore_model(root: Path, kind: str, form: str, trained: int) -> None:
    """Into a model that began elsewhere and has been trained so far; then train on."""
    model, optimizer = make(kind, seed=2)
    train(model, optimizer, trained)
    with checkpointer_of(root) as checkpointer:
        assert checkpointer.restore(state_of(form, model, optimizer)).step == LAST_STEP
    expected = torch.load(reference_path(root))
    assert_alike(reference(model, optimizer), expected)
    train(model, optimizer, 1)
    after = reference(model, optimizer)
    assert bytes_of(after["/model/up.weight"]) != bytes_of(expected["/model/up.weight"])
    assert after["/optimizer/state/up.weight/step"] == LAST_STEP + 1


def keys_of_both(kind: str) -> tuple[list[str], list[str]]:
    """Of TrainState and of torch's own ``get_state_dict``, for the same model and optimizer."""
    model, optimizer = make(kind, seed=1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = TrainState(model, optimizer)
    ours = {"model": state.model_state(), "optimizer": state.optimizer_state()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    return names_in(ours), names_in(theirs)


def names_in(state: dict[str, Any]) -> list[str]:
    """Every path, and the names that parameter groups list."""
    groups = [f"{number}: {sorted(group['params'])}" for number, group in enumerate(state["optimizer"]["param_groups"])]
    return sorted(path for path, _ in flat(state)) + groups


# --- what is read and written --------------------------------------------------------------


@contextmanager
def recorded() -> Iterator[tuple[set[int], set[tuple[int, int]]]]:
    """Whose parts of checkpoints are opened, and which chunks of them are read."""
    opened: set[int] = set()
    read: set[tuple[int, int]] = set()
    open_part, read_chunk = Checkpoint.of, stillframe.checkpoint.read.read_chunk

    def of(checkpoint: Checkpoint, rank: int) -> RankPart:
        opened.add(rank)
        return open_part(checkpoint, rank)

    def read_and_note(part: RankPart, number: int, buffer: Any) -> tuple[int, int]:
        read.add((part.rank, number))
        return read_chunk(part, number, buffer)

    with (
        mock.patch.object(Checkpoint, "of", of),
        mock.patch.object(stillframe.checkpoint.read, "read_chunk", read_and_note),
    ):
        yield opened, read


def restore_recorded(root: Path, kind: str) -> set[int]:
    """The ranks whose parts a restore of a model opens."""
    model, optimizer = make(kind, seed=2)
    with checkpointer_of(root) as checkpointer, recorded() as (opened, _):
        checkpointer.restore(TrainState(model, optimizer))
    return opened


def save_rows(root: Path, rows: int) -> None:
    """A tensor of rows of one MiB each, row ``i`` full of ``i``; every rank holds as many."""
    world = dist.get_world_size()
    own = torch.arange(rows).chunk(world)[this_rank()]
    local = own.float().unsqueeze(1).repeat(1, 1 << 18)
    with checkpointer_of(root) as checkpointer:
        checkpointer.save(1, {"rows": sharded_rows(local)}).wait(timeout_s=DEADLINE_S)


def restore_rows(root: Path, rows: int) -> tuple[set[int], set[tuple[int, int]]]:
    """Which parts are opened and which chunks are read."""
    own = torch.arange(rows).chunk(dist.get_world_size())[this_rank()]
    local = torch.full((len(own), 1 << 18), -1.0)
    with checkpointer_of(root) as checkpointer, recorded() as (opened, read):
        checkpointer.restore({"rows": sharded_rows(local)})
    assert torch.equal(local, own.float().unsqueeze(1).expand_as(local))
    return opened, read


def sharded_rows(local: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = DTensor.from_local(local, mesh_of(tuple(range(dist.get_world_size()))), [Shard(0)])
    return made


class Lopsided(torch.nn.Module):
    """One huge embedding and many small layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(4096, 128)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(17, 19) for _ in range(40))


def save_lopsided(root: Path, kind: str) -> int:
    """Tells how many bytes one copy of everything has."""
    model: Any = Lopsided()
    if kind.startswith("ddp"):
        model = wrap(model, kind)
    else:
        for layer in model.layers:
            fully_shard(layer, mesh=named_mesh((2, 2), ("copy", "dp")))
        fully_shard(model, mesh=named_mesh((2, 2), ("copy", "dp")))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with checkpointer_of(root) as checkpointer:
        checkpointer.save(1, TrainState(model, optimizer))
    return sum(3 * each.numel() * each.element_size() for each in model.parameters())


# --- what each rank keeps for itself -------------------------------------------------------


class Own:
    """What every rank has of its own: random state, numbers, and a tensor."""

    def __init__(self, seed: int) -> None:
        random.seed(seed)
        torch.manual_seed(seed)
        self.state = {
            "rng": stillframe.RNG(),
            "loader": {"rank": seed, "seen": list(range(seed))},
            "tensor": torch.full((100,), float(seed)),
        }


def save_own(root: Path) -> None:
    with checkpointer_of(root) as checkpointer:
        checkpointer.save(1, Own(this_rank()).state)


def restore_own(root: Path) -> tuple[int, int]:
    """This rank, and the one whose state it got, as told by everything in it."""
    own = Own(seed=1000 + this_rank())
    with checkpointer_of(root) as checkpointer:
        checkpointer.restore(own.state)
    drawn = random.random(), torch.rand(5)
    loader: Any = own.state["loader"]
    tensor: Any = own.state["tensor"]
    whose: int = loader["rank"]
    Own(seed=whose)
    assert drawn[0] == random.random()
    assert torch.equal(drawn[1], torch.rand(5))
    assert loader["seen"] == list(range(whose))
    assert tensor.unique().tolist() == [float(whose)]
    return this_rank(), whose


# --- serving -------------------------------------------------------------------------------

ORDERS: dict[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (
        save_drawn, restore_drawn, end_drawing, save_some, restore_some, save_model, restore_model, keys_of_both,
        restore_recorded, save_rows, restore_rows, save_lopsided, save_own, restore_own,
        save_sound_loops, save_changed_by_hand,
    )
}  # fmt: skip


def serve(directory: Path) -> None:
    """Under this rank's name in the directory, for as long as torchrun lives."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    dist.init_process_group("gloo")
    address = directory / f"rank-{dist.get_rank()}"
    listener = Listener(f"{address}.new")
    os.rename(f"{address}.new", address)  # it appears when it can be called
    with listener.accept() as connection:
        while True:
            name, arguments = connection.recv()
            try:
                connection.send((True, ORDERS[name](*arguments)))
            except Exception:
                connection.send((False, traceback.format_exc()))


if __name__ == "__main__":
    from tests.ranks import reshard_worker  # its classes come through the socket under this name

    reshard_worker.serve(Path(sys.argv[1]))
