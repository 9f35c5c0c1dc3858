"""docs/CLI.md, made from the commands themselves: ``python -m stillframe.cli.document > docs/CLI.md``."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import typer.main

from stillframe.cli.app import COMMANDS, EXIT_CODES, make_app

_HEAD = """# The command line

<!-- Made by `make docs` from the commands; do not edit. -->

`stillframe COMMAND …`, or `python -m stillframe COMMAND …`. Every command works on any root; none changes anything
without saying what. `--json`, where there is one, prints one document for programs. Errors are one line on standard
error, and the exit code tells their kind. `stillframe --install-completion` teaches the shell to complete.
"""


def document() -> str:
    made: Any = typer.main.get_command(make_app())
    return "\n".join([_HEAD, _codes(), *(_command(name, made.commands[name]) for name in COMMANDS)])


def _codes() -> str:
    rows = []
    for code, meaning, kinds in EXIT_CODES:
        names = ", ".join(f"`{kind.__name__}`" for kind in kinds)
        rows.append(f"| {code} | {meaning} | {names} |")
    return "## Exit codes\n\n| code | means | errors |\n| ---: | --- | --- |\n" + "\n".join(rows) + "\n"


def _command(name: str, command: Any) -> str:
    text, _, example = inspect.cleandoc(command.callback.__doc__).partition("Example")
    examples = example.partition(":")[2].strip().split("; ")
    shown = "\n".join(" ".join(each.split()) for each in examples)
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option" and each.name != "help"]
    usage = " ".join(["stillframe", name, *map(_placeholder, arguments), "[OPTIONS]"])
    rows = [f"| `{_placeholder(each)}` | {each.help} |" for each in arguments]
    rows += [f"| {_option(each)} | {each.help}{_default(each)} |" for each in options]
    table = "| | |\n| --- | --- |\n" + "\n".join(rows) + "\n"
    return (
        f"## {name}\n\n{text.strip()}\n\n```\n{usage}\n```\n\n{table}\n```console\n$ "
        + shown.replace("\n", "\n$ ")
        + "\n```\n"
    )


def _placeholder(argument: Any) -> str:
    name = (argument.metavar or argument.name or "").upper()
    return name if argument.required else f"[{name}]"


def _option(option: Any) -> str:
    names = ", ".join(f"`{each}`" for each in option.opts)
    choices = [str(getattr(each, "value", each)) for each in getattr(option.type, "choices", ())]
    what = " or ".join(choices) or option.metavar or option.name.upper()
    return names if option.is_flag else f"{names} {what}"


def _default(option: Any) -> str:
    if isinstance(option.show_default, str):
        return f" Default: {option.show_default}."
    return "" if option.is_flag or option.default is None else f" Default: {option.default}."


if __name__ == "__main__":
    sys.stdout.write(document())
