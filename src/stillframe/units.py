"""Sizes, durations, times and counts, as people write and read them."""

from __future__ import annotations

import re
import time
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


def parse_rate(rate: int | str, what: str) -> int:
    """``"500MB/s"``, or a number of bytes a second; ``what`` names it in the error."""
    found = parse_bytes(rate.strip().removesuffix("/s") if isinstance(rate, str) else rate, what)
    if found < 1:
        raise ConfigError(f"{what}={rate!r}: give at least 1 byte a second, or None")
    return found


def format_bytes(count: float) -> str:
    for unit, factor in (("TiB", 1 << 40), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} bytes"


def format_seconds(seconds: float) -> str:
    """A duration with two or three digits, in the unit that fits: ``24 ms``, ``3.1 s``, ``12.5 min``."""
    if seconds < 0.9995:
        return "0 s" if seconds < 1e-6 else f"{seconds * 1e3:.2g} ms" if seconds < 0.01 else f"{seconds * 1e3:.0f} ms"
    for unit, factor in (("s", 1), ("min", 60), ("h", 3600)):
        if seconds < 99.95 * factor:
            return f"{seconds / factor:.1f} {unit}"
    return f"{seconds / 86400:.1f} days"


def format_time(unix_s: float) -> str:
    """A wall-clock time in the local time zone: ``2030-01-31 23:59:59``."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))


def format_count(count: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def format_ranks(ranks: Iterable[int], noun: str = "rank") -> str:
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
    return f"{noun}{'s' if len(ordered) != 1 else ''} {', '.join(texts)}{more}"
