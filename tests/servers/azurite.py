"""A real server of Azure's blobs for tests: Microsoft's Azurite, on loopback and in a directory.

``make test-servers`` installs it from npm, below the project's own ``.servers``.
"""

from __future__ import annotations

import base64
import contextlib
import email.utils
import hashlib
import hmac
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / ".servers/node_modules/azurite/dist/src/blob/main.js"
ACCOUNT = "stillframetest"
KEY = base64.b64encode(b"of no use elsewhere").decode()
START_S, STOP_S = 60.0, 20.0
_VERSION = "2021-12-02"


def missing() -> str:
    """Why it cannot run here; empty if it can."""
    if shutil.which("node") is None:
        return "node not installed"
    return "" if PROGRAM.is_file() else "Azurite not installed: make test-servers"


class Azurite:
    """From :meth:`start` to :meth:`stop`, as often as one likes.  Only its own process is ever ended."""

    def __init__(self, home: Path) -> None:
        self._home = home
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port: int = probe.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def options(self) -> dict[str, str]:
        """For ``storage_options=``."""
        return {"endpoint": self._endpoint, "account_name": ACCOUNT, "account_key": KEY}

    @property
    def environment(self) -> dict[str, str]:
        """The same for programs."""
        return {f"AZURE_STORAGE_{name.upper()}": value for name, value in self.options.items()}

    @property
    def _endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}/{ACCOUNT}"

    def start(self) -> None:
        command = ["node", str(PROGRAM), "--blobHost", "127.0.0.1", "--blobPort", str(self._port)]
        command += ["--location", str(self._home), "--silent", "--disableTelemetry"]
        environment = {**os.environ, "AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"}
        with (self._home / "azurite.out").open("ab") as out:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environment,
                start_new_session=True,
            )  # fmt: skip
        end_s = time.monotonic() + START_S
        while not self._answers():
            assert self._process.poll() is None, (self._home / "azurite.out").read_text()[-2000:]
            assert time.monotonic() < end_s, "Azurite does not answer"
            time.sleep(0.1)

    def stop(self) -> None:
        """Asked to end, not killed: it writes its tables every few seconds only, and what it has confirmed would go."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def make_place(self, name: str) -> None:
        """obstore makes none, so this is signed by hand."""
        date = email.utils.formatdate(usegmt=True)
        headers = f"x-ms-date:{date}\nx-ms-version:{_VERSION}\n"
        text = "PUT" + 12 * "\n" + headers + f"/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
        signature = base64.b64encode(hmac.digest(base64.b64decode(KEY), text.encode(), hashlib.sha256)).decode()
        request = urllib.request.Request(f"{self._endpoint}/{name}?restype=container", method="PUT")
        request.add_header("x-ms-date", date)
        request.add_header("x-ms-version", _VERSION)
        request.add_header("Authorization", f"SharedKey {ACCOUNT}:{signature}")
        with urllib.request.urlopen(request, timeout=START_S):
            pass

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), timeout=1):
            return True
        return False
