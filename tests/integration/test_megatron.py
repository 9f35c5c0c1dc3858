"""Megatron-core, where it is installed: its strategies on one rank, and the example on two.

Kills, tensor parallel ranks and its GPT model: ``tests/engines/test_megatron.py``.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

import stillframe
from stillframe import Catalog, ConfigError, IntegrityError, MismatchError, NotFoundError, StorageError
from tests.support import assert_same, until

pytest.importorskip("megatron.core", reason="megatron-core is not installed: `make test-engines` installs it")
core: Any = importlib.import_module("megatron.core")
mcore: Any = importlib.import_module("megatron.core.dist_checkpointing")
ours: Any = importlib.import_module("stillframe.integrations.megatron")

pytestmark = [pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]
REPOSITORY = Path(__file__).resolve().parent.parent.parent
EXAMPLE = REPOSITORY / "examples/megatron_core.py"
TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


@pytest.fixture
def strategy() -> Iterator[Any]:
    made = ours.SaveStrategy()
    yield made
    made.close()


def tensor(key: str, data: torch.Tensor, *offsets: tuple[int, int, int], **more: Any) -> Any:
    return mcore.ShardedTensor.from_rank_offsets(key, data, *offsets, **more)


def state(value: float, size: int = 4) -> dict[str, Any]:
    """Layers under one key, a tensor in two parts, an object of a rank's own, common values; all depend on value."""
    value = float(value)
    layers = [torch.full((size, 3), value + at) for at in range(2)]
    halves = torch.arange(2.0 * size).reshape(2 * size, 1) * value
    return {
        "layers": [tensor("w", each, (0, at, 2), prepend_axis_num=1) for at, each in enumerate(layers)],
        "fc1": [tensor("fc1", each, (0, at, 2)) for at, each in enumerate(halves.chunk(2))],
        "half": tensor("half", torch.full((2, 2), value, dtype=torch.bfloat16)),
        "scalar": tensor("scalar", torch.tensor(value)),
        "replica": tensor("other", torch.full((3,), value)),
        "copy": tensor("other", torch.full((3,), -1.0), replica_id=1),
        "numbers": mcore.ShardedObject(
            "rng", [{"a": numpy.arange(3), "b": (1, value), "c": torch.ones(2)}], (1,), (0,)
        ),
        "iteration": int(value),
    }


def save(strategy: Any, directory: Path, value: float, **more: Any) -> Any:
    directory.mkdir(parents=True, exist_ok=True)
    return mcore.save(state(value), str(directory), strategy, **more)


def finalize(request: Any) -> None:
    """As Megatron's queue does, when the process that it started is over."""
    for each in request.finalize_fns:
        each()


def load(directory: Path, wanted: dict[str, Any] | None = None) -> dict[str, Any]:
    wanted = state(0) if wanted is None else wanted
    found: dict[str, Any] = mcore.load(wanted, str(directory), ours.LoadStrategy(), validate_access_integrity=False)
    return found


def assert_is(found: dict[str, Any], value: float) -> None:
    expected = {key: each for key, each in state(value).items() if key != "copy"}
    for key, each in expected.items():
        if isinstance(each, list):
            for one, other in zip(found[key], each, strict=True):
                assert_same(one, other.data)
        elif key == "numbers":
            (numbers,) = found[key]
            assert numbers["b"] == (1, value)
            assert numbers["a"].tolist() == [0, 1, 2]
            assert_same(numbers["c"], torch.ones(2))
        else:
            assert_same(found[key], each if key == "iteration" else each.data)
    assert_same(found["copy"], torch.full((3,), float(value)))


def test_a_version_that_was_not_tried_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "__version__", "0.99.1")
    for make in (ours.SaveStrategy, ours.LoadStrategy, ours.register):
        with pytest.raises(ConfigError, match=r"megatron-core 0\.99\.1 was not tested .* install megatron-core 0\.16"):
            make()


def test_what_was_saved_comes_back(tmp_path: Path, strategy: Any) -> None:
    for value in (1, 2):
        assert save(strategy, tmp_path / f"iter_{value:07d}", value) is None
    assert Catalog(tmp_path / "_stillframe").steps() == [1, 2]
    assert (tmp_path / TRACKER).read_text() == "2"
    for value in (1, 2):
        assert_is(load(tmp_path / f"iter_{value:07d}"), value)
    assert ours.latest(tmp_path) == str(tmp_path / "iter_0000002")
    whole = stillframe.load(tmp_path / "_stillframe", 2)["tensors"]
    assert_same(whole["fc1"], torch.arange(8.0).reshape(8, 1) * 2)
    assert_same(whole["w"]["1"], torch.full((4, 3), 3.0))
    moved = tmp_path.with_name("moved")
    strategy.close()
    tmp_path.rename(moved)
    assert_is(load(moved / "iter_0000001"), 1)


