"""Children that need not import torch: a process that has done so forks them.

``import torch`` takes two seconds of a core, and hundreds of tests want a process of their own.  Here one process for
each pytest worker imports it, starts no thread, and forks.  A child has its own environment, ``sys.argv``, output and
session, ends like any interpreter, and can be killed like any process.  ``python -m tests.fork_server`` is the server;
:class:`Child` is what a test has in its hands.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).resolve().parent.parent
_PATH = {"PYTHONPATH": f"{SOURCE / 'src'}{os.pathsep}{SOURCE}"}
_MAX_BYTES = 1 << 20
_START_S = 60.0


class _Job(NamedTuple):
    """What a child is to be; ``fds``: its output, its errors, and where its end is told."""

    argv: list[str]
    env: dict[str, str]
    cwd: str
    fds: list[int]


class Child:
    """A Python process that runs the file ``argv[0]``, or the code behind ``-c``, as its main module."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], stdout: int, stderr: int) -> None:
        self._status, told = os.pipe()
        self.returncode: int | None = None
        try:
            _server().request(_Job(list(argv), dict(env), os.getcwd(), [stdout, stderr, told]))
        finally:
            os.close(told)
        self.pid = int(self._read(_START_S))

    def _read(self, timeout_s: float) -> str:
        ready, _, _ = select.select([self._status], [], [], max(timeout_s, 0.0))
        if not ready:
            raise subprocess.TimeoutExpired("a forked child", timeout_s)
        line = os.read(self._status, 32).decode()
        if not line:
            raise RuntimeError("the fork server has ended")
        return line

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout_s: float = 60.0) -> int:
        if self.returncode is None:
            self.returncode = int(self._read(timeout_s))
            os.close(self._status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:  # it is not reaped before its status is told
            os.kill(self.pid, number)


class Talker(Child):
    """Runs ``code`` with these arguments; what it says is read through pipes, as of ``subprocess.Popen``."""

    def __init__(self, code: str, *arguments: str) -> None:
        pipes = [os.pipe(), os.pipe()]
        try:
            super().__init__(["-c", code, *arguments], {**os.environ, **_PATH}, pipes[0][1], pipes[1][1])
        finally:
            for _, theirs in pipes:
                os.close(theirs)
        self.stdout, self.stderr = (open(ours) for ours, _ in pipes)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float = 60.0) -> tuple[str, str]:
        """All that it says until it ends, and whoever has its pipes."""
        with ThreadPoolExecutor(2) as readers:
            said = [readers.submit(each.read) for each in (self.stdout, self.stderr)]
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
            out, err = (each.result(timeout) for each in said)
        self.stdout.close()
        self.stderr.close()
        return out, err


class _Server:
    """The client's end.  It ends when this process does: its socket is closed then."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for each in (self._socket, theirs):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_BYTES)
        # Read when torch is loaded, so its children cannot choose.
        env = {**os.environ, **_PATH, "OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}
        command = [sys.executable, "-m", "tests.fork_server", str(theirs.fileno())]
        self.process = subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()], cwd=SOURCE)
        theirs.close()
        self.owner = os.getpid()

    def request(self, job: _Job) -> None:
        socket.send_fds(self._socket, [json.dumps(job[:3]).encode()], job.fds)


_started: _Server | None = None


def _server() -> _Server:
    global _started
    if _started is None or _started.owner != os.getpid() or _started.process.poll() is not None:
        _started = _Server()
    return _started


# --- the server ----------------------------------------------------------------------------


def _serve(requests: socket.socket) -> _Job | None:
    """Forks until the client is gone.  In a child it returns what the child is to do, in the server ``None``."""
    children: dict[int, int] = {}
    wakeup, woken = os.pipe()
    for fd in (wakeup, woken):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    while True:
        ready, _, _ = select.select([requests.fileno(), wakeup], [], [])
        if wakeup in ready:
            os.read(wakeup, 4096)
        _tell_ended(children)
        if requests.fileno() not in ready:
            continue
        message, fds, _, _ = socket.recv_fds(requests, _MAX_BYTES, 3)
        if not message:
            return None
        assert len(os.listdir("/proc/self/task")) == 1, "only a process without threads may fork"
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for fd in (wakeup, woken, requests.detach(), *children.values()):
                os.close(fd)
            argv, env, cwd = json.loads(message)
            return _Job(argv, env, cwd, fds)
        stdout, stderr, status = fds
        os.close(stdout)
        os.close(stderr)
        children[pid] = status
        os.write(status, f"{pid}\n".encode())


def _tell_ended(children: dict[int, int]) -> None:
    for pid, status in list(children.items()):
        # Its status is told before it is reaped: until then nobody else can get its number.
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None:
            code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            with contextlib.suppress(BrokenPipeError):
                os.write(status, f"{code}\n".encode())
            os.close(status)
            os.waitpid(pid, 0)
            del children[pid]


def _become(job: _Job) -> None:
    """What was asked for is the main module, until the interpreter ends."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    stdout, stderr, status = job.fds
    for fd, to in ((os.open(os.devnull, os.O_RDONLY), 0), (stdout, 1), (stderr, 2)):
        os.dup2(fd, to)
        os.close(fd)
    os.close(status)
    for file in (sys.stdout, sys.stderr):
        assert isinstance(file, io.TextIOWrapper)
        file.reconfigure(line_buffering=True)
    os.environ.clear()
    os.environ.update(job.env)
    os.chdir(job.cwd)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if job.argv[0] == "-c":
        source, name, sys.path[0], sys.argv = job.argv[1], "<string>", "", ["-c", *job.argv[2:]]
    else:
        name, sys.argv = job.argv[0], job.argv
        sys.path[0], source = str(Path(name).parent), Path(name).read_text()
        main.__file__ = name
    exec(compile(source, name, "exec"), main.__dict__)


def _main() -> _Job | None:
    import torch
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401

    import stillframe  # noqa: F401

    requests = socket.socket(fileno=int(sys.argv[1]))
    return _serve(requests)


if __name__ == "__main__":
    _job = _main()
    if _job is not None:
        _become(_job)
