"""The ``stillframe`` command: inspect, verify, compare, convert and remove checkpoints.

Each command is one module, named after it.  Its function ``command`` takes the arguments, asks
:mod:`stillframe.checkpoint`, :mod:`stillframe.convert` or :mod:`stillframe.observe`, and prints text, or one JSON
document with ``--json``.  The commands decide nothing themselves.  docs/CLI.md is generated from them.
"""

from __future__ import annotations


def main() -> None:
    """The entry point.  Imports the application only when it is called, so that this package is cheap to import."""
    from stillframe.cli import app

    app.main()
