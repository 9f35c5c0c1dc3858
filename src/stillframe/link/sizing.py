"""How large the arena is: as the user says, or as the first state needs and the machine can give."""

from __future__ import annotations

import logging
from collections.abc import Callable

from stillframe.errors import ConfigError, StorageError
from stillframe.link.arena import Arena
from stillframe.model import CHUNK_BYTES
from stillframe.store import files
from stillframe.units import format_bytes, parse_bytes, round_up

logger = logging.getLogger("stillframe")

_AUTO_SHARE = 0.5
"""``arena="auto"`` takes at most this fraction of the memory available."""
_SPARE_SPANS = 2


def arena_of(given: int | str) -> tuple[Arena | None, Callable[[int], Arena]]:
    """An arena of the size given, or None for "auto"; and what makes one for the first state.  Raises: ConfigError."""
    if isinstance(given, str) and given.startswith("auto"):
        most = None if given == "auto" else parse_bytes(given.removeprefix("auto:"), "arena")
        return None, lambda state_bytes: auto_arena(state_bytes, most)
    return fixed_arena(parse_bytes(given, "arena")), auto_arena


def fixed_arena(size: int) -> Arena:
    """Raises :class:`ConfigError` if it is too small to work with, or more than there is."""
    if size < 2 * CHUNK_BYTES:
        raise ConfigError(f"arena={size} bytes is smaller than two chunks ({format_bytes(2 * CHUNK_BYTES)})")
    available = memory_available_bytes()
    if size > available:
        raise ConfigError(f"arena={format_bytes(size)} exceeds the memory available ({format_bytes(available)})")
    return Arena(size)


def auto_arena(state_bytes: int, most: int | None = None) -> Arena:
    """Room for one state and a little more, so that the next save can begin; at most ``most`` bytes.

    If memory is short, half of what is available, with a warning.
    """
    wanted = round_up(state_bytes, CHUNK_BYTES) + _SPARE_SPANS * CHUNK_BYTES
    if most is not None:
        wanted = min(wanted, max(most, 2 * CHUNK_BYTES))
    room = int(memory_available_bytes() * _AUTO_SHARE)
    if wanted <= room:
        logger.info("arena: %s, for a state of %s", format_bytes(wanted), format_bytes(state_bytes))
        return Arena(wanted)
    size = max(room, 2 * CHUNK_BYTES)
    logger.warning(
        "arena: %s, half of the memory available, for a state of %s: updates may wait for storage",
        format_bytes(size), format_bytes(state_bytes),
    )  # fmt: skip
    return Arena(size)


def memory_available_bytes() -> int:
    """What this process may still allocate: the machine's free memory, or less where a cgroup says so."""
    available = _meminfo_available()
    for limit, usage in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            room = int(files.read_file(limit)) - int(files.read_file(usage))
        except (StorageError, ValueError):
            continue
        available = min(available, max(room, 0))
    return available


def _meminfo_available() -> int:
    for line in files.read_file("/proc/meminfo").decode().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise ConfigError("/proc/meminfo does not say how much memory is available: give arena= a size")
