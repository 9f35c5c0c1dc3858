"""The ``stillframe`` command: finds the module of a command, and turns an error into one line and an exit code.

Only a bug shows a traceback.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import keyword
import os
import signal
import sys
from collections.abc import Callable, Iterable
from typing import Annotated

import typer

from stillframe import errors
from stillframe.cli import exit_codes, output
from stillframe.cli.steps import readable

COMMANDS = (
    "list", "show", "verify", "diff", "copy", "export", "import", "prune", "remove", "pin", "unpin", "doctor", "watch",
    "trace", "report",
)  # fmt: skip
"""In the order of the help.  Each is the function ``command`` of the module with its name."""


def load(name: str) -> Callable[..., None]:
    """Import the module of a command; a name that Python reserves ends with an underscore there."""
    module = importlib.import_module(f"stillframe.cli.{name}{'_' if keyword.iskeyword(name) else ''}")
    command: Callable[..., None] = module.command
    return command


def make_app(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """The application with these commands; imports no module of another command."""
    app = typer.Typer(
        name="stillframe",
        help="Inspect, verify, compare, copy, convert and remove checkpoints.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
        rich_markup_mode=None,
    )
    app.callback()(_options)
    for name in names:
        app.command(name)(load(name))
    return app


def _version(is_asked: bool) -> None:
    if is_asked:
        from stillframe.version import VERSION

        output.say(f"stillframe {VERSION}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command that ``sys.argv`` names.  Never returns."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal may lack a character
            stream.reconfigure(errors="backslashreplace")
    # A closed pipe (`| head`) ends the process silently, as with any other tool.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    is_one = len(sys.argv) > 1 and sys.argv[1] in COMMANDS and "_STILLFRAME_COMPLETE" not in os.environ
    try:
        make_app(sys.argv[1:2] if is_one else COMMANDS)(readable(sys.argv[1:]), prog_name="stillframe")
    except errors.StillframeError as error:
        _exit(str(error), exit_codes.exit_code(error))
    except OSError as error:
        _exit(f"{error.filename or 'the system'}: {error.strerror or error}", exit_codes.STORAGE)


def _exit(message: str, code: int) -> None:
    lines = map(output.printable, message.splitlines())
    with contextlib.suppress(OSError):
        sys.stderr.write("\n".join(["stillframe: " + next(lines, ""), *lines]) + "\n")
        sys.stdout.flush()
    sys.exit(code)
