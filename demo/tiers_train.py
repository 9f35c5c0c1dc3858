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

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a script, from anywhere

from demo import options
from demo.ranks_train import run_rank

from stillframe import Checkpointer, KeepLast, Tier

KEPT, SHARED_EVERY, STORE_EVERY = 10, 5, 10


def make(given: argparse.Namespace) -> Checkpointer:
    os.environ["STILLFRAME_NODE"] = f"node{dist.get_rank()}"  # by default it is the host's name
    tiers = [Tier(given.root / "shared", every=SHARED_EVERY)]
    if given.store:
        tiers.append(Tier(given.store, every=STORE_EVERY))
    return Checkpointer(given.root / "{node}", keep=KeepLast(KEPT), tiers=tiers)


def main() -> None:
    parser = options.parser("Train a small GPT on several nodes, with tiers behind their disks.")
    parser.add_argument("--store", help="the second tier")
    run_rank(parser, make)


if __name__ == "__main__":
    main()
