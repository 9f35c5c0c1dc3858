"""One HTML page about a run: what checkpointing cost, where, and whether it worked.  Needs no network and no script."""

from __future__ import annotations

import math
import os
import pkgutil
import statistics
from collections.abc import Sequence
from html import escape

from stillframe.checkpoint.survey import Survey
from stillframe.format.events import Save
from stillframe.observe.charts import Bar, Slice, bars, timeline
from stillframe.observe.history import RankHistory, beside_saves, newest, rate, save_blocked_s
from stillframe.observe.tiers import Standing
from stillframe.units import format_bytes, format_count, format_seconds, format_time

_SHOWN_SAVES, _SHOWN_RANKS, _SHOWN_STEPS = 6, 64, 50
_CHEAP, _DEAR = 0.01, 0.05
"""Shares of the time that training may be blocked before the verdict turns yellow, and red."""
_SENTENCES = ("cause", "fails now", "ended", "tier")
_COLOURS = (
    (("iter", "iter2"), "iterations, in two greys in turn"), (("bad",), "training blocked"),
    (("stage",), "copied to host memory"), (("flush",), "written"),
    (("wait",), "sealed; waits for other ranks and the commit"),
)  # fmt: skip


def report(found: Survey, every: Sequence[RankHistory], now_s: float, tiers: Sequence[Standing] = ()) -> str:
    """The page.  Without histories (``every`` is empty), it tells only what lies in the root."""
    last = newest(every)
    slowest = _slowest(last)
    sections = [f"<h1>{escape(str(found.root))}</h1>", *_verdict(last, slowest), _tiles(found, slowest, now_s)]
    if slowest is not None:
        sections += [*_timeline(slowest, len(last)), _charts(last, slowest)]
    sections += [*_ranks(last), *_runs(every), *_tiers(tiers), *_failures(found, every), _checkpoints(found, last)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>stillframe: {escape(os.path.basename(found.root))}</title><style>{_style()}</style></head><body>"
        f"{''.join(sections)}<footer>stillframe report, {format_time(now_s)}</footer></body></html>\n"
    )


def _slowest(last: Sequence[RankHistory]) -> RankHistory | None:
    """The rank that was blocked longest; the others wait for it."""
    known = [each for each in last if each.cost is not None and each.saves]
    return max(known, key=lambda each: each.cost or 0.0, default=None)


def _verdict(last: Sequence[RankHistory], slowest: RankHistory | None) -> list[str]:
    if slowest is None or slowest.cost is None or slowest.span_s is None:
        return [
            '<p class="verdict">How long training was blocked is not known</p>',
            '<p class="lead">The root has no events of a run with two saves.</p>',
        ]
    begin_s, end_s = slowest.span_s
    steps = {save.step for each in last for save in each.committed}
    failed = sum(len(each.failed) for each in last)
    rank = f" (rank {slowest.rank}, the slowest of {len(last)})" if len(last) > 1 else ""
    made = f"{format_count(len(steps), 'checkpoint')} in {format_seconds(end_s - begin_s)}"
    lead = [
        f"{made}; they blocked training for {format_seconds(slowest.blocked_s)} in total{rank}.",
        f"{format_count(failed, 'save')} failed." if failed else "No save failed.",
    ]
    if any(each.end is not None and not each.end.is_closed for each in last):
        lead.append("The run ended without closing its checkpointer.")
    beside = beside_saves(slowest)
    if beside is not None:
        lead.append(f"An iteration during a save took {beside:.2f} × as long as one without.")
    lead.append("Copying and writing also use cores and memory bandwidth; this is not counted.")
    cost = slowest.cost
    if cost > _CHEAP:
        lead.append(_advice(slowest))
    kind = "worse" if failed or cost > _DEAR else "warn" if cost > _CHEAP else "good"
    share = "less than 0.1 %" if cost < 0.001 else f"{100 * cost:.2g} %"
    share = share.replace(" %", "\N{NO-BREAK SPACE}%")
    return [
        f'<p class="verdict {kind}">Training was blocked {share} of the time</p>',
        f'<p class="lead">{escape(" ".join(lead))}</p>',
    ]


