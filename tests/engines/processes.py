"""Which processes an engine has started: tests end their own, and no others."""

from __future__ import annotations

from pathlib import Path


def below(pid: int, title: str) -> list[int]:
    """The processes with a title that descend from a process, the nearest of each line."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            name = (path / "cmdline").read_bytes()
        except OSError:  # it has just ended
            continue
        if parent == pid:
            found += [int(path.name)] if title.encode() in name else below(int(path.name), title)
    return found
