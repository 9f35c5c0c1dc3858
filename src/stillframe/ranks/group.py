"""The ranks of one run, and how they agree: through the store of torch.distributed, never by a collective.

A store (the key-value server that every torch.distributed job has) can be waited on with a deadline and tells
which ranks are missing; a collective can only hang.  Ranks agree in two places, both on the training thread:
when a checkpointer is made, and in ``restore``.  ``save`` never talks.

A store may hold what an earlier life of this job has left there: torchrun keeps it when it restarts the workers.  So
rank 0 makes up a name for this life, under which everything is said.  The others get it by a call: each adds a random
number to a list, and rank 0 answers under that number while it waits for the first round.

There is one primitive, :meth:`Group.decide`: every rank says something, rank 0 judges, all get the verdict.
Its cost per rank does not grow with the number of ranks, but for rank 0, which reads what each has said.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import torch.distributed as dist

from stillframe import errors
from stillframe.errors import ConfigError, DeadlineError, StillframeError
from stillframe.latch import Answer as Reply
from stillframe.ranks.calls import GuardedStore, InterpreterEnds
from stillframe.ranks.told import Told
from stillframe.units import format_ranks
from stillframe.untrusted import decoder_of

logger = logging.getLogger("stillframe")

_T = TypeVar("_T")
_R = TypeVar("_R")
_FIRST_S, _LONGEST_S = 0.001, 0.2
_WATCH_S, _WATCH_LONGEST_S = 0.05, 5.0
_CROWD = 64
"""With more ranks than this, each watches less often: all of them ask one store."""
_TELL_S = 10.0
"""After so long, a wait is mentioned."""
_VERDICT_S = 10.0
"""How much longer than rank 0 the others wait: so its error, which names the missing ranks, comes first."""
_CALL_BYTES = 16
_AT_ONCE = 256
"""So many keys are looked for in one request: while one is missing, those after it need not be asked for."""
_numbers = itertools.count(1)


class _Said(msgspec.Struct, frozen=True):
    """What a rank says, as it stands in the store: a value, or the error that keeps it from saying one."""

    value: msgspec.Raw = msgspec.Raw(b"null")
    error: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What one rank said in a round, or why it could not."""

    rank: int
    value: Any
    error: StillframeError | None


def check_same(what: str, said: Sequence[Any]) -> None:
    """Raises :class:`ConfigError`, naming the ranks, unless all have said the same."""
    by_value: dict[str, list[int]] = {}
    for rank, value in enumerate(said):
        by_value.setdefault(repr(value), []).append(rank)
    if len(by_value) > 1:
        parts = "; ".join(f"{format_ranks(ranks)}: {what}={value}" for value, ranks in by_value.items())
        raise ConfigError(f"the ranks differ: {parts}")


class _Line:
    """A thread that talks to the store, one turn after the other.

    Nobody has to wait for it: a store whose host hangs never answers.  It is started with the first turn.
    """

    def __init__(self, name: str, watch_s: float = _WATCH_S) -> None:
        self._name = name
        self._watch_s = watch_s
        self._turns: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._watches: list[Callable[[], bool]] = []
        self._is_unstarted = threading.Lock()

    def ask(self, work: Callable[[], _R]) -> Reply[_R]:
        reply: Reply[_R] = Reply()
        self._turns.put(lambda: reply.run(work))
        if self._is_unstarted.acquire(blocking=False):  # once, whoever comes at the same time
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        return reply

    def watch(self, is_over: Callable[[], bool]) -> None:
        self.ask(lambda: self._watches.append(is_over))

    def _run(self) -> None:
        with contextlib.suppress(InterpreterEnds):
            while True:
                self._turn()

    def _turn(self) -> None:
        with contextlib.suppress(queue.Empty):
            self._turns.get(timeout=self._watch_s if self._watches else None)()
        for is_over in list(self._watches):
            try:
                if is_over():
                    self._watches.remove(is_over)
            except Exception:  # a log handler that raises, say: other watches must not end because of it
                logger.exception("a watch over other ranks met an unexpected error")
                self._watches.remove(is_over)


