"""Committing a step that several ranks save: each seals alone, rank 0's keeper counts the seals.

The file system is the only medium, so no background collective can get in training's way, and it works when
the trainers are gone.  Rank 0 (the coordinator) publishes the manifest when every rank of its attempt has
sealed the step; the other ranks (members) watch for it.  A rank that cannot seal says so in a failure file.

A sealed file is a promise that rank 0 may already have counted: a member takes it back only on rank 0's word that
the step will not be committed, and leaves it to the next run's sweep in every other case.

Every wait ends: with the manifest, with somebody's failure, when a keeper that is waited for is gone (its lock
is free), or at the deadline, and the error names the ranks.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from stillframe import errors
from stillframe.checkpoint.lock import Life, life_of
from stillframe.errors import DeadlineError, ExistsError, FormatError, KeeperError, StateError, StorageError
from stillframe.format import limits, names, tree
from stillframe.format.records import (
    HEAD_BYTES,
    RankEntry,
    Team,
    decode_failure,
    decode_seal,
    decode_seal_head,
    has_head,
)
from stillframe.format.segment import OF_TEAM
from stillframe.keeper.segment import SegmentWriter
from stillframe.store import heads
from stillframe.store.protocol import Missing, Store, read_all, read_range
from stillframe.units import format_ranks

COORDINATOR = 0
_ADVICE = "every rank must save the same steps"
_MEMBERS_WAIT_LONGER_S = 10.0
"""So that the coordinator's error, which knows more, comes first."""
_LOOK_AT_LOCKS_S = 0.5
_LOCKS_AT_ONCE = 16
_UNKNOWN_S = 5.0
_ABSENT_S = 5.0
_HEAD_BYTES = 512


@dataclass(frozen=True, slots=True)
class Terms:
    """What every wait of this keeper goes by."""

    store: Store
    attempt: str
    world_size: int
    deadline_s: float


class Commit(Protocol):
    """A sealed step that waits to be committed."""

    save: SegmentWriter
    decides: bool
    """It makes the checkpoint, and so has work to do even when no trainer is left."""

    def poll(self, is_orphan: bool) -> bool:
        """Whether it is committed now.  Never blocks for another rank; raises when it never will be."""
        ...

    @property
    def awaited(self) -> list[int]:
        """The ranks that have not done their part yet."""
        ...


class _Watch:
    """Whether the keepers that are waited for still live, looked up now and then."""

    def __init__(self, terms: Terms, has_locks: bool) -> None:
        self._terms = terms
        self._has_locks = has_locks
        self._began = self._looked = time.monotonic()
        self._turn = 0

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._began

    def gone(self, ranks: Sequence[int], is_orphan: bool) -> list[int]:
        """Those of the ranks (a few at a time) whose keeper has ended without a word."""
        now = time.monotonic()
        if not self._has_locks or now - self._looked < _LOOK_AT_LOCKS_S or not ranks:
            return []
        self._looked = now
        start = self._turn % len(ranks)
        self._turn += _LOCKS_AT_ONCE
        # One that never had its lock may be starting still; but if our own trainer is gone, a new run has taken it.
        is_late = is_orphan and self.waited_s > _UNKNOWN_S
        lives = {rank: life_of(self._terms.store, rank, self._terms.attempt) for rank in _turn(ranks, start)}
        return sorted(rank for rank, life in lives.items() if life is Life.GONE or (life is Life.UNKNOWN and is_late))


def _turn(ranks: Sequence[int], start: int) -> list[int]:
    return [ranks[(start + at) % len(ranks)] for at in range(min(_LOCKS_AT_ONCE, len(ranks)))]


