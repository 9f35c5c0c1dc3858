"""What used to go wrong because a file did not say which save it belongs to, or because a read was taken for damage."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import stillframe
from stillframe import Catalog, Checkpointer, KeepLast, StillframeError, StorageError, UnsupportedStateError, load
from stillframe.checkpoint.epochs import next_epoch
from stillframe.format import names
from stillframe.format.envelope import wrap
from stillframe.keeper.retention import Pruner
from stillframe.model import SaveId
from stillframe.save.device import HostDevice
from stillframe.save.steps import TakenSteps
from stillframe.state import dtypes
from stillframe.store.calls import Calls
from stillframe.store.memory import Fault, MemoryBackend, MemoryStore
from tests import layout
from tests.support import assert_same, run_child, start_child
from tests.unit.saved import begun

CODES = [errno.EIO, errno.EACCES, errno.ESTALE, errno.ETIMEDOUT]


def make_state(step: int) -> dict[str, Any]:
    return {"weights": torch.full((1000,), float(step)), "step": step}


def tree(root: Path) -> dict[str, tuple[int, int]]:
    """Everything in a root, and when it was changed; but for the notes of the run that is at work there."""
    found = {}
    for path in sorted(root.rglob("*")):
        about = path.lstat()
        found[str(path.relative_to(root))] = about.st_size, about.st_mtime_ns
    return {name: about for name, about in found.items() if "/events" not in name}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 1, 2 and 3."""
    with Checkpointer(tmp_path / "root") as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, make_state(step)).wait()
    return tmp_path / "root"


# --- what cannot be read now is not damaged ----------------------------------------------------


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
@pytest.mark.parametrize("verb", ["read", "open"])
def test_a_read_that_fails_is_an_error_and_costs_no_checkpoint(
    root: Path, monkeypatch: pytest.MonkeyPatch, code: int, verb: str
) -> None:
    """One hiccup of a mount: neither an older step nor a fresh start is what anybody wants."""
    segment = layout.segment(root, 3)
    number = segment.stat().st_ino
    before = {path.name: path.read_bytes() for path in segment.parent.iterdir()}
    real_read, real_open = Calls.pread, Calls.open

    def pread(self: Calls, fd: int, into: memoryview, offset: int) -> int:
        if verb == "read" and os.fstat(fd).st_ino == number:
            raise OSError(code, os.strerror(code))
        return real_read(self, fd, into, offset)

    def open_(self: Calls, name: str, flags: int, dir_fd: int | None = None) -> int:
        if verb == "open" and name == segment.name:
            raise OSError(code, os.strerror(code), name)
        return real_open(self, name, flags, dir_fd)

    with monkeypatch.context() as patched:
        patched.setattr(Calls, "pread", pread)
        patched.setattr(Calls, "open", open_)
        with Checkpointer(root, keep=KeepLast(5)) as checkpointer, warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(StorageError, match=os.strerror(code)):
                checkpointer.restore(make_state(0))
    assert {path.name: path.read_bytes() for path in segment.parent.iterdir()} == before
    state = make_state(0)
    with Checkpointer(root, keep=KeepLast(5)) as checkpointer:
        assert checkpointer.restore(state).step == 3
    assert_same(state, make_state(3))


RESTORE = """
import sys, torch, stillframe
state = {"weights": torch.zeros(1000), "step": 0}
with stillframe.Checkpointer(sys.argv[1]) as checkpointer:
    try:
        print("restored", checkpointer.restore(state).step)
    except stillframe.StillframeError as error:
        print(type(error).__name__, error)
"""


def as_anybody() -> list[str]:
    """What a command needs before it, so that permissions count for it."""
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("root sees everything, and there is no setpriv")
    dropped = "-dac_override,-dac_read_search"
    return ["setpriv", f"--bounding-set={dropped}", f"--inh-caps={dropped}"]


def test_steps_that_may_not_be_looked_into_are_no_fresh_start(root: Path) -> None:
    places = [layout.step_dir(root, step) for step in (1, 2, 3)]
    for place in places:
        place.chmod(0)
    source = str(Path(stillframe.__file__).parent.parent)
    try:
        done = subprocess.run(
            [*as_anybody(), sys.executable, "-c", RESTORE, str(root)],
            capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": source},
        )  # fmt: skip
    finally:
        for place in places:
            place.chmod(0o755)
    assert done.stdout.startswith("StorageError"), done
    assert "Permission denied" in done.stdout
    state = make_state(0)
    with Checkpointer(root) as checkpointer:
        assert checkpointer.restore(state).step == 3


# --- a value that is known elsewhere -----------------------------------------------------------


def forget_dtype(patched: pytest.MonkeyPatch, name: str) -> None:
    """As in a torch that does not have it."""
    patched.setattr(dtypes, "_ALL_DTYPES", {key: kind for key, kind in dtypes._ALL_DTYPES.items() if key != name})


