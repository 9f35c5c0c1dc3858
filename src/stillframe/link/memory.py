"""How much memory this process may still take: of the machine, of its control groups, and by its own limits.

A control group counts with every group above it, as far as its mount shows them: a job's, a step's, a container's, or
systemd's.  Page cache counts as free, because the kernel drops it when a process asks for memory; memory in swap does
not.  A file that is not there, or cannot be read, is a limit that is not known: it is ignored.

All of it is read below a directory, ``/`` unless a test has built another.
"""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from stillframe.errors import ConfigError, StorageError
from stillframe.store import files

_PAGE_BYTES = resource.getpagesize()


@dataclass(frozen=True, slots=True)
class Room:
    """How many bytes can still be allocated, and by which limit."""

    nbytes: int
    of: str


def shared_room(root: Path = Path("/")) -> Room:
    """The least of what the machine and this process's control groups have left.  Other processes take from it, too.

    Raises :class:`ConfigError` if the machine does not tell.
    """
    return min([_machine(root), *_groups(root)], key=lambda room: room.nbytes)


def own_rooms(root: Path = Path("/")) -> list[Room]:
    """What the limits of this process alone (``ulimit``) leave for a mapped file in memory."""
    rooms = []
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    used = _numbers(root / "proc/self/statm")
    if most != resource.RLIM_INFINITY and used:
        rooms.append(Room(max(most - used[0] * _PAGE_BYTES, 0), "address space (ulimit -v)"))
    most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if most != resource.RLIM_INFINITY:
        rooms.append(Room(most, "the size of a file (ulimit -f), which the arena is"))
    return rooms


# --- the machine -----------------------------------------------------------------------------


def _machine(root: Path) -> Room:
    for line in _lines(root / "proc/meminfo"):
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return Room(int(rest.split()[0]) * 1024, "the machine's memory")
    raise ConfigError("/proc/meminfo does not say how much memory is available: give arena= a size")


# --- control groups --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Names:
    """How one version of control groups calls what we read."""

    limits: tuple[str, ...]
    usage: str
    cache: tuple[str, ...]
    """In ``memory.stat``: page cache of the group and of those below it."""
    inherited: str = ""
    """In ``memory.stat``: the least limit of the group and of those above it, also of those that no mount shows."""


_V1 = _Names(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
    "hierarchical_memory_limit",
)
_V2 = _Names(("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"))
"""At ``memory.high`` the kernel slows a process down until it hardly moves: a limit like the other."""


def _groups(root: Path) -> Iterator[Room]:
    """What is left of each limit that holds for this process."""
    mounts = list(_mounts(root))
    for version, own in _own_paths(root):
        names = _V1 if version == 1 else _V2
        shown = [(point, _below(own, top)) for kind, point, top in mounts if kind == version]
        if all(below is None for _, below in shown):
            # A container may see its own group at the top of the mount, and know it by another path.
            shown = [(point, PurePosixPath()) for point, _ in shown]
        for point, below in shown:
            if below is not None:
                for depth in range(len(below.parts) + 1):
                    yield from _rooms(root / point.relative_to("/") / PurePosixPath(*below.parts[:depth]), names)


def _own_paths(root: Path) -> Iterator[tuple[int, PurePosixPath]]:
    """The version and the path of each group of this process that may limit memory."""
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if "memory" in controllers.split(","):
            yield 1, PurePosixPath(path)
        elif number == "0" and not controllers:
            yield 2, PurePosixPath(path)


def _mounts(root: Path) -> Iterator[tuple[int, PurePosixPath, PurePosixPath]]:
    """Where groups that may limit memory can be looked at: version, mount point, and the group that is seen there."""
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, file_system = line.partition(" - ")
        fields, (kind, *more) = mount.split(), file_system.split() or [""]
        if len(fields) < 5 or not fields[4].startswith("/"):
            continue
        top, point = (PurePosixPath(_unescaped(text)) for text in fields[3:5])
        if kind == "cgroup2":
            yield 2, point, top
        elif kind == "cgroup" and "memory" in more[-1].split(","):
            yield 1, point, top


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _below(own: PurePosixPath, top: PurePosixPath) -> PurePosixPath | None:
    """Where our group lies below a mount that shows ``top``; ``None`` if it does not show it."""
    return own.relative_to(top) if own.is_relative_to(top) and ".." not in own.parts else None


def _rooms(group: Path, names: _Names) -> Iterator[Room]:
    usage = _number(group / names.usage)
    if usage is None:
        return
    stat = dict(line.split(maxsplit=1) for line in _lines(group / "memory.stat") if " " in line)
    limits = {name: _number(group / name) for name in names.limits}
    if names.inherited:
        limits[names.inherited] = _to_number(stat.get(names.inherited, ""))
    cache = sum(_to_number(stat.get(name, "")) or 0 for name in names.cache)
    for name, limit in limits.items():
        if limit is not None:
            room = limit - max(usage - cache, 0)
            yield Room(max(room, 0), f"the memory of this process's control group ({name} in {group})")


# --- files -----------------------------------------------------------------------------------


def _lines(path: Path) -> list[str]:
    try:
        return files.read_file(path).decode(errors="surrogateescape").splitlines()
    except StorageError:
        return []


def _numbers(path: Path) -> list[int]:
    return [int(word) for line in _lines(path)[:1] for word in line.split() if word.isdigit()]


def _number(path: Path) -> int | None:
    """``None`` also for "max", which is no limit."""
    return next(iter(_numbers(path)), None)


def _to_number(text: str) -> int | None:
    return int(text) if text.isdigit() else None
