"""The training of :mod:`demo.ranks_train` on several hosts, each with a disk of its own, and a directory that all see.

    torchrun --nnodes N --nproc-per-node 1 … demo/nodes_train.py --root DIR --steps N [--no-save] [--record FILE]

A host's checkpoints lie in ``DIR/{node}``, which is the name of the host; some are carried to ``DIR/shared``.
"""

from __future__ import annotations

import argparse
import sys
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a script, from anywhere

from demo import options
from demo.ranks_train import run_rank

from stillframe import Checkpointer, KeepLast, Tier

KEPT, SHARED_EVERY = 10, 3
SILENCE = timedelta(seconds=10)
"""So long the other hosts may be silent in a collective: of a host that is cut off nothing else tells."""
PAUSE_S = 0.2
"""After each step of an engine: its model is smaller than ours, and a disk should keep up."""


def make(given: argparse.Namespace) -> Checkpointer:
    tier = Tier(given.root / "shared", every=SHARED_EVERY)
    return Checkpointer(given.root / "{node}", keep=KeepLast(KEPT), tiers=[tier])


def main() -> None:
    run_rank(options.parser("Train a small GPT on several hosts."), make, SILENCE)


if __name__ == "__main__":
    main()
