"""``list`` and ``show``: what is there, and what is in it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from stillframe.checkpoint import contents, survey
from stillframe.checkpoint.catalog import Checkpoint
from stillframe.checkpoint.contents import Entry
from stillframe.checkpoint.stored import Stored
from stillframe.cli import output
from stillframe.cli.arguments import Json, Rank, Root, Step
from stillframe.errors import NotFoundError, VersionError
from stillframe.format.records import Manifest
from stillframe.units import format_bytes, format_ranks

_NARROW = 76
_DEPTH = 2
_Figures = dict[tuple[object, ...], dict[str, object]]


def list_steps(root: Root, json: Json = False) -> None:
    """The steps in a root, and the state of each.

    With when it was committed, its size, how many ranks saved it, and how long after save() it was staged, sealed and
    committed. The newest checkpoint has a star.

    Example: stillframe list runs/gpt
    """
    found = survey.survey(root)
    newer = found.with_state("newer format")
    if json:
        output.print_json(
            {
                "root": found.root,
                "latest": found.latest,
                "steps": [_step_json(each) for each in found.steps],
                "writers": [{"rank": rank, **_fields(holder)} for rank, holder in found.holders.items()],
            }
        )
    else:
        _print_steps(found)
    if newer:
        raise VersionError(newer[-1].reason)


def _print_steps(found: survey.Survey) -> None:
    if not found.steps:
        output.say(f"{found.root} has no checkpoint yet")
    elif output.console().width < _NARROW:
        rows = [[_label(found, each), each.state, format_bytes(each.bytes)] for each in found.steps]
        output.table(["step", "state", "size"], rows, right=["step", "size"])
    else:
        columns = ["step", "state", "when", "size", "ranks", "staged after", "sealed", "committed", ""]
        rows = [[_label(found, each), *_cells(each)] for each in found.steps]
        output.table(columns, rows, right=["step", "size", "ranks", "staged after", "sealed", "committed"])
    for rank, holder in list(found.holders.items())[:1]:
        more = f" (and {len(found.holders) - 1} more ranks)" if len(found.holders) > 1 else ""
        who = f"rank {rank}, process {holder.pid} on {holder.host}{more}"
        output.console().print(f"a run is at work here: {who}" if holder.state == "training" else f"finishing: {who}")


def _label(found: survey.Survey, each: survey.Step) -> str:
    return f"* {each.step}" if each.step == found.latest else f"{each.step}"


def _cells(each: survey.Step) -> list[str]:
    manifest = each.manifest
    if manifest is None:
        sealed = f"sealed by {format_ranks(each.here)}" if each.here and each.state == "in progress" else ""
        return [each.state, "", format_bytes(each.bytes), "", "", "", "", each.reason or sealed]
    ranks = str(manifest.world_size)
    if len(each.here) != manifest.world_size:
        ranks = f"{len(each.here)} of {manifest.world_size}"
    times = [_seconds(manifest.stage_s), _seconds(manifest.seal_s), _seconds(manifest.commit_s)]
    stray = f"+ {format_bytes(each.stray_bytes)} left of another try" if each.stray_bytes else ""
    return [each.state, _when(manifest.created_unix_s), format_bytes(each.bytes), ranks, *times, each.reason or stray]


def _seconds(count: float | None) -> str:
    return "" if count is None else f"{count:.2f} s" if count >= 1 else f"{count * 1e3:.0f} ms"


def _when(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))


def _step_json(each: survey.Step) -> dict[str, object]:
    found: dict[str, object] = {
        "step": each.step, "state": each.state, "bytes": each.bytes, "ranks": each.here, "reason": each.reason or None,
    }  # fmt: skip
    return found | _manifest_json(each.manifest)


def _manifest_json(manifest: Manifest | None) -> dict[str, object]:
    names = ("world_size", "created_unix_s", "stage_s", "seal_s", "commit_s", "attempt")
    return {name: getattr(manifest, name, None) for name in names}


def _fields(record: Any) -> dict[str, object]:
    return {name: getattr(record, name) for name in record.__struct_fields__}


def show(
    root: Root,
    step: Step = None,
    tree: Annotated[bool, typer.Option("--tree", help="The whole tree, to every leaf.")] = False,
    tensor: Annotated[
        list[str] | None,
        typer.Option(
            help="Only what has this path, lies below it, or matches this glob; may be repeated.", metavar="GLOB"
        ),
    ] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Read the tensors: least, most, mean, how many NaN and Inf.")
    ] = False,
    rank: Rank = None,
    json: Json = False,
) -> None:
    """The state in a checkpoint, as a tree.

    Paths, dtypes, shapes, sharding, bytes, plain values. A tree that is deep is shown to its second level, unless
    --tree is given.

    Example: stillframe show runs/gpt 1000 --tensor 'model/*.weight' --stats
    """
    with survey.open_checkpoint(root, step, rank) as checkpoint:
        if rank is not None and rank not in checkpoint.ranks:
            raise NotFoundError(f"step {checkpoint.step} has no rank {rank}; it was saved by {checkpoint.world_size}")
        stored = Stored(checkpoint, rank if rank is not None else checkpoint.ranks[0], is_merged=True)
        every = contents.entries(stored)
        chosen = contents.matching(every, tensor) if tensor else every
        figures = _statistics(stored, chosen) if stats else {}
        if json:
            head = {"root": Path(root).absolute(), "step": checkpoint.step, "bytes": checkpoint.manifest.bytes}
            listed = [_entry_json(each) | figures.get(each.key, {}) for each in chosen]
            output.print_json(head | _manifest_json(checkpoint.manifest) | {"entries": listed})
        elif tensor or stats:
            _print_head(checkpoint)
            _print_entries([each for each in chosen if tensor or each.kind != "value"], figures)
        else:
            _print_head(checkpoint)
            _print_tree(chosen, None if tree else _DEPTH)


def _statistics(stored: Stored, chosen: Sequence[Entry]) -> _Figures:
    from stillframe.restore.load import pull
    from stillframe.restore.statistics import statistics

    read = [each for each in chosen if each.kind != "value"]
    figures: _Figures = {}
    with output.progress("reading", sum(each.bytes for each in read)) as advance:
        tensors = pull(stored, [each.leaf for each in read])
        for each, found in zip(read, tensors, strict=True):
            made = statistics(found)
            figures[each.key] = {name: getattr(made, name) for name in ("min", "max", "mean", "nan", "inf")}
            advance(each.bytes)
    return figures


def _entry_json(each: Entry) -> dict[str, object]:
    found: dict[str, object] = {"path": each.name, "kind": each.kind}
    if each.kind == "value":
        return found | {"value": each.value}
    parts = [{"rank": part.rank, "offset": part.offset, "shape": part.shape} for part in each.boxes]
    return found | {
        "dtype": each.dtype, "shape": each.shape, "bytes": each.bytes, "tied_to": each.tied_to or None,
        "sharding": each.sharding or None, "parts": parts,
    }  # fmt: skip


def _print_head(checkpoint: Checkpoint) -> None:
    manifest = checkpoint.manifest
    ranks = f"{manifest.world_size} rank{'s' if manifest.world_size > 1 else ''}"
    if len(checkpoint.ranks) != manifest.world_size:
        ranks = f"{format_ranks(checkpoint.ranks)} of {manifest.world_size}"
    output.console().print(
        f"step {checkpoint.step}: {format_bytes(manifest.bytes)}, {ranks}, committed {_when(manifest.created_unix_s)}, "
        f"{manifest.commit_s:.2f} s after save()"
    )


def _print_entries(chosen: Sequence[Entry], figures: _Figures) -> None:
    columns = ["path", "dtype", "shape", "bytes", "sharding", "value"]
    names = ["min", "max", "mean", "nan", "inf"] if figures else []
    rows = [
        [
            each.name,
            each.dtype,
            "" if each.kind == "value" else _shape(each.shape),
            "" if each.kind == "value" else f"= {each.tied_to}" if each.tied_to else format_bytes(each.bytes),
            each.sharding,
            contents.text_of(each.value) if each.kind == "value" else "",
            *(_figure(figures.get(each.key, {}).get(name)) for name in names),
        ]
        for each in chosen
    ]
    output.table(columns + names, rows, right=["bytes", *names])


def _figure(value: object) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _shape(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


@dataclass(slots=True)
class _Branch:
    """The entries again, nested by their paths."""

    entries: list[Entry] = field(default_factory=list)
    """Of everything below."""
    below: dict[object, _Branch] = field(default_factory=dict)
    leaf: Entry | None = None


def _print_tree(chosen: Sequence[Entry], depth: int | None) -> None:
    top = _Branch()
    for entry in chosen:
        branch = top
        branch.entries.append(entry)
        for key in entry.path:
            branch = branch.below.setdefault(key, _Branch())
            branch.entries.append(entry)
        branch.leaf = entry
    rows: list[tuple[str, str]] = []
    if top.leaf is not None:
        rows.append(("~", _described(top.leaf)))
    _add(rows, top, depth, "")
    width = max((len(name) for name, _ in rows), default=0)
    for name, text in rows:
        output.say(f"{name:<{width}}  {text}".rstrip())


def _add(rows: list[tuple[str, str]], branch: _Branch, depth: int | None, indent: str) -> None:
    last = len(branch.below) - 1
    for at, (key, below) in enumerate(branch.below.items()):
        is_last = at == last
        name = f"{indent}{'└─ ' if is_last else '├─ '}{key}"
        if below.leaf is not None:
            rows.append((name, _described(below.leaf)))
        else:
            rows.append((name, _summed(below.entries)))
            if depth is None or depth > 1:
                inner = indent + ("   " if is_last else "│  ")
                _add(rows, below, None if depth is None else depth - 1, inner)


def _summed(found: Sequence[Entry]) -> str:
    tensors = [each for each in found if each.kind != "value"]
    values = len(found) - len(tensors)
    parts = [f"{len(tensors)} tensor{'s' if len(tensors) != 1 else ''}"] if tensors else []
    parts += [format_bytes(sum(each.bytes for each in tensors))] if tensors else []
    parts += [f"{values} value{'s' if values != 1 else ''}"] if values else []
    return f"({', '.join(parts)})"


def _described(entry: Entry) -> str:
    if entry.kind == "value":
        return f"= {contents.text_of(entry.value)}"
    size = f"same memory as {entry.tied_to}" if entry.tied_to else format_bytes(entry.bytes)
    described = f"{entry.dtype}{_shape(entry.shape)}  {size}"
    return f"{described}  {entry.sharding}".rstrip()
