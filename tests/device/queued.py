"""The device ``"queued"``: an accelerator made of threads, which torch takes for a real one (``queued.hpp`` says how).

:func:`load` registers it for the whole process, so only processes that are there for it do: :mod:`tests.device.worker`
and the trainees.  Below are what torch looks for in ``torch.queued``, and how a test governs the device.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import struct
import sys
import types
from collections.abc import Iterator
from typing import Any, Literal, get_args

import torch

from tests.device.build import build

DEVICES = 2
_ROOM = 65536
_FUNCTIONS: tuple[tuple[str, list[Any], Any], ...] = (
    ("hold", [ctypes.c_int, ctypes.c_int64], ctypes.c_int64),
    ("open", [ctypes.c_int64], None),
    ("leave", [], None),
    ("is_idle", [ctypes.c_int, ctypes.c_int64], ctypes.c_int),
    ("set_rate", [ctypes.c_int, ctypes.c_int, ctypes.c_double], None),
    ("set_budget", [ctypes.c_int, ctypes.c_int, ctypes.c_int64], None),
    ("copied", [ctypes.c_int, ctypes.c_int], ctypes.c_int64),
    ("fail", [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int], None),
    ("set_limit", [ctypes.c_int, ctypes.c_int64], None),
    ("allocated", [ctypes.c_int], ctypes.c_int64),
    ("take_reports", [ctypes.c_char_p, ctypes.c_int64], ctypes.c_int64),
    ("waiting_ops", [ctypes.c_char_p, ctypes.c_int64], ctypes.c_int64),
    ("begin_capture", [ctypes.c_int, ctypes.c_int64], ctypes.c_int64),
    ("end_capture", [ctypes.c_int64, ctypes.c_char_p, ctypes.c_int64], ctypes.c_int64),
    ("is_capturing", [ctypes.c_int, ctypes.c_int64], ctypes.c_int),
    ("replay", [ctypes.c_int64, ctypes.c_int, ctypes.c_int64], None),
    ("host_register", [ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint], ctypes.c_int),
    ("host_unregister", [ctypes.c_void_p], ctypes.c_int),
    ("registered", [ctypes.c_char_p, ctypes.c_int64], ctypes.c_int64),
    ("register", [], None),
    ("get_rng", [ctypes.c_int, ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_uint64)], None),
    ("set_rng", [ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64], None),
)

library: Any = None


def load() -> None:
    """Build it if need be; from then on it is the accelerator of this process.  Raises :class:`CannotBuild`."""
    global library
    import torch._meta_registrations  # the forms of what operators return, without running them
    from torch.utils import backend_registration

    library = ctypes.CDLL(str(build()))
    for name, arguments, result in _FUNCTIONS:
        function = getattr(library, f"queued_{name}")
        function.argtypes, function.restype = arguments, result
    library.queued_register()
    atexit.register(library.queued_leave)  # before anything of stillframe's is, so after it
    backend_registration.rename_privateuse1_backend("queued")
    torch._register_device_module("queued", _module())
    sys.modules["torch.queued"] = torch.queued  # type: ignore[attr-defined]
    backend_registration.generate_methods_for_privateuse1_backend()


def load_slow() -> None:
    """For a process that nobody governs: copies take their time."""
    load()
    set_rate(1e9)


# --- what torch looks for ------------------------------------------------------------------------


def _index(device: Any = None) -> int:
    if device is None:
        return int(torch.accelerator.current_device_index())
    index = device if isinstance(device, int) else torch.device(device).index
    return int(torch.accelerator.current_device_index()) if index is None else index


def get_rng_state(device: Any = None) -> torch.Tensor:
    seed, offset = ctypes.c_uint64(), ctypes.c_uint64()
    library.queued_get_rng(_index(device), ctypes.byref(seed), ctypes.byref(offset))
    return torch.frombuffer(bytearray(struct.pack("<QQ", seed.value, offset.value)), dtype=torch.uint8).clone()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    library.queued_set_rng(_index(device), *struct.unpack("<QQ", bytes(state.tolist())))


def manual_seed_all(seed: int) -> None:
    for device in range(DEVICES):
        library.queued_set_rng(device, seed % 2**64, 0)


def _stream(device: Any = None, *, priority: int = 0) -> torch.Stream:
    return torch.Stream(device=torch.device("queued", _index(device)), priority=priority)


def _event(*, enable_timing: bool = False, blocking: bool = False) -> torch.Event:
    return torch.Event(device="queued", enable_timing=enable_timing)


@contextlib.contextmanager
def on_stream(stream: torch.Stream) -> Iterator[None]:
    """The current stream of its device, for this thread."""
    before = torch.accelerator.current_stream(stream.device)
    device = torch.accelerator.current_device_index()
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(device)


@contextlib.contextmanager
def _on_device(device: Any) -> Iterator[None]:
    before = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(_index(device))
    try:
        yield
    finally:
        torch.accelerator.set_device_index(before)


def _is_capturing() -> bool:
    stream = torch.accelerator.current_stream()
    return bool(library.queued_is_capturing(stream.device_index, stream.stream_id))


def _module() -> types.ModuleType:
    module = types.ModuleType("torch.queued")
    for name, value in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "device_count": lambda: DEVICES,
        "current_device": lambda: torch.accelerator.current_device_index(),
        "set_device": lambda device: torch.accelerator.set_device_index(_index(device)),
        "device": _on_device,
        "synchronize": lambda device=None: torch.accelerator.synchronize(torch.device("queued", _index(device))),
        "Stream": _stream,
        "Event": _event,
        "stream": on_stream,
        "current_stream": lambda device=None: torch.accelerator.current_stream(torch.device("queued", _index(device))),
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "manual_seed": manual_seed_all,
        "manual_seed_all": manual_seed_all,
        "get_amp_supported_dtype": lambda: [torch.bfloat16],
        "get_device_name": lambda device=None: f"queued {_index(device)}, made of threads",
        "is_current_stream_capturing": _is_capturing,
        "cudart": lambda: types.SimpleNamespace(
            cudaHostRegister=library.queued_host_register, cudaHostUnregister=library.queued_host_unregister
        ),
    }.items():
        setattr(module, name, value)
    return module


# --- how a test governs it --------------------------------------------------------------------------

Call = Literal["allocate", "launch", "copy", "record", "wait", "synchronize", "stream", "register", "unregister"]
_TO_HOST = 0


def default_stream(device: int = 0) -> torch.Stream:
    kind = torch.accelerator.current_stream(torch.device("queued", device)).device_type
    return torch.Stream(stream_id=0, device_index=device, device_type=kind)


def peek(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of its bytes as they are at this moment, whatever is queued; it must be contiguous."""
    assert tensor.is_contiguous()
    data = ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
    return torch.frombuffer(bytearray(data), dtype=tensor.dtype).view(tensor.shape)


