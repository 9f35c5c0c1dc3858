"""File names: what is made is recognised, and nothing else is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillframe.format import names
from stillframe.format.names import MAX_ATTEMPT, MAX_EPOCH, RankFile
from stillframe.model import MAX_STEP, SaveId

saves = st.builds(SaveId, st.integers(0, MAX_STEP), st.integers(1, MAX_EPOCH), st.integers(1, MAX_ATTEMPT))
ranks = st.integers(0, 99_999)
UNFINISHED = ".0123abcd.partial"


@given(saves)
def test_the_directory_of_a_save_is_recognised(save: SaveId) -> None:
    assert names.is_id(save)
    assert names.parse_step_dir(names.step_dir(save)) == save


@given(st.lists(st.builds(SaveId, st.integers(0, MAX_STEP), st.integers(1, 9999), st.integers(1, 9))))
def test_directories_sort_as_their_saves(found: list[SaveId]) -> None:
    assert sorted(map(names.step_dir, found)) == list(map(names.step_dir, sorted(found)))


@given(saves, saves)
def test_no_two_saves_share_a_directory(one: SaveId, other: SaveId) -> None:
    assert (names.step_dir(one) == names.step_dir(other)) == (one == other)


@given(ranks)
def test_the_files_of_a_rank_are_recognised_finished_or_not(rank: int) -> None:
    made = {
        names.segment(rank): RankFile(rank, "segment", False),
        names.seal(rank): RankFile(rank, "seal", False),
        names.failure(rank): RankFile(rank, "failure", False),
        names.aside(rank): RankFile(rank, "aside", False),
    }
    for name, file in made.items():
        assert names.parse_rank_file(name) == file
        assert names.parse_rank_file(name + UNFINISHED) == RankFile(rank, file.kind, True)
        assert names.is_ours(name)
        assert names.is_ours(name + UNFINISHED)


@pytest.mark.parametrize("name", [names.MANIFEST, names.PIN, names.LABEL, names.aside()])
def test_the_files_of_a_save_are_ours_and_no_ranks(name: str) -> None:
    assert names.is_ours(name)
    assert names.is_ours(name + UNFINISHED)
    assert names.parse_rank_file(name) is None


@given(st.integers(1, MAX_EPOCH))
def test_an_epoch_is_recognised_as_a_directory_or_without_its_slash(epoch: int) -> None:
    name = names.epoch_dir(epoch).removeprefix("run/")
    assert names.parse_epoch(name) == names.parse_epoch(name + "/") == epoch
    assert {names.claim(epoch), names.parent(epoch), names.outcomes(epoch)} == {
        f"run/{name}/claim.json", f"run/{name}/parent.json", f"run/{name}/outcomes.json",
    }  # fmt: skip


@given(ranks)
def test_locks_and_spares_are_recognised(rank: int) -> None:
    assert names.parse_lock(names.lock(rank).removeprefix("run/")) == rank
    assert names.parse_spare(names.spare(rank)) == (rank, False)
    assert names.parse_spare(names.spare(rank) + UNFINISHED) == (rank, True)
    assert names.parse_lock(names.spare(rank)) is None
    assert names.parse_spare(names.lock(rank).removeprefix("run/")) is None


def test_requests_and_answers_are_recognised() -> None:
    assert names.parse_asked(names.request("0123abcd").removeprefix("run/")) == ("request", "0123abcd")
    assert names.parse_asked(names.answer("0123abcd").removeprefix("run/")) == ("answer", "0123abcd")
    for name in ("request-0123ABCD.json", "request-0123abc.json", "answer.json", "request-0123abcd.json.partial", ""):
        assert names.parse_asked(name) is None


@given(saves)
def test_the_label_of_a_save_that_is_not_committed_is_recognised(save: SaveId) -> None:
    assert names.parse_label_partial(names.label_partial(save)) == save
    assert names.is_unfinished_latest(names.LATEST + UNFINISHED)
    assert not names.is_unfinished_latest(names.LATEST)


@pytest.mark.parametrize(
    "name",
    [
        "step-000000000001", "step-1-e1-1", "step-000000000001-e001-1", "step-000000000001-e0000-1",
        "step-000000000001-e0001-0", "step-000000000001-e0001-01", "step-000000000001-e00001-1",
        "step-000000000001-e0001", "step-000000000001-e0001-10000", "step-0000000000001-e0001-1",
        "step-000000000001-e10000000-1", "step-000000000001-e0001-1\n", "step-000000000001-e0001-1/",
        "Step-000000000001-e0001-1", " step-000000000001-e0001-1", "step-00000000000١-e0001-1", "", ".", "..",
    ],
)  # fmt: skip
def test_a_directory_with_another_name_is_no_save(name: str) -> None:
    assert names.parse_step_dir(name) is None


@pytest.mark.parametrize("name", ["e001", "e00001", "e0000", "e10000000", "E0001", "e0001.partial", "events", "", "e"])
def test_a_name_in_run_that_is_no_epoch_is_none(name: str) -> None:
    assert names.parse_epoch(name) is None


@pytest.mark.parametrize(
    "name",
    [
        "rank-0.safetensors", "rank-000000.safetensors", "rank-00000.pt", "rank-00000.safetensors.bak",
        "rank-00000.safetensors\n", "../rank-00000.safetensors", "/etc/passwd", "seal-00000", "seal-0.json",
        "seal-00000.json.partial", "seal-00000.json.0123ABCD.partial", "seal.json", "rank-00000.lock",
        "aside-0.json", "manifest-00000.json", "manifest.json.0123abcd", "manifest.json.partial", "manifest.json~",
        "MANIFEST.JSON", "README.md", "",
    ],
)  # fmt: skip
def test_a_strangers_file_is_not_ours(name: str) -> None:
    assert names.parse_rank_file(name) is None
    assert not names.is_ours(name)


@pytest.mark.parametrize(
    "save",
    [
        SaveId(-1), SaveId(MAX_STEP + 1), SaveId(1, 0), SaveId(1, MAX_EPOCH + 1), SaveId(1, 1, 0),
        SaveId(1, 1, MAX_ATTEMPT + 1),
    ],
    ids=str,
)  # fmt: skip
def test_a_save_that_no_directory_can_be_named_for_is_none(save: SaveId) -> None:
    assert not names.is_id(save)
    assert names.parse_step_dir(names.step_dir(save)) is None


@given(st.text())
def test_a_name_that_is_accepted_never_leaves_its_directory(name: str) -> None:
    accepted = (
        names.is_ours(name)
        or names.parse_step_dir(name) is not None
        or names.parse_lock(name) is not None
        or names.parse_spare(name) is not None
        or names.parse_label_partial(name) is not None
    )
    if accepted:
        assert "/" not in name
        assert name not in (".", "..")
