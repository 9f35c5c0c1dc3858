"""The training of :mod:`demo.ranks_train` on several hosts, each with a disk of its own, and a directory that all see.

    torchrun --nnodes N --nproc-per-node 1 … demo/nodes_train.py --root DIR --steps N [--no-save] [--record FILE]

A host's checkpoints lie in ``DIR/{node}``, which is the name of the host; some are carried to ``DIR/shared``.
"""

from __future__ import annotations

import argparse
import sys
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a script, from anywhere

from demo.ranks_train import train

from stillframe import Checkpointer, KeepLast, Tier

KEPT, SHARED_EVERY = 10, 3
SILENCE = timedelta(seconds=10)
"""So long the other hosts may be silent in a collective: of a host that is cut off nothing else tells."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT on several hosts.")
    parser.add_argument("--root", type=Path, required=True, help="directory of the hosts' disks and of the shared one")
    parser.add_argument("--steps", type=int, required=True, help="train up to this step")
    parser.add_argument("--no-save", action="store_true", help="save nothing and restore nothing, for comparison")
    parser.add_argument("--record", type=Path, help="write timings and the fingerprint of the final state here")
    given = parser.parse_args()
    torch.set_num_threads(1)  # the ranks share the cores; and the same number everywhere, for the same order of sums
    dist.init_process_group("gloo", timeout=SILENCE)

    def make() -> Checkpointer:
        tier = Tier(given.root / "shared", every=SHARED_EVERY)
        return Checkpointer(given.root / "{node}", keep=KeepLast(KEPT), tiers=[tier])

    record = train(None if given.no_save else make, given.steps)
    if given.record is not None and dist.get_rank() == 0:
        given.record.write_bytes(msgspec.json.encode(record))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
