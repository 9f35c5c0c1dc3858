"""One page about a run: does checkpointing cost anything, where, and did it work?  Needs no network and no script."""

from __future__ import annotations

import html
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from stillframe.checkpoint.survey import Survey
from stillframe.format.events import Save
from stillframe.observe.charts import Bar, Slice, bars, timeline
from stillframe.observe.history import RankHistory, beside_saves, newest, rate, save_blocked_s
from stillframe.units import format_bytes

_SHOWN_SAVES = 6
_CHEAP, _DEAR = 0.01, 0.05


def report(found: Survey, every: Sequence[RankHistory], now_s: float) -> str:
    """The page.  ``every`` may be empty: then it tells what lies in the root."""
    last = newest(list(every)) if every else []
    sections = [
        f"<h1>{_safe(str(found.root))}</h1>",
        *_verdict(last),
        _tiles(found, last, now_s),
        *_timeline(last),
        *_charts(last),
        *_ranks(last),
        *_attempts(every),
        *_failures(found, every),
        _checkpoints(found, last),
    ]
    made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now_s))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>stillframe: {_safe(found.root.name)}</title><style>{_style()}</style></head><body>"
        f"{''.join(sections)}<footer>stillframe report, {made}</footer></body></html>\n"
    )


def _slowest(last: Sequence[RankHistory]) -> RankHistory | None:
    """The rank that training waited for longest: it is what the others wait for, too."""
    known = [each for each in last if each.cost is not None and each.saves]
    return max(known, key=lambda each: each.cost or 0.0, default=None)


def _verdict(last: Sequence[RankHistory]) -> list[str]:
    slowest = _slowest(last)
    failed = [save for each in last for save in each.failed]
    if slowest is None or slowest.cost is None:
        text = "Nothing is known of how long training waited"
        lead = "There are no events of a run with two saves here."
        return [f'<p class="verdict">{text}</p>', f'<p class="lead">{lead}</p>']
    cost = slowest.cost
    kind = "worse" if failed or cost > _DEAR else "warn" if cost > _CHEAP else "good"
    steps = {save.step for each in last for save in each.committed}
    share = "less than 0.1 %" if cost < 0.001 else f"{100 * cost:.2g} %"
    span = slowest.span_s
    assert span is not None
    of = f"{len(steps)} checkpoint{'s' if len(steps) != 1 else ''} in {_duration(span[1] - span[0])}"
    rank = f" (rank {slowest.rank}, the slowest of {len(last)})" if len(last) > 1 else ""
    lead = f"{of}; training waited {_duration(slowest.blocked_s)} for them in all{rank}. "
    lead += f"{len(failed)} saves failed." if failed else "None failed."
    if any(each.end is not None and not each.end.is_closed for each in last):
        lead += " The run ended without closing its checkpointer."
    beside = beside_saves(slowest)
    if beside is not None:
        lead += f" An iteration beside a save took {beside:.2f} × one without."
    lead += " Copying and writing also take cores and memory bandwidth, which this does not count."
    return [f'<p class="verdict {kind}">Training waited {share} of the time</p>', f'<p class="lead">{_safe(lead)}</p>']


def _tiles(found: Survey, last: Sequence[RankHistory], now_s: float) -> str:
    slowest = _slowest(last)
    tiles: list[tuple[str, str]] = []
    if slowest is not None:
        blocked = list(slowest.blocked_by().values())
        tiles.append((_duration(statistics.median(blocked)), f"blocked per save (at most {_duration(max(blocked))})"))
        rates = [each for save in slowest.committed if (each := rate(save)) is not None]
        if rates:
            tiles.append((f"{format_bytes(statistics.median(rates))}/s", "write speed of a rank"))
        latencies = [save.committed_s - save.requested_s for save in slowest.committed if save.committed_s is not None]
        if latencies:
            tiles.append((_duration(statistics.median(latencies)), "from save() to committed"))
    newest_step = next((each for each in reversed(found.steps) if each.state == "committed"), None)
    if newest_step is not None and newest_step.manifest is not None:
        tiles.append((format_bytes(newest_step.bytes), "size of a checkpoint"))
        age = now_s - newest_step.manifest.created_unix_s
        tiles.append((f"step {newest_step.step}", f"the newest, committed {_duration(max(age, 0))} before this page"))
    made = "".join(f'<div class="tile"><b>{_safe(big)}</b><span>{_safe(small)}</span></div>' for big, small in tiles)
    return f'<div class="tiles">{made}</div>'


