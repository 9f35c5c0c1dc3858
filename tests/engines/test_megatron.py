"""Megatron-core on stillframe: its GPT model on gloo ranks, tensor parallel, killed and resumed.

Run as a program, it trains (tests/loops/driving.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from stillframe import Catalog, IntegrityError, NotFoundError, StateError
from tests.engines import megatron_on_cpu
from tests.engines.megatron_on_cpu import Run
from tests.loops.conformance import Conformance, assert_goes_on
from tests.loops.driving import STEPS, Life, Living, Result, Wish, digest_of
from tests.ranks.saying import say
from tests.support import assert_same

pytestmark = [pytest.mark.timeout(1800), pytest.mark.filterwarnings("ignore")]
MODULE = "tests.engines.test_megatron"


@contextlib.contextmanager
def group() -> Iterator[None]:
    """As torchrun says, or alone."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()


def main() -> None:
    megatron_on_cpu.pretend()
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    from stillframe.integrations.megatron import LoadStrategy, SaveStrategy, latest

    life = Life()
    wish, place = life.wish, Path(life.wish.place)
    root = f"{place}-elsewhere" if "elsewhere" in wish.kind else None
    if "disks" in wish.kind:
        os.environ["STILLFRAME_NODE"] = f"node{life.rank}"
        root = f"{place}-disks/{{node}}"
    with group():
        run, queue, strategy = Run(life, wish.seed), AsyncCallsQueue(), SaveStrategy(root)
        wrapped = FullyParallelSaveStrategyWrapper(strategy) if "dp" in wish.kind else strategy
        found = strategy.latest(place) if "disks" in wish.kind else latest(place, root)
        begin = 0
        if found is None:  # a life before this one may have left nothing: then this is the first
            run.seed(1)
        else:
            wanted = run.sharded(0)
            if "reshaped" in wish.kind:
                del wanted["numbers"]
            begin = run.restore(dist_checkpointing.load(wanted, found, LoadStrategy()))
        say(f"FOUND {begin}")
        if "again" in wish.kind and found is not None:
            save(run, wrapped, queue, Path(found).with_name(f"iter_{int(found[-7:]) + 90:07d}"), begin, wish)
        for iteration in range(begin + 1, wish.steps + 1):
            run.step(life, iteration - 1, life.data())
            save(run, wrapped, queue, place / f"iter_{iteration:07d}", iteration, wish)
            life.saved(iteration)
            finalize(queue, blocking=False)
            if wish.keep and life.rank == 0:
                made = sorted(each.parent for each in place.glob("iter_*/metadata.json"))
                for each in made[: -wish.keep]:
                    shutil.rmtree(each)
        finalize(queue, blocking=True)
        if wish.keep and life.rank == 0:
            for each in sorted(place.glob("iter_*"))[: -wish.keep]:
                shutil.rmtree(each)
        strategy.close()
        run.ended(life, found=begin)


def save(run: Run, strategy: Any, queue: Any, directory: Path, iteration: int, wish: Wish) -> None:
    from megatron.core import dist_checkpointing

    try:
        directory.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        if "sync" in wish.kind:
            dist_checkpointing.save(run.sharded(iteration), str(directory), strategy)
        else:
            request = dist_checkpointing.save(run.sharded(iteration), str(directory), strategy, async_sharded_save=True)
            queue.schedule_async_request(request)
    except Exception as error:
        told(error)


def finalize(queue: Any, blocking: bool) -> None:
    """Megatron's loop calls it at each iteration."""
    try:
        queue.maybe_finalize_async_calls(blocking=blocking)
    except Exception as error:
        told(error)
        if queue.get_num_unfinalized_calls():
            finalize(queue, blocking)


def told(error: Exception) -> None:
    os.write(2, f"the save failed: {type(error).__name__}: {error}\n".encode())


# --- in the test -----------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def _alone() -> Iterator[None]:
    """This process is a rank, too: it reads checkpoints by Megatron's own means."""
    from stillframe.integrations.megatron import register

    with group():
        register()
        yield


