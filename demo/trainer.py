"""A training run as a child process: started, listened to, killed, and never left behind.

Owns the process and its pipe.  The child has a session of its own, so that Ctrl-C reaches only the parent,
which then ends the child.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

import msgspec
from demo.record import Record, Started, Step
from rich.console import Console
from rich.markup import escape

_COMMAND = (sys.executable, str(Path(__file__).resolve().parent / "train.py"))
LINE = msgspec.json.Decoder(Started | Step)
_TAIL_BYTES = 3000
_END_S = 20.0
ENVIRONMENT = {
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",  # bf16 kernels can die with SIGILL where AMX is shown but forbidden
    "OMP_WAIT_POLICY": "PASSIVE",  # spinning at barriers makes steps 3 to 4 times as long beside two busy loops
    # torchrun would restart ranks with the store of the killed ones, where gloo finds the addresses of the dead.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


class TrainerFailed(Exception):
    """It ended by itself, and badly."""


def run_demo(demo: Callable[[Console], int], home: Path, *roots: Path) -> int:
    """Empty ``home``, show the demo on the terminal, say how to look at ``roots``.  Returns the exit code."""
    console = Console()
    began_s = time.monotonic()
    try:
        if home.exists():
            shutil.rmtree(home)
        home.mkdir(parents=True)
        code = demo(console)
    except KeyboardInterrupt:
        console.print("\nstopped; the training processes are ended")
        return 130
    except TrainerFailed as error:
        console.print("[bold red]failed[/]:", escape(str(error)), soft_wrap=True, highlight=False)
        return 1
    command = os.path.relpath(Path(sys.executable).parent / "stillframe")
    for root in filter(Path.exists, roots):
        console.print(f"look at it: {command} list {os.path.relpath(root)}", highlight=False, soft_wrap=True)
    console.print(f"in {time.monotonic() - began_s:.0f} s; all files are in {os.path.relpath(home)}", highlight=False)
    return code


class Trainer:
    """Leaving the ``with`` ends the process.  Its checkpoints, record and log are all in ``home``."""

    def __init__(self, home: Path, name: str, steps: int, *options: str, command: Sequence[str] = _COMMAND) -> None:
        self._record = home / f"{name}.json"
        self._log = home / f"{name}.log"
        self._is_killed = False
        self._script = Path(command[-1]).name
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *command, "--root", str(home / "checkpoints"), "--steps", str(steps),
                    "--record", str(self._record), *options,
                ],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
                env={**ENVIRONMENT, **os.environ},
            )  # fmt: skip

    def lines(self) -> Iterator[Started | Step]:
        """What it tells, until it ends.  Raises :class:`TrainerFailed` if nobody killed it and yet it failed."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            yield LINE.decode(line)
        code = self._process.wait()
        if code != 0 and not self._is_killed:
            tail = self._log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip()
            raise TrainerFailed(f"{self._script} ended with code {code}; the end of {self._log}:\n{tail}")

    def kill(self) -> None:
        """SIGKILL: no warning, no clean-up.  Its keeper lives on for as long as it has work."""
        self._is_killed = True
        self._process.kill()

    def record(self) -> Record:
        """After its end."""
        return msgspec.json.decode(self._record.read_bytes(), type=Record)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._end()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _end(self) -> None:
        """With SIGTERM first: torchrun then ends its ranks, which have sessions of their own."""
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
