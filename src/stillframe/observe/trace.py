"""A run as a Chrome trace, for Perfetto and chrome://tracing: one process for each rank, one row for each activity."""

from __future__ import annotations

from collections.abc import Sequence

from stillframe.format.events import Save
from stillframe.observe.history import RankHistory

_TRAINING, _STAGING, _FLUSHING, _COMMITTING = 1, 100, 200, 300


def trace(found: Sequence[RankHistory]) -> dict[str, object]:
    """The trace as a document for JSON.  Times are in microseconds since the first event."""
    starts = [each.span_s[0] for each in found if each.span_s]
    origin_s = min(starts, default=0.0)
    made: list[dict[str, object]] = []
    for number, history in enumerate(found):
        made += _rank(history, number, origin_s)
    return {"traceEvents": made, "displayTimeUnit": "ms", "otherData": {"origin_unix_s": origin_s}}


def _rank(history: RankHistory, pid: int, origin_s: float) -> list[dict[str, object]]:
    where = f" on {history.started.host}" if history.started else ""
    made = [_name("process_name", pid, 0, f"rank {history.rank}{where} ({history.run})")]
    made.append(_name("thread_name", pid, _TRAINING, "training"))

    def add(tid: int, name: str, begin_s: float | None, end_s: float | None, **about: object) -> None:
        if begin_s is not None and end_s is not None and end_s >= begin_s:
            made.append(
                {
                    "name": name, "ph": "X", "pid": pid, "tid": tid, "ts": (begin_s - origin_s) * 1e6,
                    "dur": (end_s - begin_s) * 1e6, "args": about,
                }
            )  # fmt: skip

    for begin_s, end_s in history.iterations():
        add(_TRAINING, "iteration", begin_s, end_s)
    for update in history.updates:
        if update.waited_s:
            add(_TRAINING, "fence", update.at_s, update.at_s + update.waited_s)
    for restore in history.restores:
        add(_TRAINING, "restore", restore.at_s - restore.seconds, restore.at_s, step=restore.step, bytes=restore.bytes)
    for save in history.saves:
        add(_TRAINING, "save()", save.requested_s, save.returned_s, step=save.step)
    rows = (
        ("stage", _STAGING, [(save.stage_begin_s, save.staged_s, save) for save in history.saves]),
        ("flush", _FLUSHING, [(save.flush_begin_s, save.sealed_s, save) for save in history.saves]),
        ("commit", _COMMITTING, [(save.sealed_s, save.committed_s, save) for save in history.saves]),
    )
    for name, first, spans in rows:
        for lane, saves in enumerate(_lanes(spans)):
            made.append(_name("thread_name", pid, first + lane, name))
            for begin_s, end_s, save in saves:
                add(first + lane, f"{name} {save.step}", begin_s, end_s, bytes=save.bytes, outcome=save.outcome)
    return made


def _lanes(spans: Sequence[tuple[float | None, float | None, Save]]) -> list[list[tuple[float, float, Save]]]:
    """Distribute spans over rows so that none overlap."""
    lanes: list[list[tuple[float, float, Save]]] = []
    known = [(begin, end, save) for begin, end, save in spans if begin is not None and end is not None]
    for begin, end, save in sorted(known, key=lambda span: span[:2]):
        lane = next((each for each in lanes if each[-1][1] <= begin), None)
        if lane is None:
            lane = []
            lanes.append(lane)
        lane.append((begin, end, save))
    return lanes


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, object]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
