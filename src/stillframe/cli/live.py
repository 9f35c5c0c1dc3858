"""``watch``, ``trace`` and ``report``: what a run does, or did."""

from __future__ import annotations

import secrets
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from stillframe.cli import output
from stillframe.cli.arguments import Json, Root
from stillframe.errors import ExistsError, NotFoundError
from stillframe.observe.watch import Follower, Frame, Moving
from stillframe.store import durable
from stillframe.units import format_bytes, format_ranks

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

_BAR = 20
Out = Annotated[Path | None, typer.Option("--out", "-o", help="The file to write.", show_default=False)]
Force = Annotated[bool, typer.Option("--force", help="Write over a file that is there.")]


def watch(
    root: Root,
    every: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.1)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, print it, and end.")] = False,
    json: Json = False,
) -> None:
    """A running training, live.

    Each save in flight, time blocked, arena, ranks that lag, what a crash would cost now. Reads the root's files
    and changes nothing: works from another shell, and from another node that sees them. Ctrl-C ends it. With
    --json, or where there is no terminal, it looks once.

    Example: stillframe watch runs/gpt
    """
    follower = Follower(root)
    frame = follower.look()
    if json:
        output.print_json(frame)
    elif once or not sys.stdout.isatty():
        output.console().print(_drawn(frame))
    else:
        from rich.live import Live

        try:
            with Live(_drawn(frame), console=output.console(), auto_refresh=False) as live:
                while True:
                    time.sleep(every)
                    live.update(_drawn(follower.look()), refresh=True)
        except KeyboardInterrupt:
            pass


def _drawn(frame: Frame) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    ended = "no run is at work here" + ("" if frame.is_closed else "; the last one was killed, or left without close()")
    who = {"training": "training", "finishing": "ended; its keeper still writes", "ended": ended}
    lines = [Text(f"{frame.root}", style="bold", overflow="fold"), Text(_state(frame, who[frame.state]))]
    lines += [_moving(each, frame) for each in frame.moving]
    if frame.committed is not None:
        age = f", {_ago(frame.committed_age_s)}" if frame.committed_age_s is not None else ""
        lines.append(Text(f"last commit  step {frame.committed}{age}"))
    if frame.saves or frame.failed:
        cost = f" ({100 * frame.cost:.2g} % of the time)" if frame.cost is not None else ""
        failed = f", {frame.failed} failed" if frame.failed else ""
        saves = f"{frame.saves} save{'s' if frame.saves != 1 else ''}"
        lines.append(Text(f"blocked      {_time(frame.blocked_s)} over {saves}{cost}{failed}"))
    if frame.arena_bytes:
        used = f"{format_bytes(frame.arena_used_bytes)} of {format_bytes(frame.arena_bytes)}"
        lines.append(Text(f"arena        {used} in use"))
    if frame.at_risk_s is not None:
        lines.append(
            Text(
                f"a crash now  would cost {_time(frame.at_risk_s)} of training",
            )
        )
    return Group(*lines)


def _state(frame: Frame, what: str) -> str:
    ranks = f", {frame.alive} of {frame.world_size} ranks" if frame.world_size > 1 else ""
    step = f"; step {frame.step} was the last to be saved" if frame.step is not None else ""
    return f"{what}{ranks}{step}"


def _moving(each: Moving, frame: Frame) -> Text:
    from rich.text import Text

    share = each.flushed_bytes / each.total_bytes if each.total_bytes else 1.0
    bar = "█" * round(share * _BAR) + "░" * (_BAR - round(share * _BAR))
    speed = f"  {format_bytes(each.rate)}/s" if each.rate else ""
    ranks = ""
    if frame.world_size > 1:
        late = f", waiting for {format_ranks(each.lagging)}" if each.lagging and each.sealed else ""
        ranks = f"  sealed by {each.sealed} of {frame.world_size}{late}"
    done = f"{format_bytes(each.flushed_bytes)} of {format_bytes(each.total_bytes)}"
    return Text(f"step {each.step}  {each.phase:<8}  {bar}  {done}{speed}{ranks}", style="cyan")


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.1f} min"


def _ago(seconds: float) -> str:
    return f"{_time(max(seconds, 0.0))} ago"


def trace(root: Root, out: Out = None, force: Force = False) -> None:
    """Write what a run did as a Chrome trace.

    For ui.perfetto.dev or chrome://tracing. Iterations, fences, staging, flushing and commits of every rank and
    attempt on one axis.

    Example: stillframe trace runs/gpt -o gpt.trace.json
    """
    from stillframe.observe.history import histories
    from stillframe.observe.trace import trace as made

    found = histories(root)
    if not found:
        raise NotFoundError(f"no run has left events in {root}")
    _write(out or Path(f"{Path(root).resolve().name}.trace.json"), msgspec.json.encode(made(found)), force)


def report(root: Root, out: Out = None, force: Force = False) -> None:
    """Write one page about a run.

    What checkpointing cost, a timeline, every save, sizes, retention, failures. The page is one file that needs no
    network.

    Example: stillframe report runs/gpt -o gpt.html
    """
    from stillframe.checkpoint.survey import survey
    from stillframe.observe.history import histories
    from stillframe.observe.report import report as made

    page = made(survey(root), histories(root), time.time())
    _write(out or Path(f"{Path(root).resolve().name}.html"), page.encode(errors="replace"), force)


def _write(to: Path, data: bytes, is_forced: bool) -> None:
    if not to.parent.is_dir():
        raise NotFoundError(f"there is no directory {to.parent}")
    partial = to.with_name(f"{to.name}.{secrets.token_hex(4)}.partial")
    with durable.storage_errors(f"writing {to}"):
        try:
            durable.write_partial(partial, data)
            if is_forced:
                durable.publish(partial, to)
            else:
                durable.publish_new(partial, to)
        except ExistsError:
            durable.remove(partial)
            raise ExistsError(f"{to} is there already; --force writes over it") from None
        except BaseException:
            durable.remove(partial)
            raise
    output.say(f"wrote {to} ({format_bytes(len(data))})")
