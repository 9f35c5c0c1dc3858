"""The storage refuses: it is full, read-only, failing, or gone.

What is promised: training goes on; the save fails with its cause, which is told once; no partial file stays;
earlier checkpoints stay; the next save works as soon as the storage does.  The mounts are real, so these tests
need root and skip without it.
"""

from __future__ import annotations

import contextlib
import copy
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stillframe import Catalog, Checkpointer, StorageError, load, spi
from stillframe.units import MIB
from tests import layout
from tests.layout import leftovers
from tests.support import assert_same, make_model, pause, train_step, until

WIDTH = 900
"""Makes a model and an Adam state of about 20 MB together."""
PAGE_BYTES = 4096


class Mounts:
    """Mounts of one test, unmounted in reverse order whatever happens."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._points: list[Path] = []

    def tmpfs(self, name: str, size: str) -> Path:
        return self._mount(name, "-t", "tmpfs", "-o", f"size={size}", "none")

    def ext4(self, name: str, image: Path, size: str) -> Path:
        if shutil.which("mkfs.ext4") is None:
            pytest.skip("there is no mkfs.ext4 here")
        subprocess.run(["truncate", "-s", size, str(image)], check=True)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
        return self._mount(name, "-t", "ext4", "-o", "loop", str(image))

    def remount(self, point: Path, how: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{how}", str(point)], check=True)

    def _mount(self, name: str, *arguments: str) -> Path:
        point = self._base / name
        point.mkdir()
        done = subprocess.run(["mount", *arguments, str(point)], capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
        self._points.append(point)
        return point

    def unmount_all(self) -> None:
        for point in reversed(self._points):
            if subprocess.run(["umount", str(point)], capture_output=True).returncode != 0:
                subprocess.run(["umount", "--lazy", str(point)], check=True)


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    made = Mounts(tmp_path)
    yield made
    made.unmount_all()


@pytest.fixture(params=["tmpfs", "ext4"])
def disk(request: pytest.FixtureRequest, mounts: Mounts, tmp_path: Path) -> Path:
    """A file system with room for two checkpoints, not three."""
    if request.param == "tmpfs":
        return mounts.tmpfs("disk", "64m")
    return mounts.ext4("disk", tmp_path / "image", "72M")


class Training:
    """A real run: what it saves, and what that was at each step."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.model = make_model(WIDTH)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.at: dict[int, Any] = {}
        self.go_on()

    def go_on(self) -> None:
        train_step(self.model, self.optimizer, WIDTH)

    def save(self, checkpointer: Checkpointer, step: int) -> None:
        """Request a checkpoint, and train on at once."""
        state = {"model": self.model, "optimizer": self.optimizer, "step": step}
        before = {"model": dict(self.model.state_dict()), "optimizer": self.optimizer.state_dict(), "step": step}
        self.at[step] = copy.deepcopy(before)
        checkpointer.save(step, state)
        self.go_on()

    def save_and_wait(self, checkpointer: Checkpointer, step: int) -> None:
        self.save(checkpointer, step)
        checkpointer.wait()


def fill(root: Path, leave_bytes: int) -> Path:
    """Take all the room but this much; gives the file that takes it."""
    assert _free_bytes(root) < 1024 * MIB, "this is not one of our small disks"
    ballast = root / "ballast"
    with ballast.open("wb") as file:
        while (room := _free_bytes(root) - leave_bytes) > 0:
            try:
                file.write(bytes(min(room, MIB)))
                file.flush()
            except OSError:  # the file system keeps some blocks for itself
                break
        os.fsync(file.fileno())
    return ballast


def _free_bytes(root: Path) -> int:
    status = os.statvfs(root)
    return status.f_bavail * status.f_frsize


def segment_bytes(root: Path, step: int) -> int:
    return layout.segment(root, step).stat().st_size


def failed_for_space(checkpointer: Checkpointer) -> None:
    with pytest.raises(StorageError, match=r"step 2 failed.*(?i:space)"):
        checkpointer.wait()


# --- full --------------------------------------------------------------------------------------


def test_a_full_disk_fails_the_save_and_leaves_nothing_of_it(disk: Path) -> None:
    training = Training()
    with Checkpointer(disk, arena="32MiB") as checkpointer:
        training.save_and_wait(checkpointer, 1)
        fill(disk, leave_bytes=MIB)
        training.save(checkpointer, 2)
        failed_for_space(checkpointer)
        assert leftovers(disk) == []
        assert Catalog(disk).steps() == [1]


def test_a_failed_save_gives_its_room_back(disk: Path) -> None:
    training = Training()
    with Checkpointer(disk, arena="32MiB") as checkpointer:
        training.save_and_wait(checkpointer, 1)
        fill(disk, leave_bytes=8 * MIB)
        before = _free_bytes(disk)
        training.save(checkpointer, 2)
        failed_for_space(checkpointer)
        assert _free_bytes(disk) >= before - 64 * 1024


