"""Real ranks for tests: the workers of this directory are real processes that talk through gloo.

:class:`Launch` starts them by torchrun.  :class:`Ranks` starts workers that need nobody to start them again, in the
environment that torchrun gives, with a store such as its agent has; they are forked (:mod:`tests.fork_server`), which
saves the six seconds that three processes take to import torch.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from tests.fork_server import Child

HERE = Path(__file__).parent
SOURCE = HERE.parent.parent
LAUNCH_S = 120.0
_END_S = 45.0
"""Longer than torchrun gives its workers."""


class Extensions:
    """What torch builds at run time (DeepSpeed has it build one), in a directory of this launch's own.

    torch guards a build with a lock file whose owner nobody knows: a process killed while it holds it makes all others
    wait for ever. So no two launches share a lock; each begins with a copy of what an earlier one built.
    """

    _BUILT = Path(sys.prefix) / "built-extensions"

    def __init__(self) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="sf-extensions-", ignore_cleanup_errors=True)
        if self._BUILT.exists():
            shutil.copytree(self._BUILT, self._home.name, dirs_exist_ok=True)

    @property
    def env(self) -> dict[str, str]:
        return {"TORCH_EXTENSIONS_DIR": self._home.name}

    def keep(self) -> None:
        """For the launches after this one; only after all of this one's processes have ended well."""
        if not self._BUILT.exists() and any(Path(self._home.name).iterdir()):
            spare = tempfile.mkdtemp(prefix="built-", dir=sys.prefix)
            shutil.copytree(self._home.name, spare, dirs_exist_ok=True)
            try:
                os.rename(spare, self._BUILT)
            except OSError:
                shutil.rmtree(spare)  # another was first

    def close(self) -> None:
        self._home.cleanup()


class Launch:
    """A torchrun in the background; its output is gathered in a file, and it never outlives the ``with``."""

    def __init__(self, ranks: int, worker: str, *args: object, max_restarts: int = 0, **env: str) -> None:
        self._extensions = Extensions()
        self._output = tempfile.TemporaryFile("w+")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), "--max-restarts", str(max_restarts), "--monitor-interval", "0.1"]
        path = os.pathsep.join([str(SOURCE / "src"), str(SOURCE)])
        self.process = subprocess.Popen(
            [*command, str(HERE / worker), *map(str, args)],
            stdout=self._output, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
                 **self._extensions.env, **env},
        )  # fmt: skip

    def wait(self, timeout_s: float = LAUNCH_S) -> str:
        """Everything the workers printed, when all have ended."""
        if self.process.wait(timeout_s) == 0:
            self._extensions.keep()
        return self.output

    @property
    def output(self) -> str:
        return _written(self._output.fileno())

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
        self._extensions.close()


class Ranks:
    """A worker on so many ranks in the background, forked; none of them outlives the ``with``."""

    def __init__(self, ranks: int, worker: str, *args: object) -> None:
        self._extensions = Extensions()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        self._output = tempfile.TemporaryFile("w+")
        env = {**os.environ, **self._extensions.env, **_environment(ranks, self._store.port)}
        argv = [str((HERE / worker).resolve()), *map(str, args)]
        self.workers: list[Child] = []
        with contextlib.ExitStack() as stack:
            stack.callback(self._end)
            for rank in map(str, range(ranks)):
                own = {"RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank}
                self.workers.append(Child(argv, {**env, **own}, self._output.fileno(), self._output.fileno()))
            stack.pop_all()

    @property
    def output(self) -> str:
        return _written(self._output.fileno())

    def wait(self, timeout_s: float = LAUNCH_S) -> list[int | None]:
        """Their exit codes.  As with torchrun, when one has failed the others are ended."""
        codes = _wait_all(self.workers, timeout_s)
        if not any(codes):
            self._extensions.keep()
        return codes

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        for each in self.workers:
            each.send_signal(signal.SIGKILL)
        for each in self.workers:
            each.wait(_END_S)
        self._output.close()
        self._extensions.close()


def run_ranks(ranks: int, worker: str, *args: object, timeout_s: float = LAUNCH_S) -> str:
    """Run a worker on so many ranks to its end; fails the test, with their output, if one of them failed."""
    with Ranks(ranks, worker, *args) as running:
        codes = running.wait(timeout_s)
        assert not any(codes), f"{codes}: {running.output[-8000:]}"
        return running.output


def _written(fd: int) -> str:
    """What is in a file that children write to.  Not seek and read: they write through the same file position."""
    return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")


def _environment(ranks: int, port: int) -> dict[str, str]:
    """What torchrun tells every rank."""
    size = str(ranks)
    return {
        "OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "ROLE_WORLD_SIZE": size,
        "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_NAME": "default", "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_RUN_ID": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "PYTHONPATH": os.pathsep.join([str(SOURCE / "src"), str(SOURCE)]), "PYTHONUNBUFFERED": "1",
    }  # fmt: skip


def _wait_all(workers: list[Child], timeout_s: float) -> list[int | None]:
    end_s = time.monotonic() + timeout_s
    while True:
        codes = [each.poll() for each in workers]
        if None not in codes:
            return codes
        if any(codes):
            for each in workers:
                each.send_signal(signal.SIGTERM)
            for each in workers:
                each.wait(_END_S)
            return codes
        if time.monotonic() > end_s:
            raise subprocess.TimeoutExpired("the ranks", timeout_s)
        time.sleep(0.02)