def _timeline(last: Sequence[RankHistory]) -> list[str]:
    shown = _slowest(last)
    if shown is None or len(shown.updates) < 2:
        return []
    saves = sorted(shown.saves, key=lambda save: save.requested_s)[-_SHOWN_SAVES:]
    begin_s = min([save.requested_s for save in saves] or [shown.updates[0].at_s])
    ends = [save.committed_s or save.requested_s for save in saves] + [shown.updates[-1].at_s]
    end_s = min(max(ends), begin_s + 4 * ((saves[-1].committed_s or saves[-1].requested_s) - begin_s + 1e-3))
    before = max((update.at_s for update in shown.updates if update.at_s < begin_s), default=begin_s)
    begin_s = max(before, begin_s - 0.5 * (end_s - begin_s))
    slices = [*_iterations(shown), *(piece for save in saves for piece in _slices(save))]
    key = "".join(
        f'<i style="background:var(--{colour})"></i>{text}'
        for colour, text in (
            ("iter", "iteration"), ("bad", "training waits"), ("stage", "copied to host memory"),
            ("flush", "written"), ("wait", "sealed; waits for other ranks and the commit"),
        )
    )  # fmt: skip
    rank = f" of rank {shown.rank}" if len(last) > 1 else ""
    rows = ["training", "staging", "flushing", "commit"]
    return [
        f"<h2>The last {len(saves)} saves{rank}, under the iterations they ran beside</h2>",
        f'<div class="scroll">{timeline(rows, slices, begin_s, end_s)}</div><p class="key">{key}</p>',
    ]


def _iterations(shown: RankHistory) -> list[Slice]:
    made = []
    for number, (begin_s, end_s) in enumerate(shown.iterations()):
        title = f"iteration: {_duration(end_s - begin_s)}"
        made.append(Slice(0, begin_s, end_s, "iter2" if number % 2 else "iter", title))
    made += [
        Slice(0, update.at_s, update.at_s + update.waited_s, "blocked", f"fence: {_duration(update.waited_s)}")
        for update in shown.updates
        if update.waited_s > 0
    ]
    made += [
        Slice(
            0,
            save.requested_s,
            save.returned_s or save.requested_s,
            "blocked",
            f"save(): {_duration(save_blocked_s(save))}",
        )
        for save in shown.saves
    ]
    return made


def _slices(save: Save) -> list[Slice]:
    rows = (
        (1, save.stage_begin_s, save.staged_s, "stage", "staged"),
        (2, save.flush_begin_s, save.sealed_s, "flush", "written and sealed"),
        (3, save.sealed_s, save.committed_s, "wait", "committed"),
    )
    return [
        Slice(
            row,
            begin_s,
            end_s,
            kind,
            f"step {save.step} {what}: {_duration(end_s - begin_s)}",
            f"step {save.step}" if row == 3 else "",
        )
        for row, begin_s, end_s, kind, what in rows
        if begin_s is not None and end_s is not None
    ]


def _charts(last: Sequence[RankHistory]) -> list[str]:
    shown = _slowest(last)
    if shown is None:
        return []
    failed = {save.step for save in shown.failed}
    blocked = [Bar(str(step), seconds, step in failed) for step, seconds in sorted(shown.blocked_by().items())]
    rates = [Bar(str(save.step), each) for save in shown.committed if (each := rate(save)) is not None]
    sizes: dict[int, int] = {}
    for history in last:
        for save in history.committed:
            sizes[save.step] = sizes.get(save.step, 0) + save.bytes
    of = [Bar(str(step), float(size)) for step, size in sorted(sizes.items())]
    drawn = [
        bars("Training waited, by save", blocked, _duration, note="red: failed" if failed else ""),
        bars("Made durable, bytes a second", rates, lambda value: f"{format_bytes(value)}/s", base=1024),
        bars("Size, all ranks", of, format_bytes, base=1024),
    ]
    return [f'<h2>Save by save</h2><div class="charts">{"".join(drawn)}</div>']


def _ranks(last: Sequence[RankHistory]) -> list[str]:
    if len(last) < 2:
        return []
    rows = []
    for each in sorted(last, key=lambda each: -each.blocked_s)[:64]:
        sealed = [save.sealed_s - save.requested_s for save in each.committed if save.sealed_s is not None]
        staged = [save.staged_s - save.requested_s for save in each.committed if save.staged_s is not None]
        cells = [str(each.rank), each.run.host if each.run else "", str(len(each.committed)), str(len(each.failed))]
        cells += [_duration(each.blocked_s)]
        cells += [_duration(statistics.median(times)) if times else "" for times in (staged, sealed)]
        rows.append(cells)
    head = ["rank", "host", "committed", "failed", "blocked in all", "staged after", "sealed after"]
    return [f"<h2>Ranks, those that waited longest first</h2>{_table(head, rows, numbers=(0, 2, 3, 4, 5, 6))}"]