def test_by_its_name_it_is_found_by_everything_that_reads(tmp_path: Path) -> None:
    ours.register()
    place = tmp_path / "iter_0000003"
    place.mkdir()
    mcore.save(state(3), str(place), ("stillframe", 1), content_metadata={"who": "me"})
    plain = {key: each for key, each in mcore.load_plain_tensors(str(place)).items() if isinstance(each, torch.Tensor)}
    assert {key: tuple(each.shape) for key, each in plain.items()} == {
        "w": (2, 4, 3), "fc1": (8, 1), "half": (2, 2), "scalar": (), "other": (3,),
    }  # fmt: skip
    assert_same(plain["w"], torch.stack([torch.full((4, 3), 3.0), torch.full((4, 3), 4.0)]))
    assert mcore.load_common_state_dict(str(place))["iteration"] == 3
    assert mcore.load_content_metadata(str(place)) == {"who": "me"}
    known = mcore.load_sharded_metadata(str(place)) if hasattr(mcore, "load_sharded_metadata") else None
    assert known is None or "rng/shard_0_1" in known
    loaded = mcore.load({"half": tensor("half", torch.zeros(2, 2))}, str(place), validate_access_integrity=False)
    assert_same(loaded["half"], torch.full((2, 2), 3.0))  # of another dtype


def test_nothing_names_it_before_it_is_committed(tmp_path: Path, strategy: Any) -> None:
    from stillframe import spi
    from stillframe.open_roots import find_root
    from tests.support import kill

    save(strategy, tmp_path / "iter_0000001", 1)
    request = save(strategy, tmp_path / "iter_0000002", 2, async_sharded_save=True)
    request.execute_sync()
    assert_is(load(tmp_path / "iter_0000002"), 2)
    opened = find_root(tmp_path / "_stillframe")
    assert opened is not None
    keeper = spi.keeper_pid(opened.run)
    assert keeper is not None
    os.kill(keeper, signal.SIGSTOP)
    request = save(strategy, tmp_path / "iter_0000003", 3, async_sharded_save=True)
    assert not (tmp_path / "iter_0000003/metadata.json").exists()
    assert (tmp_path / TRACKER).read_text() == "2"
    with pytest.raises(mcore.core.CheckpointingException, match="is not a distributed checkpoint"):
        load(tmp_path / "iter_0000003")
    strategy._last[0].wait("staged", timeout_s=60)  # else the next keeper may get it
    kill(keeper)
    with pytest.raises(stillframe.StillframeError):
        finalize(request)
    assert not (tmp_path / "iter_0000003/metadata.json").exists()
    assert (tmp_path / TRACKER).read_text() == "2"
    assert_is(load(tmp_path / "iter_0000002"), 2)
    save(strategy, tmp_path / "iter_0000003", 3)
    assert_is(load(tmp_path / "iter_0000003"), 3)


def test_latest_publishes_what_a_trainer_died_over(tmp_path: Path, strategy: Any) -> None:
    """Not the newest alone: one may have been killed between the files of a step while a later one was on its way."""
    for value in (1, 2, 3, 4):
        save(strategy, tmp_path / f"iter_{value:07d}", value)
    strategy.close()
    whole = (tmp_path / "iter_0000001/metadata.json").read_bytes()
    (tmp_path / "iter_0000001/metadata.json").unlink()
    (tmp_path / "iter_0000002/metadata.json").write_bytes(whole[:20])  # Megatron writes it again, and not atomically
    (tmp_path / "iter_0000003/stillframe.json").unlink()
    (tmp_path / "iter_0000003/metadata.json").unlink()
    (tmp_path / TRACKER).write_text("2")
    assert ours.latest(tmp_path) == str(tmp_path / "iter_0000004")
    assert (tmp_path / TRACKER).read_text() == "4"
    for value in (1, 2, 3, 4):
        assert (tmp_path / f"iter_{value:07d}/metadata.json").read_bytes() == whole
        assert_is(load(tmp_path / f"iter_{value:07d}"), value)


