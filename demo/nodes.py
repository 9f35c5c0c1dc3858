"""The demo of several hosts: two with a network address and a disk of their own, a directory that both see.

    A   2 hosts that save nothing and are left alone
    B   the same with a checkpoint at every step; inside a step one host is cut off from the network and killed, and its
        disk is lost.  The other notices by itself.  A fresh host with another name and address takes the place, and
        torchrun goes on: the host that stayed reads its own disk where it can, the fresh one the shared directory

A and B must end with the same bits; the exit code is 1 if they do not.  The hosts are network namespaces of this
machine (:mod:`demo.hosts`), which need root.  Everything is written to runs/demo-nodes, which is emptied first.
"""

from __future__ import annotations

import queue
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import msgspec
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a script, from anywhere

from demo import show
from demo.hosts import INTERFACE, Host, Network, missing
from demo.nodes_train import SHARED_EVERY, SILENCE
from demo.record import Record, Started, Step
from demo.tiers import tell_sources
from demo.trainer import ENVIRONMENT, LINE, TrainerFailed, run_demo

from stillframe import Catalog

_HOME = Path(__file__).resolve().parent.parent / "runs" / "demo-nodes"
_ROOT = _HOME / "checkpoints"
_SHARED = _ROOT / "shared"
_RECORD = _HOME / "record.json"
_STEPS = 28
_HOSTS = 2
_PORT = 29400
_QUIET_S = 180.0
"""So long nothing may happen."""
_TAIL_BYTES = 3000
_SCRIPT = str(Path(__file__).resolve().parent / "nodes_train.py")


class Job:
    """One torchrun on each host, as a user would start them; what their ranks tell comes in one stream."""

    def __init__(self, meeting_point: Host, *options: str) -> None:
        self._meeting_point = meeting_point
        self._options = options
        self._told: queue.Queue[Started | Step | str] = queue.Queue()
        """Also the name of a host where it has ended."""
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start_on(self, host: Host) -> None:
        command = (
            sys.executable, "-m", "torch.distributed.run", "--nnodes", str(_HOSTS), "--nproc-per-node", "1",
            "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self._meeting_point.address}:{_PORT}",
            "--rdzv-id", "demo", "--local-addr", host.address, "--max-restarts", "3", "--monitor-interval", "0.1",
            _SCRIPT, "--root", str(_ROOT), "--steps", str(_STEPS), "--record", str(_RECORD), *self._options,
        )  # fmt: skip
        environment = {**ENVIRONMENT, "GLOO_SOCKET_IFNAME": INTERFACE}
        process = host.start(command, environment, log_of(host.name))
        assert process.stdout is not None
        self._running[host.name] = process
        threading.Thread(target=self._listen, args=(host.name, process.stdout), daemon=True).start()

    def _listen(self, name: str, lines: IO[bytes]) -> None:
        with lines:
            for line in lines:
                self._told.put(LINE.decode(line))
        self._told.put(name)

    def lost(self, host: Host) -> None:
        """It was killed: its end says nothing."""
        self._running.pop(host.name).wait()

    def next(self) -> Started | Step | None:
        """``None`` when all of it has ended, and well.  Raises :class:`TrainerFailed`."""
        while self._running:
            try:
                told = self._told.get(timeout=_QUIET_S)
            except queue.Empty:
                raise TrainerFailed(f"nothing happens any more; the logs are in {_HOME}") from None
            if not isinstance(told, str):
                return told
            process = self._running.pop(told, None)  # None: it was lost
            if process is not None and (code := process.wait()) != 0:
                log = log_of(told).read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip()
                raise TrainerFailed(f"torchrun ended with code {code} on {told}; the end of its log:\n{log}")
        return None


def log_of(name: str) -> Path:
    return _HOME / f"{name}.log"


def record() -> Record:
    return msgspec.json.decode(_RECORD.read_bytes(), type=Record)


def run_alone(console: Console) -> Record:
    with Network() as network:
        hosts = [network.add() for _ in range(_HOSTS)]
        job = Job(hosts[0], "--no-save")
        for host in hosts:
            job.start_on(host)
        with show.Bar(console, "A  left alone", _STEPS) as bar:
            while (line := job.next()) is not None:
                bar.show(line)
    return record()


