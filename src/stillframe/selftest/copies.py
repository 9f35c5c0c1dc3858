"""How fast bytes come off the device: into the arena, and into the best memory that torch itself offers."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from stillframe.errors import StillframeError
from stillframe.link import numa
from stillframe.link.arena import Arena
from stillframe.model import CHUNK_BYTES
from stillframe.save.device import AcceleratorDevice
from stillframe.save.pinning import Registrations, pci_address, pin
from stillframe.selftest.checks import Check, Figures, tell
from stillframe.store import files

NBYTES = 16 * CHUNK_BYTES
_TIMES = 5
_GOOD, _BAD = 0.9, 0.5
"""Of the best rate: below the first it is a note, below the second a failure."""


def check_copies(device: torch.device) -> None:
    """Tells every check."""
    source = torch.ones(NBYTES, dtype=torch.uint8, device=device)
    arena = Arena(NBYTES)
    try:
        memory = torch.frombuffer(arena.memory, dtype=torch.uint8)
        _touch(arena)
        pageable = _rate(partial(_by_chunks, source, memory), device)
        pin(arena, [AcceleratorDevice(device)])
        _touch(arena)
        tell(_registration(arena, device))
        tell(_copies(source, memory, pageable, device))
        tell(_place(arena, device))
    finally:
        arena.close()


def _touch(arena: Arena) -> None:
    while arena.touch_one():
        pass


def _copies(source: torch.Tensor, memory: torch.Tensor, pageable: float, device: torch.device) -> Check:
    best_memory = torch.empty(NBYTES, dtype=torch.uint8, pin_memory=True)
    best = _rate(lambda: best_memory.copy_(source, non_blocking=True), device)
    memory.zero_()
    rate = _rate(partial(_by_chunks, source, memory), device)
    if not bool((memory == 1).all()):
        return Check("copies", "fail", "the arena does not hold what was copied")
    share = rate / best
    said = (
        f"{rate / 1e9:.2f} GB/s into the arena, {share:.0%} of torch's own pinned memory "
        f"({best / 1e9:.2f} GB/s); before it was pinned {pageable / 1e9:.2f} GB/s"
    )
    figures: Figures = {"arena_bytes_s": rate, "best_bytes_s": best, "pageable_bytes_s": pageable}
    return Check("copies", "pass" if share >= _GOOD else "note" if share >= _BAD else "fail", said, figures)


def _registration(arena: Arena, device: torch.device) -> Check:
    pins = arena.pins
    if not isinstance(pins, Registrations):
        return Check("pinning", "note", f"torch has no way to pin memory for {device.type}: copies are slower")
    stats = pins.stats
    figures: Figures = {"seconds": stats.seconds, "nbytes": stats.nbytes, "problem": stats.problem}
    if stats.nbytes < arena.nbytes:
        said = f"{stats.spans} of {arena.spans} spans could be pinned: {stats.problem}"
        return Check("pinning", "fail", said, figures)
    said = f"{stats.spans} spans in {stats.seconds:.3f} s, {stats.seconds / stats.nbytes * (1 << 30):.3f} s per GiB"
    return Check("pinning", "pass", said, figures)


def _place(arena: Arena, device: torch.device) -> Check:
    address = pci_address(device)
    wanted = None if address is None else numa.node_of_pci(address)
    found, huge = numa.node_at(arena.address), _huge_pages()
    figures: Figures = {"pci": address, "device_node": wanted, "arena_node": found, "shmem_enabled": huge}
    where = "at a node that is not known, or at the only one" if wanted is None else f"at node {wanted}"
    said = f"the device is {where}, the arena at node {found}; huge pages for shared memory: {huge}"
    is_good = wanted in (None, found) and huge not in ("never", "deny", "unknown")
    return Check("memory", "pass" if is_good else "note", said, figures)


def _huge_pages() -> str:
    """What the system says of huge pages for memory such as the arena's; ``advise`` is enough."""
    try:
        said = files.read_file("/sys/kernel/mm/transparent_hugepage/shmem_enabled", 256).decode()
    except StillframeError:
        return "unknown"
    return said.partition("[")[2].partition("]")[0] or "unknown"


def _by_chunks(source: torch.Tensor, memory: torch.Tensor) -> None:
    for at in range(0, NBYTES, CHUNK_BYTES):
        memory[at : at + CHUNK_BYTES].copy_(source[at : at + CHUNK_BYTES], non_blocking=True)


def _rate(copy: Callable[[], object], device: torch.device) -> float:
    """Bytes a second, at its best."""
    best = float("inf")
    for _ in range(_TIMES):
        torch.accelerator.synchronize(device)
        began = time.monotonic()
        copy()
        torch.accelerator.synchronize(device)
        best = min(best, time.monotonic() - began)
    return NBYTES / best
