"""Failures are told first: a device that is dead for good, errors of any size, a checkpointer that is dropped."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import stillframe
from stillframe import Catalog, Checkpointer, spi
from stillframe.testing.emulated import EmulatedDevice
from tests.support import is_alive, until


class Dying(EmulatedDevice):
    """Every call fails once it is dead, as with a CUDA context after an illegal access."""

    is_dead = False
    text = "an illegal memory access was encountered"

    def copy(self, sources: Any, into: Any) -> None:
        self._live()
        super().copy(sources, into)

    def ticket(self) -> Any:
        self._live()
        return super().ticket()

    def _live(self) -> None:
        if self.is_dead:
            raise RuntimeError(self.text)


@pytest.mark.parametrize("text", ["an illegal memory access was encountered", "x" * 3_000_000])
def test_a_device_that_stays_dead_fails_its_saves_and_hangs_nothing(tmp_path: Path, text: str) -> None:
    with Dying() as device:
        assert isinstance(device, Dying)
        weights = device.place(torch.randn(4 << 20))

        def train() -> None:
            with Checkpointer(tmp_path) as checkpointer:
                checkpointer.save(1, {"weights": weights}).wait()
                device.is_dead, device.text = True, text
                save = checkpointer.save(2, {"weights": weights})
                with pytest.raises(stillframe.StateError, match="staging step 2 failed: RuntimeError") as failed:
                    save.wait(timeout_s=30.0)
                assert len(str(failed.value)) < 10_000
                checkpointer.fence()
                raise RuntimeError("training meets it, too")

        with pytest.raises(RuntimeError, match="training meets it, too"):
            train()
    assert Catalog(tmp_path).steps() == [1]


def test_spans_that_a_dead_device_may_still_write_to_are_used_no_more(tmp_path: Path) -> None:
    with Dying() as device, Checkpointer(tmp_path, arena="32MiB", on_error="warn") as checkpointer:
        assert isinstance(device, Dying)
        weights = device.place(torch.randn(6 << 20))
        checkpointer.save(1, {"weights": weights}).wait()
        device.is_dead = True
        for step in (2, 3, 4):
            with pytest.raises(stillframe.StateError):
                checkpointer.save(step, {"weights": weights}).wait(timeout_s=30.0)
        device.is_dead = False
        with pytest.raises(stillframe.StateError, match="restart the process"):
            checkpointer.save(5, {"weights": weights}).wait(timeout_s=30.0)


def test_an_older_failure_is_told_and_costs_the_present_save_nothing(tmp_path: Path) -> None:
    with Dying() as device, Checkpointer(tmp_path) as checkpointer:
        assert isinstance(device, Dying)
        weights = device.place(torch.randn(1000))
        device.is_dead = True
        checkpointer.save(1, {"weights": weights})
        until(lambda: checkpointer.stats().failed == 1, "the failure")
        with pytest.raises(stillframe.StateError, match=r"saving step 1 failed.*; step 2, requested now, goes on"):
            checkpointer.save(2, {"weights": torch.ones(3)})
        checkpointer.save(3, {"weights": torch.ones(3)}).wait()
    assert Catalog(tmp_path).steps() == [2, 3]


def test_a_function_is_told_of_each_failure_once_and_nothing_is_raised(tmp_path: Path) -> None:
    told: list[stillframe.StillframeError] = []
    with Dying() as device:
        assert isinstance(device, Dying)
        weights = device.place(torch.randn(1 << 20))
        with Checkpointer(tmp_path, on_error=told.append) as checkpointer:
            device.is_dead = True
            for step in (1, 2):
                checkpointer.save(step, {"weights": weights})
                checkpointer.wait(timeout_s=30.0)
            device.is_dead = False
            checkpointer.save(3, {"weights": weights}).wait(timeout_s=30.0)
    assert [str(error).split(":")[0] for error in told] == [
        f"saving step {step} failed; training goes on" for step in (1, 2)
    ]
    assert all(isinstance(error, stillframe.StateError) and error.__cause__ is not None for error in told)
    assert Catalog(tmp_path).steps() == [3]


def test_a_checkpointer_that_is_dropped_is_closed_with_a_warning(tmp_path: Path) -> None:
    def cell(step: int) -> int:
        checkpointer = Checkpointer(tmp_path)
        checkpointer.save(step, {"weights": torch.ones(100_000)})
        pid = spi.keeper_pid(checkpointer)
        del checkpointer
        gc.collect()
        return pid or 0

    for step in (1, 2):
        with pytest.warns(ResourceWarning, match="dropped without close"):
            keeper = cell(step)
        until(lambda: not is_alive(keeper), "its keeper finishes and leaves")  # noqa: B023
        assert Catalog(tmp_path).latest() == step


def test_a_script_that_ends_without_close_ends_with_its_own_code(tmp_path: Path) -> None:
    script = (
        "import sys, torch, stillframe\n"
        "model = torch.nn.Linear(300, 300); optimizer = torch.optim.AdamW(model.parameters())\n"
        "checkpointer = stillframe.Checkpointer(sys.argv[1])\n"
        "for step in (1, 2):\n"
        "    model(torch.ones(1, 300)).sum().backward(); optimizer.step()\n"
        "    checkpointer.save(step, {'model': model, 'optimizer': optimizer})\n"
        "sys.exit(7)\n"
    )
    runs = [
        subprocess.Popen([sys.executable, "-c", script, str(tmp_path / str(number))], stderr=subprocess.PIPE)
        for number in range(3)
    ]
    for number, run in enumerate(runs):
        _, said = run.communicate(timeout=100)
        assert run.returncode == 7, said.decode()
        root = tmp_path / str(number)
        until(lambda root=root: Catalog(root).steps() == [1, 2], "the keeper finishes")  # type: ignore[misc]


def test_save_does_no_io_not_even_the_first(tmp_path: Path) -> None:
    """A hung mount must not hang the training thread."""
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"n": 1}).wait()
    touched: list[str] = []
    watched: list[int] = []

    def hook(event: str, arguments: object) -> None:
        if threading.get_ident() in watched and event in ("open", "os.listdir", "os.scandir", "os.stat"):
            touched.append(f"{event} {arguments}")

    sys.addaudithook(hook)
    with Checkpointer(tmp_path) as checkpointer:
        watched.append(threading.get_ident())
        save = checkpointer.save(2, {"n": 2})
        watched.clear()
        save.wait()
        with pytest.raises(stillframe.ExistsError):
            checkpointer.save(1, {"n": 1})
    assert [each for each in touched if str(tmp_path) in each] == []


class Closing:
    """A part of the state that closes the checkpointer: as a signal handler may, or another thread, in mid-save."""

    def __init__(self, checkpointer: Checkpointer) -> None:
        self._checkpointer = checkpointer

    def state_dict(self) -> dict[str, Any]:
        self._checkpointer.close()
        return {"n": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def test_a_save_that_meets_close_is_told_and_nothing_hangs(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"n": 1}).wait()
    with pytest.raises(stillframe.StillframeError, match="closed"):
        checkpointer.save(2, {"w": torch.zeros(9), "closing": Closing(checkpointer)})
    assert checkpointer.stats().in_flight == 0
    assert Catalog(tmp_path).steps() == [1]


def test_a_signal_handler_that_cannot_wait_says_so(tmp_path: Path) -> None:
    """A handler runs between two lines of its thread, also while that holds the book of saves."""
    with Checkpointer(tmp_path) as checkpointer:
        with checkpointer._saves._lock, pytest.raises(stillframe.StateError, match="set a flag"):
            checkpointer.wait()
        with checkpointer._saves._lock, checkpointer._keeper.tiers._lock:
            checkpointer.stats()
            checkpointer.save(1, {"n": 1})
        with checkpointer._stager._starting:
            checkpointer.wait()