def test_a_brim_full_disk_fails_the_save(disk: Path) -> None:
    training = Training()
    with Checkpointer(disk, arena="32MiB") as checkpointer:
        training.save_and_wait(checkpointer, 1)
        fill(disk, leave_bytes=0)
        training.save(checkpointer, 2)
        failed_for_space(checkpointer)
        assert leftovers(disk) == []


def test_the_earlier_checkpoint_outlives_a_full_disk(disk: Path) -> None:
    training = Training()
    with Checkpointer(disk, arena="32MiB") as checkpointer:
        training.save_and_wait(checkpointer, 1)
        fill(disk, leave_bytes=MIB)
        training.save(checkpointer, 2)
        failed_for_space(checkpointer)
        state = {"model": training.model, "optimizer": training.optimizer, "step": 0}
        assert checkpointer.restore(state).step == 1
    assert_same(dict(training.model.state_dict()), training.at[1]["model"])
    assert_same(training.optimizer.state_dict(), training.at[1]["optimizer"])


def test_the_next_save_works_once_there_is_room(disk: Path) -> None:
    training = Training()
    with Checkpointer(disk, arena="32MiB") as checkpointer:
        training.save_and_wait(checkpointer, 1)
        ballast = fill(disk, leave_bytes=MIB)
        training.save(checkpointer, 2)
        failed_for_space(checkpointer)
        ballast.unlink()
        training.save_and_wait(checkpointer, 3)
    assert Catalog(disk).steps() == [1, 3]
    assert_same(load(disk, 3), training.at[3])


def test_the_step_that_failed_can_be_saved_again(disk: Path) -> None:
    training = Training()
    with Checkpointer(disk, arena="32MiB") as checkpointer:
        ballast = fill(disk, leave_bytes=MIB)
        training.save(checkpointer, 2)
        failed_for_space(checkpointer)
        ballast.unlink()
        training.save_and_wait(checkpointer, 2)
    assert_same(load(disk, 2), training.at[2])


def test_a_failure_is_raised_by_the_next_save_and_only_once(disk: Path) -> None:
    training = Training()
    with Checkpointer(disk, arena="32MiB") as checkpointer:
        ballast = fill(disk, leave_bytes=MIB)
        training.save(checkpointer, 2)
        until(lambda: checkpointer.stats().failed == 1, "the failure")
        ballast.unlink()
        with pytest.raises(StorageError, match=r"step 2 failed.*(?i:space).*step 3, requested now, goes on"):
            training.save(checkpointer, 3)
        training.save_and_wait(checkpointer, 4)
    assert Catalog(disk).steps() == [3, 4]


