"""Statistics of one tensor, and the difference of two.  Counts are exact; sums are taken in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from stillframe.state.dtypes import DTYPE_NAMES

_FOUR_BITS = [sign * size for sign in (1.0, -1.0) for size in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]
"""What the 16 patterns of e2m1 stand for."""
_SLICE_ITEMS = 1 << 22
"""How much is converted to float64 at a time."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of the finite items; ``None`` where there are none."""

    min: float | None
    max: float | None
    mean: float | None
    nan: int
    inf: int


@dataclass(frozen=True, slots=True)
class Difference:
    """How two tensors of one form differ.  Items count as different when their bits are."""

    items: int
    different: int
    max_abs: float | None
    """Over the items that are finite in both; ``None`` if there are none."""
    relative: float | None
    """Norm of the difference over the norm of the first, of the same items; ``None`` if that is zero."""


def statistics(tensor: torch.Tensor) -> Statistics:
    low, high, total, count, nan, inf = math.inf, -math.inf, 0.0, 0, 0, 0
    for (part,) in _slices(tensor):
        values = _real(part)
        nan += int(values.isnan().sum())
        inf += int(values.isinf().sum())
        finite = values[values.isfinite()]
        if finite.numel():
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
            total += float(finite.sum())
            count += finite.numel()
    return Statistics(low, high, total / count, nan, inf) if count else Statistics(None, None, None, nan, inf)


def difference(left: torch.Tensor, right: torch.Tensor) -> Difference:
    """Blocks: reads both once."""
    different, largest, changed, norm = 0, -1.0, 0.0, 0.0
    for one, other in _slices(left, right):
        bits = (one.view(torch.uint8) != other.view(torch.uint8)).view(one.numel(), -1)
        different += int(bits.any(dim=1).sum())
        a, b = _real(one), _real(other)
        is_finite = a.isfinite() & b.isfinite()
        a, b = a[is_finite], b[is_finite]
        if a.numel():
            apart = (a - b).abs()
            largest = max(largest, float(apart.max()))
            changed += float(apart.square().sum())
            norm += float(a.square().sum())
    relative = math.sqrt(changed / norm) if norm else None
    return Difference(left.numel(), different, largest if largest >= 0 else None, relative)


def _slices(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    flat = [tensor.detach().contiguous().view(-1) for tensor in tensors]
    for at in range(0, flat[0].numel(), _SLICE_ITEMS):
        yield tuple(each[at : at + _SLICE_ITEMS] for each in flat)


def _real(part: torch.Tensor) -> torch.Tensor:
    """As float64; a complex number as two, a pair of 4-bit numbers too."""
    if DTYPE_NAMES.get(part.dtype) == "F4":  # has no conversion
        bits = part.view(torch.uint8).to(torch.int64)
        return torch.tensor(_FOUR_BITS, dtype=torch.float64)[torch.stack([bits & 15, bits >> 4], dim=-1)]
    if part.dtype == torch.uint64:  # has no conversion of its own everywhere
        return part.view(torch.int64).double() + (part.view(torch.int64) < 0) * 2.0**64
    return (torch.view_as_real(part) if part.is_complex() else part).to(torch.float64)
