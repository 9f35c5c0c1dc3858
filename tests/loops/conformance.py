"""What every framework must do on stillframe.  A driver takes part by a class of its own in its test file::

    class TestMine(Conformance):
        module = "tests.loops.test_mine"      # run as a program, it trains; see tests/loops/driving.py

Dropout, a shuffled loader with two workers, a learning rate that changes, a save at every step.  An engine that starts
its processes itself overrides :meth:`Conformance.living`.
"""

from __future__ import annotations

import dataclasses
import os
import random
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

from stillframe import Catalog
from tests.loops.driving import STEPS, Living, Result, Wish


def assert_goes_on(result: Result, calm: Result) -> None:
    """It ended as the run left alone, and saw the last of that one's samples, in order."""
    for field in ("parameters", "optimizer", "scheduler", "numbers"):
        assert getattr(result, field) == getattr(calm, field), field
    assert 0 < len(result.order) < len(calm.order)
    assert result.order == calm.order[-len(result.order) :]


_calm: dict[tuple[str, str, int], Result] = {}
"""Runs left alone, by class, kind and ranks."""


@pytest.mark.timeout(1800)
class Conformance:
    """The questions; and first what differs between frameworks."""

    module: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]] = ("",)
    """Of a run (:attr:`Wish.kind`): every question is asked of the first, the kill at some moment of the last."""
    kills: ClassVar[tuple[int, int]] = (3, 8)
    """After which saves: within the first epoch, and at its end."""
    ranks: ClassVar[int] = 2
    """On how many ranks it is tried, too; 1: the framework has one only."""
    disk_kib: ClassVar[int] = 2200
    """Room for the first checkpoints of a run, and not for all."""
    kind_on_full_disk: ClassVar[str | None] = None
    """The kind of a run that writes nothing but checkpoints to its place, if the first does."""

    @staticmethod
    def root(place: Path) -> Path:
        return place / "_stillframe"

    @staticmethod
    def checkpoints(place: Path) -> dict[int, Path]:
        """The checkpoints as the framework names them, by step."""
        return {int(path.name.rpartition("-")[2]): path for path in place.glob("checkpoint-*")}

    @staticmethod
    def read(path: Path) -> str:
        """A digest of the parameters in a checkpoint, by the framework's own means.  Raises if it is not whole."""
        raise NotImplementedError

    # --- lives -------------------------------------------------------------------------------

    def living(self, wish: Wish, ranks: int = 1) -> Any:
        """A life under way: a context with ``is_over`` and ``wait()``, as :class:`Living`."""
        return Living(self.module, wish, ranks)

    def live(self, wish: Wish, ranks: int = 1) -> Result:
        """A life that is left alone."""
        with self.living(wish, ranks) as living:
            result, _ = living.wait()
        assert isinstance(result, Result)
        return result

    def die(self, wish: Wish, ranks: int = 1) -> None:
        """A life that ends with SIGKILL."""
        with self.living(wish, ranks) as living:
            living.wait()

    # --- the questions -----------------------------------------------------------------------

    def calm(self, kind: str, ranks: int = 1) -> Result:
        """A run left alone; made once."""
        key = type(self).__qualname__, kind, ranks
        if key not in _calm:
            with tempfile.TemporaryDirectory(prefix="sf-calm-") as place:
                disk = Path(place, "disk")  # what a driver puts beside it goes with it, too
                disk.mkdir()
                _calm[key] = self.live(Wish(str(disk / "run"), kind=kind), ranks)
        return _calm[key]

    @pytest.mark.parametrize("number", range(2))
    def test_a_killed_run_goes_on_bit_for_bit(self, tmp_path: Path, number: int) -> None:
        """Killed right after a save was requested, and at some moment after one."""
        kind, delay_s = self.kinds[-number], random.random() * 0.3 * number
        self.die(Wish(str(tmp_path / "run"), kill_at=self.kills[number], delay_s=delay_s, kind=kind))
        assert_goes_on(self.live(Wish(str(tmp_path / "run"), seed=2, kind=kind)), self.calm(kind))

    def test_a_run_that_is_killed_again_and_again_ends_alike(self, tmp_path: Path) -> None:
        for seed, kill_at in enumerate((1, 6, 11), 1):
            self.die(Wish(str(tmp_path / "run"), kill_at=kill_at, seed=seed, kind=self.kinds[0]))
        assert_goes_on(self.live(Wish(str(tmp_path / "run"), seed=9, kind=self.kinds[0])), self.calm(self.kinds[0]))

    def test_on_several_ranks(self, tmp_path: Path) -> None:
        if self.ranks == 1:
            pytest.skip("the framework, as it is driven here, has one rank")
        kind = self.kinds[0]
        self.die(Wish(str(tmp_path / "run"), kill_at=5, kind=kind), self.ranks)
        again = self.live(Wish(str(tmp_path / "run"), seed=2, kind=kind), self.ranks)
        assert_goes_on(again, self.calm(kind, self.ranks))

    def test_as_many_stay_as_were_asked_for(self, tmp_path: Path) -> None:
        self.live(Wish(str(tmp_path / "run"), keep=2, kind=self.kinds[0]))
        assert sorted(self.checkpoints(tmp_path / "run")) == [STEPS - 1, STEPS]
        assert Catalog(self.root(tmp_path / "run")).steps() == [STEPS - 1, STEPS]

    def test_whoever_reads_beside_it_never_sees_a_part(self, tmp_path: Path) -> None:
        """Neither while it runs, nor after its death; and what was read stays what it is."""
        place, seen = tmp_path / "run", dict[int, str]()
        with self.living(Wish(str(place), kill_at=STEPS - 2, kind=self.kinds[0])) as living:
            while not living.is_over:
                for step, path in self.checkpoints(place).items():
                    if step not in seen:
                        seen[step] = self.read(path)
                time.sleep(0.01)
            living.wait()
        self.live(Wish(str(place), seed=2, kind=self.kinds[0]))
        found = {step: self.read(path) for step, path in self.checkpoints(place).items()}
        assert sorted(found) == list(range(1, STEPS + 1))
        assert {step: found[step] for step in seen} == seen
        assert len(set(found.values())) == STEPS

    def test_a_full_disk_costs_saves_and_neither_training_nor_older_ones(self, tmp_path: Path) -> None:
        kind, disk = self.kind_on_full_disk or self.kinds[0], tmp_path / "disk"
        disk.mkdir()
        options = ["-t", "tmpfs", "-o", f"size={self.disk_kib}k", "none", str(disk)]
        if os.geteuid() != 0 or subprocess.run(["mount", *options], capture_output=True).returncode != 0:
            pytest.skip("mounting is not permitted here")
        try:
            with self.living(Wish(str(disk / "run"), kind=kind)) as living:
                result, said = living.wait()
            assert result is not None
            assert dataclasses.replace(result, more={}) == dataclasses.replace(self.calm(kind), more={})
            assert "failed" in said, said[-2000:]
            steps = Catalog(self.root(disk / "run")).steps()
            assert 0 < len(steps) < STEPS
            for step in steps:
                self.read(self.checkpoints(disk / "run")[step])
        finally:
            subprocess.run(["umount", "--lazy", str(disk)], check=True)


class OnOtherRanks:
    """For a driver that shards: its runs go on on another number of ranks, and without shards."""

    module: ClassVar[str]
    turns: ClassVar[tuple[tuple[int, str], ...]]
    """The ranks of each life, and its kind."""

    def test_other_numbers_of_ranks_go_on_with_the_same_state(self, tmp_path: Path) -> None:
        last: Result | None = None
        for number, (ranks, kind) in enumerate(self.turns):
            wish = Wish(str(tmp_path / "run"), 5 + 2 * number, seed=7 + number, kind=kind)
            with Living(self.module, wish, ranks) as living:
                result, _ = living.wait()
            assert result is not None
            if last is not None:
                assert result.more["begun"] == last.more["ended"]
                assert len(result.order) == 2
            last = result
