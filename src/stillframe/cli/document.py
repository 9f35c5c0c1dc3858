"""Generates docs/CLI.md from the commands: ``python -m stillframe.cli.document > docs/CLI.md``."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import typer.main

from stillframe.cli.app import COMMANDS, make_app
from stillframe.cli.exit_codes import EXIT_CODES

_HEAD = """# The command line

<!-- Generated from the commands by `make docs`; do not edit. -->

`stillframe COMMAND …`, or `python -m stillframe COMMAND …`. Only `copy`, `prune`, `remove`, `pin`, `unpin`,
`import` and `doctor` with `--quarantine` or `--finish` change a root, the last one its tiers. With `--json`, a command
prints one JSON document for programs. An error is one line on standard error, and the exit code tells its kind.
`stillframe --install-completion` installs completion for the shell.
"""


def document() -> str:
    made: Any = typer.main.get_command(make_app())
    return "\n".join([_HEAD, _codes(), *(_command(name, made.commands[name]) for name in COMMANDS)])


def _codes() -> str:
    rows = [
        f"| {code} | {meaning} | {', '.join(f'`{kind.__name__}`' for kind in kinds)} |"
        for code, meaning, kinds in EXIT_CODES
    ]
    return "\n".join(["## Exit codes\n", "| code | meaning | errors |", "| ---: | --- | --- |", *rows, ""])


def _command(name: str, command: Any) -> str:
    text, _, examples = inspect.cleandoc(command.callback.__doc__).partition("Example")
    shown = [f"$ {' '.join(each.split())}" for each in examples.partition(":")[2].split("; ")]
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option" and each.name != "help"]
    usage = " ".join(["stillframe", name, *map(_placeholder, arguments), "[OPTIONS]"])
    rows = [f"| `{_placeholder(each)}` | {each.help} |" for each in arguments]
    rows += [f"| {_option(each)} | {each.help}{_default(each)} |" for each in options]
    parts = [f"## {name}\n", f"{text.strip()}\n", f"```\n{usage}\n```\n", "| | |", "| --- | --- |", *rows, ""]
    return "\n".join([*parts, "```console", *shown, "```\n"])


def _placeholder(argument: Any) -> str:
    name = (argument.metavar or argument.name or "").upper()
    return name if argument.required else f"[{name}]"


def _option(option: Any) -> str:
    names = ", ".join(f"`{each}`" for each in option.opts)
    choices = [str(getattr(each, "value", each)) for each in getattr(option.type, "choices", ())]
    what = " or ".join(choices) or option.metavar or option.name.upper()
    return names if option.is_flag else f"{names} {what}".replace("|", "\\|")


def _default(option: Any) -> str:
    if isinstance(option.show_default, str):
        return f" Default: {option.show_default}."
    return "" if option.is_flag or option.default is None else f" Default: {option.default}."


if __name__ == "__main__":
    sys.stdout.write(document())
