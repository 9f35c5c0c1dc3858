"""One rank of a real training run for the tests to kill, stop and continue; torchrun starts it.

`trainee.py obey ADDRESS` does what a test says, call by call (:class:`Crew` is the test's end of it).
`trainee.py train ROOT KIND STEPS RANK:STEP…` trains to the end and on its way kills itself, once at each RANK:STEP.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import stillframe
from stillframe import spi
from stillframe.model import Phase
from tests.ranks.launch import Launch
from tests.ranks.leaving import leave
from tests.ranks.saying import say
from tests.support import bytes_of, is_alive, kill, make_model, train_step, until

ANSWER_S = 60.0
START_S = 90.0


# --- a state and its training, on every rank ---------------------------------------------------


def make_state(kind: str, ballast: int = 0) -> dict[str, Any]:
    """``kind``: fsdp, ddp, or alone (every rank for itself); ``ballast``: how many floats of this rank's own."""
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    torch.manual_seed(7)
    model = make_model()
    if kind == "fsdp":
        fully_shard(model)
    elif kind == "ddp":
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    torch.manual_seed(100 + rank)
    return {
        "model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": stillframe.RNG(),
        "data": {"position": 1000 * rank, "seen": []}, "ballast": torch.full((ballast,), float(rank)),
    }  # fmt: skip


def advance(state: dict[str, Any]) -> None:
    """One iteration.  The ballast is updated by hand: call it behind a fence."""
    train_step(state["model"], state["optimizer"])
    state["scheduler"].step()
    state["ballast"].add_(1.0)
    state["data"]["position"] += 8
    state["data"]["seen"].append(torch.rand(()).item())


def digest(state: dict[str, Any]) -> str:
    """Of everything that a resumed rank must have right, its own random state and data position with it."""
    result = xxhash.xxh3_128()
    _add(result, state["model"].state_dict())
    _add(result, state["optimizer"].state_dict()["state"])
    _add(result, state["ballast"])
    result.update(repr((state["data"], state["scheduler"].state_dict()["_last_lr"])).encode())
    result.update(bytes_of(torch.get_rng_state()))
    return result.hexdigest()


def _add(result: Any, part: Any) -> None:
    if isinstance(part, dict):
        for key in sorted(part):
            _add(result, part[key])
    else:
        result.update(bytes_of(part.to_local() if isinstance(part, DTensor) else part))


# --- doing what a test says --------------------------------------------------------------------


class Trainee:
    """What a test can ask of a rank, by the name of the method."""

    def __init__(self) -> None:
        self._state: dict[str, Any] = {}
        self._checkpointer: stillframe.Checkpointer | None = None
        self._saves: dict[int, stillframe.Save] = {}

    @property
    def checkpointer(self) -> stillframe.Checkpointer:
        assert self._checkpointer is not None
        return self._checkpointer

    def begin(self, root: Path, kind: str, ballast: int = 0, **options: Any) -> int | None:
        """A run in this root; gives the keeper's pid."""
        self._state = make_state(kind, ballast)
        self._saves = {}
        self._checkpointer = stillframe.Checkpointer(root, **options)
        return spi.keeper_pid(self._checkpointer)

    def restore(self) -> tuple[int | None, list[str]]:
        """The step, and the warnings."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step = self.checkpointer.restore(self._state).step
        return step, [str(each.message) for each in caught if "damaged" in str(each.message)]

    def keeper(self) -> int | None:
        return spi.keeper_pid(self.checkpointer)

    def advance(self) -> None:
        self.checkpointer.fence()
        advance(self._state)

    def save(self, step: int) -> str:
        """Gives the digest of what it saves."""
        self._saves[step] = self.checkpointer.save(step, self._state)
        return digest(self._state)

    def digest(self) -> str:
        return digest(self._state)

    def staged_bytes(self, step: int) -> int:
        return self._saves[step].progress.staged_bytes

    def wait_for(self, step: int, phase: Phase = "committed") -> None:
        self._saves[step].wait(phase)

    def wait(self) -> None:
        self.checkpointer.wait()

    def close(self) -> None:
        self.checkpointer.close()


def obey(address: str) -> None:
    """Until the test hangs up.  SIGTERM, which torchrun sends when another rank has died, is not heeded."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    trainee = Trainee()
    with Client(address) as connection:
        connection.send((dist.get_rank(), os.getpid()))
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                name, arguments, options = connection.recv()
                try:
                    answer: Any = getattr(trainee, name)(*arguments, **options)
                except Exception as error:
                    answer = error
                connection.send(answer)
    os._exit(0)  # whatever state a test has left things in


# --- the test's end of it ----------------------------------------------------------------------


