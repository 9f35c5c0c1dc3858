"""The demo of several hosts: two with a network address and a disk of their own, a directory that both see.

    A   2 hosts that save nothing and are left alone
    B   the same with a checkpoint at every step; inside a step one host is cut off from the network and killed, and its
        disk is lost.  The other notices by itself.  A fresh host with another name and address takes the place, and
        torchrun goes on: the host that stayed reads its own disk where it can, the fresh one the shared directory (with
        Megatron both read the shared directory)

A and B must end with the same bits; the exit code is 1 if they do not.  The hosts are network namespaces of this
machine (:mod:`demo.hosts`), which need root.  Everything is written to runs/demo-nodes, which is emptied first.

    demo/nodes.py [torchtitan | megatron | ray]      the same with an engine that trains in the place of our own loop
"""

from __future__ import annotations

import argparse
import functools
import queue
import random
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import msgspec
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a script, from anywhere

from demo import show
from demo.hosts import INTERFACE, Host, Network, missing
from demo.nodes_train import SILENCE
from demo.record import Record, Started, Step
from demo.tiers import tell_sources
from demo.trainer import ENVIRONMENT, LINE, TrainerFailed, run_demo

from stillframe import Catalog

_HOME = Path(__file__).resolve().parent.parent / "runs" / "demo-nodes"
_ROOT = _HOME / "checkpoints"
_RECORD = _HOME / "record.json"
_STEPS = 28
_HOSTS = 2
_PORT = 29400
_QUIET_S = 180.0
"""So long nothing may happen."""
_TAIL_BYTES = 3000
_OBJECTS_BYTES = 100 * 2**20
"""Of Ray's object store on each host."""


@dataclass(frozen=True)
class Engine:
    """What trains on the hosts; ``places``: where it saves, besides, and how often."""

    script: str
    what: str
    places: str
    shared: Path
    """The directory of checkpoints that all hosts see."""

    def job(self, meeting_point: Host, *options: str) -> Job:
        kind = RayJob if self.script == "nodes_ray.py" else Job
        return kind(self, meeting_point, *options)


_TIERED = """   host0, host1   a disk of each host's own: every step
   shared         a directory that all hosts see: every 3rd"""
ENGINES = {
    "": Engine("nodes_train.py", "a GPT sharded over 2 hosts with FSDP2", _TIERED, _ROOT / "shared"),
    "torchtitan": Engine("nodes_torchtitan.py", "torchtitan's Llama on 2 hosts with FSDP2", _TIERED, _ROOT / "shared"),
    "megatron": Engine(
        "nodes_megatron.py", "a GPT of Megatron-core, tensor parallel on 2 hosts",
        "   host0, host1   a disk of each host's own: every step\n"
        "   _stillframe    a directory that all hosts see: every step",
        _ROOT / "_stillframe",
    ),
    "ray": Engine("nodes_ray.py", "a GPT sharded over 2 hosts with FSDP2 under Ray Train", _TIERED, _ROOT / "shared"),
}  # fmt: skip