class Group:
    """This rank among the others.  Thread: the training thread's; :meth:`count` and what follows from any.

    A round is talked on one line, news on another: a rank that waits in a round still tells what it has sealed.
    """

    def __init__(self, rank: int, world_size: int, store: Any, deadline_s: float, talks: bool = True) -> None:
        self.rank = rank
        self.world_size = world_size
        self.deadline_s = deadline_s
        self.ranks_on_node = _ranks_on_node(world_size)
        """The most on any node.  Until the ranks have agreed on it: as torchrun says, or all of them."""
        self._store: Any = GuardedStore(store)
        self._prefix = f"stillframe/{next(_numbers) if talks and world_size > 1 else 0}"
        self._rounds = itertools.count(1)
        self._name = ""
        self._heard_bytes = 0
        """Of the calls: rank 0 has answered these."""
        self._have_met = False
        self._agreeing = _Line("stillframe-agree")
        self._telling = _Line("stillframe-tell", min(_WATCH_S * max(1.0, world_size / _CROWD), _WATCH_LONGEST_S))
        self._told = Told(self._store, world_size)

    @property
    def is_global(self) -> bool:
        """Whether its ranks are those of torch.distributed, so that meshes and process groups speak of them."""
        return (
            dist.is_available()
            and dist.is_initialized()
            and (dist.get_rank(), dist.get_world_size()) == (self.rank, self.world_size)
        )

    @property
    def can_tell(self) -> bool:
        """Whether the ranks have met, so that what is said now is of this life of the job."""
        return bool(self._name)

    def meet_as(self, name: str) -> None:
        """Whoever brings the ranks together has given each this name, which rank 0 has made up in this life."""
        if self.world_size > 1:
            self._name = f"{self._prefix}/{name}"

    def decide(
        self,
        about: str,
        say: Callable[[], Any],
        judge: Callable[[list[Answer]], _T],
        into: type[_T],
    ) -> _T:
        """Every rank says something; rank 0 judges; all get its verdict, or all raise.

        ``about`` says what is being done, for messages.  An error of ``say`` is this rank's word: ``judge`` sees it.
        An error of ``judge`` is raised on every rank; on a rank whose ``say`` failed, that error itself.

        Blocks until all have spoken.  Raises: :class:`DeadlineError`, naming the ranks that did not.
        """
        own: Exception | None = None
        value: Any = None
        try:
            value = say()
        except Exception as error:  # raised again when the others have heard of it
            own = error
        if self.world_size == 1:
            if own is not None and not isinstance(own, StillframeError):
                raise own
            return judge([Answer(0, value, own)])
        said = _Said(msgspec.Raw(msgspec.json.encode(value)), _record(own) if own else None)
        exchange = self._agreeing.ask(lambda: self._exchange(about, said, judge))
        try:
            verdict = exchange.get(2 * (self.deadline_s + _VERDICT_S))
        except StillframeError:
            if not exchange.is_given:
                why = "the store of torch.distributed does not answer; is its host still there?"
                raise DeadlineError(f"{about}: {why}") from None
            raise
        except (RuntimeError, OSError) as error:
            raise DeadlineError(f"{about}: the store of torch.distributed is gone ({error})") from error
        if verdict.error is not None:
            raise own or errors.from_record(*verdict.error)
        return decoder_of(into).decode(verdict.value)

    def _exchange(self, about: str, said: _Said, judge: Callable[[list[Answer]], Any]) -> _Said:
        if not self._name:
            self._name = f"{self._prefix}/{secrets.token_hex(8)}" if self.rank == 0 else self._ask_name(about)
        key = f"{self._name}/{next(self._rounds)}"
        self._store.set(f"{key}/{self.rank}", msgspec.json.encode(said))
        if self.rank != 0:
            return decoder_of(_Said).decode(self._get(f"{key}/verdict", about))
        verdict = self._judge(key, about, judge)
        self._store.set(f"{key}/verdict", msgspec.json.encode(verdict))
        return verdict

    def _ask_name(self, about: str) -> str:
        """The name that rank 0 has made up for this life of the job, given under a number that only this rank knows."""
        call = secrets.token_hex(_CALL_BYTES // 2)
        self._store.append(f"{self._prefix}/calls", call)
        return self._get(f"{self._prefix}/answer/{call}", about).decode()

    def _answer_calls(self) -> None:
        """Rank 0, before the ranks have met: tell the name to those that ask for it, all new ones at once.

        A call from an earlier life of the job is answered, too, and read by nobody.
        """
        key = f"{self._prefix}/calls"
        calls = self._store.get(key).decode() if self._store.check([key]) else ""
        new = [calls[at : at + _CALL_BYTES] for at in range(self._heard_bytes, len(calls), _CALL_BYTES)]
        if new:
            self._store.multi_set([f"{self._prefix}/answer/{call}" for call in new], [self._name] * len(new))
            self._heard_bytes = len(calls)

    def _judge(self, key: str, about: str, judge: Callable[[list[Answer]], Any]) -> _Said:
        keys = {rank: f"{key}/{rank}" for rank in range(self.world_size)}
        try:
            self._wait(keys, self.deadline_s, about)
            answers = []
            for rank, data in enumerate(self._store.multi_get(list(keys.values()))):
                said = decoder_of(_Said).decode(data)
                error = errors.from_record(*said.error) if said.error else None
                answers.append(Answer(rank, msgspec.json.decode(said.value), error))
            return _Said(msgspec.Raw(msgspec.json.encode(judge(answers))))
        except Exception as error:  # also one of ours: the others must not wait for a verdict that never comes
            return _Said(error=_record(error))

    def _get(self, key: str, about: str) -> bytes:
        """What rank 0 says under this key."""
        self._wait({0: key}, self.deadline_s + _VERDICT_S, about)
        value: bytes = self._store.get(key)
        return value

    def _wait(self, keys: dict[int, str], timeout_s: float, about: str) -> None:
        """Until every key is there, each given with the rank that sets it.

        Polls: a wait of the store's own cannot be interrupted.  Raises: :class:`DeadlineError`, naming missing ranks.
        """
        began = time.monotonic()
        is_told = False
        pause_s = _FIRST_S
        left = list(keys.items())
        while left:
            if self._store.check([key for _, key in left[:_AT_ONCE]]):
                del left[:_AT_ONCE]
                continue
            if self.rank == 0 and not self._have_met:
                self._answer_calls()
            waited_s = time.monotonic() - began
            if waited_s > timeout_s or (waited_s > _TELL_S and not is_told):
                missing = format_ranks(rank for rank, key in left if not self._store.check([key]))
                if waited_s > timeout_s:
                    raise self._late(missing, timeout_s, about)
                is_told = True
                logger.warning("%s: rank %d is waiting for %s (up to %g s)", about, self.rank, missing, timeout_s)
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _LONGEST_S)
        self._have_met = True

    def _late(self, missing: str, timeout_s: float, about: str) -> DeadlineError:
        if self.rank == 0:
            what = f"{missing} of {self.world_size} did not come within {timeout_s:g} s"
        else:
            what = f"rank 0 did not answer within {timeout_s:g} s (is it still there?)"
        return DeadlineError(f"{about}: {what}; every rank must make the checkpointer, and restore, in the same order")

    # --- telling one another outside of a round: nobody waits, and what is told first is seen first ---

    def count(self, key: str) -> None:
        """This rank has come so far."""

        def turn() -> None:
            self._store.set(f"{self._name}/{key}/{self.rank}", b"1")
            self._store.add(f"{self._name}/{key}", 1)
            self._told.add(f"{self._name}/{key}/{self.rank}", f"{self._name}/{key}")

        self._telling.ask(turn)

    def take_back(self, key: str) -> None:
        """The opposite of :meth:`count`."""

        def turn() -> None:
            self._store.delete_key(f"{self._name}/{key}/{self.rank}")
            self._store.add(f"{self._name}/{key}", -1)

        self._telling.ask(turn)

    def say(self, key: str, text: str) -> None:
        def turn() -> None:
            self._store.set(f"{self._name}/{key}", text)
            self._told.add(f"{self._name}/{key}")

        self._telling.ask(turn)

    def watch(self, is_over: Callable[[], bool]) -> None:
        """Have this called now and then, on a thread of its own, until it says so; it may ask what follows."""
        self._telling.watch(is_over)

    def lacking(self, key: str) -> int:
        """How many ranks have not come so far."""
        return self.world_size - int(self._store.add(f"{self._name}/{key}", 0))

    def said(self, key: str) -> str | None:
        full = f"{self._name}/{key}"
        return self._store.get(full).decode(errors="replace") if self._store.check([full]) else None

    def missing(self, key: str) -> list[int]:
        """Which ranks have not come so far."""
        return [rank for rank in range(self.world_size) if not self._store.check([f"{self._name}/{key}/{rank}"])]

    def settle(self, key: str) -> None:
        """This rank has seen that all have come so far, and asks no more.  For a watch."""
        self._told.seen(f"{self._name}/{key}")


def _record(error: Exception) -> tuple[str, str]:
    if isinstance(error, StillframeError):
        return errors.to_record(error)
    return "StateError", f"{type(error).__name__}: {error}"


def _ranks_on_node(world_size: int) -> int:
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return min(max(int(text), 1), world_size) if text.isdecimal() else world_size
