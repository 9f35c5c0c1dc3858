"""File names: what is made is recognised, and nothing else is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillframe.format import names
from stillframe.format.names import RankFile
from stillframe.model import MAX_STEP

attempts = st.from_regex(r"[0-9a-f]{8}", fullmatch=True)
ranks = st.integers(0, 99_999)


def is_ours(name: str) -> bool:
    return (names.parse_rank_file(name) or names.parse_manifest(name)) is not None


@given(st.integers(0, MAX_STEP))
def test_a_step_directory_is_recognised(step: int) -> None:
    assert names.parse_step_dir(names.step_dir(step)) == step


@given(st.lists(st.integers(0, MAX_STEP)))
def test_step_directories_sort_as_their_steps(steps: list[int]) -> None:
    assert sorted(map(names.step_dir, steps)) == list(map(names.step_dir, sorted(steps)))


UNFINISHED = ".0123abcd.partial"


@given(ranks, attempts)
def test_segments_and_seals_are_recognised(rank: int, attempt: str) -> None:
    assert names.parse_rank_file(names.segment(rank, attempt)) == RankFile(rank, attempt, "safetensors", False)
    assert names.parse_rank_file(names.seal(rank, attempt)) == RankFile(rank, attempt, "seal.json", False)


@given(ranks, attempts)
def test_partial_files_are_recognised_as_partial(rank: int, attempt: str) -> None:
    for name, kind in ((names.segment(rank, attempt), "safetensors"), (names.seal(rank, attempt), "seal.json")):
        assert names.parse_rank_file(name + UNFINISHED) == RankFile(rank, attempt, kind, True)


@given(ranks, attempts)
def test_every_file_stillframe_makes_in_a_step_is_ours(rank: int, attempt: str) -> None:
    made = [names.segment(rank, attempt), names.seal(rank, attempt)]
    made += [name + UNFINISHED for name in made]
    made += [names.MANIFEST, names.damaged_manifest(), names.MANIFEST + UNFINISHED, names.failure(rank, attempt)]
    made += [names.manifest(rank), names.damaged_manifest(rank), names.manifest(rank) + UNFINISHED]
    assert all(map(is_ours, made))


@pytest.mark.parametrize(
    "name",
    [
        "step-1", "step-0000000000001", "step-00000000000a", "step-000000000001\n", "step-000000000001/",
        "Step-000000000001", " step-000000000001", "step-00000000000١", "", ".", "..",
    ],
)  # fmt: skip
def test_a_directory_with_another_name_is_no_step(name: str) -> None:
    assert names.parse_step_dir(name) is None


@pytest.mark.parametrize(
    "name",
    [
        "rank-0-0123abcd.safetensors", "rank-00000-0123abc.safetensors", "rank-00000-0123ABCD.safetensors",
        "rank-00000-0123abcd.pt", "rank-00000-0123abcd.seal.json.partial", "rank-00000-0123abcd.safetensors\n",
        "../rank-00000-0123abcd.safetensors", "/etc/passwd", "rank-000001-0123abcd.safetensors", "rank-00000.lock",
        "manifest.json.0123abcd", "manifest.json.partial", "manifest.json~", "MANIFEST.JSON", "README.md", "",
    ],
)  # fmt: skip
def test_a_strangers_file_is_not_ours(name: str) -> None:
    assert names.parse_rank_file(name) is None
    assert not is_ours(name)


@given(st.text())
def test_a_name_that_is_accepted_never_leaves_its_directory(name: str) -> None:
    if is_ours(name) or names.parse_rank_file(name) or names.parse_step_dir(name) is not None:
        assert "/" not in name
        assert name not in (".", "..")