def test_the_process_that_megatron_starts_ends_with_the_save(tmp_path: Path, strategy: Any) -> None:
    request = save(strategy, tmp_path / "iter_0000001", 1, async_sharded_save=True)
    for method in ("fork", "spawn"):
        context: Any = torch.multiprocessing.get_context(method)
        process = context.Process(target=request.async_fn, args=request.async_fn_args, kwargs=request.async_fn_kwargs)
        process.start()
        process.join(120)
        assert process.exitcode == 0
    until(lambda: (tmp_path / "iter_0000001/metadata.json").exists(), "the commit")
    finalize(request)


def test_directories_decide_what_stays(tmp_path: Path, strategy: Any) -> None:
    for value in range(1, 5):
        save(strategy, tmp_path / f"iter_{value:07d}", value)
    (tmp_path / "iter_0000002").rename(tmp_path / "best")
    shutil.rmtree(tmp_path / "iter_0000001")
    shutil.rmtree(tmp_path / "iter_0000003")
    save(strategy, tmp_path / "iter_0000005", 5)
    strategy.close()
    assert Catalog(tmp_path / "_stillframe").steps() == [2, 4, 5]
    assert_is(load(tmp_path / "best"), 2)


def test_a_directory_that_is_saved_to_again_holds_the_later_one(tmp_path: Path, strategy: Any) -> None:
    place = tmp_path / "iter_0000007"
    save(strategy, place, 1)
    save(strategy, place, 2)
    assert_is(load(place), 2)
    strategy.close()
    assert len(Catalog(tmp_path / "_stillframe").steps()) == 1
    common = (place / "common.pt").read_bytes()
    (place / "common.pt").write_bytes(common[:-9] + b"x" * 9)
    with pytest.raises((IntegrityError, RuntimeError)):
        load(place)
    assert ours.latest(tmp_path) is None
    (place / "common.pt").write_bytes(common)
    (place / "metadata.json").write_text("")  # Megatron was killed while it wrote it
    (place / "stillframe.json").unlink()
    assert ours.latest(tmp_path) == str(place)
    assert_is(load(place), 2)


DYING = """
import os, signal, sys
import torch.distributed as dist
from pathlib import Path
from stillframe.store.calls import Calls
from tests.integration import test_megatron as tests

rename = Calls.rename
def dying(self, source, target, *where):
    if target == sys.argv[2]:
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(self, source, target, *where)
Calls.rename = dying
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
strategy = tests.ours.SaveStrategy()
tests.save(strategy, Path(sys.argv[1]), 3)
strategy.close()
"""


@pytest.mark.parametrize("name", ["common.pt", "stillframe.json", "metadata.json", TRACKER])
def test_a_trainer_that_is_killed_while_it_publishes_leaves_nothing(tmp_path: Path, name: str) -> None:
    place = tmp_path / "iter_0000003"
    where = {**os.environ, "PYTHONPATH": f"{REPOSITORY / 'src'}{os.pathsep}{REPOSITORY}"}
    died = subprocess.run([sys.executable, "-W", "ignore", "-c", DYING, str(place), name], env=where, timeout=300)
    assert died.returncode == -signal.SIGKILL
    above = tmp_path if name == TRACKER else place
    assert len(list(above.glob(f"{name}.*.partial"))) == 1
    own = place / "notes.0123abcd.partial"  # the user's
    own.touch()
    assert ours.latest(tmp_path) == str(place)
    assert [path for path in tmp_path.rglob("*.partial") if "_stillframe" not in path.parts] == [own]
    assert_is(load(place), 3)
    assert (tmp_path / TRACKER).read_text() == "3"


def test_places_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    tier, disks = stillframe.Tier(tmp_path / "tier"), f"{tmp_path}/{{node}}"
    for given, says in (
        ({"tiers": [tier]}, "for a root on the nodes' own disks"),
        ({"root": tmp_path, "keep": stillframe.KeepLast(3)}, "only the directories decide what stays"),
        ({"shared": False}, "give a root on the nodes' own disks"),
        ({"root": disks, "shared": True}, "give a root on the nodes' own disks"),
        ({"root": disks, "tiers": [stillframe.Tier(tmp_path, every=3), tier]}, "the first tier gets each"),
        ({"root": disks, "tiers": tier}, "give a list of Tier"),
    ):
        with pytest.raises(ConfigError, match=says):
            ours.SaveStrategy(**given)
    with pytest.raises(ConfigError, match=r"call SaveStrategy\(…\)\.latest\(save_dir\)"):
        ours.latest(tmp_path, disks)