def _advice(shown: RankHistory) -> str:
    """What would make it cheap."""
    scale = f"Up to {100 * _CHEAP:g} % is shown as cheap, more than {100 * _DEAR:g} % as dear"
    iterations_s = [end_s - begin_s for begin_s, end_s in shown.iterations()]
    if not iterations_s:
        return f"{scale}: save less often."
    blocked_s, usual_s = statistics.median(shown.blocked_by().values()), statistics.median(iterations_s)
    every = math.ceil(blocked_s / (_CHEAP * usual_s))
    if every < 2:  # a few saves, and not the usual one: the first, say, which plans
        return f"{scale}. The usual save is cheap; a few were not, most often the first of a run."
    return (
        f"{scale}. A save blocks {format_seconds(blocked_s)}, an iteration takes {format_seconds(usual_s)}: with one "
        f"save in {every:,} iterations, or fewer, it is cheap. Longer iterations hide more of the copy."
    )


def _tiles(found: Survey, slowest: RankHistory | None, now_s: float) -> str:
    tiles: list[tuple[str, str]] = []
    if slowest is not None:
        blocked = list(slowest.blocked_by().values())
        tiles.append((_median_s(blocked), f"blocked per save (at most {format_seconds(max(blocked))})"))
        rates = [each for save in slowest.committed if (each := rate(save)) is not None]
        if rates:
            tiles.append((f"{format_bytes(statistics.median(rates))}/s", "write speed of a rank"))
        latencies = [save.committed_s - save.requested_s for save in slowest.committed if save.committed_s is not None]
        if latencies:
            tiles.append((_median_s(latencies), "from save() to committed"))
    for step in found.with_state("committed")[-1:]:
        tiles.append((format_bytes(step.bytes), "size of a checkpoint"))
        if step.manifest is not None:
            age = format_seconds(now_s - step.manifest.saved_unix_s)
            tiles.append((f"step {step.step}", f"the newest, saved {age} before this page"))
    made = "".join(f'<div class="tile"><b>{escape(big)}</b><span>{escape(small)}</span></div>' for big, small in tiles)
    return f'<div class="tiles">{made}</div>'


def _timeline(shown: RankHistory, ranks: int) -> list[str]:
    if len(shown.updates) < 2:
        return []
    saves = sorted(shown.saves, key=lambda save: save.requested_s)[-_SHOWN_SAVES:]
    begin_s = saves[0].requested_s
    last_s = saves[-1].committed_s or saves[-1].requested_s
    ends = [save.committed_s or save.requested_s for save in saves] + [shown.updates[-1].at_s]
    end_s = min(max(ends), begin_s + 4 * (last_s - begin_s + 1e-3))
    before = max((update.at_s for update in shown.updates if update.at_s < begin_s), default=begin_s)
    begin_s = max(before, begin_s - 0.5 * (end_s - begin_s))
    slices = [*_training(shown), *(each for save in saves for each in _slices(save))]
    drawn = timeline(["training", "staging", "flushing", "commit"], slices, begin_s, end_s)
    key = "".join(f"<span>{''.join(map(_patch, colours))}{text}</span>" for colours, text in _COLOURS)
    rank = f" of rank {shown.rank}" if ranks > 1 else ""
    return [
        f"<h2>The last {format_count(len(saves), 'save')}{rank}, and the iterations beside them</h2>",
        f'<div class="scroll">{drawn}</div><p class="key">{key}</p>',
    ]


def _patch(colour: str) -> str:
    return f'<i style="background:var(--{colour})"></i>'


def _training(shown: RankHistory) -> list[Slice]:
    made = []
    for number, (begin_s, end_s) in enumerate(shown.iterations()):
        title = f"iteration: {format_seconds(end_s - begin_s)}"
        made.append(Slice(0, begin_s, end_s, "iter2" if number % 2 else "iter", title))
    for update in shown.updates:
        if update.waited_s > 0:
            title = f"fence: {format_seconds(update.waited_s)}"
            made.append(Slice(0, update.at_s, update.at_s + update.waited_s, "blocked", title))
    for save in shown.saves:
        title = f"save(): {format_seconds(save_blocked_s(save))}"
        made.append(Slice(0, save.requested_s, save.returned_s or save.requested_s, "blocked", title))
    return made