@dataclass
class Cut:
    """Run B."""

    before: list[Step] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)
    """The ranks that went on."""
    steps: list[Step] = field(default_factory=list)
    cut_s: float = 0.0
    """When the host was cut off."""


def run_cut(console: Console) -> Cut:
    found = Cut()
    with Network() as network:
        stays, goes = network.add(), network.add()
        job = Job(stays)
        job.start_on(stays)
        job.start_on(goes)
        run_until_cut(console, job, found)
        goes.cut_off()
        found.cut_s = time.monotonic()
        goes.kill()
        job.lost(goes)
        shutil.rmtree(_ROOT / goes.name)
        last = found.before[-1].step
        console.print(
            f"   [bold red]{goes.name} is cut off and killed[/], inside step {last + 1}, and its disk is lost",
            highlight=False,
        )
        fresh = network.add()
        job.start_on(fresh)
        console.print(f"   {fresh.name} ({fresh.address}) joins {stays.name} ({stays.address})", highlight=False)
        with show.Bar(console, "B  goes on", _STEPS) as bar:
            while (line := job.next()) is not None:
                if isinstance(line, Started):
                    found.started.append(line)
                elif found.started:
                    found.steps.append(line)
                else:  # told before, not heard yet
                    found.before.append(line)
                bar.show(line)
    return found


def run_until_cut(console: Console, job: Job, found: Cut) -> None:
    """To a random moment inside a step near the middle, when the shared directory has a step."""
    cut_after = random.randint(_STEPS * 2 // 5, _STEPS * 3 // 5)
    with show.Bar(console, "B  saving every step", _STEPS) as bar:
        while (line := job.next()) is not None:
            bar.show(line)
            if isinstance(line, Step):
                found.before.append(line)
                if line.step >= cut_after and Catalog(_SHARED).steps():
                    time.sleep(random.uniform(0.1, 0.9) * line.seconds)
                    return


def compare(console: Console, alone: Record, steps: Sequence[Step], cut: Record) -> bool:
    wrong = show.differences(alone.fingerprint, cut.fingerprint)
    losses = {step.step: step.loss for step in alone.steps}
    wrong += [f"the loss of step {step.step}" for step in steps if step.loss != losses[step.step]]
    if wrong:
        console.print(f"[bold red]A and B differ[/] in {len(wrong)} places:", *wrong[:10], sep="\n  ")
        return False
    console.print(
        f"[bold green]A = B, bit for bit[/]: {alone.started.parameters / 1e6:.1f} M parameters, the optimizer's state, "
        "scheduler,\ndata position, each rank's random number generators, and the loss of every step",
        highlight=False,
    )
    return True


def demo(console: Console) -> int:
    if trouble := missing():
        console.print(f"[yellow]no hosts can be made here[/]: {trouble}", highlight=False)
        return 1
    if _HOME.exists():
        shutil.rmtree(_HOME)
    _HOME.mkdir(parents=True)
    console.print(
        f"a GPT sharded over {_HOSTS} hosts with FSDP2, one rank each; a checkpoint at every step\n"
        f"   host0, host1   a disk of each host's own: every step\n"
        f"   shared         a directory that all hosts see: every {SHARED_EVERY}rd",
        highlight=False,
    )
    alone = run_alone(console)
    cut = run_cut(console)
    tell_sources(console, sorted(cut.started, key=lambda each: each.rank))
    if len(cut.started) != _HOSTS or any(each.restored_step is None for each in cut.started):
        console.print("[bold red]a host found no checkpoint[/]")
        return 1
    back_s = cut.steps[0].begun_s - cut.cut_s
    console.print(
        f"   {back_s:.0f} s from the cut to the next step: {SILENCE.seconds} s until gloo gives up, then torchrun's "
        "own time to notice and to meet again",
        highlight=False,
    )
    return 0 if compare(console, alone, [*cut.before, *cut.steps], record()) else 1


if __name__ == "__main__":
    sys.exit(run_demo(demo))
