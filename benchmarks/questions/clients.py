from __future__ import annotations

from collections.abc import Sequence

from benchmarks.case import Case, Outcome
from benchmarks.plots import bars
from benchmarks.questions.base import Question, Scope, Table, good, median, number, spread
from matplotlib.figure import Figure

_NAMES = {"default": "its own", "stillframe": "stillframe"}


class Clients(Question):
    """What do the loops that people already have gain?"""

    name = "clients"
    title = "Inside DeepSpeed and torch.distributed.checkpoint"
    asks = (
        "Each with its own storage and with stillframe's, otherwise the same. DeepSpeed: ZeRO-1 in bf16 on two ranks, "
        "`save_checkpoint` at every iteration of 1 s (0.5 s in the short form) of emulated compute beside the real one; the size is a rank's. DCP: one "
        "process, default planner and settings; `save` until it returns, `async_save` until it returns plus what is left to "
        "wait before an update 1 s later, `load` into live tensors with nothing in the page cache. The first of each is not counted. "
        "DeepSpeed's own engine does not fsync; DCP's own writer does (files, not directories)."
    )

    def cases(self, scope: Scope) -> list[Case]:
        gib = scope.sizes(0.0625 if scope.is_short else 1.0)[0]
        compute_s, iterations = (0.5, 2) if scope.is_short else (1.0, 4)
        if "stillframe" not in scope.systems:
            return []
        return [
            Case(
                task=task, system=system, gib=gib, iterations=iterations, compute_s=compute_s, ranks=ranks, detail=detail, is_sharded=ranks > 1,
            )
            for task, detail, ranks in (("deepspeed-loop", "DeepSpeed", 2), ("dcp-calls", "DCP", 1))
            for system in _NAMES
        ]  # fmt: skip

    def turns(self, is_short: bool) -> int:
        return 1

    def tables(self, outcomes: Sequence[Outcome]) -> list[Table]:
        rows = []
        for what, times in measures(outcomes).items():
            cells = [spread(times[system], 1e3) if times[system] else "—" for system in _NAMES]
            is_whole = all(times.values())
            rows.append(
                [
                    what,
                    *cells,
                    f"{number(median(times['default']) / median(times['stillframe']))} ×" if is_whole else "—",
                ]
            )
        title = f"Milliseconds, {outcomes[0].case.gib:g} GiB"
        return [Table(title, ["", "its own", "stillframe", "its own ÷ stillframe"], rows)]

    def draw(self, outcomes: Sequence[Outcome], figure: Figure) -> None:
        found = {what: times for what, times in measures(outcomes).items() if all(times.values())}
        axes = figure.subplots()
        values = {system: [[each * 1e3 for each in times[system]] for times in found.values()] for system in _NAMES}
        bars(axes, list(found), values)
        axes.set_yscale("log")
        axes.set_ylabel("milliseconds")


def measures(outcomes: Sequence[Outcome]) -> dict[str, dict[str, list[float]]]:
    """For each thing that was timed the samples of both."""
    wanted = (
        ("save_checkpoint", "DeepSpeed", "blocked_s"), ("an iteration", "DeepSpeed", "saving_s"),
        ("without saving", "DeepSpeed", "quiet_s"), ("dcp.save", "DCP", "save_s"),
        ("dcp.async_save", "DCP", "async_s"), ("dcp.load", "DCP", "load_s"),
    )  # fmt: skip
    return {
        what: {
            system: [
                each
                for outcome in good(outcomes, system=system, detail=detail)
                for rank in outcome.figures.get("ranks", [outcome.figures])
                for each in rank[name]
            ]
            for system in _NAMES
        }
        for what, detail, name in wanted
    }


QUESTION = Clients()
