"""Ranks that use torch.distributed.checkpoint: ``dcp_worker.py ROOT write|read``, ``train DIE_AT``, ``NAME STEPS``."""

from __future__ import annotations

import copy
import importlib
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import stillframe
from stillframe.integrations.dcp import Reader, Stager, Writer
from tests.ranks.leaving import leave
from tests.ranks.saying import say
from tests.support import assert_same

warnings.simplefilter("ignore")
sharding: Any = importlib.import_module("torch.distributed._shard.sharded_tensor")
dcp: Any = importlib.import_module("torch.distributed.checkpoint")
"""Its names are not declared as exported."""


class Net(torch.nn.Module):
    """With a buffer that changes in forward, and a size that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(13, 31), torch.nn.BatchNorm1d(31), torch.nn.Linear(31, 13))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(batch)
        return found


def build(seed: int) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 if seed else 0.01)
    update(model, optimizer, 0)
    return model, optimizer


def update(model: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(1000 + step)  # DCP keeps one rank's buffers: all get the same
    model(torch.randn(8, 13, generator=generator)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model: Net, optimizer: torch.optim.Optimizer, **more: Any) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, **more}


def frozen(state: Any) -> Any:
    if isinstance(state, DTensor):
        return state.full_tensor().clone()
    if isinstance(state, torch.Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {key: frozen(state[key]) for key in sorted(state)}  # DCP does not keep their order
    if isinstance(state, list):
        return [frozen(value) for value in state]
    return copy.deepcopy(state)


def loaded(root: object, step: int | None = None) -> Any:
    """What dcp.load puts into a model that was built otherwise."""
    state = state_of(*build(seed=7), note="", more=[0, 0])
    dcp.load(state, storage_reader=Reader(str(root), step=step))
    return frozen(state)


def write(root: Path) -> None:
    group = dist.new_group(backend="gloo")
    model, optimizer = build(seed=0)
    expected: dict[int, Any] = {}

    def state(step: int) -> dict[str, Any]:
        found = state_of(model, optimizer, note=f"step {step}", more=[step, 2.5])
        expected[step] = frozen(found)
        return found

    # Saved and durable when it returns; with plans from the cache; its own planner.
    writer = Writer(root / "sync")
    for step in range(3):
        dcp.save(state(step), storage_writer=writer, planner=dcp.DefaultSavePlanner(enable_plan_caching=True))
        update(model, optimizer, step)
    for step in range(3):
        assert_same(loaded(root / "sync", step), expected[step])
    newest = expected[2]

    # Lazy: the update, and the forward that changes the buffer, come while it is copied.
    lazy = Writer(root / "lazy")
    stager = Stager(lazy)
    for step in range(4):
        response = dcp.async_save(state(step), storage_writer=lazy, async_stager=stager, process_group=group)
        update(model, optimizer, step)
    response.staging_completion.result()
    response.upload_completion.result()
    for step in range(4):
        assert_same(loaded(root / "lazy", step), expected[step])

    # DCP's own stager, in a thread and in a process of its own.
    for kind in (AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS):
        where = Writer(root / kind.name, step=5)
        saving = dcp.async_save(state(5), storage_writer=where, async_checkpointer_type=kind, process_group=group)
        update(model, optimizer, 5)
        saving.result()
        assert_same(loaded(root / kind.name), expected[5])

    # DCP's process and the trainer take turns in one root.
    for step in range(4):
        turn, where = state(step), Writer(root / "turns")
        if step % 2:
            dcp.save(turn, storage_writer=where)
        else:
            kind = AsyncCheckpointerType.PROCESS
            dcp.async_save(turn, storage_writer=where, async_checkpointer_type=kind, process_group=group).result()
        update(model, optimizer, step)
    for step in range(4):
        assert_same(loaded(root / "turns", step), expected[step])

    # What a Checkpointer wrote, through DCP; and what DCP wrote, through a Checkpointer.
    with stillframe.Checkpointer(root / "ours") as checkpointer:
        checkpointer.save(8, stillframe.TrainState(model, optimizer, note="ours", more=[8, 2.5]))
    state(8)
    expected[8]["note"] = "ours"
    assert_same(loaded(root / "ours"), expected[8])
    other, its = build(seed=3)
    back = stillframe.TrainState(other, its, note="", more=[0, 0])
    with stillframe.Checkpointer(root / "sync") as checkpointer:
        assert checkpointer.restore(back, step=2).step == 2
    assert_same(frozen(state_of(other, its, note=back.more["note"], more=back.more["more"])), newest)

    # Everybody alone.
    alone = {"w": torch.arange(5) + dist.get_rank(), "name": f"rank {dist.get_rank()}"}
    own = root / f"alone-{dist.get_rank()}"
    dcp.save(alone, storage_writer=Writer(own), no_dist=True)
    got = {"w": torch.zeros(5, dtype=torch.long), "name": ""}
    dcp.load(got, storage_reader=Reader(own), no_dist=True)
    assert_same(got, alone)

    # DCP spreads the items of a list over the ranks.
    rows = [torch.full((4,), float(n)) for n in range(5)] + [7]
    dcp.save({"ema": rows, "pairs": [{"a": torch.ones(3)}, [torch.zeros(2)]]}, storage_writer=Writer(root / "lists"))
    new: dict[str, Any] = {
        "ema": [torch.zeros(4) for _ in range(5)] + [0],
        "pairs": [{"a": torch.zeros(3)}, [torch.ones(2)]],
    }
    dcp.load(new, storage_reader=Reader(root / "lists"))
    assert_same(new["ema"], rows)
    for found in (stillframe.load(root / "lists"), new):
        assert_same(found["ema"], rows)
        assert_same(found["pairs"], [{"a": torch.ones(3)}, [torch.zeros(2)]])
    Writer(root / "lists").close()
    into = [torch.zeros(4) for _ in range(5)] + [0]
    with stillframe.Checkpointer(root / "lists") as checkpointer:
        checkpointer.restore({"ema": into, "pairs": [{"a": torch.zeros(3)}, [torch.ones(2)]]})
    assert_same(into, rows)

    # A ShardedTensor with several shards on each rank, of different shapes.
    whole = torch.arange(48.0).view(8, 6)
    dcp.save({"sharded": pieces(whole), "n": 3}, storage_writer=Writer(root / "pieces"))
    new = {"sharded": pieces(torch.zeros(8, 6)), "n": 0}
    dcp.load(new, storage_reader=Reader(root / "pieces"))
    assert new["n"] == 3
    for one, two in zip(new["sharded"].local_shards(), pieces(whole).local_shards(), strict=True):
        assert_same(one.tensor, two.tensor)
    assert_same(stillframe.load(root / "pieces")["sharded"], whole)
    sharded = pieces(whole + 1)  # nobody owns its memory: lazily, it is copied at once
    where = Writer(root / "pieces")
    response = dcp.async_save(
        {"sharded": sharded}, storage_writer=where, async_stager=Stager(where), process_group=group
    )
    for shard in sharded.local_shards():
        shard.tensor.zero_()
    response.upload_completion.result()
    assert_same(stillframe.load(root / "pieces")["sharded"], whole + 1)

    # A DTensor where DCP hands over rank 0's part only is refused: it would come back as every rank's.
    sharded = next(model.parameters())
    for hidden, flatten in (({"pair": (sharded, 1)}, True), ({"pair": {"w": sharded}}, False)):
        planner = dcp.DefaultSavePlanner(flatten_state_dict=flatten, flatten_sharded_tensors=flatten)
        try:
            dcp.save(hidden, storage_writer=Writer(root / "hidden"), planner=planner)
            raise AssertionError("a part was stored for the whole")
        except dcp.CheckpointException as error:
            if "pair/" not in str(error):
                raise

    # A list that each rank keeps for itself is nobody else's, however long theirs are.
    mine = [torch.full((2,), float(dist.get_rank())) for _ in range(2 + dist.get_rank())]
    with stillframe.Checkpointer(root / "own") as checkpointer:
        checkpointer.save(1, {"mine": mine})
    dist.barrier()
    assert_same(stillframe.load(root / "own", rank=dist.get_rank()), {"mine": mine})

    # What cannot be stored fails on every rank, by name, and leaves what was there.
    try:
        dcp.save({"model": model.state_dict(), "odd": {"x": object()}}, storage_writer=Writer(root / "sync"))
        raise AssertionError("object() was stored")
    except dcp.CheckpointException as error:
        if "odd/x" not in str(error):
            raise
    assert_same(loaded(root / "sync"), newest)
    if dist.get_rank() == 0:
        torch.save(newest, root / "expected.pt")


def pieces(source: torch.Tensor) -> Any:
    """An 8 × 6 tensor, divided into five, of which each rank has some."""
    boxes = [[(0, 0, 2, 6), (4, 0, 2, 3)], [(2, 0, 2, 6), (4, 3, 2, 3), (6, 0, 2, 6)]][dist.get_rank()]
    shards = [
        sharding.Shard.from_tensor_and_offsets(source[y : y + rows, x : x + columns].clone(), [y, x], dist.get_rank())
        for y, x, rows, columns in boxes
    ]
    return sharding.init_from_local_shards(shards, 8, 6)


def read(root: Path) -> None:
    """By another number of ranks than wrote it."""
    assert_same(loaded(root / "sync"), torch.load(root / "expected.pt"))
    some = dist.new_group(range(1, dist.get_world_size()) if dist.get_world_size() > 1 else [0])
    if dist.get_rank() > 0:  # some of the ranks save, as for one replica of several
        for number in range(2):
            mine = {"n": number, f"from {dist.get_rank()}": torch.full((3,), dist.get_rank())}
            dcp.save(mine, storage_writer=Writer(root / "some"), process_group=some)
    dist.barrier()
    if dist.get_world_size() > 1:
        found = stillframe.load(root / "some")
        assert (found["n"], found["from 2"].tolist()) == (1, [2, 2, 2])


def train(root: Path, die_at: int = -1, until: int = 8) -> None:
    """Save at every step, lazily or not; go on from the newest checkpoint."""
    group = dist.new_group(backend="gloo")
    model, optimizer = build(seed=0)
    at = 0
    newest = [stillframe.Catalog(root).latest()]
    dist.broadcast_object_list(newest)  # the keeper of a run just killed may commit another at any moment
    if newest[0] is not None:
        state = state_of(model, optimizer, at=0)
        dcp.load(state, storage_reader=Reader(root, step=newest[0]))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        at = state["at"]
    say(f"resumed at {at}")
    writer = Writer(root)
    stager = Stager(writer)
    previous = None
    for step in range(at, until):
        update(model, optimizer, 100 + step)
        if previous is not None and step - at < 3:
            previous.upload_completion.result()  # at least these are committed
        state = state_of(model, optimizer, at=step + 1)
        if step % 4 == 3:
            if previous is not None:
                previous.upload_completion.result()
            previous = dcp.save(state, storage_writer=writer) and None
        else:
            previous = dcp.async_save(state, storage_writer=writer, async_stager=stager, process_group=group)
        say(f"at {step + 1}")
        if step == die_at and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
    if previous is not None:
        previous.upload_completion.result()
    if dist.get_rank() == 0:
        say(f"trained {root.name}")
    final = frozen(state_of(model, optimizer))
    if dist.get_rank() == 0:
        torch.save(final, root.parent / f"{root.name}.pt")


def main() -> None:
    root, what = Path(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo")
    if what == "write":
        write(root)
    elif what == "read":
        read(root)
    elif what == "train":
        train(root / "calm")
        train(root / "hit", die_at=int(sys.argv[3]))
    else:
        train(root / what, until=int(sys.argv[3]))
    leave()


if __name__ == "__main__":
    main()
