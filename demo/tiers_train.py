"""The training of :mod:`demo.ranks_train` on nodes with disks of their own, and tiers behind them.

    torchrun --nproc-per-node N demo/tiers_train.py --root DIR --steps N [--store s3://…] [--no-save] [--record FILE]

Every rank plays a node: its checkpoints lie in ``DIR/node0``, ``DIR/node1`` …, which no other rank sees.  Some are
carried to ``DIR/shared``, and a few to the object store.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a script, from anywhere

from demo.ranks_train import train

from stillframe import Checkpointer, KeepLast, Tier

KEPT, SHARED_EVERY, STORE_EVERY = 10, 5, 10


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT on several nodes, with tiers behind their disks.")
    parser.add_argument("--root", type=Path, required=True, help="directory of the nodes and of the first tier")
    parser.add_argument("--steps", type=int, required=True, help="train up to this step")
    parser.add_argument("--store", help="the second tier")
    parser.add_argument("--no-save", action="store_true", help="save nothing and restore nothing, for comparison")
    parser.add_argument("--record", type=Path, help="write timings and the fingerprint of the final state here")
    given = parser.parse_args()
    torch.set_num_threads(1)  # the ranks share the cores; and the same number everywhere, for the same order of sums
    dist.init_process_group("gloo")
    os.environ["STILLFRAME_NODE"] = f"node{dist.get_rank()}"  # by default it is the host's name

    def make() -> Checkpointer:
        tiers = [Tier(given.root / "shared", every=SHARED_EVERY)]
        if given.store:
            tiers.append(Tier(given.store, every=STORE_EVERY))
        return Checkpointer(given.root / "{node}", keep=KeepLast(KEPT), tiers=tiers)

    record = train(None if given.no_save else make, given.steps)
    if given.record is not None and dist.get_rank() == 0:
        given.record.write_bytes(msgspec.json.encode(record))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
