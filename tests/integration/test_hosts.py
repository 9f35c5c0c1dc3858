"""The hosts of ``make demo-nodes``: each has an address and a name, can be cut off, and is never left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from demo.hosts import Host, Network, missing

SERVE = "import socket; s = socket.create_server(('', 7777)); print('ready', flush=True)\nwhile True: s.accept()"
CALL = "import socket; socket.create_connection(('host0', 7777), 2); print(socket.gethostname())"


def call(host: Host, log: Path) -> str:
    process = host.start([sys.executable, "-c", CALL], {}, log)
    return process.communicate(timeout=30)[0].decode().strip()


@pytest.mark.timeout(120)
def test_hosts_meet_by_name_until_one_is_cut_off(tmp_path: Path) -> None:
    if trouble := missing():
        pytest.skip(trouble)
    with Network() as network:
        server, client = network.add(), network.add()
        serving = server.start([sys.executable, "-c", SERVE], {}, tmp_path / "server.log")
        assert serving.stdout is not None
        assert serving.stdout.readline() == b"ready\n"
        assert call(client, tmp_path / "client.log") == "host1", (tmp_path / "client.log").read_text()
        client.cut_off()
        assert call(client, tmp_path / "cut.log") == ""
        assert "timed out" in (tmp_path / "cut.log").read_text()
        spaces = [server._space, client._space]
    assert serving.wait(10) == -9
    serving.stdout.close()
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not any(space in left for space in spaces)
