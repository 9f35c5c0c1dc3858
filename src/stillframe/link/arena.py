"""The arena: one memfd, mapped by both processes, cut into spans of one chunk each.

A span is free, or lent.  The stager takes one, fills it, and hands it to the keeper with the
chunk's message; it is free again only when the keeper says that its bytes are written.  Spans
are all alike, so there is no fragmentation and no order in which they must come back.

Memory is touched for the first time in the background, span by span: page faults cost more
than the copy itself (3 s per GiB were seen on a fresh virtual machine).  So is it pinned, if an accelerator's runtime
can (:class:`Pins`): a copy into a span that is not pinned yet is right, only slower.  Memory that is pinned, or may be,
is never unmapped: the runtime would write to pages that nobody has any more, or that are somebody else's.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Protocol

from stillframe.errors import ConfigError
from stillframe.model import CHUNK_BYTES
from stillframe.units import format_bytes

_MADV_POPULATE_WRITE = 23
_LOOK_S = 0.5
"""How often a wait looks by itself."""
_libc = ctypes.CDLL(None, use_errno=True)
_SMALLER = "give arena= a smaller size"
_ADVICE = {
    errno.EFBIG: f"files may not be so large (ulimit -f): raise that limit, or {_SMALLER}",
    errno.EMFILE: "this process has too many files open: raise the limit (ulimit -n)",
    errno.ENFILE: "this machine has too many files open: raise the limit (fs.file-max)",
    errno.ENOMEM: f"memory or address space (ulimit -v) is short: {_SMALLER}",
}

_kept: dict[int, mmap.mmap] = {}
"""Mappings that may not go, because a runtime refers to them, or may; by the address."""


class Pins(Protocol):
    """What an accelerator's runtime does with the arena's memory so that copies into it are fast."""

    def pin(self, address: int, nbytes: int) -> None:
        """Called once for each span.  Blocks for milliseconds; never raises."""

    def release(self) -> bool:
        """Undo it all.  Returns whether nothing refers to the memory any more; blocks for seconds at most."""


class Arena:
    """The trainer's side: who has which span.  Thread: all methods are safe from any thread.

    Raises :class:`ConfigError`, with nothing left open, if the system does not give so much; also later, when memory is
    touched for the first time.
    """

    def __init__(self, size: int) -> None:
        self.spans = size // CHUNK_BYTES
        self.nbytes = self.spans * CHUNK_BYTES
        self.fd, self.memory = _mapped(self.nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self._free = deque(range(self.spans))
        self._holders: dict[int, object] = {}
        """Who has each span that is lent: who fills it, then the keeper that reads it.  Only they can give it back."""
        self._filling: set[int] = set()
        self._untouched = set(range(self.spans))
        self._unpinned: set[int] = set()
        self._pins: Pins | None = None
        self._retired = 0
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self.wait_s = 0.0
        self.is_awaited = False
        self.on_wait: Callable[[], None] = lambda: None
        """Called when somebody begins to wait for a span."""

    @property
    def free_spans(self) -> int:
        return len(self._free)

    def take(self, is_cancelled: Callable[[], bool], holder: object) -> int | None:
        """A free span to be filled, or ``None`` if cancelled.  Blocks until the keeper frees one, or is given up.

        Raises: ``MemoryError`` if none will ever be free again, or the memory cannot be allocated.
        """
        with self._lock:
            if not self._free:
                began = time.monotonic()
                self.is_awaited = True
                self.on_wait()
                while not self._free and not is_cancelled() and self._retired < self.spans:
                    self._changed.wait(_LOOK_S)
                self.is_awaited = False
                self.wait_s += time.monotonic() - began
            if self._retired == self.spans:
                raise MemoryError("a failing device may still write to every part of the arena: restart the process")
            if not self._free or is_cancelled():
                return None
            span = self._free.popleft()
            self._holders[span] = holder
            self._filling.add(span)
        try:
            self.touch(span)
        except BaseException:
            self.give_back(span, holder)
            raise
        return span

    def give_back(self, span: int, holder: object) -> None:
        """Free the span, if it is still this one's.  It is the next one taken: it is warm in the cache, faulted in."""
        with self._lock:
            if self._take_from(span, holder):
                self._free.appendleft(span)
                self._changed.notify_all()

    def retire(self, spans: Sequence[int], holder: object) -> None:
        """A copy may write to these at any time: nobody gets them again."""
        with self._lock:
            self._retired += sum(self._take_from(span, holder) for span in spans)
            self._changed.notify_all()

    def give_back_all(self, holder: object) -> None:
        """The keeper is dead: what it had been lent is free."""
        with self._lock:
            held = [span for span, each in self._holders.items() if each is holder]
            self._free.extendleft(span for span in held if self._take_from(span, holder))
            self._changed.notify_all()

    def hand_over(self, span: int, holder: object, to: object) -> None:
        """The span is filled; from now on ``to``, the keeper, has it."""
        with self._lock:
            if self._take_from(span, holder):
                self._holders[span] = to

    def _take_from(self, span: int, holder: object) -> bool:
        """Whether it was this one's until now."""
        if span not in self._holders or self._holders[span] is not holder:
            return False
        del self._holders[span]
        self._filling.discard(span)
        return True

    def wake(self) -> None:
        """Make a waiting :meth:`take` look at its ``is_cancelled`` again."""
        with self._lock:
            self._changed.notify_all()

    @property
    def pins(self) -> Pins | None:
        return self._pins

    @property
    def is_adopted(self) -> bool:
        return self._pins is not None

    def adopt(self, pins: Pins) -> None:
        """Have the memory pinned, in the background.  Once: what is pinned for one device is for all."""
        with self._lock:
            if self._pins is None:
                _kept[self.address] = self.memory  # first: whoever drops the arena must not unmap it
                self._unpinned = set(range(self.spans))
                self._pins = pins

    def touch_one(self) -> bool:
        """Fault in and pin one span that never was; tells whether there was one.

        One that a copy may be writing to is left for later; what the keeper reads can be pinned meanwhile.
        """
        with self._lock:
            missing = self._unpinned or self._untouched
            idle = chain(self._free, self._holders.keys() - self._filling) if self._unpinned else self._free
            span = next((span for span in idle if span in missing), None)
        if span is None:
            return False
        try:
            self.touch(span)
        except ConfigError:
            return False  # whoever takes it will be told
        if span in self._unpinned and self._pins is not None:
            self._unpinned.discard(span)
            self._pins.pin(self.address + span * CHUNK_BYTES, CHUNK_BYTES)
        return True

    def touch(self, span: int) -> None:
        if span not in self._untouched:
            return
        address = ctypes.c_void_p(self.address + span * CHUNK_BYTES)
        # Through ctypes because mmap.madvise keeps the GIL, and this takes milliseconds.
        if _libc.madvise(address, ctypes.c_size_t(CHUNK_BYTES), _MADV_POPULATE_WRITE) != 0:
            code = ctypes.get_errno()
            if code != errno.EINVAL:  # EINVAL: a kernel before 5.14, which faults while copying
                raise _refused(self.nbytes, OSError(code, os.strerror(code)))
        self._untouched.discard(span)

    def close(self, *, is_in_use: bool = False) -> None:
        """Close this end.  The memory is freed when the keeper and the last view of it are gone, too.

        ``is_in_use``: a device may still write to it, as it may to a span that is being filled.  Then it stays until
        the process ends; also if it cannot be unpinned.
        """
        fd, self.fd = self.fd, -1
        if fd < 0:
            return
        os.close(fd)
        if self._pins is not None:
            if is_in_use or self._retired or self._filling or not self._pins.release():
                return
            _kept.pop(self.address, None)
        with contextlib.suppress(BufferError):  # a tensor still looks at it: then it goes with that
            self.memory.close()


def _mapped(nbytes: int) -> tuple[int, mmap.mmap]:
    """Memory with a descriptor, for both processes.  Raises :class:`ConfigError`."""
    fd = -1
    try:
        fd = os.memfd_create("stillframe-arena", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        memory = mmap.mmap(fd, nbytes)
        with contextlib.suppress(OSError, AttributeError):  # fewer faults, faster pinning; where the system gives any
            memory.madvise(mmap.MADV_HUGEPAGE)
        return fd, memory
    except BaseException as error:
        if fd >= 0:
            os.close(fd)
        if isinstance(error, OSError):
            raise _refused(nbytes, error) from error
        raise


def _refused(nbytes: int, error: OSError) -> ConfigError:
    advice = _ADVICE.get(error.errno or 0, _SMALLER)
    return ConfigError(f"an arena of {format_bytes(nbytes)} cannot be allocated: {error.strerror}; {advice}")
