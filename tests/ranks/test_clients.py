"""The conformance suite: every way into stillframe keeps the same promises."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest

from stillframe import Catalog
from tests.fork_server import Child
from tests.ranks.launch import HERE
from tests.support import until

CLIENTS = ["checkpointer", "dcp", "dcp-lazy", "deepspeed"]


def run(client: str, root: Path, what: str) -> tuple[int, str]:
    with tempfile.TemporaryFile("w+") as file:
        argv = [str(HERE / "client_worker.py"), client, str(root), what]
        child = Child(argv, os.environ, file.fileno(), file.fileno())
        try:
            code = child.wait(110)
        finally:
            child.send_signal(signal.SIGKILL)
        file.seek(0)
        return code, file.read()


@pytest.mark.parametrize("client", CLIENTS)
def test_a_save_holds_the_state_as_it_was_and_a_crash_leaves_what_was_committed(client: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    code, output = run(client, root, "train")
    assert code == -signal.SIGKILL, output[-4000:]
    assert "committed 5" in output
    code, output = run(client, root, "resume")
    assert code == 0, output[-4000:]
    assert "resumed" in output


@pytest.mark.parametrize("client", CLIENTS)
def test_a_failure_is_told(client: str, tmp_path: Path) -> None:
    code, output = run(client, tmp_path / "root", "fail")
    assert code == 0, output[-4000:]
    assert "told" in output


@pytest.mark.parametrize("client", CLIENTS)
def test_a_program_that_ends_by_an_error_ends_and_what_it_saved_is_committed(client: str, tmp_path: Path) -> None:
    code, output = run(client, tmp_path / "root", "error")
    assert code == 1, output[-4000:]
    assert "on purpose" in output
    until(lambda: Catalog(tmp_path / "root").steps() == [1, 2], "the last save is committed")
