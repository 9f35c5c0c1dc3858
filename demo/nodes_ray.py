"""Ray Train on several hosts: as :mod:`demo.nodes_train`, with Ray's workers in the place of torchrun's.

    demo/nodes_ray.py --address HOST:PORT --root DIR --steps N [--no-save] [--record FILE]

The driver, on a host of a cluster that ``ray start`` has made.  A worker's checkpoints lie in ``DIR/{node}``; some are
carried to ``DIR/shared``, and these are what Ray hears of.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from pathlib import Path

import ray
import torch
import torch.distributed as dist
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a script, from anywhere

import msgspec
from demo import options
from demo.nodes_train import KEPT, SHARED_EVERY, SILENCE
from demo.ranks_train import ROWS, SIZES, make_state, of_all_ranks, rank_fingerprint
from demo.record import Record, Started, Step
from demo.text import Text

import stillframe
from stillframe.integrations.ray import RayCheckpointer, checkpointer, locate

_MEET_S = 60.0
_LOOK_S = 0.05


# --- in Ray's workers ------------------------------------------------------------------------


class Teller:
    """What a worker tells goes to a file that the driver reads: Ray sends what is printed late, and with names."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)

    def tell(self, line: Started | Step) -> None:
        os.write(self._file, msgspec.json.encode(line) + b"\n")


def opened(given: argparse.Namespace, state: stillframe.TrainState) -> RayCheckpointer:
    tier = stillframe.Tier(given.root / "shared", every=SHARED_EVERY)
    return checkpointer(state, given.root / "{node}", keep=stillframe.KeepLast(KEPT), tiers=[tier])


def train(config: dict[str, argparse.Namespace]) -> None:
    given = config["given"]
    torch.set_num_threads(1)  # the same number everywhere, for the same order of sums
    rank, world_size = dist.get_rank(), dist.get_world_size()
    teller, begun_s = Teller(f"{given.root}.told"), time.monotonic()
    state = make_state(given.steps, rank, init_device_mesh("cpu", (world_size,)))
    checkpoints = None if given.no_save else opened(given, state)
    found = stillframe.RestoreReport(None) if checkpoints is None else checkpoints.restored
    parameters = sum(each.numel() for each in state.model.parameters())
    started = Started(
        parameters, torch.get_num_threads(), found.step, time.monotonic() - begun_s, rank, os.getpid(),
        source=found.source, restored_bytes=found.bytes,
    )  # fmt: skip
    teller.tell(started)
    steps = [trained(state, step, checkpoints, teller) for step in range((found.step or 0) + 1, given.steps + 1)]
    if checkpoints is not None:
        checkpoints.close()
    together = of_all_ranks(rank_fingerprint(rank, state))
    if rank == 0:
        options.write(given, Record(started, steps, [], together))


def trained(state: stillframe.TrainState, step: int, checkpoints: RayCheckpointer | None, teller: Teller) -> Step:
    rank, world_size, begun_s = dist.get_rank(), dist.get_world_size(), time.monotonic()
    inputs, targets = Text(ROWS * world_size, SIZES.context).batch(state.more["data"])
    loss = state.model(inputs[rank::world_size], targets[rank::world_size])
    assert state.optimizer is not None
    state.optimizer.zero_grad()
    loss.backward()
    dist.all_reduce(loss.detach())  # in place: now the sum over the ranks
    state.optimizer.step()
    state.more["scheduler"].step()
    trained_s, mean = time.monotonic(), loss.item() / world_size
    if checkpoints is not None:
        checkpoints.report(step, {"loss": mean})
    told = Step(step, mean, begun_s, trained_s - begun_s, 0, 0, 0, time.monotonic() - trained_s)
    if rank == 0:
        teller.tell(told)
    return told


# --- in the driver ---------------------------------------------------------------------------


def pass_on(path: Path) -> None:
    """What the workers tell, to this process's own output, for ever."""
    with path.open("rb") as told:
        while True:
            line = told.readline()  # each was written at once
            if line:
                os.write(1, line)
            else:
                time.sleep(_LOOK_S)


def meet(address: str) -> None:
    """The cluster, which may be starting just now."""
    end_s = time.monotonic() + _MEET_S
    while True:
        try:
            ray.init(address, log_to_driver=False, configure_logging=False)
            return
        except (ConnectionError, RuntimeError, ValueError):
            if time.monotonic() > end_s:
                raise
            time.sleep(1)


def main() -> None:
    parser = options.parser("Train a small GPT on several hosts with Ray Train.")
    parser.add_argument("--address", required=True, help="of the head of the cluster")
    given = parser.parse_args()
    told = Path(f"{given.root}.told")
    told.write_bytes(b"")
    threading.Thread(target=pass_on, args=[told], daemon=True).start()
    meet(given.address)
    trainer = TorchTrainer(
        train,
        train_loop_config={"given": given},
        torch_config=TorchConfig(backend="gloo", timeout_s=SILENCE.seconds),
        scaling_config=ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD"),
        run_config=RunConfig(
            storage_path=str(given.root.parent / "ray"),
            name="alone" if given.no_save else "cut",
            failure_config=FailureConfig(max_failures=3),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    result = trainer.fit()
    if not given.no_save:
        root, step = locate(result.checkpoint)
        assert (root, step) == (str(given.root / "shared"), given.steps // SHARED_EVERY * SHARED_EVERY)
        stillframe.load(root, step, only="model")  # readable from here, whatever disks are lost
    time.sleep(10 * _LOOK_S)  # the last lines are passed on
    ray.shutdown()


if __name__ == "__main__":
    main()
