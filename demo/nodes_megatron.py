"""A GPT of Megatron-core, tensor parallel on several hosts: as :mod:`demo.nodes_train`, with ``dist_checkpointing``.

    torchrun --nnodes N --nproc-per-node 1 … demo/nodes_megatron.py --root DIR --steps N [--no-save] [--record FILE]

The data lies in ``DIR/{node}``, which is the name of the host, and every step is carried to ``DIR/_stillframe``.  All
hosts see that one, and Megatron's directories in ``DIR``.

What makes Megatron run without an accelerator is that of its tests (:mod:`tests.engines.megatron_on_cpu`).
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a script, from anywhere

from demo import options
from demo.nodes_train import PAUSE_S, SILENCE
from demo.ranks_train import of_all_ranks
from demo.record import Record, Started, Step, fingerprint
from demo.train import tell
from tests.engines import megatron_on_cpu
from tests.loops.driving import Life, Wish

import stillframe


class Saves:
    """What Megatron's training loop does with checkpoints: asynchronous, a directory for each iteration."""

    def __init__(self, place: Path) -> None:
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

        from stillframe.integrations.megatron import SaveStrategy

        self._place, self._queue, self._strategy = place, AsyncCallsQueue(), SaveStrategy(place / "{node}")

    def load(self, run: Any) -> tuple[int, str]:
        """The iteration, and its directory; 0 if there is none."""
        from megatron.core import dist_checkpointing

        from stillframe.integrations.megatron import LoadStrategy

        found = self._strategy.latest(self._place)
        if found is None:
            return 0, ""
        return run.restore(dist_checkpointing.load(run.sharded(0), found, LoadStrategy())), found

    def save(self, run: Any, iteration: int) -> None:
        from megatron.core import dist_checkpointing

        directory = self._place / f"iter_{iteration:07d}"
        directory.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        request = dist_checkpointing.save(
            run.sharded(iteration), str(directory), self._strategy, async_sharded_save=True
        )
        self._queue.schedule_async_request(request)
        self._queue.maybe_finalize_async_calls(blocking=False)

    def close(self) -> None:
        self._queue.maybe_finalize_async_calls(blocking=True)
        self._strategy.close()


def main() -> None:
    given = options.parser("Train a small GPT of Megatron-core on several hosts.").parse_args()
    megatron_on_cpu.pretend()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=SILENCE)
    rank, life = dist.get_rank(), Life(Wish(str(given.root)))
    run = megatron_on_cpu.Run(life, 1, SILENCE)
    saves = None if given.no_save else Saves(given.root)
    begun_s = time.monotonic()
    begin, source = (0, "") if saves is None else saves.load(run)
    parameters = sum(each.numel() for each in run.model.parameters())
    restore_s, size = time.monotonic() - begun_s, 4 * 3 * parameters  # each with two moments
    started = Started(
        parameters, torch.get_num_threads(), begin or None, restore_s, rank, os.getpid(),
        source=source, restored_bytes=size if source else 0,
    )  # fmt: skip
    tell(started)
    steps: list[Step] = []
    for iteration in range(begin + 1, given.steps + 1):
        begun_s = time.monotonic()
        loss = run.step(life, iteration - 1, life.data())
        trained_s = time.monotonic()
        if saves is not None:
            saves.save(run, iteration)
        save_s = time.monotonic() - trained_s
        steps.append(Step(iteration, loss, begun_s, trained_s - begun_s, 0, 0, 0, save_s))
        if rank == 0:
            tell(steps[-1])
        time.sleep(PAUSE_S)
    if saves is not None:
        saves.close()
    own = {"model": run.model, "optimizer": run.optimizer, "scheduler": run.scheduler, "rng": stillframe.RNG()}
    together = of_all_ranks(fingerprint({f"rank {rank}": own}))
    if rank == 0:
        options.write(given, Record(started, steps, [], together))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
