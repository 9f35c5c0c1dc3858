"""Requests to a living run, carried out by the keeper of rank 0 (:mod:`stillframe.checkpoint.requests`)."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from stillframe import errors
from stillframe.checkpoint.catalog import Catalog
from stillframe.checkpoint.cleaning import Plan, Wanted, carry_out, plan
from stillframe.errors import IntegrityError, StillframeError, StorageError, VersionError
from stillframe.format import limits, names
from stillframe.format.epochs import Answer, Request, decode_request, encode_answer
from stillframe.keeper.retention import Pruner
from stillframe.retention import decode_policy
from stillframe.store.protocol import read_all

_PERIOD_S = 1.0
_FRESH_S = 120.0
"""A request that is older, by these two clocks, is left alone: whoever asked has gone."""
_STALE_S = 3600.0
_CLOSE_S = 60.0


class RequestDesk:
    """Looks for requests about once a second, with one listing.  Thread: its own.

    ``epoch``: begins one if there is none yet, and gives its number.  ``tidying``: the pruner's lock.
    """

    def __init__(self, catalog: Catalog, pruner: Pruner, epoch: Callable[[], int], tidying: threading.Lock) -> None:
        self._catalog = catalog
        self._pruner = pruner
        self._epoch = epoch
        self._tidying = tidying
        self._ended = threading.Event()
        self._answered: set[str] = set()
        self._told_s = 0.0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """May be called again."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="stillframe-requests", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Blocks until a request that is being carried out has been answered, unless that takes very long."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while not self._ended.wait(_PERIOD_S):
            with contextlib.suppress(Exception):  # whoever asked finds no answer; saving, and other requests, go on
                self.look()

    def look(self) -> None:
        """Carry out what is asked for.  Raises :class:`StorageError` if that cannot be determined."""
        store = self._catalog.store
        asked = [found for name in store.list(names.RUN) if (found := names.parse_asked(name)) is not None]
        requests = {ticket for kind, ticket in asked if kind == "request"}
        for kind, ticket in asked:
            if kind == "answer" and ticket not in requests:  # nobody waits for it any more
                store.delete([names.answer(ticket)])
        self._answered &= requests
        for ticket in sorted(requests - self._answered):
            self._answered.add(ticket)
            request = self._read(ticket)
            if request is not None:
                self._serve(request)

    def _read(self, ticket: str) -> Request | None:
        key = names.request(ticket)
        try:
            found = decode_request(read_all(self._catalog.store, key, limits.MAX_NOTE_BYTES), file=key)
        except (StorageError, IntegrityError, VersionError):  # gone, or none: it holds no other request up
            return None
        age_s = abs(time.time() - found.unix_s)
        if age_s > _STALE_S:
            self._catalog.store.delete([names.answer(ticket), key])
        return found if age_s <= _FRESH_S and found.ticket == ticket else None

    def _serve(self, request: Request) -> None:
        try:
            self._tell(request, Plan(), is_done=False)
            keep = decode_policy(request.policy) if request.policy else None
            wanted = Wanted(tuple(request.saves), keep)
            epoch = self._epoch()

            def go_on(so_far: Plan) -> None:
                if time.monotonic() - self._told_s > _PERIOD_S:
                    self._tell(request, so_far, is_done=False)

            done = carry_out(self._catalog, plan(self._catalog, wanted), wanted.reason, epoch, go_on, self._tidying)
            with self._tidying:
                for each in done.gone:
                    self._pruner.forget(each.save)
        except StillframeError as error:
            done = Plan(error=error)
        self._tell(request, done, is_done=True)

    def _tell(self, request: Request, done: Plan, is_done: bool) -> None:
        self._told_s = time.monotonic()
        error = ("", "") if done.error is None else errors.to_record(done.error)
        gone = done.gone if is_done else done.gone[-1:]  # that it goes on is all that matters meanwhile
        answer = Answer(request.ticket, is_done, gone, done.stays if is_done else [], *error)
        self._catalog.store.put(names.answer(request.ticket), encode_answer(answer), durable=False)
