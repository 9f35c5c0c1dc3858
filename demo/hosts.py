"""Hosts on one machine: a network of their own with addresses of their own, and names of their own.

Linux's network namespaces, which need root and ``ip``.  A host can be cut off, as if its cable was pulled, and killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

INTERFACE = "eth0"
_MAX_HOSTS = 8
_BOOT = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'
"""In spaces of its own for mounts and names: every host knows the others by name, as torchrun expects."""
_END_S = 10.0


def missing() -> str:
    """What keeps this machine from having hosts; empty if nothing does."""
    for tool in ("ip", "unshare", "hostname"):
        if shutil.which(tool) is None:
            return f"there is no {tool} here"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with Network() as network, tempfile.TemporaryDirectory() as home:
            tried = network.add().start(["true"], {}, Path(home) / "log")
            tried.communicate()
            if tried.returncode != 0:
                return f"a host cannot be started: {(Path(home) / 'log').read_text().strip()}"
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"
    return ""


class Network:
    """A switch with hosts on it; leaving the ``with`` ends all of them.  Nothing outside is touched."""

    def __init__(self) -> None:
        self._name = f"sf-{os.getpid()}"
        self._hosts: list[Host] = []
        self._book = Path(tempfile.mkdtemp(prefix="sf-hosts-")) / "hosts"
        lines = [f"{address_of(number)} host{number}" for number in range(_MAX_HOSTS)]
        self._book.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))

    def add(self) -> Host:
        """One more host; its number is its place in the network, too."""
        host = Host(self._name, len(self._hosts), self._book)
        self._hosts.append(host)
        host.plug_in()
        return host

    def __enter__(self) -> Network:
        _ip("netns", "add", self._name)
        try:
            _ip("-n", self._name, "link", "add", "switch", "type", "bridge")
            _ip("-n", self._name, "link", "set", "switch", "up")
        except subprocess.CalledProcessError:
            _ip("netns", "delete", self._name)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for host in self._hosts:
            host.end()
        _ip("netns", "delete", self._name)
        shutil.rmtree(self._book.parent)


def address_of(number: int) -> str:
    return f"10.77.0.{number + 1}"


class Host:
    """``name`` is what ``hostname`` says there.  Its file system is this machine's."""

    def __init__(self, switch: str, number: int, book: Path) -> None:
        self.name = f"host{number}"
        self.address = address_of(number)
        self._book = book
        self._switch = switch
        self._space = f"{switch}-{number}"
        self._cable = f"cable{number}"

    def plug_in(self) -> None:
        _ip("netns", "add", self._space)
        _ip("-n", self._switch, "link", "add", self._cable, "type", "veth", "peer", INTERFACE, "netns", self._space)
        _ip("-n", self._switch, "link", "set", self._cable, "master", "switch", "up")
        _ip("-n", self._space, "address", "add", f"{self.address}/24", "dev", INTERFACE)
        for link in ("lo", INTERFACE):
            _ip("-n", self._space, "link", "set", link, "up")

    def start(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """What it prints comes by a pipe; its complaints go to ``log``."""
        inside = ["ip", "netns", "exec", self._space, "unshare", "--uts", "--mount", "sh", "-c", _BOOT, "sh"]
        with log.open("ab") as errors:
            return subprocess.Popen(
                [*inside, str(self._book), self.name, *command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=errors, start_new_session=True, env={**os.environ, **environment},
            )  # fmt: skip

    def cut_off(self) -> None:
        """Nothing comes out, and nothing in: to the others it is silent, not gone."""
        _ip("-n", self._switch, "link", "set", self._cable, "down")

    def kill(self) -> None:
        """SIGKILL to every process there: trainers, keepers, torchrun."""
        end_s = time.monotonic() + _END_S
        while pids := self._pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > end_s:
                raise RuntimeError(f"processes of {self.name} do not end: {pids}")
            time.sleep(0.05)

    def end(self) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):  # it never came to be
            self.kill()
            _ip("netns", "delete", self._space)

    def _pids(self) -> list[int]:
        return [int(pid) for pid in _ip("netns", "pids", self._space).split()]


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
