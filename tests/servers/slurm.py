"""A real Slurm for tests: one controller, one node, two partitions, of which one preempts the other; on loopback.

``make slurm`` installs it from Debian's packages.  It needs root.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.servers.ceph import free_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
CORES = 2
_START_S = 60.0
_CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={home}/munge,cred_expire=5
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd.pid
SlurmctldPort={controller}
SlurmdPort={node}
ProctrackType=proctrack/{tracking}
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
FirstJobId={first}
ReturnToService=2
MpiDefault=none
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN
PartitionName=low Nodes={host} Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes={host} PriorityTier=10 PreemptMode=OFF
"""
# A job that was requeued begins again when its credential has expired: after 5 s here, after two minutes otherwise.


def missing() -> str:
    """Why it cannot run here; empty if it can."""
    absent = [each for each in PROGRAMS if shutil.which(each) is None]
    if absent:
        return f"{', '.join(absent)} not installed: make slurm"
    if os.geteuid() != 0:
        return "Slurm is started by root"
    return "" if (os.cpu_count() or 1) >= CORES else f"fewer than {CORES} cores"


class Slurm:
    """From :meth:`start` to :meth:`stop`.  Only its own processes are ever ended."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._jobs: list[int] = []

    @property
    def _environment(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return {**os.environ, "SLURM_CONF": str(self._home / "slurm.conf"), "PATH": path}

    def start(self) -> None:
        home = self._home
        home.chmod(0o755)
        for name in ("state", "spool"):
            (home / name).mkdir()
        (home / "key").write_bytes(secrets.token_bytes(1024))
        (home / "key").chmod(0o600)
        controller, node = free_ports(2)
        has_freezer = Path("/sys/fs/cgroup/freezer").is_dir()
        text = _CONFIG.format(
            home=home, host=socket.gethostname().partition(".")[0], controller=controller, node=node, cores=CORES,
            tracking="cgroup" if has_freezer else "linuxproc", first=random.randint(1000, 50_000),
        )  # fmt: skip
        (home / "slurm.conf").write_text(text)
        (home / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        munge = [f"--{name}-file={home / name}" for name in ("key", "pid", "log", "seed")]
        self._daemon("munged", "--foreground", "--force", f"--socket={home / 'munge'}", *munge)
        self._until((home / "munge").exists, "munged")
        self._daemon("slurmctld", "-D", "-c")
        self._daemon("slurmd", "-D")
        self._until(lambda: "State=IDLE" in self.ask("scontrol", "show", "node"), "the node")

    def submit(self, directory: Path, *arguments: str, **environment: str) -> int:
        """A job that runs in a directory; returns its number."""
        told = self.ask("sbatch", "--parsable", f"--chdir={directory}", *arguments, **environment)
        self._jobs.append(int(told.strip()))
        return self._jobs[-1]

    def state(self, job: int) -> str:
        """Such as RUNNING or COMPLETED.  It is asked again and again: not more often than this."""
        time.sleep(0.3)
        return self._field(job, "JobState")

    def restarts(self, job: int) -> int:
        return int(self._field(job, "Restarts"))

    def _field(self, job: int, name: str) -> str:
        found = re.search(rf"\b{name}=(\w+)", self.ask("scontrol", "show", "job", str(job)))
        assert found is not None
        return found[1]

    def ask(self, *command: str, **environment: str) -> str:
        env = {**self._environment, **environment}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=30, check=False).stdout

    def stop(self) -> None:
        for job in self._jobs:
            self.ask("scancel", "--signal=KILL", "--full", str(job))
            self.ask("scancel", str(job))
        for each in reversed(self._daemons):
            each.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.wait(20)
            if each.poll() is None:
                each.kill()
                each.wait()

    def _daemon(self, *command: str) -> None:
        with (self._home / f"{command[0]}.out").open("wb") as out:
            self._daemons.append(
                subprocess.Popen(
                    command,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def _until(self, is_ready: Callable[[], bool], what: str) -> None:
        end_s = time.monotonic() + _START_S
        while not is_ready():
            outs = "\n".join(path.read_text()[-1000:] for path in self._home.glob("*.out"))
            assert time.monotonic() < end_s, f"{what} is not ready: {outs}"
            assert all(each.poll() is None for each in self._daemons), outs
            time.sleep(0.2)