def _attempts(every: Sequence[RankHistory]) -> list[str]:
    """Every time that a run was started."""
    rows = []
    for attempt in dict.fromkeys(each.attempt for each in every):
        own = [each for each in every if each.attempt == attempt]
        first = own[0]
        steps = sorted({save.step for each in own for save in each.committed})
        resumed = [restore.step for each in own for restore in each.restores if restore.step is not None]
        ends = {"not closed" if each.end is None else "closed" if each.end.is_closed else "killed" for each in own}
        saved = f"{len(steps)} (steps {steps[0]} to {steps[-1]})" if steps else "0"
        how = "its trainer was killed, or left without close()" if "killed" in ends else "closed"
        how = "still running, or its keeper was killed" if "not closed" in ends else how
        when = _when(first.run.at_s) if first.run else ""
        rows.append([when, str(len(own)), str(resumed[-1]) if resumed else "—", saved, how])
    if len(rows) < 2 and all(row[4] == "closed" for row in rows):
        return []
    head = ["started", "ranks", "resumed from", "committed", "ended"]
    return [f"<h2>Attempts</h2>{_table(head, rows, numbers=(1, 2))}"]


def _failures(found: Survey, every: Sequence[RankHistory]) -> list[str]:
    rows = [
        [str(save.step), str(each.rank), _when(save.at_s), save.error or "no reason is known"]
        for each in every
        for save in each.failed
    ]
    rows += [
        [str(step), str(each.rank), _when(restore.at_s), "found damaged by a restore, and passed over"]
        for each in every
        for restore in each.restores
        for step in restore.passed_over
    ]
    rows += [
        [str(save.step), str(each.rank), _when(each.progress.at_s), "its keeper was killed while it was in flight"]
        for each in every
        if each.end is None and each.progress is not None and each.rank not in found.holders
        for save in each.progress.saves
    ]
    rows += [[str(each.step), "", "", each.reason] for each in found.with_state("damaged", "newer format")]
    if not rows:
        return []
    return [f"<h2>What failed, and why</h2>{_table(['step', 'rank', 'when', 'cause'], rows, numbers=(0, 1))}"]


def _checkpoints(found: Survey, last: Sequence[RankHistory]) -> str:
    rows = []
    for each in reversed(found.steps[-50:]):
        manifest = each.manifest
        when = _when(manifest.created_unix_s) if manifest else ""
        ranks = str(manifest.world_size) if manifest else ""
        rows.append([str(each.step), each.state, when, format_bytes(each.bytes), ranks])
    run = next((each.run for each in last if each.run), None)
    policy = "every checkpoint is kept"
    if run is not None and (run.keep_last or run.keep_every):
        parts = [f"the newest {run.keep_last}"] if run.keep_last else []
        parts += [f"every step that is a multiple of {run.keep_every}"] if run.keep_every else []
        policy = f"kept are {' and '.join(parts)}"
    saved = {save.step for each in last for save in each.committed}
    gone = len(saved - {each.step for each in found.steps})
    note = f"{policy}; {gone} of the last run's checkpoints have been removed since" if gone else policy
    head = ["step", "state", "committed", "size", "ranks"]
    return f"<h2>On the disk <small>{_safe(note)}</small></h2>{_table(head, rows, numbers=(0, 3, 4))}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int]) -> str:
    kinds = ['class="n"' if at in numbers else "" for at in range(len(head))]
    top = "".join(f"<th {kind}>{_safe(text)}</th>" for kind, text in zip(kinds, head, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td {kind}>{_safe(text)}</td>" for kind, text in zip(kinds, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><tr>{top}</tr>{body}</table></div>'


def _duration(seconds: float) -> str:
    if seconds < 0.0995:
        return f"{seconds * 1e3:.2g} ms" if seconds < 0.01 else f"{seconds * 1e3:.0f} ms"
    if seconds < 99.5:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 99.5 else f"{minutes / 60:.1f} h"


def _when(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))


def _style() -> str:
    return Path(__file__).with_name("report.css").read_text(encoding="utf-8")


def _safe(text: str) -> str:
    return html.escape(text, quote=True)