@pytest.fixture
def disks(tmp_path: Path) -> str:
    return f"{tmp_path}/disks/{{node}}"


def test_a_disk_that_is_lost_is_made_up_for_by_the_tier(tmp_path: Path, disks: str) -> None:
    """Two ranks with disks of their own: ``tests/engines/test_megatron.py``."""
    place = tmp_path / "run"
    for value in (1, 2, 3):
        strategy = ours.SaveStrategy(disks)
        assert strategy.latest(place) == (str(place / f"iter_{value - 1:07d}") if value > 1 else None)
        save(strategy, place / f"iter_{value:07d}", value)
        assert (place / TRACKER).read_text() == str(value)
        strategy.close()
        shutil.rmtree(tmp_path / "disks")
    assert Catalog(place / "_stillframe").steps() == [1, 2, 3]
    for value in (1, 2, 3):
        assert_is(load(place / f"iter_{value:07d}"), value)
    assert ours.latest(place) == str(place / "iter_0000003")  # it needs no disk


def test_nothing_names_it_before_the_tier_has_it(tmp_path: Path, disks: str) -> None:
    place, tier = tmp_path / "run", stillframe.Tier(tmp_path / "tier", limit="4kB/s")
    strategy = ours.SaveStrategy(disks, tiers=[tier])
    save(strategy, place / "iter_0000001", 1)
    request = save(strategy, place / "iter_0000002", 2, async_sharded_save=True)  # later, by the limit
    (own,) = (tmp_path / "disks").iterdir()
    until(lambda: Catalog(own).steps() == [1, 2], "the commit in the root")
    assert (place / TRACKER).read_text() == "1"
    assert not (place / "iter_0000002/metadata.json").exists()
    assert Catalog(tmp_path / "tier").steps() == [1]
    assert not request.async_fn_args[0].item()
    finalize(request)
    assert (place / TRACKER).read_text() == "2"
    assert Catalog(tmp_path / "tier").steps() == [1, 2]
    assert_is(load(place / "iter_0000002"), 2)
    strategy.close()