class Coordinator:
    """Rank 0's side: collects seals as they come, then publishes the manifest."""

    decides = True

    def __init__(self, save: SegmentWriter, terms: Terms, has_locks: bool) -> None:
        self.save = save
        entry = save.entry
        self._terms = terms
        self._watch = _Watch(terms, has_locks)
        self._entries = {entry.rank: entry}
        self._teams: dict[int, list[Team]] = {entry.rank: save.draft.teams}
        self._seen_gone: set[int] = set()

    @property
    def awaited(self) -> list[int]:
        return [rank for rank in range(self._terms.world_size) if rank not in self._entries]

    def poll(self, is_orphan: bool) -> bool:
        self._take_seals()
        missing = self.awaited
        if not missing:
            self._check_teams()
            self.save.commit([self._entries[rank] for rank in range(self._terms.world_size)])
            return True
        gone = self._watch.gone(missing, is_orphan)
        if self._seen_gone.intersection(gone):  # twice: its seal may have come between the listing and the look
            if not self._begun().isdisjoint(gone):
                raise KeeperError(
                    f"{_not_committed(self.save.begin.step)}: {format_ranks(gone)} ended before sealing it"
                )
            if is_orphan or self._watch.waited_s > _ABSENT_S:  # else its trainer may yet come, and start another
                raise KeeperError(
                    f"{_not_committed(self.save.begin.step)}: {format_ranks(gone)} ended without saving it; {_ADVICE}"
                )
        self._seen_gone.update(gone)
        if self._watch.waited_s > self._terms.deadline_s:
            raise DeadlineError(self._lateness(missing))
        return False

    def _begun(self) -> set[int]:
        """The ranks that have written anything of this step."""
        files = map(names.parse_rank_file, self._list())
        return {file.rank for file in files if file is not None and file.attempt == self._terms.attempt}

    def _take_seals(self) -> None:
        seals: dict[str, int] = {}
        for name in self._list():
            file = names.parse_rank_file(name)
            if file is None or file.is_partial or file.attempt != self._terms.attempt or file.rank in self._entries:
                continue
            if file.kind == "failure.json":
                raise _failure(self._terms.store, self._key(name))
            if file.kind == "seal.json":
                seals[name] = file.rank
        if seals:
            directory = names.step_dir(self.save.begin.step)
            for name, head in heads(self._terms.store, directory, list(seals), HEAD_BYTES[0]):
                self._take(seals[name], name, head)

    def _list(self) -> list[str]:
        return list(self._terms.store.list(names.step_dir(self.save.begin.step)))

    def _key(self, name: str) -> str:
        return self.save.catalog.key(self.save.begin.step, name)

    def _take(self, rank: int, name: str, head: bytes) -> None:
        path = self._terms.store.where(self._key(name))
        if not has_head(head):
            head = read_range(self._terms.store, self._key(name), 0, HEAD_BYTES[1])
        seal, known_by = decode_seal_head(head, file=path)
        if (seal.step, seal.rank, seal.attempt) != (self.save.begin.step, rank, self._terms.attempt):
            raise FormatError(f"{path} is the seal of step {seal.step}, rank {seal.rank}")
        if seal.world_size != self._terms.world_size:
            raise StateError(
                f"rank {rank} saves step {seal.step} as one of {seal.world_size} ranks, rank 0 as one of "
                f"{self._terms.world_size}: give every rank the same world size"
            )
        if rank >= self._terms.world_size:
            raise StateError(f"step {seal.step} has a seal of rank {rank}, but the world has {seal.world_size} ranks")
        self._entries[rank] = RankEntry(rank, names.segment(rank, seal.attempt), seal.segment_bytes, name, known_by)
        self._teams[rank] = seal.teams

    def _check_teams(self) -> None:
        """Ranks that hold boxes of the same tensors agree on which tensors these are; else boxes would be missing."""
        members: dict[str, list[int]] = defaultdict(list)
        teams: dict[tuple[int, str], Team] = {}
        for rank in sorted(self._teams):
            for team in self._teams[rank]:
                members[team.ranks].append(rank)
                teams[rank, team.ranks] = team
        for key, ranks in members.items():
            first = teams[ranks[0], key]
            odd = [rank for rank in ranks if teams[rank, key].tensors != first.tensors]
            if odd:
                raise StateError(self._difference(ranks[0], odd))
            if len(ranks) != first.size:
                others = sorted(set(self._teams) - set(ranks))
                raise StateError(self._difference(ranks[0], others[:1]) if others else "a team has too few ranks")

    def _difference(self, rank: int, odd: list[int]) -> str:
        """Says of which tensors two ranks have different ideas."""
        one, other = self._tensors(rank), self._tensors(odd[0])
        lines = [f"{name}: {one[name]} on rank {rank}, not on rank {odd[0]}" for name in sorted(one.keys() - other)]
        lines += [f"{name}: {other[name]} on rank {odd[0]}, not on rank {rank}" for name in sorted(other.keys() - one)]
        lines += [
            f"{name}: {one[name]} on rank {rank}, {other[name]} on rank {odd[0]}"
            for name in sorted(one.keys() & other)
            if one[name] != other[name]
        ]
        listed = "\n  ".join(lines[:20]) or "they are laid out differently over the ranks"
        return (
            f"{_not_committed(self.save.begin.step)}: {format_ranks([rank])} and {format_ranks(odd)} save "
            f"different tensors where they should hold boxes of the same:\n  {listed}"
        )

    def _tensors(self, rank: int) -> dict[str, str]:
        store, key = self._terms.store, self._key(names.seal(rank, self._terms.attempt))
        seal, _ = decode_seal(read_all(store, key, limits.MAX_SEAL_BYTES), file=store.where(key))
        sharded = tree.nodes(seal.tree, tree.ShardedNode)
        return {node.tensor.split(OF_TEAM)[0]: f"{node.dtype}{list(node.shape)}" for node in sharded}

    def _lateness(self, missing: list[int]) -> str:
        text = (
            f"{_not_committed(self.save.begin.step)}: {format_ranks(missing)} of {self._terms.world_size} did "
            f"not seal it within {self._terms.deadline_s:g} s"
        )
        elsewhere = self._newest_step_of(missing[0])
        if elsewhere is not None:
            text += f" (rank {missing[0]} has sealed step {elsewhere}); {_ADVICE}"
        return text

    def _newest_step_of(self, rank: int) -> int | None:
        """Another step, later or not committed either, that a missing rank has sealed; for a message."""
        catalog, now = self.save.catalog, self.save.begin.step
        seal = names.seal(rank, self._terms.attempt)
        with contextlib.suppress(StorageError):  # the message is right without it
            sealed = [step for step in catalog.step_dirs() if catalog.store.head(catalog.key(step, seal)) is not None]
            return max((step for step in sealed if step > now or not catalog.is_committed(step)), default=None)
        return None