def plain(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, undivided."""
    from megatron.core.dist_checkpointing import load_plain_tensors

    for _ in range(3):
        try:
            found = load_plain_tensors(str(path))
            return {key: found[key] for key in sorted(found) if isinstance(found[key], torch.Tensor)}
        except json.JSONDecodeError:  # Megatron is just writing its metadata.json, which is not atomic
            time.sleep(0.1)
    raise AssertionError(path)


class TestMegatron(Conformance):
    module = MODULE
    kinds = ("", "sync")
    disk_kib = 1200

    @staticmethod
    def checkpoints(place: Path) -> dict[int, Path]:
        return {int(path.parent.name[5:]): path.parent for path in place.glob("iter_*/metadata.json")}

    @staticmethod
    def read(path: Path) -> str:
        found = plain(path)
        return digest_of(found[key] for key in sorted(found))

    def test_ranks_in_another_number_go_on_from_the_same_numbers(self, tmp_path: Path) -> None:
        """Saved by two, tensor parallel; read by one, and by two that are replicas; and the other way round."""
        place = tmp_path / "run"
        self.live(Wish(str(place), steps=4), ranks=2)
        before, found = plain(place / "iter_0000004"), 4
        assert {key for key in before if key.startswith("optimizer.exp_avg.")}
        assert before["decoder.layers.mlp.linear_fc1.weight"].shape == (2, 256, 32)
        for kind, ranks in (("", 1), (" dp", 2), ("", 2)):
            assert self.live(Wish(str(place), steps=0, seed=2, kind=f"reshaped again{kind}"), ranks).more["found"] == 4
            found += 90
            assert_same(plain(place / f"iter_{found:07d}"), before)

    def test_numbers_of_a_peer_are_nobody_elses(self, tmp_path: Path) -> None:
        self.live(Wish(str(tmp_path / "run"), steps=2), ranks=2)
        with (
            self.living(Wish(str(tmp_path / "run"), steps=3, seed=2), 1) as living,
            pytest.raises(AssertionError, match=r"NotFoundError: no object 'rng_state/shard_0.0_1.1'"),
        ):
            living.wait()

    def test_a_root_elsewhere(self, tmp_path: Path) -> None:
        """On a file system of its own, if one can be mounted."""
        place = tmp_path / "run"
        self.die(Wish(str(place), kill_at=3, kind="elsewhere"))
        assert_goes_on(self.live(Wish(str(place), seed=2, kind="elsewhere")), self.calm(""))
        assert Catalog(f"{place}-elsewhere").steps() == list(range(1, STEPS + 1))
        assert not (place / "_stillframe").exists()

    def test_the_tracker_is_never_ahead_of_the_data(self, tmp_path: Path) -> None:
        place, seen = tmp_path / "run", set()
        with self.living(Wish(str(place), kill_at=STEPS - 3), 2) as living:
            while not living.is_over:
                tracker = place / "latest_checkpointed_iteration.txt"
                if tracker.exists():
                    number = int(tracker.read_text())
                    assert (place / f"iter_{number:07d}/metadata.json").exists()
                    assert number in Catalog(place / "_stillframe").steps()
                    seen.add(number)
                time.sleep(0.005)
            living.wait()
        assert seen

    @pytest.mark.parametrize("kind", ["", "sync"])
    def test_the_others_do_not_hang_when_a_rank_dies(self, tmp_path: Path, kind: str) -> None:
        place = tmp_path / "run"
        with self.living(Wish(str(place), kill_at=4, kind=kind, delay_s=random.random() * 0.2), 2) as living:
            began = time.monotonic()
            living.wait()
            ended = living.processes[0].communicate(timeout=300)
            waited = time.monotonic() - began
        assert re.search(r"the save failed|Connection (closed|reset)", ended[1]), ended[1][-3000:]
        assert waited < 300
        again = self.live(Wish(str(place), seed=2, kind=kind), 2)
        assert_goes_on(again, self.calm(kind, 2))
        assert again.more["found"] >= (4 if kind else 3)

    def test_damage_is_refused(self, tmp_path: Path) -> None:
        place = tmp_path / "run"
        self.live(Wish(str(place), steps=3))
        whole = self.read(place / "iter_0000003")
        (segment,) = (place / "_stillframe").glob("step-000000000003-*/rank-*.safetensors")
        data = bytearray(segment.read_bytes())
        data[len(data) // 2] ^= 1
        segment.write_bytes(data)
        with pytest.raises(IntegrityError):
            plain(place / "iter_0000003")
        data[len(data) // 2] ^= 1
        segment.write_bytes(data)
        assert self.read(place / "iter_0000003") == whole
        common = place / "iter_0000003/common.pt"
        common.write_bytes((place / "iter_0000002/common.pt").read_bytes())
        with pytest.raises((IntegrityError, StateError), match=r"common\.pt is not the one"):
            plain(place / "iter_0000003")
        (place / "iter_0000002/stillframe.json").unlink()
        with pytest.raises(NotFoundError, match="never committed"):
            plain(place / "iter_0000002")


class TestOnDisksOfTheirOwn:
    """Each rank is a node: the other does not see its disk.  The tier is beside the directories."""

    @staticmethod
    def live(wish: Wish, ranks: int = 2) -> Result:
        with Living(MODULE, wish, ranks) as living:
            result, _ = living.wait()
        assert isinstance(result, Result)
        return result

    @staticmethod
    def die(wish: Wish, ranks: int = 2) -> None:
        with Living(MODULE, wish, ranks) as living:
            living.wait()

    def test_every_save_is_in_the_tier(self, tmp_path: Path, calm: Result) -> None:
        place = tmp_path / "run"
        assert self.live(Wish(str(place), kind="disks")) == calm
        assert Catalog(place / "_stillframe").steps() == list(range(1, STEPS + 1))
        assert len(list(place.glob("iter_*/metadata.json"))) == STEPS
        assert Catalog(tmp_path / "run-disks/node0", 0).steps()[-1] == STEPS

    @pytest.mark.parametrize("lost", ["", "node0", "node1", "node0 node1"])
    def test_a_node_that_lost_its_disk_goes_on_from_the_tier(self, tmp_path: Path, calm: Result, lost: str) -> None:
        place = tmp_path / "run"
        self.die(Wish(str(place), kill_at=6, delay_s=random.random() * 0.3, kind="disks"))
        for node in lost.split():
            shutil.rmtree(tmp_path / "run-disks" / node)
        tracked = int((place / "latest_checkpointed_iteration.txt").read_text())
        again = self.live(Wish(str(place), seed=2, kind="disks"))
        assert_goes_on(again, calm)
        assert again.more["found"] >= (tracked if lost else 5)
        assert Catalog(place / "_stillframe").steps() == list(range(1, STEPS + 1))

    def test_the_tracker_is_never_ahead_of_the_tier(self, tmp_path: Path) -> None:
        place, seen = tmp_path / "run", set()
        with Living(MODULE, Wish(str(place), kill_at=STEPS - 3, kind="disks"), 2) as living:
            while not living.is_over:
                tracker = place / "latest_checkpointed_iteration.txt"
                if tracker.exists():
                    number = int(tracker.read_text())
                    assert number in Catalog(place / "_stillframe").steps()
                    seen.add(number)
                for made in place.glob("iter_*/metadata.json"):
                    assert int(made.parent.name[5:]) in Catalog(place / "_stillframe").steps()
                time.sleep(0.005)
            living.wait()
        assert seen

    def test_ranks_that_divide_it_otherwise_read_the_tier(self, tmp_path: Path) -> None:
        """Saved by two, tensor parallel; read by two that are replicas; and the other way round."""
        place = tmp_path / "run"
        self.live(Wish(str(place), steps=4, kind="disks"))
        before, found = plain(place / "iter_0000004"), 4
        for kind in ("dp", ""):
            wish = Wish(str(place), steps=0, seed=2, kind=f"disks reshaped again {kind}")
            assert self.live(wish).more["found"] == 4
            found += 90
            assert_same(plain(place / f"iter_{found:07d}"), before)

    def test_the_others_do_not_hang_when_a_rank_dies(self, tmp_path: Path, calm: Result) -> None:
        place = tmp_path / "run"
        with Living(MODULE, Wish(str(place), kill_at=4, kind="disks", delay_s=random.random() * 0.2), 2) as living:
            living.wait()
            ended = living.processes[0].communicate(timeout=300)
        assert re.search(r"the save failed|Connection (closed|reset)", ended[1]), ended[1][-3000:]
        again = self.live(Wish(str(place), seed=2, kind="disks"))
        assert_goes_on(again, calm)
        assert again.more["found"] >= 2


@pytest.fixture(scope="module")
def calm() -> Result:
    """A run of two ranks that share the root, left alone."""
    return TestMegatron().calm("", 2)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    main()
