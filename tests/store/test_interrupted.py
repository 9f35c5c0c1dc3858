"""Ctrl-C at any line of a write: nothing that is half done stays, and the write can be done again."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from stillframe.store import blob, calls, posix, root
from stillframe.store.posix import PosixStore
from stillframe.store.protocol import read_all
from tests.layout import unfinished_files

DATA = bytes(range(256)) * 32
"""Not where direct I/O wants it: the write falls back to the page cache."""
_PLACES = frozenset(str(each.__file__) for each in (blob, calls, posix, root))


def write(store: PosixStore) -> None:
    writer = store.writer("step/blob", len(DATA))
    try:
        with memoryview(DATA) as data:
            writer.write_at(data, 0)
        writer.finish()
    finally:
        writer.abort()


def interrupted_at(number: int, work: Callable[[], None]) -> bool:
    """Whether there is a line with this number; there ``work`` is interrupted.

    A signal is seen between lines, and when a call of the system has returned; never where a ``with`` block that has
    run to its end is left, so a line counts once.
    """
    seen: set[tuple[object, ...]] = set()

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        place = frame.f_code.co_filename
        if place not in _PLACES or frame.f_code.co_name == "__del__":
            return None
        if event == "line" or (event == "return" and place == calls.__file__):
            above = frame.f_back
            seen.add((place, frame.f_lineno, event, above and (above.f_code.co_filename, above.f_lineno)))
            if len(seen) > number:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_ctrl_c_at_any_line_leaves_no_unfinished_file(tmp_path: Path) -> None:
    number = 0
    is_interrupted = True
    while is_interrupted:
        place = tmp_path / str(number)
        place.mkdir()
        store = PosixStore(place)
        is_interrupted = interrupted_at(number, partial(write, store))
        assert unfinished_files(place) == [], f"interrupted at line {number}"
        write(store)
        assert read_all(store, "step/blob", len(DATA)) == DATA
        store.close()
        number += 1
    assert number > 100


def test_a_forked_child_that_drops_a_writer_leaves_the_file_to_its_parent(tmp_path: Path) -> None:
    store = PosixStore(tmp_path)
    writer = store.writer("step/blob", len(DATA))
    child = os.fork()
    if child == 0:
        try:
            del writer
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    writer.write_at(memoryview(DATA), 0)
    writer.finish()
    assert read_all(store, "step/blob", len(DATA)) == DATA
    store.close()
