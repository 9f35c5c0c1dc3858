"""One thread that waits for the other ranks, for all sealed steps at once: a late one delays only its own commit."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable

from stillframe.keeper.commit import Commit
from stillframe.keeper.segment import SegmentWriter
from stillframe.keeper.terms import NEWS_S

_FIRST_S = 0.005
_LONGEST_S = 0.25
_CROWD, _CROWDED_S = 64, 5.0
_SLOWER = 1.5
_LOAD = 10
_LONGEST_LOAD_S = 2.0
"""The longer a keeper waits, the less often it looks.  A pause is also at least ten times as long as the look took, or
this long if that is less."""
_IDLE_S = 0.1
"""The pause between two looks for other ranks that the removal of old checkpoints waits for."""
_LINGER_S = 1.0
"""How long a keeper waits for them when all else is done."""


def longest_pause_s(crowd: int) -> float:
    """Of a keeper that is one of ``crowd``: the more there are, the less often each asks the file system."""
    return min(_LONGEST_S * max(crowd / _CROWD, 1.0), _CROWDED_S)


def or_die(work: Callable[..., None], *arguments: object) -> None:
    """A bug must not leave a save hanging: the trainer reports a dead keeper, with this traceback."""
    try:
        work(*arguments)
    except BaseException:
        traceback.print_exc()
        os._exit(70)


class CommitLoop:
    """``settle`` is called once for each commit, when it is done or has failed; ``tell`` with the ranks it waits for.

    ``longest_s``: the longest pause between two looks.
    """

    def __init__(
        self,
        settle: Callable[[int, SegmentWriter], None],
        tell: Callable[[int, list[int]], None],
        tidy: Callable[[], bool],
        is_orphan: Callable[[], bool],
        longest_s: float,
    ) -> None:
        self._longest_s = longest_s
        self._settle = settle
        self._tell = tell
        self._tidy = tidy
        self._is_orphan = is_orphan
        self._changed = threading.Condition()
        self._pending: dict[int, Commit] = {}
        self._given_up: dict[int, Exception] = {}
        self._is_finishing = False
        self._linger_s = 0.0
        self._thread: threading.Thread | None = None

    def add(self, save: int, commit: Commit) -> None:
        with self._changed:
            self._pending[save] = commit
            if self._thread is None:
                self._thread = threading.Thread(target=or_die, args=(self._run,), name="stillframe-commit")
                self._thread.start()
            self._changed.notify()

    def give_up(self, save: int, error: Exception) -> None:
        """Commit it no more, unless that is done; only who decides may say so.  It may be added later."""
        with self._changed:
            self._given_up[save] = error
            self._changed.notify()

    def look(self) -> None:
        """There is news of a save: look now."""
        with self._changed:
            self._changed.notify()

    def finish(self) -> None:
        """Blocks until nothing is pending."""
        with self._changed:
            self._is_finishing = True
            self._linger_s = time.monotonic() + _LINGER_S
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        pause_s, told_s = _FIRST_S, time.monotonic()
        has_chores = False
        while True:
            with self._changed:
                if not self._pending:
                    if self._is_finishing and (not has_chores or time.monotonic() > self._linger_s):
                        return
                    self._changed.wait(_IDLE_S if has_chores else None)
                    pause_s, told_s = _FIRST_S, time.monotonic()
                pending = list(self._pending.items())
            began = time.monotonic()
            is_news = began - told_s > NEWS_S
            before = sum(len(commit.awaited) for _, commit in pending)
            has_settled = [self._poll(save, commit, is_news) for save, commit in pending]
            took_s = time.monotonic() - began
            has_chores = self._tidy()
            if is_news:
                told_s = began
            if not pending:
                continue
            if any(has_settled) or sum(len(commit.awaited) for _, commit in pending) < before:
                pause_s = wait_s = _FIRST_S  # this look found something: more is coming
            else:
                pause_s = min(pause_s * _SLOWER, self._longest_s)
                wait_s = max(pause_s, min(took_s * _LOAD, _LONGEST_LOAD_S))
            with self._changed:
                if len(self._pending) == len(pending) - sum(has_settled):  # else another has come
                    self._changed.wait(wait_s)

    def _poll(self, save: int, commit: Commit, is_news: bool) -> bool:
        """Whether it has been settled, one way or the other."""
        segment = commit.save
        is_orphan = self._is_orphan()
        if is_orphan and not commit.decides:
            self._forget(save)  # nobody is left to be told
            return True
        try:
            if save in self._given_up and commit.decides:
                raise self._given_up[save]
            is_done = commit.poll(is_orphan)
        except Exception as error:  # kept, and reported
            segment.error = error
            is_done = True
        if is_done:
            self._forget(save)
            self._settle(save, segment)
        elif is_news:
            self._tell(save, commit.awaited)
        return is_done

    def _forget(self, save: int) -> None:
        with self._changed:
            del self._pending[save]
            self._given_up.pop(save, None)
