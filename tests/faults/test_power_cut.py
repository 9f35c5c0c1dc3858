"""A power cut under a real trainer and its keeper: the short form of :mod:`tests.torture.test_power_cut`."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from stillframe.format.names import MANIFEST
from tests.store.recording import Event
from tests.torture.power_cut.parse import Note, Parser
from tests.torture.power_cut.record import BRIEF, record, why_not
from tests.torture.power_cut.replay import replay

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Parser:
    place = tmp_path_factory.mktemp("power-cut")
    parser = Parser(place / "top")
    for trace in record(place, BRIEF):
        parser.read(trace)
    return parser


def test_what_the_trace_tells_is_what_is_there(recorded: Parser) -> None:
    recorded.check()


def test_whatever_a_power_cut_leaves_is_restored_from(recorded: Parser) -> None:
    report = replay(recorded.events, recorded.notes, limit=4, every=3, runs=1)
    sys.stdout.write(f"{report}\n")
    assert not report.faults, report.faults[0]
    assert report.distinct >= 200


def without(events: list[Event], is_dropped: Callable[[Event], bool]) -> list[Event]:
    """The same, but these have done nothing; the others' numbers stay."""
    return [("nothing", 0, "", 0, b"") if is_dropped(event) else event for event in events]


@pytest.mark.parametrize("kind", ["directories", "directories of steps", "files"])
def test_without_what_makes_it_durable_something_is_lost(recorded: Parser, kind: str) -> None:
    """The replay can fail."""
    steps = {event[3] for event in recorded.events if event[0] == "mkdir" and event[2].startswith("step-")}
    directories = {event[3] for event in recorded.events if event[0] == "mkdir"} | {0}
    kinds: dict[str, Callable[[Event], bool]] = {
        "directories": lambda event: event[0] == "sync" and event[1] in directories,
        "files": lambda event: event[0] == "sync" and event[1] not in directories,
        "directories of steps": lambda event: event[0] == "sync" and event[1] in steps,
    }
    report = replay(without(recorded.events, kinds[kind]), recorded.notes, limit=2, most_faults=1)
    sys.stdout.write(f"without {kind}: {report}\n")
    assert report.faults


def test_a_commit_that_is_told_before_its_manifest_is_durable_is_lost(recorded: Parser) -> None:
    """The replay knows the moment at which something was told: here it is when the manifest has got its name."""
    published = [time for time, event in enumerate(recorded.events, 1) if event[0] == "name" and event[2] == MANIFEST]
    early = [
        Note(max(time for time in published if time <= note.time), *note[1:]) if note.what == "committed" else note
        for note in recorded.notes
    ]
    report = replay(recorded.events, early, limit=4, most_faults=1)
    assert report.verdicts["lost"] > 0, report
