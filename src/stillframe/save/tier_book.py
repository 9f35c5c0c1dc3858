"""How the tiers stand, as the keeper tells; and waiting for them."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import msgspec

from stillframe.errors import ConfigError, DeadlineError, NotFoundError, StillframeError, StorageError
from stillframe.link.messages import TierNews
from stillframe.model import SaveId, TierPhase, TierStats
from stillframe.save.saves import Save, Saves
from stillframe.store.address import root_address
from stillframe.tiers import Tier, TierConfig, TierName
from stillframe.units import format_bytes
from stillframe.waits import TELL_S, Wait

logger = logging.getLogger("stillframe")

_REMEMBERED = 10_000
_CLOSE_S = 30.0
"""So long ``close()`` waits for a tier that fails, or where nothing moves."""
_STILL_S = 600.0
"""So long whoever waits without a timeout waits while nothing moves."""
_REVIVE_S = 5.0
_LOOK_S = 0.5


class TierBook:
    """Thread: safe from any."""

    def __init__(self, tiers: Sequence[TierConfig], saves: Saves, revive: Callable[[], object]) -> None:
        self._saves = saves
        self._revive = revive
        """Starts a keeper if there is none."""
        self._revived_s = 0.0
        self._lock = threading.RLock()  # a signal handler may ask for stats(), too
        self._stats = [TierStats(tier.root) for tier in tiers]
        self._news: list[TierNews | None] = [None for _ in tiers]
        self._moved_s = [time.monotonic() for _ in tiers]
        """When something has last changed."""
        self._committed = [deque[SaveId](maxlen=_REMEMBERED) for _ in tiers]
        self._considered = [deque[SaveId](maxlen=_REMEMBERED) for _ in tiers]
        self.asked: int | None = None
        """A step that every tier gets, due there or not."""
        self.has_begun = False
        """The run has restored: what an earlier one has left to be carried is carried on."""
        self._heard_s: dict[SaveId, float] = {}
        """When each save was first heard to be committed in the root."""

    def hear(self, news: TierNews) -> None:
        """On the receiving thread."""
        with self._lock:
            before = self._stats[news.tier]
            is_new = _step(news.committed) not in (None, before.committed_step)
            if _moves(self._news[news.tier], news):
                self._moved_s[news.tier] = time.monotonic()
            self._news[news.tier] = news
            self._stats[news.tier] = TierStats(
                before.root, _step(news.committed), time.time() if is_new else before.committed_unix_s,
                _step(news.target), _step(news.waiting), news.carried_bytes, news.total_bytes,
                news.failures, news.trouble, news.is_over, _step(news.considered),
            )  # fmt: skip
            if news.considered is not None:
                self._heard_s.setdefault(news.considered, time.monotonic())
                if len(self._heard_s) > _REMEMBERED:
                    del self._heard_s[next(iter(self._heard_s))]
            for saves, save in ((self._committed, news.committed), (self._considered, news.considered)):
                if save is not None and save not in list(saves[news.tier])[-1:]:
                    saves[news.tier].append(save)
        self._saves.ring()

    def stats(self) -> tuple[TierStats, ...]:
        with self._lock:
            last = self._saves.last_committed
            newest = 0 if last is None else last.step
            return tuple(
                replace(
                    each, behind_steps=max(newest - (each.committed_step or 0), 0),
                    behind_s=self._lag_s(last, number),
                )
                for number, each in enumerate(self._stats)
            )  # fmt: skip

    def _lag_s(self, last: Save | None, number: int) -> float | None:
        news = self._news[number]
        there = None if news is None or news.committed is None else self._heard_s.get(news.committed)
        here = None if last is None else self._heard_s.get(_id(last) or SaveId(-1))
        return None if here is None or there is None else max(here - there, 0.0)

    def phases(self, save: Save) -> dict[str, TierPhase]:
        with self._lock:
            return {each.root: self._phase(save, number) for number, each in enumerate(self._stats)}

    def _phase(self, save: Save, number: int) -> TierPhase:
        stats, news, known = self._stats[number], self._news[number], _id(save)
        if known is not None and known in self._committed[number]:
            return "committed"
        if known is not None and news is not None and known in (news.target, news.waiting):
            return "carrying" if known == news.target else "waiting"
        is_ended = save.phase in ("failed", "skipped") or (
            save.phase == "committed" and self._is_decided(known, number)
        )
        return "not carried" if is_ended or stats.is_over else "waiting"

    def _is_decided(self, save: SaveId | None, number: int) -> bool:
        """Whether it is known if it is carried.  Each is told of, but for what a keeper that died has taken along."""
        news = self._news[number]
        if save is None or news is None or news.considered is None:
            return False
        if save.step == self.asked != news.asked:
            return False  # the keeper has not heard yet that it is asked for
        is_passed = (news.considered.epoch, news.considered.step) > (save.epoch, save.step)
        return save in self._considered[number] or is_passed

    def _find(self, tier: TierName) -> int:
        """Raises :class:`ConfigError` if there is no such tier."""
        root = root_address(tier.root if isinstance(tier, Tier) else tier)
        for number, each in enumerate(self._stats):
            if each.root == root:
                return number
        known = ", ".join(each.root for each in self._stats) or "none"
        raise ConfigError(f"tier={root!r}: the tiers are {known}")

    def wait_for(self, save: Save, tier: TierName, timeout_s: float | None) -> None:
        """Until a committed save is committed in the tier.

        Raises: :class:`NotFoundError` if it is not carried there; :class:`StorageError` if nothing is any more;
        :class:`DeadlineError`.
        """
        number = self._find(tier)
        root = self._stats[number].root

        def phase() -> TierPhase:
            return self.phases(save)[root]

        is_done = self._wait(number, lambda: phase() in ("committed", "not carried"), timeout_s)
        if phase() == "committed":
            return
        self._raise_if_over(number)
        if is_done:
            raise NotFoundError(
                f"step {save.step} is not carried to {root}: it was not due (every=…), or a newer one came before it "
                "was its turn"
            )
        raise DeadlineError(f"step {save.step} is not committed in {root}{self._why(number)}")

    def wait_idle(self, tier: TierName, timeout_s: float | None) -> None:
        """Until what is committed and due is committed in the tier, also what an earlier run has left.

        Raises: as :meth:`wait_for`.
        """
        number = self._find(tier)
        if not self._wait(number, lambda: self._is_settled(number) and self._is_known(number), timeout_s):
            raise DeadlineError(f"{self._stats[number].root} is behind{self._why(number)}")
        self._raise_if_over(number)

    def _wait(self, number: int, is_done: Callable[[], bool], timeout_s: float | None) -> bool:
        """Until it is done; tells whether it is.  Without a timeout, as long as something moves now and then."""
        began, wait = time.monotonic(), Wait(self._stats[number].root, timeout_s)
        while not is_done():
            now = time.monotonic()
            if self._stats[number].trouble or now - self._moved_s[number] > TELL_S:
                wait.turn("; ".join(filter(None, (self._doing(number), self._stats[number].trouble))))
            left_s = _LOOK_S if timeout_s is None else min(timeout_s - (now - began), _LOOK_S)
            is_still = timeout_s is None and now - max(self._moved_s[number], began) > _STILL_S
            if left_s <= 0 or is_still:
                return False
            self._revive_now_and_then(now)
            self._saves.wait_until(is_done, left_s)
        return True

    def _revive_now_and_then(self, now: float) -> None:
        """Nobody else does, if no save is under way.  Not at every look: the next one may die at once, too."""
        if now - self._revived_s > _REVIVE_S:
            self._revived_s = now
            with contextlib.suppress(StillframeError):
                self._revive()

    def _is_settled(self, number: int) -> bool:
        stats, last = self._stats[number], self._saves.last_committed
        return stats.is_over or (stats.is_idle and (last is None or self._is_decided(_id(last), number)))

    def _is_known(self, number: int) -> bool:
        """Whether nothing can be left of an earlier run that was not told of."""
        news, has_begun = self._news[number], self.has_begun or self._saves.last_committed is not None
        return not has_begun or (news is not None and (news.is_known or news.is_over))

    def _raise_if_over(self, number: int) -> None:
        stats = self._stats[number]
        if stats.is_over:
            raise StorageError(f"nothing is carried to {stats.root} any more: {stats.trouble}")

    def _why(self, number: int) -> str:
        said = "; ".join(filter(None, (self._doing(number), self._stats[number].trouble)))
        return f": {said}" if said else ""

    def _doing(self, number: int) -> str:
        stats = self._stats[number]
        if stats.target_step is None and stats.waiting_step is None:
            return "" if self._is_known(number) else "it is not known yet what is left to be carried there"
        if stats.target_step is None:
            return f"step {stats.waiting_step} is to be carried there"
        count = (
            f", {format_bytes(stats.carried_bytes)} of {format_bytes(stats.total_bytes)}" if stats.total_bytes else ""
        )
        return f"step {stats.target_step} is being carried there{count}"

    @property
    def unfinished(self) -> list[str]:
        """The tiers that have not got all that is due there, each with what is known of it."""
        numbers = [number for number in range(len(self._stats)) if not self._is_settled(number)]
        return [f"{self._stats[number].root}{self._why(number)}" for number in numbers]

    def wait_at_close(self, timeout_s: float | None) -> bool:
        """Until all tiers have what is due, or ``timeout_s`` is over; one that fails is not waited for long.

        Raises nothing: what is not carried by then is told, and carried by the keeper, or by the next run.  Tells
        whether all have.
        """
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        shown = _Line()
        for number in range(len(self._stats)):
            self._wait_at_close(number, end_s, shown)
            if not self._is_settled(number):
                logger.warning(
                    "%s is left behind by close()%s. The keeper goes on as long as that works; the next run does the "
                    "rest", self._stats[number].root, self._why(number),
                )  # fmt: skip
        shown.clear()
        return not self.unfinished

    def _wait_at_close(self, number: int, end_s: float | None, shown: _Line) -> None:
        moved_s, wait = time.monotonic(), Wait(self._stats[number].root, None)
        while not self._is_settled(number) and (end_s is None or time.monotonic() < end_s):
            if not self._stats[number].trouble:
                moved_s = max(moved_s, self._moved_s[number])
            still_s = time.monotonic() - moved_s
            if still_s > _CLOSE_S:
                return
            left_s = [] if end_s is None else [end_s - time.monotonic()]
            limits_s = [*left_s, *([_CLOSE_S - still_s] if still_s > TELL_S / 2 else [])]
            wait.until(min(limits_s, default=None))
            if not shown.show(self._stats[number]) or still_s > TELL_S:
                wait.turn("; ".join(filter(None, (self._doing(number), self._stats[number].trouble))))
            self._wait(number, partial(self._is_settled, number), max(min([*left_s, _LOOK_S]), 0.0))


class _Line:
    """How far it is, on a terminal."""

    def __init__(self) -> None:
        self._width = 0

    def show(self, stats: TierStats) -> bool:
        """Tells whether there is one."""
        if sys.stderr is None or not sys.stderr.isatty() or stats.target_step is None:
            return False
        text = f"stillframe: carrying step {stats.target_step} to {stats.root}"
        if stats.total_bytes:
            text += f": {format_bytes(stats.carried_bytes)} of {format_bytes(stats.total_bytes)}"
        _write(f"\r{text.ljust(self._width)}")
        self._width = len(text)
        return True

    def clear(self) -> None:
        if self._width:
            _write(f"\r{' ' * self._width}\r")


def _write(text: str) -> None:
    with contextlib.suppress(OSError):  # a terminal that is gone: close() goes on
        sys.stderr.write(text)
        sys.stderr.flush()


def _moves(before: TierNews | None, news: TierNews) -> bool:
    """Whether something has got on in the tier.  One more failure is no such thing."""
    if before is None:
        return True
    return msgspec.structs.replace(before, failures=news.failures, trouble=news.trouble) != news


def _step(save: SaveId | None) -> int | None:
    return None if save is None else save.step


def _id(save: Save) -> SaveId | None:
    """``None`` until it is sealed."""
    return None if save.epoch is None else SaveId(save.step, save.epoch, save.attempt)
