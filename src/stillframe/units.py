"""Counts of bytes and sets of ranks, as people write and read them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from stillframe.errors import ConfigError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_FACTORS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12, "tb": 10**12,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": 1 << 40,
}  # fmt: skip
_MAX_RANGES = 8
_SIZE = re.compile(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([a-z]*)\s*", re.ASCII | re.IGNORECASE)


def parse_bytes(size: int | str, what: str) -> int:
    """``"2GiB"``, ``"512 MB"`` or a number of bytes; ``what`` names it in the error."""
    if isinstance(size, int) and not isinstance(size, bool):
        if size < 0:
            raise ConfigError(f"{what}={size} is negative; give a number of bytes or a size such as '2GiB'")
        return size
    found = _SIZE.fullmatch(size) if isinstance(size, str) else None
    factor = _FACTORS.get(found[2].lower()) if found else None
    if found is None or factor is None:
        raise ConfigError(f"{what}={size!r} is not a size; write it as '2GiB', '512MiB', '1.5GB' or a number of bytes")
    return int(float(found[1]) * factor) if "." in found[1] else int(found[1]) * factor


def format_bytes(count: float) -> str:
    for unit, factor in (("TiB", 1 << 40), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} bytes"


def round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def format_ranks(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0-2, 5``, ``ranks 1, 3, 5, … and 40 more``."""
    ordered = sorted(ranks)
    ranges: list[tuple[int, int]] = []
    for rank in ordered:
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1] = ranges[-1][0], rank
        else:
            ranges.append((rank, rank))
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges[:_MAX_RANGES]]
    left = sum(last - first + 1 for first, last in ranges[_MAX_RANGES:])
    more = f", … and {left} more" if left else ""
    return f"rank{'s' if len(ordered) != 1 else ''} {', '.join(texts)}{more}"
