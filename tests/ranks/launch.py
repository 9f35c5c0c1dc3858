"""Real ranks for tests: torchrun starts the workers of this directory as real processes that talk through gloo."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

HERE = Path(__file__).parent
SOURCE = HERE.parent.parent
LAUNCH_S = 120.0
_BUILD_S = 300.0
_END_S = 45.0
"""Longer than torchrun gives its workers."""


def remove_stale_build_locks() -> None:
    """Of torch's extension builds: a process killed while it built one leaves a lock that all others wait for."""
    home = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    for lock in home.glob("**/lock"):
        with contextlib.suppress(OSError):
            if time.time() - lock.stat().st_mtime > _BUILD_S:
                lock.unlink()


class Launch:
    """A torchrun in the background; its output is gathered in a file, and it never outlives the ``with``."""

    def __init__(self, ranks: int, worker: str, *args: object, max_restarts: int = 0, **env: str) -> None:
        remove_stale_build_locks()
        self._output = tempfile.TemporaryFile("w+")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), "--max-restarts", str(max_restarts), "--monitor-interval", "0.1"]
        path = os.pathsep.join([str(SOURCE / "src"), str(SOURCE)])
        self.process = subprocess.Popen(
            [*command, str(HERE / worker), *map(str, args)],
            stdout=self._output, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE", **env},
        )  # fmt: skip

    def wait(self, timeout_s: float = LAUNCH_S) -> str:
        """Everything the workers printed, when all have ended."""
        self.process.wait(timeout_s)
        return self.output

    @property
    def output(self) -> str:
        # Not seek and read: the children write through the same file position.
        fd = self._output.fileno()
        return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")

    def __enter__(self) -> Launch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.terminate()  # it then ends its workers, which have sessions of their own
            try:
                self.process.wait(_END_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        self._output.close()


def run_ranks(ranks: int, worker: str, *args: object, timeout_s: float = LAUNCH_S) -> str:
    """Run a worker on so many ranks to its end; fails the test, with their output, if one of them failed."""
    with Launch(ranks, worker, *args) as launch:
        output = launch.wait(timeout_s)
        assert launch.process.returncode == 0, output[-8000:]
        return output
