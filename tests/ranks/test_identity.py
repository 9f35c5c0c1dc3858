"""Ranks that save the same step differently, fail, retry and go back: no save mixes with another."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stillframe import Catalog
from stillframe.model import SaveId
from tests.ranks.launch import run_ranks

Said = dict[tuple[int, str], str]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("identity")


@pytest.fixture(scope="module")
def said(root: Path) -> Said:
    output = run_ranks(2, "identity_worker.py", root)
    found = re.findall(r"^\[(\d+) ([a-z ]+)\] (.*)$", output, re.MULTILINE)
    assert found, output
    return {(int(rank), about): line for rank, about, line in found}


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_made_different_numbers_of_updates_commit_nothing(said: Said, rank: int, root: Path) -> None:
    assert said[rank, "first"] == "ok 1"
    assert "StateError" in said[rank, "other updates"]
    assert "rank 0: 1; rank 1: 2" in said[rank, "other updates"]
    assert said[rank, "after that"] == "ok 1"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_save_that_one_rank_refused_is_saved_again_by_both(said: Said, rank: int) -> None:
    assert "UnsupportedStateError" in said[rank, "refused on one"]
    assert float(re.findall(r"([\d.]+)s", said[rank, "refused on one"])[0]) < 3, "they learn of it at once"
    assert said[rank, "again"] == "ok 2"
    assert said[rank, "next"] == "ok 1"


@pytest.mark.parametrize("how", ["disk", "memory", "interrupt", "too large"])
def test_whatever_save_raises_on_one_rank_the_other_learns_of_it_at_once(said: Said, how: str) -> None:
    assert said[0, "loader"] == said[1, "loader"] == "ok 1"
    errors = {"disk": "OSError", "memory": "OutOfMemoryError", "interrupt": "KeyboardInterrupt"}
    assert said[1, how].startswith(errors.get(how, "UnsupportedStateError")), said[1, how]
    assert "rank 1 could not save it" in said[0, how]
    took_s = [float(re.findall(r"([\d.]+)s", said[rank, how])[0]) for rank in (0, 1)]
    assert took_s[0] - took_s[1] < 3, "a second, where cores are free; the deadline is another 4"
    assert said[0, "after all"] == said[1, "after all"] == "ok 1"


def test_ranks_that_count_attempts_differently_cannot_tear(said: Said) -> None:
    assert "rank 1 could not save it" in said[0, "other attempts"]
    assert "DeadlineError" in said[1, "other attempts"], "it waits for an attempt that rank 0 does not make"
    assert [said[rank, "and on"] for rank in (0, 1)] == ["ok 1", "ok 1"]


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_go_back_together(said: Said, rank: int, root: Path) -> None:
    assert said[rank, "rewind"].startswith("ok")
    assert said[rank, "restore"] == "ok 3"
    assert said[rank, "passed again"] == "ok 1"
    catalog = Catalog(root)
    assert catalog.steps() == [1, 3, 4]
    assert catalog.find(4).epoch > catalog.find(3).epoch
    committed = [save for save in catalog.look().saves if catalog.is_committed(save)]
    for save in committed:
        assert not catalog.lacks(catalog.manifest(save)), save
    assert SaveId(4, 1, 2) in committed
    assert SaveId(5, 1, 1) in committed
    assert not {save.step for save in committed} & {2, 6, 9, 10, 11, 12}


def test_a_keeper_that_dies_after_its_manifest_costs_no_rank_its_files(tmp_path: Path) -> None:
    """The next keeper of rank 0 cannot know whether the manifest was published: it must not say that it was not."""
    output = run_ranks(2, "replaced_worker.py", tmp_path)
    published = re.findall(r"published (\d): (.*)", output)
    assert published, output
    assert {what for _, what in published} == {"whole"}, output