class Rank:
    """A trainee, as a test sees it."""

    def __init__(self, connection: Connection[Any, Any], number: int, pid: int) -> None:
        self.number = number
        self.pid = pid
        self.keepers: list[int] = []
        self._connection = connection

    @property
    def keeper(self) -> int:
        """The pid of its keeper at the moment."""
        pid: int = self.ask("keeper")
        if pid not in self.keepers:
            self.keepers.append(pid)
        return pid

    def tell(self, call: str, *arguments: object, **options: object) -> None:
        self._connection.send((call, arguments, options))

    def answer(self, timeout_s: float = ANSWER_S) -> Any:
        """What the last call gave; raises what it raised, and fails the test if it hangs."""
        assert self._connection.poll(timeout_s), f"rank {self.number} did not answer within {timeout_s:g} s"
        answer = self._connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def ask(self, call: str, *arguments: object, **options: object) -> Any:
        self.tell(call, *arguments, **options)
        return self.answer()

    def hang_up(self) -> None:
        self._connection.close()


class Crew(Sequence[Rank]):
    """Trainees that a torchrun has started; none of them, nor a keeper that the test has asked for, outlives it."""

    def __init__(self, ranks: int) -> None:
        with Listener(family="AF_UNIX") as listener:
            self._launch = Launch(ranks, "trainee.py", "obey", listener.address)
            listener._listener._socket.settimeout(START_S)  # type: ignore[attr-defined]
            found: list[Rank] = []
            for _ in range(ranks):
                connection = listener.accept()
                found.append(Rank(connection, *connection.recv()))
        self._ranks = sorted(found, key=lambda rank: rank.number)
        self.is_idle = True
        """Its last run was closed on all ranks."""

    def __getitem__(self, index: Any) -> Any:
        return self._ranks[index]

    def __len__(self) -> int:
        return len(self._ranks)

    def ask(self, call: str, *arguments: object, **options: object) -> list[Any]:
        """All at once; their answers in order."""
        for rank in self:
            rank.tell(call, *arguments, **options)
        return [rank.answer() for rank in self]

    def begin(self, root: Path, kind: str, ballast: int = 0, **options: Any) -> None:
        self.is_idle = False
        keepers = self.ask("begin", root, kind, ballast, **options)
        for rank, pid in zip(self, keepers, strict=True):
            rank.keepers.append(pid)

    def step(self, step: int) -> list[str]:
        """One iteration and its save, on all; gives the digests of what was saved."""
        self.ask("advance")
        return self.ask("save", step)

    def close(self) -> None:
        self.ask("close")
        self.is_idle = True

    def kill_trainers(self) -> None:
        for rank in self:
            kill(rank.pid)
        until(lambda: not any(is_alive(rank.pid) for rank in self), "the trainers are dead")

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for rank in self:
            rank.hang_up()
            for pid in [rank.pid, *rank.keepers]:
                if _is_ours(pid):
                    kill(pid)
        self._launch.__exit__(kind, error, trace)


def _is_ours(pid: int) -> bool:
    """Whether this process still is the one that the test started, and not another of the same number."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_text()
    except (OSError, UnicodeDecodeError):
        return False
    return "trainee.py" in command or "stillframe-keeper" in command


# --- training to the end -----------------------------------------------------------------------


def train(root: Path, kind: str, steps: int, kills: list[str]) -> None:
    """Prints where it starts and, on each rank, whether it ends bit for bit as a run that nobody disturbed."""
    rank = int(os.environ["RANK"])
    state = make_state(kind, ballast=5_000_000)
    with stillframe.Checkpointer(root, keep=stillframe.KeepLast(2)) as checkpointer:
        start = checkpointer.restore(state).step or 0
        say(f"rank {rank} starts after {start}")
        for step in range(start + 1, steps + 1):
            checkpointer.fence()
            advance(state)
            marker = root.with_name(f"killed-{rank}-{step}")
            is_last = f"{rank}:{step}" in kills and not marker.exists()
            if is_last:
                checkpointer.wait()  # so that there is something to go on from
                marker.touch()
            checkpointer.save(step, state)
            if is_last:
                kill(os.getpid())
    end = digest(state)
    undisturbed = make_state(kind, ballast=5_000_000)
    for _ in range(steps):
        advance(undisturbed)
    say(f"rank {rank} ends {'equal' if end == digest(undisturbed) else 'different'}")


def main(mode: str, *arguments: str) -> None:
    if "alone" not in arguments:
        dist.init_process_group("gloo")
    if mode == "obey":
        obey(*arguments)
    else:
        root, kind, steps, *kills = arguments
        train(Path(root), kind, int(steps), kills)
    if dist.is_initialized():
        leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
