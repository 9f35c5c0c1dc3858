"""``export`` and ``import``: to and from the files that others use."""

from __future__ import annotations

import os
import signal
import time
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from stillframe.checkpoint import survey
from stillframe.checkpoint.catalog import Catalog
from stillframe.checkpoint.stored import Stored
from stillframe.cli import output
from stillframe.cli.arguments import Json, Rank, Root
from stillframe.convert import choose
from stillframe.errors import ConfigError, ExistsError, NotFoundError
from stillframe.units import format_bytes, parse_bytes

_TORCH = {".pt", ".pth", ".bin", ".ckpt"}


class Format(str, Enum):
    """What is written."""

    SAFETENSORS = "safetensors"
    TORCH = "torch"
    DCP = "dcp"


def export(
    root: Root,
    step_and_to: Annotated[
        list[str], typer.Argument(help="The step (the newest if left out), and where to.", metavar="[STEP] TO")
    ],
    format: Annotated[
        Format | None,
        typer.Option(help="By default what the name says: *.pt is torch's, everything else safetensors."),
    ] = None,
    below: Annotated[
        str | None,
        typer.Option(help="Where in the state the weights are.", metavar="PATH", show_default="model"),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="The whole state (optimizer, values), not only the weights.")
    ] = False,
    rank: Rank = None,
    max_file: Annotated[str, typer.Option(help="Larger sets of safetensors are split.", metavar="SIZE")] = "5GB",
    json: Json = False,
) -> None:
    """Write a checkpoint for other tools to read.

    As safetensors (one file, or a directory as Hugging Face lays it out), as torch.save does, or for DCP. Weights
    only, unless --all is given. Sharded tensors are assembled. Everything is verified while it is read; nothing
    appears under its final name before it is complete; what is there already is left alone (exit code 9).

    Examples: stillframe export runs/gpt 1000 gpt-hf; stillframe export runs/gpt gpt.pt
    """
    step, to = _step_and_to(step_and_to)
    if everything and below is not None:
        raise ConfigError("give --below PATH or --all, not both")
    kind = format or (Format.TORCH if to.suffix in _TORCH else Format.SAFETENSORS)
    largest = parse_bytes(max_file, "--max-file")
    survey.check_root(root)
    if os.path.lexists(to):
        raise ExistsError(f"{to} is there already, and is left alone; choose another name or remove it")
    began = time.monotonic()
    with survey.open_checkpoint(root, step, rank) as checkpoint:
        if rank is not None and rank not in checkpoint.ranks:
            raise NotFoundError(f"step {checkpoint.step} has no rank {rank}; it was saved by {checkpoint.world_size}")
        stored = Stored(checkpoint, checkpoint.ranks[0] if rank is None else rank, is_merged=True)
        chosen = choose.everything(stored) if everything else choose.weights(stored, below, rank is not None)
        from stillframe.convert import export as exporting  # torch: not before everything else is right

        with output.progress("exporting", sum(each.entry.bytes for each in chosen.tensors)) as advance:
            if kind is Format.SAFETENSORS:
                made = exporting.to_safetensors(stored, chosen, to, largest, advance)
            else:
                made = (exporting.to_torch if kind is Format.TORCH else exporting.to_dcp)(stored, chosen, to, advance)
        left_out = [each.name for each in chosen.leaves if each.entry.kind == "value"]
        if kind is not Format.SAFETENSORS:
            left_out = []
    seconds = time.monotonic() - began
    if json:
        output.print_json(
            {
                "step": checkpoint.step, "format": kind.value, "files": made.files, "tensors": made.tensors,
                "bytes": made.bytes, "left_out": left_out, "seconds": seconds,
            }
        )  # fmt: skip
        return
    for path in made.files:
        output.say(f"wrote {path}")
    output.console().print(
        f"{made.tensors} tensors, {format_bytes(made.bytes)} of step {checkpoint.step}, {seconds:.1f} s"
    )
    if kind is Format.SAFETENSORS and len(made.files) and to.suffix != ".safetensors":
        output.say("for from_pretrained, put the model's config.json (and tokenizer) beside it")
    if left_out:
        output.say(f"left out, since safetensors holds only tensors: {len(left_out)} values")


def _size(source: Path) -> int:
    files = source.iterdir() if source.is_dir() else [source]
    return sum(each.stat().st_size for each in files if each.is_file())


def _step_and_to(given: list[str]) -> tuple[int | None, Path]:
    if len(given) == 1 and not given[0].isdecimal():
        return None, Path(given[0])
    if len(given) == 2 and given[0].isdecimal():
        return int(given[0]), Path(given[1])
    raise ConfigError(f"give ROOT [STEP] TO; {' '.join(given)!r} is not [STEP] TO")


def import_files(
    source: Annotated[
        Path,
        typer.Argument(help="A torch.save file, a safetensors file or directory, or a DCP directory.", metavar="FROM"),
    ],
    root: Annotated[Path, typer.Argument(help="The root that gets it; made if need be.", show_default=False)],
    step: Annotated[int, typer.Option(help="The step that it becomes.")] = 0,
    under: Annotated[
        str | None,
        typer.Option(help="The key it is put under; 'model' for a plain set of tensors.", metavar="KEY"),
    ] = None,
    json: Json = False,
) -> None:
    """Make a checkpoint of other tools' files.

    What torch.save, safetensors or DCP have written becomes a step that a run can resume from.

    A torch.save file is read with weights_only=True: no code in it is run. DCP's own index is a pickle that DCP reads:
    import only DCP directories that you trust.

    Example: stillframe import old/model.pt runs/gpt --step 1000
    """
    began = time.monotonic()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # a keeper that dies is an error, and not the end of us
    from stillframe.convert.importing import import_state

    with output.progress("saving", _size(source)) as advance:
        size = import_state(source, root, step, under, advance)
    newest = Catalog(root).latest()
    seconds = time.monotonic() - began
    if json:
        output.print_json({"root": root.absolute(), "step": step, "bytes": size, "seconds": seconds, "latest": newest})
    else:
        output.say(f"step {step} in {root}: {format_bytes(size)}, committed in {seconds:.1f} s")
        if newest is not None and newest > step:
            output.say(f"step {newest} is newer: restore() takes that one, unless it is asked for step {step}")
