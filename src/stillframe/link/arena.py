"""The arena: one memfd, mapped by both processes, cut into spans of one chunk each.

A span is free, or lent.  The stager takes one, fills it, and hands it to the keeper with the
chunk's message; it is free again only when the keeper says that its bytes are written.  Spans
are all alike, so there is no fragmentation and no order in which they must come back.

Memory is touched for the first time in the background, span by span: page faults cost more
than the copy itself (3 s per GiB were seen on a fresh virtual machine).
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
from collections.abc import Callable

from stillframe.model import CHUNK_BYTES

_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None, use_errno=True)


class Arena:
    """The trainer's side: who has which span.  Thread: all methods are safe from any thread."""

    def __init__(self, size: int) -> None:
        self.spans = size // CHUNK_BYTES
        self.nbytes = self.spans * CHUNK_BYTES
        self.fd = os.memfd_create("stillframe-arena", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, self.nbytes)
        self.memory = mmap.mmap(self.fd, self.nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self._free = deque(range(self.spans))
        self._lent: set[int] = set()
        self._filling: set[int] = set()
        self._untouched = set(range(self.spans))
        self._changed = threading.Condition()
        self.wait_s = 0.0
        self.is_awaited = False

    @property
    def free_spans(self) -> int:
        return len(self._free)

    def take(self, is_cancelled: Callable[[], bool]) -> int | None:
        """A free span, or ``None`` if cancelled.  Blocks until the keeper frees one, or is given up."""
        with self._changed:
            if not self._free:
                began = time.monotonic()
                self.is_awaited = True
                self._changed.wait_for(lambda: self._free or is_cancelled())
                self.is_awaited = False
                self.wait_s += time.monotonic() - began
            if not self._free or is_cancelled():
                return None
            span = self._free.popleft()
            self._lent.add(span)
            self._filling.add(span)
        try:
            self.touch(span)
        except MemoryError:
            self.give_back(span)
            raise
        return span

    def give_back(self, span: int) -> None:
        """Free the span.  It is the next one taken: it is warm in the cache and already faulted in."""
        with self._changed:
            if span in self._lent:
                self._lent.remove(span)
                self._filling.discard(span)
                self._free.appendleft(span)
                self._changed.notify_all()

    def give_back_all(self) -> None:
        """The keeper is dead: what it had been lent is free."""
        with self._changed:
            self._free.extendleft(self._lent - self._filling)
            self._lent &= self._filling
            self._changed.notify_all()

    def hand_over(self, span: int) -> None:
        """The span is filled; from now on the keeper has it."""
        with self._changed:
            self._filling.discard(span)

    def wake(self) -> None:
        """Make a waiting :meth:`take` look at its ``is_cancelled`` again."""
        with self._changed:
            self._changed.notify_all()

    def touch_one(self) -> bool:
        """Fault in one span that never was used; tells whether there was one."""
        with self._changed:
            span = next((span for span in self._free if span in self._untouched), None)
        if span is None:
            return False
        try:
            self.touch(span)
        except MemoryError:
            return False  # whoever takes it will be told
        return True

    def touch(self, span: int) -> None:
        if span not in self._untouched:
            return
        address = ctypes.c_void_p(self.address + span * CHUNK_BYTES)
        # Through ctypes because mmap.madvise keeps the GIL, and this takes milliseconds.
        if _libc.madvise(address, ctypes.c_size_t(CHUNK_BYTES), _MADV_POPULATE_WRITE) != 0:
            code = ctypes.get_errno()
            if code != errno.EINVAL:  # EINVAL: a kernel before 5.14, which faults while copying
                raise MemoryError(f"the arena could not be allocated: {os.strerror(code)}; give arena= a smaller size")
        self._untouched.discard(span)

    def close(self) -> None:
        """Close this end.  The memory is freed when the keeper and the last view of it are gone, too."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
            with contextlib.suppress(BufferError):  # a tensor still looks at it: then it goes with that
                self.memory.close()
