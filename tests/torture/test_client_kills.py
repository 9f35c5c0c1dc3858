"""Runs through DCP and through DeepSpeed, on two ranks, killed at random moments, end bit-equal to one left alone."""

from __future__ import annotations

import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import stillframe
from stillframe import Catalog, Checkpointer
from tests import layout
from tests.ranks.launch import Ranks, run_ranks
from tests.support import assert_same, keeper_is_gone, kill, until

STEPS = 60
KILLS = 25
LIFE = 8
"""So many steps a life goes on at most before it is killed."""


class Client(NamedTuple):
    """A worker that trains to the end and resumes; ``calm`` and ``hit`` are the names of its two runs."""

    worker: str
    arguments: str
    root: str
    ends: tuple[str, ...]
    """Files of what the run ended with."""
    committed: Callable[[Path], int]
    """How far what is committed in a root has got."""

    def call(self, name: str) -> list[str]:
        return self.arguments.format(name).split()

    def check(self, where: Path) -> None:
        """Parameters, buffers, optimizer."""
        for end in self.ends:
            calm, hit = (torch.load(where / end.format(name), weights_only=False) for name in ("calm", "hit"))
            assert_same(hit, calm)


def _at(root: Path) -> int:
    return int(stillframe.load(root, only="at")["at"]) if Catalog(root).latest() is not None else 0


def _latest(root: Path) -> int:
    file = root / "latest"
    return int(file.read_text().removeprefix("global_step")) if file.exists() else 0


def _deepspeed(stage: int) -> Client:
    each_rank = ("{}/0.pt", "{}/1.pt")
    return Client("deepspeed_worker.py", f"train:{{}}:-1:{STEPS}:{stage}", "run-{}", each_rank, _latest)


CLIENTS = {
    "dcp": Client("dcp_worker.py", f"{{}} {STEPS}", "{}", ("{}.pt",), _at),
    "deepspeed-2": _deepspeed(2),
    "deepspeed-3": _deepspeed(3),
}


def torment(client: Client, where: Path, kills: int, seed: int) -> int:
    """Kill and resume until ``kills`` lives were ended so, then let it end; gives how many there were."""
    rng = random.Random(seed)
    run_ranks(2, client.worker, where, *client.call("calm"))
    root = where / client.root.format("hit")
    done = furthest = 0
    while True:
        with Ranks(2, client.worker, where, *client.call("hit")) as running:
            starts = _starts(running)
            assert starts[0] == starts[1] >= furthest, f"seed {seed}: {starts}, but {furthest} was committed before"
            is_killed = False
            if done < kills:
                _await_step(running, starts[0] + rng.randint(0, LIFE))
                time.sleep(rng.uniform(0.0, 0.1))
                is_killed = _kill_some(running, root, rng)
            if not is_killed:
                codes = running.wait()
                assert codes == [0, 0], f"seed {seed}: {running.output[-8000:]}"
        done += is_killed
        furthest = client.committed(root)
        print(f"\rkill {done}/{kills}, at step {furthest} of {STEPS}  ", end="", file=sys.stderr, flush=True)  # noqa: T201
        if is_killed:
            continue
        client.check(where)
        until(lambda: keeper_is_gone(root), "the keeper leaves")
        if done >= kills:
            return done
        shutil.rmtree(root)
        furthest = 0


def _numbers(running: Ranks, word: str) -> list[int]:
    """The numbers at the end of the lines that begin so, of both ranks."""
    return [int(line.split()[-1]) for line in running.output.splitlines() if line.startswith(word)]


def _starts(running: Ranks) -> list[int]:
    """Where each rank goes on from."""
    until(lambda: len(_numbers(running, "resumed at")) == 2 or _has_ended(running), "both ranks resume", 90.0)
    assert len(_numbers(running, "resumed at")) == 2, running.output[-8000:]
    return _numbers(running, "resumed at")


def _await_step(running: Ranks, step: int) -> None:
    """Until one rank has requested the save of it."""

    def has_come() -> bool:
        return max(_numbers(running, "at ") + _numbers(running, "resumed at")) >= step

    until(lambda: has_come() or _has_ended(running), f"step {step}", 90.0)


def _has_ended(running: Ranks) -> bool:
    return any(each.poll() is not None for each in running.workers)


def _kill_some(running: Ranks, root: Path, rng: random.Random) -> bool:
    """One rank or both, now and then with rank 0's keeper; what is left is killed a moment later.

    Returns whether any rank was killed: they may all have come to their end.
    """
    living = [each for each in rng.choice(([0], [1], [0, 1])) if running.workers[each].poll() is None]
    keeper = re.search(r'"pid":(\d+)', layout.lock(root).read_text()) if layout.lock(root).exists() else None
    for each in living:
        running.workers[each].send_signal(signal.SIGKILL)
    if living and keeper and rng.random() < 0.25 and _is_keeper(int(keeper[1])):
        kill(int(keeper[1]))
    if living:
        time.sleep(rng.uniform(0.0, 0.3))
    return any(running.workers[each].wait() == -signal.SIGKILL for each in living)


def _is_keeper(pid: int) -> bool:
    command = Path(f"/proc/{pid}/cmdline")
    return command.exists() and b"stillframe-keeper" in command.read_bytes()


@pytest.mark.torture
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("client", list(CLIENTS))
def test_a_run_killed_again_and_again_ends_bit_equal_to_one_left_alone(tmp_path: Path, client: str) -> None:
    assert torment(CLIENTS[client], tmp_path, KILLS, seed=int(time.time())) == KILLS
    root = tmp_path / CLIENTS[client].root.format("hit")
    with Checkpointer(root) as checkpointer:  # the next run that saves leaves nothing of those that were killed
        checkpointer.save(10 * STEPS * KILLS, {"more": 1})
    assert layout.leftovers(root) == []
