"""The commands, their exit codes, and what happens to an error: one line on standard error, never a traceback.

Only a bug shows a traceback.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterable
from typing import Annotated

import typer

from stillframe import errors
from stillframe.cli import output

EXIT_CODES: list[tuple[int, str, tuple[type[errors.StillframeError], ...]]] = [
    (0, "done, and nothing wrong", ()),
    (1, "a bug: please report the traceback", ()),
    (2, "the command line is wrong", (errors.ConfigError,)),
    (3, "there is no such root, step or entry", (errors.NotFoundError,)),
    (4, "damaged: bytes are not those that were written", (errors.IntegrityError,)),
    (5, "written by a newer stillframe", (errors.VersionError,)),
    (6, "the storage refused", (errors.StorageError,)),
    (7, "busy: a run is at work there", (errors.BusyError, errors.KeeperError, errors.DeadlineError)),
    (8, "what is stored does not fit what is asked for", (errors.StateError,)),
    (9, "it exists already, and was left alone", (errors.ExistsError,)),
    (10, "`diff`: they differ", ()),
    (11, "`doctor`: something is to be done", ()),
    (130, "interrupted (Ctrl-C)", ()),
]

COMMANDS = {
    "list": "look:list_steps",
    "show": "look:show",
    "verify": "check:verify",
    "diff": "compare:diff",
    "export": "move:export",
    "import": "move:import_files",
    "prune": "clean:prune",
    "doctor": "check:doctor",
    "watch": "live:watch",
    "trace": "live:trace",
    "report": "live:report",
}
"""Where each is; in the order of the help."""


def command(name: str) -> Callable[..., None]:
    module, _, function = COMMANDS[name].partition(":")
    found: Callable[..., None] = getattr(importlib.import_module(f"stillframe.cli.{module}"), function)
    return found


def make_app(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """With these commands: to run one, the modules of the others need not be imported."""
    app = typer.Typer(
        name="stillframe",
        help="See, check, compare, move and clean checkpoints.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
        rich_markup_mode=None,
    )
    app.callback()(_options)
    for name in names:
        app.command(name)(command(name))
    return app


def _version(is_asked: bool) -> None:
    if is_asked:
        from stillframe.version import VERSION

        sys.stdout.write(f"stillframe {VERSION}\n")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    pass


def run() -> None:
    """Never returns."""
    _raise_file_limit()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that cannot show a letter must not be the end
            stream.reconfigure(errors="backslashreplace")
    # A reader that goes away (`| head`) ends us silently, as it does any other tool.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    is_one = len(sys.argv) > 1 and sys.argv[1] in COMMANDS and "_STILLFRAME_COMPLETE" not in os.environ
    try:
        make_app(sys.argv[1:2] if is_one else COMMANDS)(prog_name="stillframe")
    except errors.StillframeError as error:
        _end(str(error), code_of(error))
    except OSError as error:
        _end(f"{error.filename or 'the system'}: {error.strerror or error}", 6)


def code_of(error: errors.StillframeError) -> int:
    return next((code for code, _, kinds in EXIT_CODES if isinstance(error, kinds)), 1)


def _end(message: str, code: int) -> None:
    output.errors().print(f"stillframe: {message}", soft_wrap=True)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    sys.exit(code)


def _raise_file_limit() -> None:
    """Parts of thousands of ranks are open together when a sharded tensor is put together."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 1 << 20)), hard))