def _slices(save: Save) -> list[Slice]:
    made = []
    for row, begin_s, end_s, kind, what in (
        (1, save.stage_begin_s, save.staged_s, "stage", "staged"),
        (2, save.flush_begin_s, save.sealed_s, "flush", "written and sealed"),
        (3, save.sealed_s, save.committed_s, "wait", "committed"),
    ):
        if begin_s is not None and end_s is not None:
            title = f"step {save.step} {what}: {format_seconds(end_s - begin_s)}"
            made.append(Slice(row, begin_s, end_s, kind, title, label=f"step {save.step}" if row == 3 else ""))
    return made


def _charts(last: Sequence[RankHistory], shown: RankHistory) -> str:
    failed = {save.step for save in shown.failed}
    blocked = [Bar(str(step), seconds, step in failed) for step, seconds in sorted(shown.blocked_by().items())]
    rates = [Bar(str(save.step), each) for save in shown.committed if (each := rate(save)) is not None]
    sizes: dict[int, int] = {}
    for history in last:
        for save in history.committed:
            sizes[save.step] = sizes.get(save.step, 0) + save.bytes
    of_all = [Bar(str(step), float(size)) for step, size in sorted(sizes.items())]
    drawn = [
        bars("Time blocked by each save", blocked, format_seconds, note="red: failed" if failed else ""),
        bars("Write speed", rates, lambda value: f"{format_bytes(value)}/s", base=1024),
        bars("Size, all ranks", of_all, format_bytes, base=1024),
    ]
    return f'<h2>Save by save</h2><div class="charts">{"".join(drawn)}</div>'


def _ranks(last: Sequence[RankHistory]) -> list[str]:
    if len(last) < 2:
        return []
    rows = []
    for each in sorted(last, key=lambda each: -each.blocked_s)[:_SHOWN_RANKS]:
        staged = [save.staged_s - save.requested_s for save in each.committed if save.staged_s is not None]
        sealed = [save.sealed_s - save.requested_s for save in each.committed if save.sealed_s is not None]
        times = [format_seconds(each.blocked_s), _median_s(staged), _median_s(sealed)]
        host = each.started.host if each.started else ""
        rows.append([str(each.rank), host, str(len(each.committed)), str(len(each.failed)), *times])
    head = ["rank", "host", "committed", "failed", "blocked in total", "staged after", "sealed after"]
    note = _how_many(len(rows), len(last), "ranks")
    return [f"<h2>Ranks, those blocked longest first{note}</h2>{_table(head, rows, left=['host'])}"]


def _runs(every: Sequence[RankHistory]) -> list[str]:
    rows = []
    for run in dict.fromkeys(each.run for each in every):
        own = [each for each in every if each.run == run]
        started = own[0].started
        steps = sorted({save.step for each in own for save in each.committed})
        resumed = [restore.step for each in own for restore in each.restores if restore.step is not None]
        saved = f"{len(steps)} (steps {steps[0]} to {steps[-1]})" if steps else "0"
        when = format_time(started.at_s) if started else ""
        rows.append([when, str(len(own)), str(resumed[-1]) if resumed else "—", saved, _how_it_ended(own)])
    if len(rows) < 2 and all(row[4] == "closed" for row in rows):
        return []
    head = ["started", "ranks", "resumed from", "committed", "ended"]
    return [f"<h2>Attempts</h2>{_table(head, rows, left=['started', 'committed', 'ended'])}"]


def _how_it_ended(ranks: Sequence[RankHistory]) -> str:
    if any(each.end is None for each in ranks):
        return "still running, or its keeper was killed"
    if all(each.end.is_closed for each in ranks if each.end):
        return "closed"
    return "killed, or ended without close()"


