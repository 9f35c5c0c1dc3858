"""The ``stillframe`` command: see, check, compare and clean checkpoints.  (docs/CLI.md is made from it.)

Each command is a module: its function parses, asks :mod:`stillframe.inspect` or the catalog, and prints a table, or one
JSON document with ``--json``.  Nothing is decided here.
"""

from __future__ import annotations


def main() -> None:
    """The entry point; imported when used, so that a completion costs little."""
    from stillframe.cli.app import run

    run()
