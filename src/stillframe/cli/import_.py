"""``stillframe import``: a checkpoint from the files of other tools."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Annotated

import typer

from stillframe.checkpoint.catalog import Catalog
from stillframe.cli import output
from stillframe.cli.arguments import Json
from stillframe.store import files
from stillframe.units import format_bytes, format_seconds


def command(
    source: Annotated[
        Path,
        typer.Argument(help="A torch.save file, a safetensors file or directory, or a DCP directory.", metavar="FROM"),
    ],
    root: Annotated[Path, typer.Argument(help="The root to save to; created if it does not exist.")],
    step: Annotated[int, typer.Option(help="The step to save as.")] = 0,
    under: Annotated[
        str | None,
        typer.Option(help="The key to put the state under. Default: 'model' for a flat set of tensors.", metavar="KEY"),
    ] = None,
    json: Json = False,
) -> None:
    """Make a checkpoint from the files of other tools.

    Reads what torch.save, safetensors or DCP wrote, and saves it as a step that a run can resume from.

    A torch.save file is read with weights_only=True: no code in it is executed. The index of a DCP directory is a
    pickle that DCP itself reads: import only DCP directories that you trust.

    Example: stillframe import old/model.pt runs/gpt --step 1000
    """
    began = time.monotonic()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # if the keeper dies, its broken pipe is an error to report
    from stillframe.convert.importing import import_state

    with output.progress("saving", files.size_of(source)) as advance:
        size = import_state(source, root, step, under, advance)
    newest = Catalog(root).latest()
    seconds = time.monotonic() - began
    if json:
        output.print_json({"root": root.absolute(), "step": step, "bytes": size, "seconds": seconds, "latest": newest})
        return
    output.say(f"committed step {step} in {root}: {format_bytes(size)}, in {format_seconds(seconds)}")
    if newest is not None and newest > step:
        output.say(f"restore() takes step {newest}, which is newer, unless it is asked for step {step}")