class Gate:
    """A stream stands still at the point where this was made, until it is opened."""

    def __init__(self, stream: torch.Stream) -> None:
        self._number = library.queued_hold(stream.device_index, stream.stream_id)

    def open(self) -> None:
        library.queued_open(self._number)

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *exc: object) -> None:
        self.open()


class Graph:
    """Within, what is queued on the stream is captured; afterwards it can be replayed, on the current stream."""

    def __init__(self, stream: torch.Stream) -> None:
        self._stream = stream
        self._number = 0
        self.broken = ""
        """By which call, on whatever thread."""

    def __enter__(self) -> Graph:
        self._number = library.queued_begin_capture(self._stream.device_index, self._stream.stream_id)
        return self

    def __exit__(self, *exc: object) -> None:
        self.broken = ",".join(_lines(lambda text, room: library.queued_end_capture(self._number, text, room)))

    def replay(self) -> None:
        assert not self.broken
        library.queued_replay(self._number, self._stream.device_index, self._stream.stream_id)


def registered() -> list[tuple[int, int, int]]:
    """Of the host's memory: the address, the bytes, and on which device it was done."""
    return [(int(at), int(size), int(device)) for at, size, device in map(str.split, _lines(library.queued_registered))]


def is_idle(stream: torch.Stream) -> bool:
    return bool(library.queued_is_idle(stream.device_index, stream.stream_id))


def set_rate(bytes_s: float) -> None:
    """Of copies to the host, for each device."""
    for device in range(DEVICES):
        library.queued_set_rate(device, _TO_HOST, bytes_s)


def stop_copies(after: int = 0, device: int | None = None) -> None:
    """Copies to the host stand still when so many more bytes are copied."""
    for each in range(DEVICES) if device is None else [device]:
        library.queued_set_budget(each, _TO_HOST, after)


def let_copies_go() -> None:
    for device in range(DEVICES):
        library.queued_set_budget(device, _TO_HOST, -1)


def copied(device: int = 0) -> int:
    """Bytes to the host, since the process began."""
    return int(library.queued_copied(device, _TO_HOST))


def fail(call: Call, times: int = -1, *, out_of_memory: bool = False) -> None:
    """The next calls of this kind raise; -1: all from now on; 0: none any more."""
    library.queued_fail(call.encode(), times, int(out_of_memory))


def set_limit(nbytes: int, device: int = 0) -> None:
    """More than this cannot be allocated; -1: anything can."""
    library.queued_set_limit(device, nbytes)


def allocated(device: int = 0) -> int:
    return int(library.queued_allocated(device))


def take_reports() -> list[str]:
    """The uses after free since this was last asked."""
    return _lines(library.queued_take_reports)


def waiting_ops() -> list[str]:
    """The operators that have waited on the host, as ``item()`` does."""
    return _lines(library.queued_waiting_ops)


def reset() -> None:
    """As it was at first: nothing held, nothing slow, nothing failing.  Waits for what is queued."""
    for call in get_args(Call):
        library.queued_fail(call.encode(), 0, 0)
    library.queued_open(-1)
    let_copies_go()
    set_rate(0)
    for device in range(DEVICES):
        set_limit(-1, device)
        torch.accelerator.set_stream(default_stream(device))
    torch.accelerator.set_device_index(0)
    for device in range(DEVICES):
        torch.accelerator.synchronize(device)


def _lines(ask: Any) -> list[str]:
    text = ctypes.create_string_buffer(_ROOM)
    count = ask(text, _ROOM)
    return text.raw[:count].decode().splitlines()