def test_a_save_that_is_on_the_disk_before_anybody_asks_to_publish_it_keeps_its_turn(
    tmp_path: Path, disks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks still tell one another that all have saved: it is pending until the tier has it."""
    from stillframe.integrations.frameworks import save_together

    tier = stillframe.Tier(tmp_path / "tier", limit="4kB/s")
    strategy = ours.SaveStrategy(disks, tiers=[tier])
    phases = []

    def late(place: Any, *arguments: Any) -> Any:
        found = save_together(place, *arguments)
        found.wait("committed")
        until(lambda: found not in place._pending, "the save is over")
        phases.append(found.tiers[place.root])
        return found

    save(strategy, tmp_path / "run/iter_0000001", 1)
    monkeypatch.setattr("stillframe.integrations.megatron.strategies.save_together", late)
    save(strategy, tmp_path / "run/iter_0000002", 2)
    assert phases == ["committed"]
    strategy.close()


def test_two_directories_of_checkpoints_have_disks_of_their_own(tmp_path: Path, disks: str) -> None:
    strategy = ours.SaveStrategy(disks)
    save(strategy, tmp_path / "run/iter_0000001", 1)
    with pytest.raises(ConfigError, match="cannot share"):
        save(strategy, tmp_path / "other/iter_0000001", 1)
    strategy.close()


def test_what_cannot_be_carried_is_no_checkpoint(tmp_path: Path, disks: str) -> None:
    """The tier turns out to be another run's."""
    place, strategy = tmp_path / "run", ours.SaveStrategy(disks)
    save(strategy, place / "iter_0000001", 1)
    strategy.close()
    shutil.rmtree(place / "_stillframe")
    with stillframe.Checkpointer(place / "_stillframe") as other:
        other.save(5, {"a": torch.ones(3)}).wait()
    strategy = ours.SaveStrategy(disks)
    with pytest.raises(StorageError):
        save(strategy, place / "iter_0000002", 2)
    assert not (place / "iter_0000002/metadata.json").exists()
    assert (place / TRACKER).read_text() == "1"
    strategy.close()


def test_directories_decide_what_stays_in_the_tier(tmp_path: Path, disks: str) -> None:
    strategy, place = ours.SaveStrategy(disks), tmp_path / "run"
    for value in range(1, 5):
        save(strategy, place / f"iter_{value:07d}", value)
    (place / "iter_0000002").rename(place / "best")
    shutil.rmtree(place / "iter_0000001")
    shutil.rmtree(place / "iter_0000003")
    for value in range(5, 8):
        save(strategy, place / f"iter_{value:07d}", value)
    strategy.close()
    assert Catalog(place / "_stillframe").steps() == [2, 4, 5, 6, 7]
    assert_is(load(place / "best"), 2)


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, strategy: Any) -> None:
    place = tmp_path / "iter_0000001"
    save(strategy, place, 1)
    for wanted, error, says in (
        ({"x": tensor("nobody", torch.zeros(2))}, NotFoundError, "no tensor 'nobody'"),
        ({"x": tensor("fc1", torch.zeros(9, 1))}, MismatchError, r"'fc1' is \(8, 1\) in the checkpoint, not \(9, 1\)"),
        (
            {"x": mcore.ShardedObject("rng", None, (2,), (0,))},
            NotFoundError,
            r"no object 'rng/shard_0_2' .* rng/shard_0_1",
        ),
    ):
        with pytest.raises(error, match=says):
            load(place, wanted)
    padded = load(place, {"x": tensor("fc1", torch.ones(9, 1), allow_shape_mismatch=True)})["x"]
    assert_same(padded, torch.cat([torch.arange(8.0), torch.zeros(1)]).reshape(9, 1))
    config = json.loads((place / "metadata.json").read_text())
    (place / "metadata.json").write_text(json.dumps({**config, "sharded_backend": "torch_dist"}))
    with pytest.raises(ConfigError, match="written as 'torch_dist'"):
        load(place)
    for damage in (b"{", b"\xff", b"[" * 9000, b'{"root": 1}', b"{}"):
        (place / "stillframe.json").write_bytes(damage)
        with pytest.raises(stillframe.FormatError, match=r"stillframe\.json is damaged"):
            ours.latest(tmp_path)
    with pytest.raises((ConfigError, StorageError, FileNotFoundError)):
        mcore.save(state(1), "s3://bucket/iter_0000001", strategy)
    with pytest.raises(ConfigError, match="give a directory"):
        strategy.save({}, "s3://bucket/iter_0000001")


def test_the_data_may_lie_on_another_file_system(tmp_path: Path) -> None:
    import tempfile

    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="sf-megatron-") as memory:
        strategy = ours.SaveStrategy(f"{memory}/root")
        save(strategy, tmp_path / "iter_0000001", 1)
        strategy.close()
        assert Catalog(f"{memory}/root").steps() == [1]
        assert_is(load(tmp_path / "iter_0000001"), 1)
        assert ours.latest(tmp_path, f"{memory}/root") == str(tmp_path / "iter_0000001")
    with pytest.raises(NotFoundError, match="was it moved without its root"):
        load(tmp_path / "iter_0000001")


def test_the_example_is_killed_and_goes_on(tmp_path: Path) -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 60

    def run(place: Path, is_killed: bool = False) -> str:
        place.mkdir(exist_ok=True)
        command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        names = {"PYTHONPATH": str(REPOSITORY / "src"), "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
        process = subprocess.Popen(
            [*command, str(EXAMPLE)], cwd=place, env={**os.environ, **names}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        if is_killed:
            root = place / "runs/megatron_core/_stillframe"
            until(lambda: root.is_dir() and (Catalog(root).latest() or 0) >= 5, "some checkpoints", 400)
            from tests.engines.processes import below

            os.kill(below(process.pid, EXAMPLE.name)[-1], signal.SIGKILL)
        out, said = process.communicate(timeout=400)
        assert (process.returncode == 0) is not is_killed, said[-3000:]
        return out

    def sums(out: str) -> list[str]:
        return sorted(re.findall(r"rank \d: sum \S+", out))

    calm = run(tmp_path / "calm")
    run(tmp_path / "killed", is_killed=True)
    time.sleep(0.1)
    again = run(tmp_path / "killed")
    assert int(re.search(r"begins after step (\d+)", again)[1]) >= 5  # type: ignore[index]
    assert sums(calm) == sums(again)
    assert len(sums(calm)) == 2
