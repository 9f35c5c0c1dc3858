"""``stillframe show``: the state in a checkpoint, as a tree or as a table of tensors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from stillframe.checkpoint import contents
from stillframe.checkpoint.catalog import Checkpoint
from stillframe.checkpoint.contents import Entry
from stillframe.checkpoint.stored import Stored
from stillframe.cli import output
from stillframe.cli.arguments import Json, Rank, Root, Step
from stillframe.cli.stored import open_stored, tensors
from stillframe.store import root_address
from stillframe.units import format_bytes, format_count, format_ranks, format_time

_DEPTH = 2
_DESCRIBED = 26
"""As much room as dtype, shape and size of a tensor usually take."""
_STATISTICS = ("min", "max", "mean", "nan", "inf")
_Statistics = dict[tuple[object, ...], dict[str, object]]


def command(
    root: Root,
    step: Step = None,
    tree: Annotated[bool, typer.Option("--tree", help="Show the whole tree, not only its first two levels.")] = False,
    tensor: Annotated[
        list[str] | None,
        typer.Option(help="Only entries at or below this path, or that match this glob; repeatable.", metavar="GLOB"),
    ] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Read the tensors: minimum, maximum, mean, number of NaN and Inf.")
    ] = False,
    rank: Rank = None,
    json: Json = False,
) -> None:
    """Show the state in a checkpoint as a tree.

    Paths, dtypes, shapes, sharding, sizes and plain values. The tree is cut at its second level, unless --tree is
    given. With --tensor or --stats, it is a table.

    Example: stillframe show runs/gpt 1000 --tensor 'model/*.weight' --stats
    """
    with open_stored(root, step, rank) as stored:
        checkpoint = stored.checkpoint
        entries = contents.entries(stored)
        chosen = contents.matching(entries, tensor) if tensor else entries
        figures = _read(stored, chosen) if stats else {}
        if json:
            head = {"root": root_address(root), "step": checkpoint.step, "save": checkpoint.save}
            about = {"bytes": checkpoint.manifest.bytes, "ranks": checkpoint.ranks}
            told = output.manifest_json(checkpoint.manifest) | {"metadata": _metadata(checkpoint)}
            listed = [_json(each) | figures.get(each.key, {}) for each in chosen]
            output.print_json(head | about | told | {"entries": listed})
            return
        _print_head(checkpoint)
        if tensor or stats:
            _print_table([each for each in chosen if tensor or each.kind != "value"], figures)
        else:
            _print_tree(chosen, sys.maxsize if tree else _DEPTH)


def _read(stored: Stored, chosen: Sequence[Entry]) -> _Statistics:
    from stillframe.restoring.statistics import statistics

    read = [each for each in chosen if each.kind != "value"]
    figures: _Statistics = {}
    with output.progress("reading", sum(each.bytes for each in read)) as advance:
        for each, found in zip(read, tensors(stored, read), strict=True):
            made = statistics(found)
            figures[each.key] = {name: getattr(made, name) for name in _STATISTICS}
            advance(each.bytes)
    return figures


def _json(each: Entry) -> dict[str, object]:
    found: dict[str, object] = {"path": each.name, "kind": each.kind}
    if each.kind == "value":
        return found | {"value": each.value}
    boxes = [{"rank": box.rank, "offset": box.offset, "shape": box.shape} for box in each.boxes]
    return found | {
        "dtype": each.dtype, "shape": each.shape, "bytes": each.bytes, "tied_to": each.tied_to or None,
        "sharding": each.sharding or None, "parts": boxes,
    }  # fmt: skip


def _print_head(checkpoint: Checkpoint) -> None:
    manifest = checkpoint.manifest
    ranks = format_count(manifest.world_size, "rank")
    if len(checkpoint.ranks) != manifest.world_size:
        ranks = f"{format_ranks(checkpoint.ranks)} of {manifest.world_size}"
    when = f"saved {format_time(manifest.saved_unix_s)}"
    output.say(f"step {checkpoint.step}: {format_bytes(manifest.bytes)} of data, {ranks}, {when}")
    save, parent = checkpoint.save, manifest.parent
    origin = "began without a checkpoint"
    if parent is not None:
        origin = f"continued from step {parent.step} of start {parent.epoch}"
    again = f" (attempt {save.attempt})" if save.attempt > 1 else ""
    output.say(f"saved by start {save.epoch} of the run{again}, which {origin}")
    if metadata := _metadata(checkpoint):
        output.say(f"metadata: {output.format_metadata(metadata)}")


def _metadata(checkpoint: Checkpoint) -> dict[str, Any]:
    """Rank 0's; in a root that the ranks do not share, that of the first rank here."""
    if len(checkpoint.ranks) == checkpoint.world_size and checkpoint.manifest.metadata:
        return checkpoint.manifest.metadata
    return checkpoint.of(checkpoint.ranks[0]).seal.metadata


def _print_table(chosen: Sequence[Entry], figures: _Statistics) -> None:
    names = _STATISTICS if figures else ()
    rows = []
    for each in chosen:
        if each.kind == "value":
            cells = ["", "", "", "", contents.text_of(each.value)]
        else:
            size = f"= {each.tied_to}" if each.tied_to else format_bytes(each.bytes)
            cells = [each.dtype, output.format_shape(each.shape), size, each.sharding, ""]
        found = [figures.get(each.key, {}).get(name) for name in names]
        rows.append([each.name, *cells, *map(_figure, found)])
    columns = ["path", "dtype", "shape", "size", "sharding", "value", *names]
    optional = ["sharding", *(("size", "dtype", "shape", "inf", "nan") if names else ())]
    output.table(columns, rows, right=["size", *names], optional=optional, text=["path", "value"])


def _figure(value: object) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _print_tree(chosen: Sequence[Entry], depth: int) -> None:
    is_leaf = len(chosen) == 1 and not chosen[0].path
    rows = [("~", _described(chosen[0]))] if is_leaf else _rows(chosen, 0, depth, "")
    width = output.fit([name for name, _ in rows], _DESCRIBED)
    for name, text in rows:
        output.say(f"{name:<{width}}  {text}", indent=width + 2)


def _rows(entries: Sequence[Entry], level: int, depth: int, indent: str) -> list[tuple[str, str]]:
    """The rows of entries whose paths are the same up to ``level``."""
    groups: dict[object, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.path[level], []).append(entry)
    rows = []
    for number, (key, found) in enumerate(groups.items(), 1):
        is_last = number == len(groups)
        name = f"{indent}{'└─ ' if is_last else '├─ '}{key}"
        rows += [(name, _described(each)) for each in found if len(each.path) == level + 1]
        below = [each for each in found if len(each.path) > level + 1]
        if below:
            rows.append((name, _summary(below)))
        if below and level + 1 < depth:
            rows += _rows(below, level + 1, depth, indent + ("   " if is_last else "│  "))
    return rows


def _summary(found: Sequence[Entry]) -> str:
    values = sum(each.kind == "value" for each in found)
    parts = []
    if values < len(found):
        parts += [format_count(len(found) - values, "tensor"), format_bytes(sum(each.bytes for each in found))]
    if values:
        parts.append(format_count(values, "value"))
    return f"({', '.join(parts)})"


def _described(entry: Entry) -> str:
    if entry.kind == "value":
        return f"= {contents.text_of(entry.value)}"
    size = f"same memory as {entry.tied_to}" if entry.tied_to else format_bytes(entry.bytes)
    return f"{entry.dtype}{output.format_shape(entry.shape)}  {size}  {entry.sharding}".rstrip()