def test_a_dtype_that_this_torch_does_not_have_is_said_and_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"weights": torch.ones(8), "config": {"dtype": torch.float8_e4m3fnuz}}
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state).wait()
    with monkeypatch.context() as patched, Checkpointer(tmp_path) as checkpointer, warnings.catch_warnings():
        warnings.simplefilter("error")
        forget_dtype(patched, "float8_e4m3fnuz")
        with pytest.raises(UnsupportedStateError, match=r"torch\.float8_e4m3fnuz.*use a newer torch"):
            checkpointer.restore(state)
        with pytest.raises(UnsupportedStateError, match="newer torch"):
            load(tmp_path)
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(state).step == 2


# --- the same step twice -----------------------------------------------------------------------


class Preempted:
    """A data loader whose job is told to end while it is being saved."""

    is_armed = False

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        if self.is_armed:
            self.is_armed = False
            os.kill(os.getpid(), signal.SIGTERM)
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def test_a_signal_handler_that_saves_the_step_which_is_being_saved_spoils_nothing(tmp_path: Path) -> None:
    weights = torch.zeros(1 << 20)
    loader = Preempted()
    state = {"weights": weights, "loader": loader}
    refused: list[int] = []
    with Checkpointer(tmp_path) as checkpointer:

        def on_sigterm(*_: object) -> None:
            try:
                checkpointer.save(loader.position, state)
            except stillframe.ExistsError:
                refused.append(loader.position)

        before = signal.signal(signal.SIGTERM, on_sigterm)
        try:
            for step in range(1, 6):
                loader.position = step
                checkpointer.fence()
                weights.fill_(step)
                loader.is_armed = True
                checkpointer.save(step, state)
                checkpointer.wait()
        finally:
            signal.signal(signal.SIGTERM, before)
    assert refused == [1, 2, 3, 4, 5]
    assert Catalog(tmp_path).steps() == [1, 2, 3, 4, 5]
    for step in range(1, 6):
        found = load(tmp_path, step)
        assert found["loader"] == {"position": step}
        assert found["weights"].unique().tolist() == [step]