class Member:
    """Every other rank's side: watches for the manifest, or for rank 0's word that it will not come."""

    decides = False

    def __init__(self, save: SegmentWriter, terms: Terms, has_locks: bool) -> None:
        self.save = save
        self._terms = terms
        self._watch = _Watch(terms, has_locks)
        step, key = save.begin.step, save.catalog.key
        self._manifests = key(step, names.MANIFEST), key(step, names.pruned_manifest())
        self._failure = key(step, names.failure(COORDINATOR, terms.attempt))

    @property
    def awaited(self) -> list[int]:
        return [COORDINATOR]

    def poll(self, is_orphan: bool) -> bool:
        step, store = self.save.begin.step, self._terms.store
        if self._is_published():
            return True
        if store.head(self._failure) is not None:
            self.save.is_promised = False
            raise _failure(store, self._failure)
        if self._watch.gone([COORDINATOR], is_orphan) and not self._is_published():
            raise KeeperError(f"{_not_committed(step)}: rank 0 ended before committing it; {_ADVICE}")
        if self._watch.waited_s > self._terms.deadline_s + _MEMBERS_WAIT_LONGER_S:
            raise DeadlineError(
                f"{_not_committed(step)}: rank 0 did not commit it within {self._terms.deadline_s:g} s; {_ADVICE}"
            )
        return False

    def _is_published(self) -> bool:
        """Whether there is a manifest of this attempt, or was until retention set it aside; raises for another's."""
        for key in self._manifests:
            # The attempt stands in its first bytes; there may be megabytes of ranks behind.
            with contextlib.suppress(Missing):
                if f'"attempt":"{self._terms.attempt}"'.encode() in read_range(self._terms.store, key, 0, _HEAD_BYTES):
                    return True
                step, where = self.save.begin.step, self._terms.store.where()
                raise ExistsError(f"step {step} was committed by another run in {where}")
        return False


def _failure(store: Store, key: str) -> Exception:
    failure = decode_failure(read_all(store, key, limits.MAX_FAILURE_BYTES), file=store.where(key))
    message = failure.message
    if not message.startswith(_not_committed(failure.step)):
        message = f"{_not_committed(failure.step)}: rank {failure.rank} could not save it: {message}"
    return errors.from_record(failure.error, message)


def _not_committed(step: int) -> str:
    return f"step {step} is not committed"
