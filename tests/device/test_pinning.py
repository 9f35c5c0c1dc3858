"""The arena is registered with the device's runtime: on the right device, once, and not when its memory is gone."""

from __future__ import annotations

import contextlib
import gc
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch

import stillframe
from stillframe import Checkpointer
from stillframe.link.arena import Arena
from stillframe.model import CHUNK_BYTES
from stillframe.save.device import AcceleratorDevice
from stillframe.save.pinning import CudaRuntime, pin
from tests.device import queued
from tests.device.running import REPOSITORY, environment, need_device, on_device
from tests.device.streams import training_on
from tests.support import until

COUNT = 10_000_000
"""Of four bytes: three chunks."""


@contextmanager
def messages() -> Iterator[list[str]]:
    """What is logged."""
    found: list[str] = []

    class Noting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    noting, logger = Noting(), logging.getLogger("stillframe")
    logger.addHandler(noting)
    try:
        yield found
    finally:
        logger.removeHandler(noting)


def pinned(checkpointer: Checkpointer) -> Arena:
    """Its arena, when all of it is."""
    arena = checkpointer._stager.arena
    assert arena is not None
    until(lambda: len(queued.registered()) == arena.spans, "the arena being pinned")
    return arena


@on_device
def test_once_in_an_arena_and_on_the_device_that_is_used(tmp_path: Path) -> None:
    """This process never touches device 0: a context there would cost its memory."""
    with messages() as said, training_on("own"), Checkpointer(tmp_path) as checkpointer:
        weights = torch.ones(COUNT, device="queued:1")
        for step in range(3):
            checkpointer.fence()
            weights.fill_(step)
            checkpointer.save(step, {"weights": weights}).wait()
        arena = pinned(checkpointer)
        assert {(nbytes, device) for _, nbytes, device in queued.registered()} == {(CHUNK_BYTES, 1)}
        assert [address for address, _, _ in queued.registered()] == [
            arena.address + span * CHUNK_BYTES for span in range(arena.spans)
        ]
        checkpointer.save(3, {"weights": weights}).wait()  # no copy across two of them
    assert queued.registered() == []
    assert said == []
    assert stillframe.load(tmp_path, 1)["weights"].unique().tolist() == [1.0]


@on_device
def test_two_devices_share_the_registration(tmp_path: Path) -> None:
    with messages() as said, Checkpointer(tmp_path) as checkpointer:
        state = [torch.ones(COUNT // 2, device=f"queued:{each}") for each in range(2)]
        checkpointer.save(0, state).wait()
        arena = pinned(checkpointer)
        checkpointer.save(1, state).wait()
        assert len(queued.registered()) == arena.spans
    assert (queued.registered(), said) == ([], [])


@pytest.mark.parametrize("clears", [True, False])
@on_device
def test_a_registration_that_fails_leaves_no_error_with_its_thread(clears: bool) -> None:
    """A runtime keeps its last error, and the next kernel of that thread raises it, unless it is taken."""
    queued.fail("register", 1)
    arena = Arena(CHUNK_BYTES)
    with mock.patch.object(CudaRuntime, "clear_error", CudaRuntime.clear_error if clears else lambda self: None):
        pin(arena, [AcceleratorDevice(torch.device("queued:0"))])
        assert arena.touch_one()
    with contextlib.nullcontext() if clears else pytest.raises(RuntimeError, match="an earlier call of this thread"):
        torch.ones(1, device="queued")
    arena.close()


@on_device
def test_a_registration_that_fails_costs_no_save(tmp_path: Path) -> None:
    queued.fail("register", 1)
    state = [torch.full((1000,), 5.0, device="queued") for _ in range(20)]  # gathered by a kernel
    with messages() as said, Checkpointer(tmp_path, arena="32MiB") as checkpointer:
        checkpointer.save(0, state).wait()
        until(lambda: len(queued.registered()) == 1, "the other span being pinned")
        checkpointer.save(1, state).wait()
    assert said == ["a part of the arena could not be pinned (runtime error 2); copies into it are right, but slower"]
    assert stillframe.Catalog(tmp_path).steps() == [0, 1]


@on_device
def test_what_cannot_be_unregistered_stays(tmp_path: Path) -> None:
    with messages() as said:
        checkpointer = Checkpointer(tmp_path)
        checkpointer.save(0, [torch.ones(10, device="queued")]).wait()
        pinned(checkpointer)
        queued.fail("unregister", -1)
        checkpointer.close()
    queued.fail("unregister", 0)
    assert queued.registered()
    for address, _, _ in queued.registered():
        assert queued.library.queued_host_unregister(address) == 0  # reports, if it is not mapped any more
    assert "its memory stays" in said[-1]


@on_device
def test_a_checkpointer_that_is_dropped_unregisters(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(0, [torch.ones(10, device="queued")]).wait()
    pinned(checkpointer)
    with warnings.catch_warnings(action="ignore"):
        del checkpointer
        gc.collect()
    until(lambda: not queued.registered(), "the arena being unpinned")


EXIT = """
import atexit, sys, torch
from tests.device import queued
queued.load()
from tests.support import until
atexit.register(lambda: print(len(queued.registered()), queued.take_reports(), flush=True))
from stillframe import Checkpointer
checkpointer = Checkpointer(sys.argv[1])
checkpointer.save(0, [torch.ones(10, device="queued")])
checkpointer.wait("staged")
until(lambda: len(queued.registered()) == checkpointer._stager.arena.spans, "the arena being pinned")
"""


def test_a_process_that_ends_without_close_unregisters(tmp_path: Path) -> None:
    need_device()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", EXIT, str(tmp_path)], env=environment(), cwd=REPOSITORY,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "0 []\n"), done.stderr
