"""``stillframe export``: a checkpoint as files for other tools."""

from __future__ import annotations

import time
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from stillframe.checkpoint import survey
from stillframe.cli import output
from stillframe.cli.arguments import Json, Rank, Root
from stillframe.cli.steps import is_step
from stillframe.cli.stored import open_stored
from stillframe.convert import choose
from stillframe.errors import ConfigError, ExistsError
from stillframe.store import files
from stillframe.units import format_bytes, format_count, format_seconds, parse_bytes

_TORCH = {".pt", ".pth", ".bin", ".ckpt"}


class Format(str, Enum):
    """What is written."""

    SAFETENSORS = "safetensors"
    TORCH = "torch"
    DCP = "dcp"


def command(
    root: Root,
    step_and_to: Annotated[
        list[str],
        typer.Argument(help="The step (default: the newest), and the file or directory to write.", metavar="[STEP] TO"),
    ],
    format: Annotated[
        Format | None, typer.Option(help="Default: torch if TO ends with .pt, .pth, .bin or .ckpt, else safetensors.")
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(help="The entry of the state that holds the weights.", metavar="PATH", show_default="model"),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Export the whole state (optimizer, values), not only the weights.")
    ] = False,
    rank: Rank = None,
    max_file: Annotated[
        str, typer.Option(help="Split safetensors into files of at most this size.", metavar="SIZE")
    ] = "5GB",
    json: Json = False,
) -> None:
    """Export a checkpoint for other tools.

    Writes safetensors (one file, or a directory as Hugging Face lays it out), a torch.save file, or a DCP directory.
    Exports only the weights, unless --all is given. Sharded tensors are assembled. All data is verified while it is
    read. The target appears under its name only when it is complete; an existing one is never changed (exit code 9).

    Examples: stillframe export runs/gpt 1000 gpt-hf; stillframe export runs/gpt gpt.pt
    """
    step, to = _step_and_to(step_and_to)
    if everything and key is not None:
        raise ConfigError("give --key PATH or --all, not both")
    kind = format or (Format.TORCH if to.suffix in _TORCH else Format.SAFETENSORS)
    largest = parse_bytes(max_file, "--max-file")
    survey.open_root(root)
    _check_absent(to)
    began = time.monotonic()
    with open_stored(root, step, rank) as stored:
        chosen = choose.chosen(stored, everything, key, rank is not None)
        from stillframe.convert import (
            export as exporting,
        )  # imports torch: only once the arguments are known to be good

        with output.progress("exporting", sum(each.entry.bytes for each in chosen.tensors)) as advance:
            if kind is Format.SAFETENSORS:
                made = exporting.to_safetensors(stored, chosen, to, largest, advance)
            else:
                made = (exporting.to_torch if kind is Format.TORCH else exporting.to_dcp)(stored, chosen, to, advance)
    is_tensors_only = kind is Format.SAFETENSORS
    left_out = [each.name for each in chosen.leaves if each.entry.kind == "value"] if is_tensors_only else []
    seconds = time.monotonic() - began
    found = stored.checkpoint.step
    if json:
        output.print_json(
            {
                "step": found, "format": kind.value, "files": made.files, "tensors": made.tensors,
                "bytes": made.bytes, "left_out": left_out, "seconds": seconds,
            }
        )  # fmt: skip
        return
    for path in made.files:
        output.say(f"wrote {path}")
    what = f"{format_count(made.tensors, 'tensor')}, {format_bytes(made.bytes)}"
    output.say(f"exported step {found}: {what}, in {format_seconds(seconds)}")
    if is_tensors_only and made.files and to.suffix != ".safetensors":
        output.say("from_pretrained also needs the model's config.json (and tokenizer) in this directory")
    if left_out:
        output.say(f"not exported, because safetensors holds only tensors: {format_count(len(left_out), 'value')}")


def _check_absent(to: Path) -> None:
    if files.is_taken(to):
        raise ExistsError(f"{to} exists already and is not changed; choose another name or remove it")


def _step_and_to(given: list[str]) -> tuple[str | None, Path]:
    if len(given) == 1 and not is_step(given[0]):
        return None, Path(given[0])
    if len(given) == 2 and is_step(given[0]):
        return given[0], Path(given[1])
    raise ConfigError(f"give ROOT [STEP] TO; {' '.join(given)!r} is not [STEP] TO")
