"""A real S3 server for tests: Ceph's RADOS gateway, with one monitor and one OSD, on loopback and in a directory.

``make test-servers`` installs it from Debian's packages.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import obstore
from obstore.store import S3Store

from tests.servers.proxy import Request

PROGRAMS = ("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "ceph", "ceph-authtool", "monmaptool")
KEY, SECRET, REGION = "test-key", "test-secret", "us-east-1"
START_S = 90.0
_CONFIG = """
[global]
fsid = {fsid}
mon host = [v1:127.0.0.1:{monitor}]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pgp num = 8
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 1000
run dir = {home}
log file = {home}/$name.log
admin socket = {home}/$name.asok
mon data = {home}/mon
osd data = {home}/osd
osd objectstore = bluestore
bluestore block size = {disk}
osd memory target = 1073741824
keyring = {home}/keyring
[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:{gateway} tcp_nodelay={is_prompt:d}
rgw data = {home}/rgw
"""


def missing() -> str:
    """Why it cannot run here; empty if it can."""
    absent = [each for each in PROGRAMS if shutil.which(each) is None]
    return f"{', '.join(absent)} not installed: make test-servers" if absent else ""


class Ceph:
    """From :meth:`start` to :meth:`stop`.  Only its own processes are ever ended.

    ``is_prompt``: without Nagle's algorithm.  With it, which is its default, the gateway answers most small requests
    40 ms late: it sends the head of an answer, and waits for the client's system to acknowledge that.
    """

    def __init__(self, home: Path, disk_gib: int = 4, is_prompt: bool = True) -> None:
        self._home, self._disk_gib, self._is_prompt = home, disk_gib, is_prompt
        self._monitor, self._gateway = free_ports(2)
        self._config = str(home / "ceph.conf")
        self._rgw: subprocess.Popen[bytes] | None = None

    @property
    def options(self) -> dict[str, str]:
        """For ``storage_options=``."""
        endpoint = f"http://127.0.0.1:{self._gateway}"
        return {"endpoint": endpoint, "access_key_id": KEY, "secret_access_key": SECRET, "region": REGION}

    @property
    def environment(self) -> dict[str, str]:
        """The same for programs."""
        return {f"AWS_{name.upper()}": value for name, value in self.options.items()}

    def start(self) -> None:
        home, fsid, osd = self._home, str(uuid.uuid4()), str(uuid.uuid4())
        for name in ("mon", "osd", "rgw"):
            (home / name).mkdir()
        text = _CONFIG.format(
            fsid=fsid, home=home, monitor=self._monitor, gateway=self._gateway, disk=self._disk_gib << 30,
            is_prompt=self._is_prompt,
        )  # fmt: skip
        (home / "ceph.conf").write_text(text)
        keyring = str(home / "keyring")
        self._run("ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
        caps = ["--cap", "mon", "allow *", "--cap", "osd", "allow *", "--cap", "mgr", "allow *"]
        self._run("ceph-authtool", keyring, "--gen-key", "-n", "client.admin", *caps)
        address = f"[v1:127.0.0.1:{self._monitor}]"
        self._run("monmaptool", "--create", "--addv", "a", address, "--fsid", fsid, str(home / "monmap"))
        monmap = ["--monmap", str(home / "monmap"), "--keyring", keyring]
        self._run("ceph-mon", "-c", self._config, "--mkfs", "-i", "a", *monmap)
        self._run("ceph-mon", "-c", self._config, "-i", "a", "--pid-file", str(home / "mon.pid"))
        # Whoever asks the monitor before it has learnt the cluster's id is refused, and may ask again.
        self._run("ceph", "-c", self._config, "--connect-timeout", "30", "osd", "new", osd, tries=10)
        self._run("ceph-osd", "-c", self._config, "-i", "0", "--mkfs", "--osd-uuid", osd)
        self._run("ceph-osd", "-c", self._config, "-i", "0", "--pid-file", str(home / "osd.pid"), tries=10)
        self.start_gateway()
        user = ["--uid=test", "--display-name=test", f"--access-key={KEY}", f"--secret-key={SECRET}"]
        self._admin("user", "create", *user)

    def start_gateway(self) -> None:
        with (self._home / "rgw.out").open("ab") as out:
            self._rgw = subprocess.Popen(
                ["radosgw", "-c", self._config, "-n", "client.rgw", "-f"],
                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        end_s = time.monotonic() + START_S
        while not _answers(self._gateway):
            assert self._rgw.poll() is None, (self._home / "rgw.out").read_text()[-2000:]
            assert time.monotonic() < end_s, "the gateway does not answer"
            time.sleep(0.1)

    def kill_gateway(self) -> None:
        assert self._rgw is not None
        self._rgw.kill()
        self._rgw.wait()

    def make_place(self, name: str) -> None:
        self._ask("PUT", f"/{name}")

    # --- what an administrator may do under a run ------------------------------------------

    @contextlib.contextmanager
    def read_only(self, bucket: str) -> Iterator[None]:
        """By a policy."""
        denied = {
            "Effect": "Deny",
            "Principal": "*",
            "Action": ["s3:PutObject"],
            "Resource": [f"arn:aws:s3:::{bucket}/*"],
        }
        self._ask("PUT", f"/{bucket}?policy", json.dumps({"Version": "2012-10-17", "Statement": [denied]}).encode())
        try:
            yield
        finally:
            self._ask("DELETE", f"/{bucket}?policy")

    @contextlib.contextmanager
    def full(self, bucket: str) -> Iterator[None]:
        """By a quota; there must be an object in it."""
        of = ["--quota-scope=bucket", f"--bucket={bucket}"]
        self._admin("quota", "set", *of, "--max-objects=1")
        self._admin("quota", "enable", *of)
        try:
            yield
        finally:
            self._admin("quota", "disable", *of)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """The user, and so his keys."""
        self._admin("user", "suspend", "--uid=test")
        try:
            yield
        finally:
            self._admin("user", "enable", "--uid=test")

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        """Killed, and started again."""
        self.kill_gateway()
        try:
            yield
        finally:
            self.start_gateway()

    @contextlib.contextmanager
    def without(self, bucket: str) -> Iterator[None]:
        """It is removed with all that is in it, and made again, empty."""
        self.empty(bucket)
        self._ask("DELETE", f"/{bucket}")
        try:
            yield
        finally:
            self.make_place(bucket)

    def empty(self, bucket: str, prefix: str = "") -> None:
        store = S3Store(bucket, **self.options, client_options={"allow_http": True})  # type: ignore[arg-type]
        for page in [*obstore.list(store, prefix or None)]:
            obstore.delete(store, [each["path"] for each in page])

    def _ask(self, method: str, target: str, body: bytes = b"") -> None:
        host = f"127.0.0.1:{self._gateway}"
        request = Request(method, target, {"host": host, "x-amz-content-sha256": "UNSIGNED-PAYLOAD"})
        request.sign(KEY, SECRET, REGION, time.time())
        with contextlib.closing(http.client.HTTPConnection(host, timeout=START_S)) as connection:
            connection.request(method, target, body, request.headers)
            answer = connection.getresponse()
            assert answer.status < 300, answer.read()

    def _admin(self, *words: str) -> None:
        self._run("radosgw-admin", "-c", self._config, *words, tries=3)

    def collect(self) -> None:
        """What was deleted leaves the disk now; else it would in some hours."""
        self._run("radosgw-admin", "-c", self._config, "gc", "process", "--include-all")

    def stop(self) -> None:
        if self._rgw is not None and self._rgw.poll() is None:
            self.kill_gateway()
        for name in ("osd", "mon"):
            with contextlib.suppress(OSError, ValueError):
                os.kill(int((self._home / f"{name}.pid").read_text()), signal.SIGKILL)

    def _run(self, *command: str, tries: int = 1) -> None:
        for left in reversed(range(tries)):
            done = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
            if done.returncode == 0:
                return
            assert left, f"{' '.join(command)}: {done.stdout}{done.stderr}"


def free_ports(count: int) -> list[int]:
    """Different ones: all are held until the last is found."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
