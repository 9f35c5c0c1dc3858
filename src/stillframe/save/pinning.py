"""Pinning: the arena's memory is registered with an accelerator's runtime, so that copies into it are fast.

Invariants:
- a span is registered once, whatever devices there are, and portable, so that it counts for all of them;
- the thread that registers sets its device first: the runtime opens a context, half a gigabyte, on the current one;
- a registration is a span, so no copy crosses two of them;
- memory that is registered already is not used: somebody freed it without unregistering it, and copies may go astray;
- what was registered, or may have been, is unregistered before the memory goes; if that fails, the memory stays;
- an error of the runtime is taken back, so that no kernel launched later on that thread is blamed for it.

Without it copies are right, only slower; so a failure is a warning, the first one only.  What a runtime offers is found
by ``torch``: CUDA and ROCm have ``cudart()``.  Other accelerators have no registration in torch.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from stillframe.errors import DeadlineError, StateError, text_of
from stillframe.latch import Answer
from stillframe.link import numa
from stillframe.link.arena import Arena
from stillframe.model import CHUNK_BYTES

logger = logging.getLogger("stillframe")

NOT_REGISTERED = 713
_PORTABLE = 1
_MOST_FAILURES = 4
"""In a row; then no more is tried."""
_RELEASE_S = 20.0
"""Unregistering waits for the device; one that hangs must not hang ``close``."""


class Runtime(Protocol):
    """What is asked of an accelerator's runtime.  Thread: any; it chooses its device itself.  Codes: 0 is success."""

    @property
    def node(self) -> int | None:
        """The NUMA node that the device is at."""

    def is_registered(self, address: int) -> bool: ...

    def register(self, address: int, nbytes: int) -> int: ...

    def unregister(self, address: int) -> int: ...

    def clear_error(self) -> None:
        """A failure was dealt with: the calling thread's later work is not blamed for it."""


class PinningDevice(Protocol):
    """A device that copies into the arena."""

    def runtime(self) -> Runtime | None:
        """How host memory is pinned for it; ``None`` if it is not."""


class CudaRuntime:
    """CUDA's, or ROCm's under its names: of any device whose module in torch has ``cudart()``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cudart = torch.get_device_module(device).cudart()

    @property
    def node(self) -> int | None:
        address = pci_address(self._device)
        return None if address is None else numa.node_of_pci(address)

    def is_registered(self, address: int) -> bool:
        byte = (ctypes.c_char * 1).from_address(address)
        return torch.frombuffer(byte, dtype=torch.uint8).is_pinned()

    def register(self, address: int, nbytes: int) -> int:
        self._use_device()
        return int(self._cudart.cudaHostRegister(address, nbytes, _PORTABLE))

    def unregister(self, address: int) -> int:
        self._use_device()
        return int(self._cudart.cudaHostUnregister(address))

    def clear_error(self) -> None:
        """torch binds no ``cudaGetLastError``.  Where the library's is not found, a small kernel takes the error."""
        library = ctypes.CDLL(None)
        for name in ("cudaGetLastError", "hipGetLastError"):
            if (take := getattr(library, name, None)) is not None:
                take()
                return
        try:
            torch.empty(1, device=self._device).zero_()
        except RuntimeError:
            pass

    def _use_device(self) -> None:
        """Of this thread, which is a thread of ours."""
        if self._device.index is not None:
            torch.accelerator.set_device_index(self._device.index)


def pci_address(device: torch.device) -> str | None:
    """As the system names it (``0000:3b:00.0``); ``None`` where torch does not tell."""
    try:
        properties: Any = torch.get_device_module(device).get_device_properties(device)
        domain, bus, slot = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
        return f"{domain:04x}:{bus:02x}:{slot:02x}.0"
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None


def runtime_of(device: torch.device) -> Runtime | None:
    """``None``: torch has no way to register memory with this kind of accelerator."""
    return CudaRuntime(device) if hasattr(torch.get_device_module(device), "cudart") else None


@dataclass(frozen=True, slots=True)
class PinningStats:
    """How far it has come."""

    spans: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    node: int | None = None
    problem: str = ""