def _tiers(tiers: Sequence[Standing]) -> list[str]:
    rows = [
        [
            each.root, "—" if each.step is None else str(each.step),
            "—" if each.behind_steps is None else str(each.behind_steps),
            "" if each.behind_s is None else format_seconds(each.behind_s), str(each.carried),
            "" if each.carry_s is None else format_seconds(each.carry_s), format_bytes(each.bytes),
            str(each.failures), each.trouble,
        ]
        for each in tiers
    ]  # fmt: skip
    head = [
        "tier", "newest step", "steps behind", "saved earlier by", "carried", "time for one", "sent", "failures",
        "fails now",
    ]  # fmt: skip
    note = "as the events of the last run tell"
    return [f"<h2>Tiers <small>{note}</small></h2>{_table(head, rows, left=['tier', 'fails now'])}"] if rows else []


def _failures(found: Survey, every: Sequence[RankHistory]) -> list[str]:
    rows = []
    for each in every:
        rank = str(each.rank)
        for save in each.failed:
            rows.append([str(save.step), rank, format_time(save.at_s), save.error or "the cause is not known"])
        for restore in each.restores:
            cause = "a restore found it damaged and took an older one"
            rows += [[str(step), rank, format_time(restore.at_s), cause] for step in restore.passed_over]
        if each.end is None and each.progress is not None and each.rank not in found.owners:
            cause, when = "the keeper was killed during the save", format_time(each.progress.at_s)
            rows += [[str(in_flight.step), rank, when, cause] for in_flight in each.progress.saves]
    broken = found.with_state("damaged", "quarantined", "newer format")
    rows += [[str(each.step), "", "", each.reason] for each in broken]
    if not rows:
        return []
    return [f"<h2>Failures</h2>{_table(['step', 'rank', 'when', 'cause'], rows, left=['when', 'cause'])}"]


def _checkpoints(found: Survey, last: Sequence[RankHistory]) -> str:
    rows = []
    for each in reversed(found.steps[-_SHOWN_STEPS:]):
        when = format_time(each.manifest.saved_unix_s) if each.manifest else ""
        ranks = str(each.manifest.world_size) if each.manifest else ""
        rows.append([str(each.step), each.state, when, format_bytes(each.bytes), ranks])
    shown = _how_many(len(rows), len(found.steps), "steps, the newest")
    note = _policy(last)
    saved = {save.step for each in last for save in each.committed}
    gone = len(saved - {each.step for each in found.steps})
    if gone:
        note += f"; {gone} of the checkpoints of the last run have been removed"
    head = ["step", "state", "saved", "size", "ranks"]
    table = _table(head, rows, left=["state", "saved"])
    return f"<h2>In the root <small>{escape(note)}</small>{shown}</h2>{table}"


def _how_many(shown: int, found: int, what: str) -> str:
    """Says that not all are shown; nothing if all are."""
    return f" <small>{shown} of {found:,} {what}</small>" if shown < found else ""


def _policy(last: Sequence[RankHistory]) -> str:
    started = next((each.started for each in last if each.started), None)
    return f"policy: {started.keep}" if started is not None and started.keep else "policy: keep every checkpoint"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str]) -> str:
    """Columns that are not in ``left`` hold numbers; those in ``_SENTENCES`` may be broken into lines."""
    kinds = ["" if each in left else ' class="n"' for each in head]
    kinds = [' class="t"' if each in _SENTENCES else kind for each, kind in zip(head, kinds, strict=True)]

    def row(tag: str, cells: Sequence[str]) -> str:
        made = [f"<{tag}{kind}>{escape(text)}</{tag}>" for kind, text in zip(kinds, cells, strict=True)]
        return f"<tr>{''.join(made)}</tr>"

    return f'<div class="scroll"><table>{row("th", head)}{"".join(row("td", each) for each in rows)}</table></div>'


def _median_s(seconds: Sequence[float]) -> str:
    return format_seconds(statistics.median(seconds)) if seconds else ""


def _style() -> str:
    return (pkgutil.get_data("stillframe.observe", "report.css") or b"").decode()