def test_with_warn_a_failure_is_logged_once_and_never_raised(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    training = Training()
    with Checkpointer(disk, arena="32MiB", on_error="warn") as checkpointer:
        ballast = fill(disk, leave_bytes=MIB)
        training.save_and_wait(checkpointer, 2)
        ballast.unlink()
        training.save_and_wait(checkpointer, 3)
    told = [record.getMessage() for record in caplog.records if "step 2" in record.getMessage()]
    assert len(told) == 1
    assert "space" in told[0]
    assert Catalog(disk).steps() == [3]


@pytest.mark.parametrize(("pages", "file"), [(0, "the seal"), (1, "the manifest")])
def test_no_room_for_the_last_small_file_fails_the_save_whole(mounts: Mounts, pages: int, file: str) -> None:
    """The segment fits exactly; ``file`` does not.  A tmpfs counts pages exactly, and directories not at all."""
    disk = mounts.tmpfs("disk", "64m")
    training = Training()
    with Checkpointer(disk, arena="32MiB") as checkpointer:
        training.save_and_wait(checkpointer, 1)
        needed = -(-segment_bytes(disk, 1) // PAGE_BYTES) * PAGE_BYTES
        fill(disk, leave_bytes=needed + pages * PAGE_BYTES)
        training.save(checkpointer, 2)
        failed_for_space(checkpointer)
        assert leftovers(disk) == []
        assert Catalog(disk).steps() == [1]


# --- read-only ---------------------------------------------------------------------------------


@pytest.fixture
def read_only(mounts: Mounts) -> tuple[Path, Training]:
    """A root with step 1, remounted read-only."""
    disk = mounts.tmpfs("disk", "64m")
    training = Training()
    with Checkpointer(disk, arena="32MiB") as checkpointer:
        training.save_and_wait(checkpointer, 1)
    mounts.remount(disk, "ro")
    return disk, training


def test_a_read_only_root_can_be_restored_from(read_only: tuple[Path, Training]) -> None:
    disk, training = read_only
    training.go_on()
    with Checkpointer(disk) as checkpointer:
        state = {"model": training.model, "optimizer": training.optimizer, "step": 0}
        assert checkpointer.restore(state).step == 1
    assert_same(dict(training.model.state_dict()), training.at[1]["model"])


def test_saving_to_a_read_only_root_says_so(read_only: tuple[Path, Training]) -> None:
    disk, training = read_only
    with Checkpointer(disk) as checkpointer:
        training.save(checkpointer, 2)
        with pytest.raises(StorageError, match="read-only"):
            checkpointer.wait()
        training.go_on()
    assert Catalog(disk).steps() == [1]


def test_saving_works_again_when_the_root_is_writable_again(read_only: tuple[Path, Training], mounts: Mounts) -> None:
    disk, training = read_only
    with Checkpointer(disk) as checkpointer:
        training.save(checkpointer, 2)
        with pytest.raises(StorageError, match="read-only"):
            checkpointer.wait()
        mounts.remount(disk, "rw")
        training.save_and_wait(checkpointer, 3)
    assert_same(load(disk, 3), training.at[3])


def test_a_root_that_became_writable_again_is_locked_like_any_other(
    read_only: tuple[Path, Training], mounts: Mounts
) -> None:
    disk, training = read_only
    with Checkpointer(disk) as checkpointer:
        training.save(checkpointer, 2)
        with pytest.raises(StorageError, match="read-only"):
            checkpointer.wait()
        mounts.remount(disk, "rw")
        training.save_and_wait(checkpointer, 3)
        assert subprocess.run(["flock", "-n", str(layout.lock(disk)), "true"]).returncode != 0


# --- failing -----------------------------------------------------------------------------------


@pytest.fixture
def failing(mounts: Mounts) -> Path:
    """An ext4 that promises more than there is below it: block writes fail once the tmpfs under its image is full."""
    below = mounts.tmpfs("below", "36m")
    return mounts.ext4("disk", below / "image", "256M")


def test_a_device_that_fails_in_the_middle_fails_the_save(failing: Path) -> None:
    training = Training()
    with Checkpointer(failing, arena="32MiB") as checkpointer:
        training.save_and_wait(checkpointer, 1)
        training.save(checkpointer, 2)
        with pytest.raises(StorageError, match=r"Input/output error|No space left|Read-only"):
            checkpointer.wait()
        assert Catalog(failing).steps() == [1]


def test_training_goes_on_beside_a_failing_device(failing: Path) -> None:
    training = Training()
    with Checkpointer(failing, arena="32MiB", on_error="warn") as checkpointer:
        training.save_and_wait(checkpointer, 1)
        for step in range(2, 6):
            training.save(checkpointer, step)
        checkpointer.wait()
        stats = checkpointer.stats()
    assert (stats.committed, stats.failed, stats.keeper_starts) == (1, 4, 1)


@contextlib.contextmanager
def one_descriptor_left() -> Iterator[None]:
    """This process may open one more file, and no second one beside it."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open("/dev/null", os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken) + 50, before[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(taken[0]))
        os.close(taken.pop())
        yield
    finally:
        for each in taken:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_reader_that_runs_out_of_descriptors_does_not_call_the_checkpoint_damaged(tmp_path: Path) -> None:
    training = Training()
    with Checkpointer(tmp_path, arena="32MiB") as checkpointer:
        training.save_and_wait(checkpointer, 1)
        training.save_and_wait(checkpointer, 2)
        state = {"model": training.model, "optimizer": training.optimizer, "step": 0}
        with one_descriptor_left(), pytest.raises(StorageError, match="Too many open files"):
            checkpointer.restore(state)
        assert Catalog(tmp_path).steps() == [1, 2]
        assert checkpointer.restore(state).step == 2


# --- gone --------------------------------------------------------------------------------------


def test_a_root_removed_between_saves_is_made_again(tmp_path: Path) -> None:
    root = tmp_path / "run" / "checkpoints"
    training = Training()
    with Checkpointer(root, arena="32MiB") as checkpointer:
        training.save_and_wait(checkpointer, 1)
        shutil.rmtree(root.parent)
        training.save_and_wait(checkpointer, 2)
    assert Catalog(root).steps() == [2]
    assert_same(load(root, 2), training.at[2])


def test_a_root_removed_under_a_save_fails_it_and_the_next_one_works(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    tensor = torch.arange(48 * MIB, dtype=torch.float32)  # many times the arena: the keeper is stopped half-way
    with Checkpointer(root, arena="32MiB") as checkpointer:
        save = checkpointer.save(1, {"tensor": tensor})
        until(lambda: layout.has_begun(root, 1, rank=0), "the first file")
        keeper = spi.keeper_pid(checkpointer)
        assert keeper is not None
        pause(keeper)
        try:
            shutil.rmtree(root)
        finally:
            os.kill(keeper, signal.SIGCONT)
        with pytest.raises(StorageError, match="removed the directory"):
            save.wait()
        checkpointer.save(2, {"tensor": tensor[:1000]})
        checkpointer.wait()
    assert Catalog(root).steps() == [2]
    assert leftovers(root) == []