class Registrations:
    """The pins of one arena.  Thread: safe from any."""

    def __init__(self, runtime: Runtime, node: int | None) -> None:
        self._runtime = runtime
        self._node = node
        self._owner_pid = os.getpid()
        self._using = threading.Lock()
        self._held: dict[int, int] = {}
        """The bytes at each address that is registered, or may be."""
        self._failures = 0
        self._is_over = False
        self._seconds = 0.0
        self._problem = ""

    def pin(self, address: int, nbytes: int) -> None:
        with self._using:
            if self._is_over or self._failures >= _MOST_FAILURES:
                return
            began = time.monotonic()
            if self._node is not None:
                numa.bind(address, nbytes, self._node, is_moved=True)
            self._held[address] = nbytes  # first: what was interrupted may have happened
            try:
                code = self._runtime.register(address, nbytes)
            except Exception as error:
                self._fail(f"{type(error).__name__}: {text_of(error)}")
            else:
                if code:
                    del self._held[address]
                    self._fail(f"runtime error {code}")
                else:
                    self._failures = 0
            self._seconds += time.monotonic() - began

    def _fail(self, why: str) -> None:
        self._failures += 1
        self._clear_error()
        if not self._problem:
            self._problem = why
            _warn("a part of the arena could not be pinned (%s); copies into it are right, but slower", why)

    def _clear_error(self) -> None:
        try:
            self._runtime.clear_error()
        except Exception as error:
            self._problem = self._problem or text_of(error)

    def release(self) -> bool:
        if os.getpid() != self._owner_pid:  # a forked child has the mapping, but not the runtime
            return True
        answer: Answer[None] = Answer()
        # On a thread of its own: it sets its device, and the runtime's last error is the thread's.
        thread = threading.Thread(target=answer.run, args=(self._release,), name="stillframe-unpin", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is ending, and starts no threads
            answer.run(self._release)
        try:
            answer.get(_RELEASE_S)
        except DeadlineError:
            self._problem = f"the device does not answer within {_RELEASE_S:g} s"
        except Exception as error:
            self._problem = f"{type(error).__name__}: {text_of(error)}"
        else:
            return True
        _warn("the arena could not be unpinned (%s); its memory stays until the process ends", self._problem)
        return False

    def _release(self) -> None:
        with self._using:
            self._is_over = True
            problem = ""
            for address in list(self._held):
                code = self._runtime.unregister(address)
                if code not in (0, NOT_REGISTERED):
                    problem = f"runtime error {code}"
                    self._clear_error()
                    continue
                if code:
                    self._clear_error()
                del self._held[address]
            if problem:
                raise OSError(problem)

    @property
    def stats(self) -> PinningStats:
        held = list(self._held.values())
        return PinningStats(len(held), sum(held), self._seconds, self._node, self._problem)


def pin(arena: Arena, devices: Iterable[PinningDevice]) -> None:
    """Have the arena pinned in the background, for the devices that copy into it, at the NUMA node that they share.

    Costs nothing when it was called before.  Raises :class:`StateError` if the memory must not be used.
    """
    if arena.is_adopted:
        return
    try:
        runtimes = [runtime for device in devices if (runtime := device.runtime()) is not None]
        if runtimes:
            _check(arena, runtimes[0])
            nodes = {runtime.node for runtime in runtimes}
            node = nodes.pop() if len(nodes) == 1 else None
            if node is not None:
                numa.bind(arena.address, arena.nbytes, node)
            arena.adopt(Registrations(runtimes[0], node))
    except StateError:
        raise
    except Exception as error:
        _warn("the arena could not be pinned (%s); copies into it are right, but slower", text_of(error))


def _check(arena: Arena, runtime: Runtime) -> None:
    for address in range(arena.address, arena.address + arena.nbytes, CHUNK_BYTES):
        if runtime.is_registered(address):
            raise StateError(
                "the arena lies where memory was that something in this process pinned and freed without unpinning it; "
                "copies may go to the wrong memory: restart the process, or give arena= another size"
            )


def _warn(text: str, *arguments: object) -> None:
    log: Callable[..., None] = logger.warning
    try:
        log(text, *arguments)
    except Exception:  # a log handler that raises must not cost the save
        pass
