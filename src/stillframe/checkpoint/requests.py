"""Removing and pinning by hand: in an epoch of one's own, or by a request to the run that lives in the root.

Beside a living run nobody else may claim an epoch: the run would take that for a successor, and save no more.  So
whoever wants something removed puts ``run/request-….json``; the keeper of rank 0 carries it out and answers.  Whether a
run lives is told by its lock, and, where locks tell nothing, by its answer.
"""

from __future__ import annotations

import contextlib
import enum
import secrets
import socket
import time
from collections.abc import Collection, Sequence

from stillframe import errors
from stillframe.checkpoint import epochs, removal
from stillframe.checkpoint.catalog import Catalog
from stillframe.checkpoint.cleaning import Plan, Wanted, carry_out, is_removable, plan
from stillframe.checkpoint.lock import is_held, owner_of
from stillframe.errors import BusyError, ConfigError, IntegrityError, NotFoundError, StorageError, VersionError
from stillframe.format import limits, names
from stillframe.format.epochs import Answer, Request, decode_answer, encode_request
from stillframe.model import SaveId, check_step
from stillframe.retention import Keep, encode_policy
from stillframe.store.lock import FileLock, NoLocks
from stillframe.store.protocol import Missing, Store, read_all

ANSWER_S = 10.0
"""So long a run may take to answer, or to go on with what it was asked for."""
ELSEWHERE_S = 3.0
"""The lock is free, and its last owner was on another node: on some file systems a lock holds on its node only."""
_POLL_S = 0.05
_PIN = b"{}\n"


class Presence(enum.Enum):
    """Whether a run lives in a root, as far as the lock of rank 0 tells."""

    LIVING = "its lock is held"
    NOBODY = "its lock is free"
    NO_LOCKS = "there are no locks"
    ELSEWHERE = "its lock is free here, and its last owner was on another node"


def presence(store: Store) -> Presence:
    """Raises :class:`StorageError` if the lock cannot be read."""
    try:
        with FileLock(store, names.lock(0), is_shared=True) as lock:
            if not lock.acquire():
                return Presence.LIVING
    except Missing:
        return Presence.NOBODY
    except NoLocks:
        return Presence.NO_LOCKS
    owner = owner_of(store, 0)
    return Presence.NOBODY if owner is None or owner.host == socket.gethostname() else Presence.ELSEWHERE


# --- removing --------------------------------------------------------------------------------


def prune(catalog: Catalog, keep: Keep) -> Plan:
    """Remove what a policy does not keep.

    Blocks.  Raises: :class:`BusyError` if the run that lives here does not answer; :class:`StorageError`.
    """
    check_shared(catalog)
    return _settle(catalog, Wanted(keep=keep))


def check_shared(catalog: Catalog) -> None:
    """A policy cannot judge by one root of several.  Raises :class:`ConfigError`."""
    if not catalog.look().is_shared:
        raise ConfigError(
            f"the ranks of the run did not share {catalog.root}, so nothing here tells which steps all of them have. "
            "Let the run itself remove old checkpoints, with Checkpointer(…, keep=…)"
        )


def remove(catalog: Catalog, steps: Sequence[int], *, force: bool = False) -> Plan:
    """Remove every checkpoint of these steps, also those off the branch, and what is quarantined.

    ``force``: even the newest checkpoint of the branch.
    Blocks.  Raises: :class:`NotFoundError`, :class:`ConfigError` (nothing was removed); :class:`BusyError` if the run
    that lives here does not answer; :class:`StorageError`.
    """
    saves = [save for step in dict.fromkeys(map(check_step, steps)) for save in removable(catalog, step)]
    newest = catalog.newest()
    if newest in saves and not force:
        others = [save.step for save in catalog.committed() if save not in saves]
        then = f"training would go on from step {others[0]}" if others else "no checkpoint would be left"
        raise ConfigError(
            f"step {newest.step if newest else ''} is the newest checkpoint in {catalog.root}: {then}. "
            "If that is what you want, give --force, or force=True"
        )
    for save in saves:
        if removal.is_pinned(catalog, save):
            raise ConfigError(f"{save} in {catalog.root} is pinned: unpin it first")
    return _settle(catalog, Wanted(tuple(saves)))


def remove_if_free(catalog: Catalog, steps: Collection[int], *, force: bool = False) -> Plan:
    """As :func:`remove`, of those of the steps that are there, are not pinned, and are not the newest of the branch.

    ``force``: the newest, too.  Raises: :class:`BusyError`; :class:`StorageError`.
    """
    kept = None if force else catalog.newest()
    asked = [save for save in catalog.look().saves if save.step in steps and save != kept]
    return _settle(catalog, Wanted(tuple(save for save in asked if is_removable(catalog, save))))


def removable(catalog: Catalog, step: int) -> list[SaveId]:
    """The saves of a step that can be removed by hand.  Raises :class:`NotFoundError`; :class:`StorageError`."""
    found = [save for save in catalog.look().saves if save.step == step and is_removable(catalog, save)]
    if not found:
        raise catalog.not_found(step)
    return found


