"""``python -m stillframe``: the command line."""

from __future__ import annotations

from stillframe.cli import main

if __name__ == "__main__":
    main()
