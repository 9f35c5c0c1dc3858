"""Committing a save of several ranks: each seals alone, rank 0's keeper counts the seals.

The store is the only medium, so no background collective can get in training's way, and it works when the trainers are
gone.  Rank 0 (the coordinator) publishes the manifest when every rank has sealed the save, and then says so in the
epoch's outcomes; the other ranks (members) watch these.  A rank that cannot seal says so in a failure file.

A seal is a promise that rank 0 may already have counted: a member takes it back only on rank 0's word that the save
will not be committed, and leaves it to retention in every other case.  Rank 0 gives that word when it has ended the
save, so that it cannot commit it any more.  Where the root cannot be written, the word comes through the trainers.

Every wait ends: with an outcome, with somebody's failure, when a keeper that is waited for is gone (its lock is free),
or at the deadline, and the error names the ranks.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

from stillframe import errors
from stillframe.checkpoint.catalog import Catalog
from stillframe.checkpoint.lock import Life, life_of
from stillframe.checkpoint.seals import read_brief, read_seal
from stillframe.errors import DeadlineError, KeeperError, StateError, StorageError
from stillframe.format import limits, names, tree
from stillframe.format.records import HEAD_BYTES, SealBrief, Team, decode_failure
from stillframe.format.segment import OF_TEAM
from stillframe.keeper.outcomes import read_outcome
from stillframe.keeper.segment import SegmentWriter
from stillframe.keeper.terms import COORDINATOR, Terms
from stillframe.store import heads
from stillframe.store.protocol import Missing, read_all
from stillframe.units import format_ranks

_ADVICE = "every rank must save the same steps"
_MEMBERS_WAIT_LONGER_S = 10.0
"""So that the coordinator's error, which knows more, comes first."""
_LOOK_AT_LOCKS_S = 0.5
_LOCKS_AT_ONCE = 16
_UNKNOWN_S = 5.0
_ABSENT_S = 5.0
"""So long after a save was sealed a keeper that is gone may be replaced by its trainer."""
_UNTOLD_S = 5.0
"""So long a member that sees the manifest waits to be told of it; then it makes sure itself."""


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
        lives = {rank: life_of(self._terms.store, rank, self._terms.run) for rank in _turn(ranks, start)}
        return sorted(rank for rank, life in lives.items() if life is Life.GONE or (life is Life.UNKNOWN and is_late))


def _turn(ranks: Sequence[int], start: int) -> list[int]:
    return [ranks[(start + at) % len(ranks)] for at in range(min(_LOCKS_AT_ONCE, len(ranks)))]