def _settle(catalog: Catalog, wanted: Wanted) -> Plan:
    planned = plan(catalog, wanted)
    if not planned.gone:
        return planned
    if all(catalog.is_shared(each.save.epoch) for each in planned.gone):
        answered = ask(catalog, wanted)
        if answered is not None:
            return answered
    else:
        check_free(catalog)
    epoch = epochs.begin_by_hand(catalog)
    return carry_out(catalog, plan(catalog, wanted), wanted.reason, epoch)


def check_free(catalog: Catalog) -> None:
    """Raises :class:`BusyError` if any rank's keeper is at work in the root, as far as locks tell."""
    for name in sorted(catalog.store.list(names.RUN)):
        rank = names.parse_lock(name)
        if rank is not None and is_held(catalog.store, rank):
            raise BusyError(
                f"{_who(catalog.store, rank)} is at work in {catalog.root}, and its ranks do not share the root. "
                "Wait until it has ended, or let it remove old checkpoints itself: Checkpointer(…, keep=…)"
            )


def _who(store: Store, rank: int) -> str:
    owner = owner_of(store, rank)
    return f"a run (process {owner.pid} on {owner.host})" if owner else "a run"


# --- asking a living run ---------------------------------------------------------------------


def ask(catalog: Catalog, wanted: Wanted) -> Plan | None:
    """What the run that lives in the root has done; ``None`` if none lives there.

    Blocks.  Raises: :class:`BusyError` if it lives and does not answer; :class:`StorageError`.
    """
    here = presence(catalog.store)
    if here is Presence.NOBODY or not catalog.epochs():
        return None
    store, ticket = catalog.store, secrets.token_hex(4)
    policy = "" if wanted.keep is None else encode_policy(wanted.keep)
    try:
        request = Request(ticket, time.time(), list(wanted.saves), policy)
        store.put(names.request(ticket), encode_request(request), durable=False)
        return _await(catalog, ticket, ELSEWHERE_S if here is Presence.ELSEWHERE else ANSWER_S)
    finally:
        with contextlib.suppress(StorageError):
            store.delete([names.answer(ticket), names.request(ticket)])


def _await(catalog: Catalog, ticket: str, patience_s: float) -> Plan | None:
    store, heard_s = catalog.store, time.monotonic()
    last: Answer | None = None
    while True:
        answer = _read_answer(store, ticket)
        if answer is not None and answer.is_done:
            error = errors.from_record(answer.error, answer.message) if answer.error else None
            return Plan(answer.gone, answer.stays, error)
        if answer is not None and answer != last:  # it is at work
            last, heard_s, patience_s = answer, time.monotonic(), ANSWER_S
        waited_s = time.monotonic() - heard_s
        is_held_up = waited_s > patience_s
        if (is_held_up or waited_s > 1.0) and last is None and presence(store) is Presence.NOBODY:
            return None  # it has ended meanwhile
        if is_held_up and (last is not None or presence(store) is Presence.LIVING):
            raise BusyError(
                f"{_who(store, 0)} is at work in {catalog.root}, and has not answered for {patience_s:g} s: it may be "
                "stopped, or its storage may hang. Try again; or let it remove old checkpoints itself: "
                "Checkpointer(…, keep=…)"
            )
        if is_held_up:
            return None
        time.sleep(_POLL_S)


def _read_answer(store: Store, ticket: str) -> Answer | None:
    key = names.answer(ticket)
    try:
        return decode_answer(read_all(store, key, limits.MAX_NOTE_BYTES), file=store.where(key))
    except (Missing, IntegrityError, VersionError):
        return None


# --- pinning ---------------------------------------------------------------------------------


def pin(catalog: Catalog, step: int) -> SaveId:
    """Retention, and whoever removes by hand, leave the checkpoint of this step alone.  May be repeated.

    Raises: :class:`NotFoundError`, also if it is being removed just now; :class:`StorageError`.
    """
    save = catalog.find(check_step(step))
    key = names.key(save, names.PIN)
    if not removal.is_pinned(catalog, save):  # who may only read finds out what was pinned for him
        catalog.store.put(key, _PIN)
    if not catalog.is_committed(save):  # the pin came too late
        catalog.store.delete([key, f"{names.step_dir(save)}/"])
        raise NotFoundError(f"{save} is being removed from {catalog.root} just now")
    return save


def unpin(catalog: Catalog, step: int) -> list[SaveId]:
    """The opposite, for every save of the step; returns those that were pinned.

    Raises: :class:`NotFoundError` if there is no such step; :class:`StorageError`.
    """
    own = [save for save in catalog.look().saves if save.step == check_step(step)]
    if not own:
        raise catalog.not_found(step)
    pinned = [save for save in own if removal.is_pinned(catalog, save)]
    catalog.store.delete([names.key(save, names.PIN) for save in pinned])
    return pinned
