"""How large the arena is: as the user says, or as the first state needs and the machine can give."""

from __future__ import annotations

import logging
from collections.abc import Callable

from stillframe.errors import ConfigError
from stillframe.link import memory
from stillframe.link.arena import Arena
from stillframe.model import CHUNK_BYTES
from stillframe.units import format_bytes, format_count, parse_bytes, round_up

logger = logging.getLogger("stillframe")

_AUTO_SHARE = 2
"""``arena="auto"`` takes at most one part in so many of the memory available."""
_SPARE_SPANS = 2
_LEAST_BYTES = 2 * CHUNK_BYTES


def arena_of(given: int | str, ranks_on_node: int = 1) -> tuple[Arena | None, Callable[[int], Arena]]:
    """An arena of the size given, or None for "auto"; and what makes one for the first state.

    ``ranks_on_node``: how many processes size their arenas by the same memory.  Raises: :class:`ConfigError`.
    """
    if isinstance(given, str) and given.startswith("auto"):
        most = None if given == "auto" else parse_bytes(given.removeprefix("auto:"), "arena")
        return None, lambda state_bytes: Arena(auto_bytes(state_bytes, most, ranks_on_node))
    arena = fixed_arena(parse_bytes(given, "arena"))
    return arena, lambda _state_bytes: arena


def fixed_arena(size: int) -> Arena:
    """Raises :class:`ConfigError` if it is too small to work with, or more than there is.

    Other ranks may have taken their arenas already, so it is compared with all that is left, and not with a share.
    """
    if size < _LEAST_BYTES:
        raise ConfigError(f"arena={size} bytes is smaller than two chunks ({format_bytes(_LEAST_BYTES)})")
    for room in (memory.shared_room(), *memory.own_rooms()):
        if size > room.nbytes:
            raise ConfigError(
                f"arena={format_bytes(size)} exceeds what is left of {room.of}: {format_bytes(room.nbytes)}; "
                f"give it a smaller size, or raise that limit"
            )
    return Arena(size)


def auto_bytes(state_bytes: int, most: int | None = None, ranks_on_node: int = 1) -> int:
    """Room for one state and a little more, so that the next save can begin; at most ``most`` bytes.

    If memory is short, half of this rank's share of what is available, with a warning.
    """
    wanted = round_up(state_bytes, CHUNK_BYTES) + _SPARE_SPANS * CHUNK_BYTES
    if most is not None:
        wanted = min(wanted, max(most, _LEAST_BYTES))
    shared = memory.shared_room()
    among = "" if ranks_on_node == 1 else f", divided among {format_count(ranks_on_node, 'rank')}"
    rooms = [memory.Room(shared.nbytes // ranks_on_node, shared.of + among), *memory.own_rooms()]
    least = min(rooms, key=lambda room: room.nbytes)
    room = least.nbytes // _AUTO_SHARE
    if wanted <= room:
        logger.info("arena: %s, for a state of %s", format_bytes(wanted), format_bytes(state_bytes))
        return wanted
    size = max(room, _LEAST_BYTES)
    logger.warning(
        "arena: %s, for a state of %s: half of what is left of %s. Updates may wait for storage; "
        "arena= sets another size",
        format_bytes(size), format_bytes(state_bytes), least.of,
    )  # fmt: skip
    return size
