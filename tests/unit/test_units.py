"""Sizes as people write them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillframe.errors import ConfigError
from stillframe.units import format_bytes, format_count, format_seconds, parse_bytes, round_up


@pytest.mark.parametrize(
    ("size", "count"),
    [
        (0, 0),
        (1, 1),
        (1 << 50, 1 << 50),
        ("0", 0),
        ("17", 17),
        ("17b", 17),
        ("17 B", 17),
        ("1k", 1000),
        ("1kB", 1000),
        ("1KiB", 1024),
        ("3MB", 3_000_000),
        ("3 MiB", 3 << 20),
        ("2GiB", 2 << 30),
        ("2g", 2_000_000_000),
        ("1TiB", 1 << 40),
        ("1tb", 10**12),
        ("1.5GB", 1_500_000_000),
        ("0.5KiB", 512),
        ("  2   gib  ", 2 << 30),
    ],
)
def test_a_size_is_read_as_written(size: int | str, count: int) -> None:
    assert parse_bytes(size, "arena") == count


@pytest.mark.parametrize(
    "size",
    [
        "", " ", "GiB", "2 GiB extra", "two", "-1", "+1", "1e9", "1,5GB", "1.GB", ".5GB", "2PiB", "2 G i B", "٣", "nan",
        -1, -(1 << 40), True, False, 1.5, None, b"2GiB", [1],
    ],
)  # fmt: skip
def test_what_is_no_size_is_refused_by_name(size: Any) -> None:
    with pytest.raises(ConfigError, match=r"^arena="):
        parse_bytes(size, "arena")


@given(st.one_of(st.text(), st.from_regex(r"\s*\d+(\.\d+)?\s*[a-zA-Z]{0,3}\s*", fullmatch=True)))
def test_any_text_is_a_count_of_bytes_or_refused(text: str) -> None:
    try:
        count = parse_bytes(text, "arena")
    except ConfigError:
        return
    assert type(count) is int
    assert count >= 0


@pytest.mark.parametrize("size", ["9" * 5000, "9" * 400 + ".0GiB"], ids=["integer", "fraction"])
def test_an_absurdly_long_number_is_refused_like_any_other_nonsense(size: str) -> None:
    with pytest.raises(ConfigError):
        parse_bytes(size, "arena")


@given(st.integers(0, 1 << 70))
def test_a_number_of_bytes_stands_for_itself_also_as_text(count: int) -> None:
    assert parse_bytes(count, "x") == parse_bytes(str(count), "x") == parse_bytes(f"{count}B", "x") == count


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1 << 20, "1.0 MiB"),
        (5 << 30, "5.0 GiB"),
        (1 << 41, "2.0 TiB"),
    ],
)
def test_a_size_is_shown_in_the_largest_fitting_unit(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1.0, "0 s"),
        (0.0, "0 s"),
        (0.00012, "0.12 ms"),
        (0.0042, "4.2 ms"),
        (0.35, "350 ms"),
        (0.9996, "1.0 s"),
        (99.9, "99.9 s"),
        (100.0, "1.7 min"),
        (6000.0, "1.7 h"),
        (864000.0, "10.0 days"),
    ],
)
def test_a_duration_is_shown_in_a_fitting_unit(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_a_count_has_the_plural_of_its_noun() -> None:
    assert [format_count(count, "rank") for count in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]


@given(st.integers(0, 1 << 60), st.integers(1, 1 << 30))
def test_rounding_up_gives_the_next_multiple(count: int, multiple: int) -> None:
    rounded = round_up(count, multiple)
    assert rounded % multiple == 0
    assert count <= rounded < count + multiple
