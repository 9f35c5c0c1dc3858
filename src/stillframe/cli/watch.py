"""``stillframe watch``: a run, live on the terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from stillframe.cli import output
from stillframe.cli.arguments import Json, Root
from stillframe.observe.watch import Follower, Frame, Moving
from stillframe.units import format_bytes, format_count, format_ranks, format_seconds

if TYPE_CHECKING:
    from rich.console import Group

_BAR = 20
_INDENT = 13
_SHORT = 3
"""Room for fewer checkpoints is shown in red: the next ones may fail."""


def command(
    root: Root,
    every: Annotated[float, typer.Option(help="Seconds between two updates.", min=0.1, metavar="SECONDS")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print the current state and exit.")] = False,
    json: Json = False,
) -> None:
    """Watch a run live.

    Each save in flight, the time that training was blocked, the arena, ranks that lag, how far each tier is behind, and
    what a crash would cost now. Reads the files in the root and changes nothing: it works from another shell, and from
    any node that sees the root. Ctrl-C ends it. With --json, or without a terminal, it prints the current state once.

    Example: stillframe watch runs/gpt
    """
    follower = Follower(root)
    frame = follower.look()
    if json:
        output.print_json(frame)
    elif once or not sys.stdout.isatty():
        for line, style in _lines(frame):
            output.say(line, style, _INDENT)
    else:
        from rich.live import Live

        live = Live(_drawn(frame), console=output.console(), auto_refresh=False)
        with contextlib.suppress(KeyboardInterrupt), live:
            while True:
                time.sleep(every)
                live.update(_drawn(follower.look()), refresh=True)


def _drawn(frame: Frame) -> Group:
    from rich.console import Group
    from rich.text import Text

    told = ((part, style) for line, style in _lines(frame) for part in output.broken(output.printable(line), _INDENT))
    return Group(*(Text(line, style=style, overflow="fold") for line, style in told))


def _lines(frame: Frame) -> list[tuple[str, str]]:
    """Each line and its style."""
    lines = [(str(frame.root), "bold"), (_state(frame), "")]
    lines += [(_moving(each, frame.world_size), "cyan") for each in frame.moving]
    if frame.committed is not None:
        age = f", {format_seconds(frame.committed_age_s)} ago" if frame.committed_age_s is not None else ""
        size = f", {format_bytes(frame.checkpoint_bytes)}" if frame.checkpoint_bytes is not None else ""
        lines.append((f"last commit  step {frame.committed}{age}{size}", ""))
    if frame.last:
        last = ", ".join(f"step {each.step} in {format_seconds(each.seconds)}" for each in frame.last)
        lines.append((f"last saves   {last}", ""))
    if frame.saves or frame.failed:
        share = f" ({100 * frame.cost:.2g} % of the time)" if frame.cost is not None else ""
        failed = f", {frame.failed} failed" if frame.failed else ""
        blocked = f"{format_seconds(frame.blocked_s)} by {format_count(frame.saves, 'save')}{share}"
        lines.append((f"blocked      {blocked}{failed}", ""))
    if frame.arena_bytes and frame.state != "ended":
        arena = f"{format_bytes(frame.arena_used_bytes)} of {format_bytes(frame.arena_bytes)} in use"
        lines.append((f"arena        {arena}", ""))
    if frame.free_bytes is not None and frame.state != "ended":
        room = frame.free_bytes // frame.checkpoint_bytes if frame.checkpoint_bytes else None
        more = f", room for {room:,} more of these checkpoints" if room is not None else ""
        is_short = room is not None and room < _SHORT
        lines.append((f"disk         {format_bytes(frame.free_bytes)} left{more}", "red" if is_short else ""))
    lines += [(f"tier         {each.root}: {each.text}", "red" if each.trouble else "") for each in frame.tiers]
    if frame.at_risk_s is not None:
        lines.append((f"a crash now  would cost {format_seconds(frame.at_risk_s)} of training", ""))
    return lines


def _state(frame: Frame) -> str:
    if frame.state == "ended":
        what = "no run is active" + ("" if frame.is_closed else "; the last one was killed, or ended without close()")
    else:
        what = "training" if frame.state == "training" else "the run has ended; its keeper still writes"
    ranks = f", {frame.alive} of {frame.world_size} ranks" if frame.world_size > 1 else ""
    step = f"; step {frame.step} was saved last" if frame.step is not None else ""
    pace = f"; {frame.iterations_per_s:.3g} iterations/s" if frame.iterations_per_s is not None else ""
    return f"{what}{ranks}{step}{pace}"


def _moving(each: Moving, world_size: int) -> str:
    share = each.flushed_bytes / each.total_bytes if each.total_bytes else 1.0
    bar = "█" * round(share * _BAR) + "░" * (_BAR - round(share * _BAR))
    done = f"{format_bytes(each.flushed_bytes)} of {format_bytes(each.total_bytes)}"
    rate = f"  {format_bytes(each.rate)}/s" if each.rate else ""
    ranks = f"  sealed by {each.sealed} of {world_size}" if world_size > 1 else ""
    late = f", waiting for {format_ranks(each.lagging)}" if ranks and each.lagging and each.sealed else ""
    return f"step {each.step}  {each.phase:<8}  {bar}  {done}{rate}{ranks}{late}"