class Coordinator:
    """Rank 0's side: collects seals as they come, then publishes the manifest."""

    decides = True

    def __init__(self, save: SegmentWriter, terms: Terms, has_locks: bool, updates: UpdateCounts) -> None:
        self.save = save
        self._id = save.identify()
        self._terms = terms
        self._watch = _Watch(terms, has_locks)
        self._updates = updates
        self._seals: dict[int, tuple[SealBrief, str]] = {COORDINATOR: save.sealed}
        self._seen: set[str] = set()
        """Names that need no second look: of many ranks, parsing them all again would take most of a look."""
        self._seen_gone: set[int] = set()

    @property
    def awaited(self) -> list[int]:
        return [rank for rank in range(self._terms.world_size) if rank not in self._seals]

    def poll(self, is_orphan: bool) -> bool:
        self._take_seals()
        missing = self.awaited
        if not missing:
            self._check_teams()
            briefs = {rank: brief for rank, (brief, _) in self._seals.items()}
            self._updates.check(self._id.step, briefs)
            self.save.commit([self._seals[rank] for rank in range(self._terms.world_size)])
            return True
        gone = self._watch.gone(missing, is_orphan)
        if self._seen_gone.intersection(gone):  # twice: its seal may have come between the listing and the look
            if not self._begun().isdisjoint(gone):
                raise KeeperError(f"{_not_committed(self._id.step)}: {format_ranks(gone)} ended before sealing it")
            if is_orphan or self._watch.waited_s > _ABSENT_S:  # else its trainer may yet come, and start another
                raise KeeperError(
                    f"{_not_committed(self._id.step)}: {format_ranks(gone)} ended without saving it; {_ADVICE}"
                )
        self._seen_gone.update(gone)
        if self._watch.waited_s > self._terms.deadline_s:
            raise DeadlineError(self._lateness(missing))
        return False

    def _begun(self) -> set[int]:
        """The ranks that have written anything of this save."""
        files = map(names.parse_rank_file, self._list())
        return {file.rank for file in files if file is not None}

    def _take_seals(self) -> None:
        seals: dict[str, int] = {}
        for name in self._list():
            if name in self._seen:
                continue
            file = names.parse_rank_file(name)
            if file is not None and not file.is_partial and file.rank not in self._seals:
                if file.kind == "failure":
                    raise _failure(self.save.catalog, self._key(name))
                if file.kind == "seal":
                    seals[name] = file.rank
                    continue
            self._seen.add(name)
        if seals:
            for name, head in heads(self._terms.store, names.step_dir(self._id), list(seals), HEAD_BYTES[0]):
                self._take(seals[name], head)
                self._seen.add(name)

    def _list(self) -> list[str]:
        return list(self._terms.store.list(names.step_dir(self._id)))

    def _key(self, name: str) -> str:
        return names.key(self._id, name)

    def _take(self, rank: int, head: bytes) -> None:
        seal, known_by = read_brief(self._terms.store, self._id, rank, head)
        if seal.world_size != self._terms.world_size:
            raise StateError(
                f"rank {rank} saves step {self._id.step} as one of {seal.world_size} ranks, rank 0 as one of "
                f"{self._terms.world_size}: give every rank the same world size"
            )
        if rank >= self._terms.world_size:
            raise StateError(
                f"step {self._id.step} has a seal of rank {rank}, but the world has {seal.world_size} ranks"
            )
        self._seals[rank] = seal, known_by

    def _check_teams(self) -> None:
        """Ranks that hold boxes of the same tensors agree on which tensors these are; else boxes would be missing."""
        members: dict[str, list[int]] = defaultdict(list)
        teams: dict[tuple[int, str], Team] = {}
        for rank in sorted(self._seals):
            for team in self._seals[rank][0].teams:
                members[team.ranks].append(rank)
                teams[rank, team.ranks] = team
        for key, ranks in members.items():
            first = teams[ranks[0], key]
            odd = [rank for rank in ranks if teams[rank, key].tensors != first.tensors]
            if odd:
                raise StateError(self._difference(ranks[0], odd))
            if len(ranks) != first.size:
                others = sorted(set(self._seals) - set(ranks))
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
            f"{_not_committed(self._id.step)}: {format_ranks([rank])} and {format_ranks(odd)} save "
            f"different tensors where they should hold boxes of the same:\n  {listed}"
        )

    def _tensors(self, rank: int) -> dict[str, str]:
        seal, _ = read_seal(self._terms.store, self._id, rank)
        sharded = tree.nodes(seal.tree, tree.ShardedNode)
        return {node.tensor.split(OF_TEAM)[0]: f"{node.dtype}{list(node.shape)}" for node in sharded}

    def _lateness(self, missing: list[int]) -> str:
        text = (
            f"{_not_committed(self._id.step)}: {format_ranks(missing)} of {self._terms.world_size} did "
            f"not seal it within {self._terms.deadline_s:g} s"
        )
        elsewhere = self._elsewhere(missing[0])
        return text + (f" ({elsewhere}); {_ADVICE}" if elsewhere else "")

    def _elsewhere(self, rank: int) -> str:
        """What else a missing rank has sealed in this epoch; for a message."""
        catalog = self.save.catalog
        with contextlib.suppress(StorageError):  # the message is right without it
            others = [save for save in catalog.look().saves if save.epoch == self._id.epoch and save != self._id]
            for save in sorted(others, key=lambda each: (each.step == self._id.step, each), reverse=True):
                is_odd = save.step >= self._id.step or not catalog.is_committed(save)
                if is_odd and catalog.store.head(names.key(save, names.seal(rank))) is not None:
                    if save.step != self._id.step:
                        return f"rank {rank} has sealed step {save.step}"
                    return f"rank {rank} has sealed it as attempt {save.attempt}, rank 0 as attempt {self._id.attempt}"
        return ""