def test_a_step_is_saved_again_at_once_after_its_save_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clean-up of the first one must not touch the files of the second."""
    real = HostDevice.copy
    copies = 0
    is_failing = False

    def copy(self: HostDevice, *given: Any) -> Any:
        nonlocal copies
        copies += 1
        if is_failing and copies % 3 == 0:
            raise RuntimeError("launch failure")
        return real(self, *given)

    monkeypatch.setattr(HostDevice, "copy", copy)
    weights = [torch.zeros(4 << 20) for _ in range(4)]
    with Checkpointer(tmp_path, on_error="warn", keep=KeepLast(1)) as checkpointer:
        for step in range(1, 5):
            checkpointer.fence()
            for each in weights:
                each.fill_(step)
            is_failing = True
            first = checkpointer.save(step, {"weights": weights})
            with pytest.raises(StillframeError, match="launch failure"):
                first.wait("staged")
            is_failing = False
            second = checkpointer.save(step, {"weights": weights})
            assert (first.attempt, second.attempt) == (1, 2)
            second.wait()
            assert all(each.unique().tolist() == [step] for each in load(tmp_path, step)["weights"])
    assert Catalog(tmp_path).steps() == [4]
    assert layout.leftovers(tmp_path) == []


# --- going back --------------------------------------------------------------------------------


def resumed(root: Path) -> tuple[int | None, dict[str, Any]]:
    state = make_state(0)
    with Checkpointer(root) as checkpointer:
        return checkpointer.restore(state).step, state


@pytest.mark.parametrize("way", ["restore", "rewind"])
def test_who_goes_back_and_saves_is_on_the_new_branch_for_good(root: Path, way: str) -> None:
    state = make_state(0)
    with Checkpointer(root) as checkpointer:
        if way == "rewind":
            checkpointer.rewind(1)
            assert Catalog(root).steps() == [1], "from the moment that it returns"
            assert checkpointer.restore(state).step == 1
        else:
            assert checkpointer.restore(state, step=1).step == 1
            assert Catalog(root).steps() == [1, 2, 3], "nothing is left behind before something is saved"
        state["step"] = -2
        checkpointer.save(2, state).wait()
    assert Catalog(root).steps() == [1, 2]
    step, found = resumed(root)
    assert step == 2
    assert_same(found, state)


def test_a_rewind_holds_even_if_nothing_is_saved_after_it(root: Path) -> None:
    with Checkpointer(root) as checkpointer:
        checkpointer.rewind(2)
    step, state = resumed(root)
    assert step == 2
    assert_same(state, make_state(2))


def test_who_only_looks_at_an_older_step_leaves_no_trace(root: Path) -> None:
    with Checkpointer(root) as checkpointer:
        assert checkpointer.restore(make_state(0), step=1).step == 1
    assert resumed(root)[0] == 3


def test_a_branch_that_was_left_behind_can_be_gone_back_to(root: Path) -> None:
    with Checkpointer(root) as checkpointer:
        checkpointer.restore(make_state(0), step=1)
        checkpointer.save(2, make_state(-2)).wait()
        assert Catalog(root).steps() == [1, 2]
        checkpointer.rewind(3)  # of the first branch
    assert Catalog(root).steps() == [1, 2, 3]
    assert_same(load(root, 2), make_state(2))


def test_what_was_left_behind_goes_when_the_new_branch_has_reached_it(root: Path) -> None:
    with Checkpointer(root, keep=KeepLast(9)) as checkpointer:
        checkpointer.restore(make_state(0), step=1)
        checkpointer.save(2, make_state(-2)).wait()
        assert [save.epoch for save in Catalog(root).look().saves if save.step == 3] == [1]
        checkpointer.save(4, make_state(-4)).wait()
    assert layout.steps_there(root) == [1, 2, 4]


def test_a_restore_that_fails_does_not_change_where_training_goes_on_from(root: Path) -> None:
    """It is at step 1, and says so with its next save."""
    state = make_state(0)
    with Checkpointer(root) as checkpointer:
        assert checkpointer.restore(state, step=1).step == 1
        with pytest.raises(stillframe.NotFoundError):
            checkpointer.restore(state, step=77)
        checkpointer.save(2, state).wait()
    assert Catalog(root).steps() == [1, 2]


# --- beside a run ------------------------------------------------------------------------------


EVALUATE = """
import sys, torch, stillframe
stillframe.Checkpointer  # importing other parts first changes nothing
state = {"weights": torch.zeros(1000), "step": 0}
print(stillframe.restore(sys.argv[1], state).step, state["step"], state["weights"].unique().tolist())
"""


def test_an_evaluation_reads_beside_a_run_without_a_trace(root: Path) -> None:
    with Checkpointer(root) as checkpointer:
        checkpointer.save(4, make_state(4)).wait()
        before = tree(root)
        assert run_child(EVALUATE, root).split("\n")[0] == "4 4 [4.0]"
        assert tree(root) == before
        checkpointer.save(5, make_state(5)).wait()


def test_a_second_trainer_beside_a_run_is_refused(root: Path) -> None:
    with Checkpointer(root) as checkpointer:
        checkpointer.save(4, make_state(4)).wait()
        child = start_child(RESTORE, root)
        out, err = child.communicate(timeout=60)
        assert out.startswith("BusyError"), (out, err)
        checkpointer.save(5, make_state(5)).wait()


# --- how much is looked at ---------------------------------------------------------------------


class Counting:
    """Counts the verbs that a store is asked."""

    def __init__(self, steps: int) -> None:
        self.counts: Counter[str] = Counter()
        self.store = MemoryStore(MemoryBackend(), self._count)
        begun(self.store)
        for step in range(steps):
            save = SaveId(step)
            for name in (names.segment(0), names.seal(0)):
                self.store.put(names.key(save, name), b"x")
            self.store.put(names.key(save, names.MANIFEST), wrap("manifest", b"{}")[0])
        self.counts.clear()

    def _count(self, verb: str, key: str) -> Fault | None:
        self.counts[verb] += 1
        return None

    def of(self, work: Any) -> Counter[str]:
        self.counts.clear()
        work()
        return self.counts.copy()


@pytest.mark.parametrize(
    "work",
    [
        lambda catalog: catalog.look(),
        lambda catalog: catalog.newest(),
        lambda catalog: catalog.latest(),
        lambda catalog: catalog.find(3),
        lambda catalog: TakenSteps(catalog).begin(10_000),
        next_epoch,
    ],
    ids=["look", "newest", "latest", "find", "take a step", "begin an epoch"],
)
def test_a_root_of_many_steps_costs_a_starting_run_no_more_than_one_of_few(work: Any) -> None:
    few, many = Counting(10), Counting(500)
    cost = many.of(lambda: work(Catalog(many.store)))
    assert cost == few.of(lambda: work(Catalog(few.store)))
    assert sum(cost.values()) <= 8


def test_retention_looks_at_each_checkpoint_once() -> None:
    """After each commit it asks for what is new."""
    counting = Counting(500)
    pruner = Pruner(Catalog(counting.store), KeepLast(1000), 0, True, lambda: 1)
    first = counting.of(lambda: pruner.committed(SaveId(499)))
    assert first["head"] <= 3 * 500
    again = counting.of(lambda: pruner.committed(SaveId(499)))
    assert sum(again.values()) <= 8