class Job:
    """One torchrun on each host, as a user would start them; what their ranks tell comes in one stream."""

    def __init__(self, engine: Engine, meeting_point: Host, *options: str) -> None:
        self._engine = engine
        self._meeting_point = meeting_point
        self._options = options
        self._environment = {**ENVIRONMENT, "GLOO_SOCKET_IFNAME": INTERFACE}
        self._told: queue.Queue[Started | Step | str] = queue.Queue()
        """Also the name of a host where it has ended."""
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start_on(self, host: Host) -> None:
        self._start(
            host, "-m", "torch.distributed.run", "--nnodes", str(_HOSTS), "--nproc-per-node", "1",
            "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self._meeting_point.address}:{_PORT}",
            "--rdzv-id", "demo", "--local-addr", host.address, "--max-restarts", "3", "--monitor-interval", "0.1",
            *self._training(),
        )  # fmt: skip

    def _training(self) -> list[str]:
        script = str(Path(__file__).resolve().parent / self._engine.script)
        return [
            script, "--root", str(_ROOT), "--steps", str(_STEPS), "--record", str(_RECORD), *self._options,
        ]  # fmt: skip

    def _start(self, host: Host, *arguments: str) -> None:
        """What the job consists of: it is over when all of these are."""
        self._running[host.name] = self._start_beside(host, host.name, *arguments)

    def _start_beside(self, host: Host, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        process = host.start((sys.executable, *arguments), self._environment, log_of(host.name))
        assert process.stdout is not None
        threading.Thread(target=self._listen, args=(name, process.stdout), daemon=True).start()
        return process

    def _listen(self, name: str, lines: IO[bytes]) -> None:
        with lines:
            for line in lines:
                self._hear(line)
        self._told.put(name)

    def _hear(self, line: bytes) -> None:
        if line.startswith(b"{"):  # the rest is the engine's
            self._told.put(LINE.decode(line))

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
                raise TrainerFailed(f"the job ended with code {code} on {told}; the end of its log:\n{log}")
        return None


class RayJob(Job):
    """A cluster of Ray: a node of it on each host, as ``ray start`` makes them, and the driver on the first."""

    def __init__(self, engine: Engine, meeting_point: Host, *options: str) -> None:
        super().__init__(engine, meeting_point, *options)
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._scratch = tempfile.TemporaryDirectory(prefix="sf-ray-", ignore_cleanup_errors=True)
        self._environment |= {
            "PYTHONPATH": str(Path(__file__).resolve().parent.parent),  # for the workers
            "PYTHONUNBUFFERED": "1",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),  # else Ray writes one to the user's home
        }
        self._is_up = threading.Event()

    def start_on(self, host: Host) -> None:
        address, is_head = f"{self._meeting_point.address}:{_PORT}", host is self._meeting_point
        head = ["--head", "--port", str(_PORT), "--include-dashboard=false", "--temp-dir", self._scratch.name]
        place = head if is_head else ["--address", address]
        self._nodes[host.name] = self._start_beside(
            host, f"Ray on {host.name}",
            "-m", "ray.scripts.scripts", "start", *place, "--node-ip-address", host.address, "--num-cpus", "1",
            "--object-store-memory", str(_OBJECTS_BYTES), "--disable-usage-stats", "--block",
        )  # fmt: skip
        if is_head:
            if not self._is_up.wait(_QUIET_S):
                raise TrainerFailed(f"Ray does not start; the logs are in {_HOME}")
            self._start(host, *self._training(), "--address", address)

    def _hear(self, line: bytes) -> None:
        if b"Ray runtime started" in line:
            self._is_up.set()
        super()._hear(line)

    def lost(self, host: Host) -> None:
        self._nodes.pop(host.name).wait()


def log_of(name: str) -> Path:
    return _HOME / f"{name}.log"


def record() -> Record:
    return msgspec.json.decode(_RECORD.read_bytes(), type=Record)


def run_alone(console: Console, engine: Engine) -> Record:
    with Network() as network:
        hosts = [network.add() for _ in range(_HOSTS)]
        job = engine.job(hosts[0], "--no-save")
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


def run_cut(console: Console, engine: Engine) -> Cut:
    found = Cut()
    with Network() as network:
        stays, goes = network.add(), network.add()
        job = engine.job(stays)
        job.start_on(stays)
        job.start_on(goes)
        run_until_cut(console, job, engine.shared, found)
        goes.cut_off()
        found.cut_s = time.monotonic()
        goes.kill()
        job.lost(goes)
        shutil.rmtree(_ROOT / goes.name, ignore_errors=True)
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


def run_until_cut(console: Console, job: Job, shared: Path, found: Cut) -> None:
    """To a random moment inside a step near the middle, when the shared directory has a step."""
    cut_after = random.randint(_STEPS * 2 // 5, _STEPS * 3 // 5)
    with show.Bar(console, "B  saving every step", _STEPS) as bar:
        while (line := job.next()) is not None:
            bar.show(line)
            if isinstance(line, Step):
                found.before.append(line)
                if line.step >= cut_after and Catalog(shared).steps():
                    time.sleep(random.uniform(0.1, 0.9) * line.seconds)
                    return


def demo(engine: Engine, console: Console) -> int:
    if trouble := missing():
        console.print(f"[yellow]no hosts can be made here[/]: {trouble}", highlight=False)
        return 1
    console.print(f"{engine.what}, one rank each; a checkpoint at every step\n{engine.places}", highlight=False)
    alone = run_alone(console, engine)
    cut = run_cut(console, engine)
    tell_sources(console, sorted(cut.started, key=lambda each: each.rank))
    if len(cut.started) != _HOSTS or any(each.restored_step is None for each in cut.started):
        console.print("[bold red]a host found no checkpoint[/]")
        return 1
    back_s = cut.steps[0].begun_s - cut.cut_s
    console.print(
        f"   {back_s:.0f} s from the cut to the next step: {SILENCE.seconds} s until gloo gives up, then the "
        "launcher's own time to notice and to meet again",
        highlight=False,
    )
    wrong = show.differences(alone.fingerprint, record().fingerprint)
    wrong += show.wrong_losses(alone, [*cut.before, *cut.steps])
    return 0 if show.verdict(console, ["A", "B"], alone, wrong) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description="Two hosts, one of which is cut off and replaced.")
    parser.add_argument("engine", nargs="?", default="", choices=ENGINES, help="what trains there")
    engine = ENGINES[parser.parse_args().engine]
    return run_demo(functools.partial(demo, engine), _HOME, engine.shared)


if __name__ == "__main__":
    sys.exit(main())