class UpdateCounts:
    """A guard: between two saves every rank makes the same number of updates, or they have not saved the same step."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}

    def check(self, step: int, briefs: dict[int, SealBrief]) -> None:
        """Raises :class:`StateError`, naming the ranks.  The next one counts from here, whatever came of this one."""
        made = {rank: brief.updates for rank, brief in briefs.items() if brief.updates}  # who has an optimizer
        since = {rank: count - self._last.get(rank, 0) for rank, count in made.items()}
        self._last = made
        by_count: dict[int, list[int]] = defaultdict(list)
        for rank, count in since.items():
            by_count[count].append(rank)
        if len(by_count) > 1:
            said = "; ".join(f"{format_ranks(ranks)}: {count}" for count, ranks in sorted(by_count.items()))
            raise StateError(
                f"{_not_committed(step)}: the ranks have made different numbers of updates since the save before "
                f"({said}), so their states do not belong together. Save the same step after the same update everywhere"
            )


class Member:
    """Every other rank's side: watches for rank 0's word, in the root; that it failed may also come by the trainers."""

    decides = False

    def __init__(self, save: SegmentWriter, terms: Terms, has_locks: bool) -> None:
        self.save = save
        self._id = save.identify()
        self._terms = terms
        self._watch = _Watch(terms, has_locks)
        self._seen_s: float | None = None

    @property
    def awaited(self) -> list[int]:
        return [COORDINATOR]

    def poll(self, is_orphan: bool) -> bool:
        outcome = read_outcome(self._terms.store, self._id)
        if outcome is not None and outcome.error:
            self.save.is_promised, self.save.is_told = outcome.files_stay, True
            raise errors.from_record(outcome.error, _told_by(COORDINATOR, self._id.step, outcome.message))
        if outcome is not None:
            return True
        if self.save.word is not None and self._is_published(is_overdue=True):
            return True  # rank 0's keeper has ended between the manifest and its word
        self.save.heed()
        is_gone = bool(self._watch.gone([COORDINATOR], is_orphan))
        if self._is_published(is_overdue=is_gone):
            return True
        if is_gone and (is_orphan or self._watch.waited_s > _ABSENT_S):  # else its trainer may start another
            raise KeeperError(f"{_not_committed(self._id.step)}: rank 0 ended before committing it; {_ADVICE}")
        if self._watch.waited_s > self._terms.deadline_s + _MEMBERS_WAIT_LONGER_S:
            raise DeadlineError(
                f"{_not_committed(self._id.step)}: rank 0 did not commit it within {self._terms.deadline_s:g} s; "
                f"{_ADVICE}"
            )
        return False

    def _is_published(self, is_overdue: bool) -> bool:
        """Whether the manifest is there, durably, although nobody has told of it for a while."""
        store, key = self._terms.store, names.key(self._id, names.MANIFEST)
        if self._seen_s is None and store.head(key) is not None:
            self._seen_s = time.monotonic()
        if self._seen_s is None or (time.monotonic() - self._seen_s < _UNTOLD_S and not is_overdue):
            return False
        try:
            is_there = store.put_new(key, read_all(store, key, limits.MAX_MANIFEST_BYTES))  # the same bytes: durable
            if store.head(names.key(self._id, names.seal(self.save.draft.rank))) is None:
                store.delete([key, f"{names.step_dir(self._id)}/"])  # retention has removed it all meanwhile
                is_there = True
        except Missing:
            aside = self.save.catalog.aside(self._id)
            is_there = aside is not None and aside.was_committed
        self.save.check_newest()
        return is_there


def _failure(catalog: Catalog, key: str) -> Exception:
    store = catalog.store
    failure = decode_failure(read_all(store, key, limits.MAX_NOTE_BYTES), file=store.where(key))
    return errors.from_record(failure.error, _told_by(failure.rank, failure.save.step, failure.message))


def _told_by(rank: int, step: int, message: str) -> str:
    """What a rank tells of its failure, for the others to read."""
    what = _not_committed(step)
    return message if message.startswith(what) else f"{what}: rank {rank} could not save it: {message}"


def _not_committed(step: int) -> str:
    return f"step {step} is not committed"
