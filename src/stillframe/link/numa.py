"""Which NUMA node a PCI device is at, and memory bound to a node: by the kernel's own calls, without libnuma.

Where a node is not known, or the kernel refuses, nothing happens: memory is then wherever it was touched first.
"""

from __future__ import annotations

import ctypes
import os
import platform

from stillframe.errors import StillframeError
from stillframe.store import files

_MBIND = {"x86_64": 237, "aarch64": 235}
"""The number of the system call, where it is known."""
_MPOL_PREFERRED = 1
_MPOL_MF_MOVE = 2
_MAX_NODES = 1024
_libc = ctypes.CDLL(None, use_errno=True)


def node_of_pci(address: str, sys: str = "/sys") -> int | None:
    """Of a device such as ``0000:3b:00.0``; ``None`` if the machine does not tell, or has one node only."""
    try:
        node = int(files.read_file(f"{sys}/bus/pci/devices/{address.lower()}/numa_node", 16))
        nodes = files.read_file(f"{sys}/devices/system/node/online", 256).decode().strip()
    except (StillframeError, ValueError):
        return None
    return node if 0 <= node < _MAX_NODES and nodes != "0" else None


def bind(address: int, nbytes: int, node: int, *, is_moved: bool = False) -> bool:
    """Pages of this range are taken from the node from now on, while it has any; with ``is_moved`` those that are there
    move, too.  Returns whether the kernel agreed.  Blocks while pages move."""
    number = _MBIND.get(platform.machine())
    if number is None:
        return False
    mask = (ctypes.c_ulong * (_MAX_NODES // 64))()
    mask[node // 64] = 1 << node % 64
    result = _libc.syscall(
        ctypes.c_long(number), ctypes.c_void_p(address), ctypes.c_ulong(nbytes), ctypes.c_long(_MPOL_PREFERRED), mask,
        ctypes.c_ulong(_MAX_NODES + 1), ctypes.c_ulong(_MPOL_MF_MOVE if is_moved else 0),
    )  # fmt: skip
    return int(result) == 0


def node_at(address: int) -> int | None:
    """The node that the page at this address is on; ``None`` if the kernel does not tell."""
    number = {"x86_64": 279, "aarch64": 239}.get(platform.machine())  # move_pages(2), which only asks here
    if number is None:
        return None
    page = ctypes.c_void_p(address - address % os.sysconf("SC_PAGE_SIZE"))
    status = ctypes.c_int(-1)
    failed = _libc.syscall(
        ctypes.c_long(number), ctypes.c_long(0), ctypes.c_ulong(1), ctypes.byref(page), None, ctypes.byref(status),
        ctypes.c_long(0),
    )  # fmt: skip
    return status.value if not failed and status.value >= 0 else None
