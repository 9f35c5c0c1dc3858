"""Retention: what goes, after each commit; and what earlier epochs have left behind.

What may go is decided by one pure function (:func:`stillframe.retention.garbage`), by the keeper of rank 0 in the
newest epoch; how it goes stands in :mod:`stillframe.checkpoint.removal`.  One that somebody is reading (it holds a
shared lock) stays until the next time.

Of several ranks, rank 0 sets a save aside; each removes its own files, so that the work of one does not grow with their
number; then rank 0 removes the rest.
"""

from __future__ import annotations

import bisect
import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from stillframe.checkpoint import labels
from stillframe.checkpoint.catalog import Catalog, View
from stillframe.checkpoint.label_use import LabelUse
from stillframe.checkpoint.removal import (
    TOMBSTONE_S,
    exclusive,
    has_rank_files,
    is_pinned,
    remove_all,
    remove_rank_files,
    set_aside,
)
from stillframe.errors import IntegrityError, NotFoundError, StorageError, VersionError
from stillframe.format import names
from stillframe.format.epochs import Aside
from stillframe.model import SaveId
from stillframe.retention import Keep, Known, garbage, judges_by_manifest

_OVERDUE_S = 600.0
"""After so long, rank 0 removes what another rank should have removed."""
_AT_ONCE = 16
_FEW, _ASKED_AT_ONCE = 4, 16
"""More saves than these few are asked about so many at a time."""


class Pruner:
    """Thread: one at a time, under the keeper's tidying lock.

    ``epoch``: that this keeper saves in, if it is known.  ``is_alone``: no other rank has files in these saves.
    ``kept``: what must stay for now, whatever the policy says.  ``is_tier``: a keeper of an earlier run may be about to
    publish what is removed here, and only the tombstone tells it: that stays for a day.
    """

    def __init__(
        self,
        catalog: Catalog,
        keep: Keep | None,
        rank: int,
        is_alone: bool,
        epoch: Callable[[], int | None],
        kept: Callable[[], set[SaveId]] = set,
        is_tier: bool = False,
    ) -> None:
        self._kept = kept
        self._is_tier = is_tier
        self._catalog = catalog
        self._keep = keep
        self._rank = rank
        self._is_alone = is_alone
        self._epoch = epoch
        self._decides = rank == 0 or catalog.rank is not None
        self._known: dict[SaveId, Known] = {}
        """Checkpoints that need no second look: nobody else removes them."""
        self._tombstones: set[SaveId] = set()
        """Set aside, and to be left alone by this keeper."""
        self._own: set[SaveId] = set()
        """Those that this keeper has had a part in, while they may be there and a policy may let them go."""
        self._looked: SaveId | None = None
        """A member looks at a few of its own at a time, in turn: the oldest may be kept for good."""
        self._labels = LabelUse(catalog)
        self._left: dict[SaveId, float] = {}
        """Set aside, and when; other ranks' files may be there still."""

    @property
    def has_work(self) -> bool:
        """Something is to be removed, but another rank has to act first."""
        if self._decides:
            return bool(self._left)
        return not judges_by_manifest(self._keep) and bool(self._going_of_own())

    def tidy(self) -> None:
        """Remove what has waited for other ranks.  Raises :class:`StorageError`."""
        if self._decides:
            self._remove_left()
        else:
            self._remove_own()

    def committed(self, save: SaveId, complete_step: int = -1) -> None:
        """Raises :class:`StorageError`, :class:`BusyError`; what was not removed is tried again next time.

        ``complete_step``: in a root that is not shared, the newest step that all ranks are known to have.
        """
        if self._keep is not None:
            self._own.add(save)
        if self._decides and (self._keep is not None or self._labels.is_labelled(save)):
            self.prune(save, complete_step)
        elif not self._decides:
            self._remove_own()

    # --- members ---------------------------------------------------------------------------

    def _going_of_own(self) -> list[SaveId]:
        """Own saves that rank 0 may have set aside."""
        if self._keep is None:
            return []
        own = sorted(self._own)[:-1]
        if not judges_by_manifest(self._keep):
            kept = self._keep.keeps([Known(save) for save in self._own], time.time())
            own = [save for save in own if save.step not in kept]
        return own

    def _remove_own(self) -> None:
        going = self._going_of_own()
        later = bisect.bisect_right(going, self._looked) if self._looked else 0
        for save in (going[later:] + going[:later])[:_AT_ONCE]:
            self._looked = save
            store = self._catalog.store
            if store.head(self._catalog.commit_key(save)) is not None:
                continue  # a checkpoint, or rank 0 may still withdraw its tombstone
            if store.head(self._catalog.aside_key(save)) is not None:  # that it is not there alone may be an old answer
                remove_rank_files(self._catalog, save, self._rank)
                self._own.discard(save)
            elif store.head(names.key(save, names.seal(self._rank))) is None:
                self._own.discard(save)  # rank 0 has removed it all

    # --- rank 0 ----------------------------------------------------------------------------

    def _remove_left(self) -> None:
        """What is left of checkpoints when every rank has removed its files, or should have long ago."""
        for save, since_s in list(self._left.items()):
            if time.monotonic() - since_s > _OVERDUE_S or not has_rank_files(self._catalog, save):
                remove_all(self._catalog, save, self._keeps_tombstones)
                del self._left[save]

    def prune(self, newest: SaveId | None = None, complete_step: int = -1) -> None:
        """One pass: what the policy lets go, and what no writer can turn into a checkpoint any more.

        ``newest``: just committed; it stays, whatever its number.  ``complete_step``: as for :meth:`committed`.
        Raises: :class:`BusyError` if another run has taken over; :class:`StorageError`, after all has been tried.
        """
        problems: list[StorageError] = []
        with _collected(problems):
            self._remove_left()
        # In the name of the epoch that has just committed, even if the trainer has begun to restore meanwhile.
        epoch = self._epoch() if newest is None else newest.epoch
        kept = self._kept()  # asked before anything is looked at: what comes later is not known of here, and stays
        view = self._catalog.look()
        uncommitted = self._take_stock(view, problems)
        if epoch is not None:
            lost: dict[SaveId, str] = {}
            with _collected(problems):
                lost = self._lost(newest)
            for save, why in {**self.going(view, newest, complete_step, lost), **lost}.items():
                with _collected(problems):
                    self._remove(save, why, epoch, is_lost=save in lost)
        for save in uncommitted:
            if save not in kept:
                with _collected(problems):
                    self._remove_leftover(save, epoch)
        if problems:
            raise problems[0]

    def _take_stock(self, view: View, problems: list[StorageError]) -> list[SaveId]:
        """Look at what is not known yet.  Returns the saves that are no checkpoints."""
        there = set(view.saves)
        self._known = {save: known for save, known in self._known.items() if save in there}
        self._tombstones &= there
        self._own &= there
        uncommitted = []
        unknown = [
            save for save in view.saves if not (save in self._known or save in self._tombstones or save in self._left)
        ]
        for save, is_committed in self._ask(unknown):
            with _collected(problems):
                if is_committed():
                    self._known[save] = self._judged(save)
                else:
                    uncommitted.append(save)
        return uncommitted

    def _ask(self, saves: Sequence[SaveId]) -> Iterator[tuple[SaveId, Callable[[], bool]]]:
        """Whether each is a checkpoint: a function that says so, or raises.

        Many at once: a tier has the tombstones of a day, and a new keeper knows none of them.
        """
        if len(saves) <= _FEW:
            yield from ((save, partial(self._catalog.is_committed, save)) for save in saves)
            return
        with ThreadPoolExecutor(_ASKED_AT_ONCE, "stillframe-stock") as pool:
            asked = [pool.submit(self._catalog.is_committed, save) for save in saves]
            yield from ((save, each.result) for save, each in zip(saves, asked, strict=True))

    def _judged(self, save: SaveId) -> Known:
        if not judges_by_manifest(self._keep):
            return Known(save)
        with contextlib.suppress(IntegrityError, VersionError, NotFoundError):
            manifest = self._catalog.manifest(save)
            return Known(save, manifest.saved_unix_s, manifest.metadata)
        return Known(save)

    def _lost(self, newest: SaveId | None) -> dict[SaveId, str]:
        """After the commit of a save with a label: checkpoints that have lost theirs, and why."""
        if newest is None or not self._labels.is_labelled(newest):
            return {}
        stays = self._kept() | {newest}
        lost = self._labels.lost(self._known)
        return {save: why for save, why in lost.items() if save not in stays and not self._is_pinned(save)}

    def going(
        self, view: View, newest: SaveId | None, complete_step: int = -1, lost: Collection[SaveId] = ()
    ) -> dict[SaveId, str]:
        """What the policy lets go, and why.  ``lost`` go anyhow: they do not count."""
        branch: list[Known] = []
        others = [save for save in view.off_branch if save in self._known]
        for saves in view.on_branch.values():
            found = [save for save in saves if save in self._known and save not in lost]
            branch += [self._known[save] for save in found[:1]]
            others += found[1:]
        if self._catalog.rank is not None:  # nothing goes before a later one is complete on every rank
            branch = [each for each in branch if each.save.step <= complete_step]
        if branch and not self._is_usable(max(each.save for each in branch)):
            return {}  # what would stay cannot be restored
        stays = self._kept() | ({newest} if newest else set())
        going = garbage(branch, others, self._keep, stays, time.time())
        return {save: why for save, why in going.items() if not self._is_pinned(save)}

    def _is_usable(self, save: SaveId) -> bool:
        """Whether nothing of a checkpoint is missing, as far as names tell; one that we have committed is whole."""
        if save in self._own:
            return True
        try:
            return not self._catalog.lacks(self._catalog.manifest(save))
        except (IntegrityError, VersionError, NotFoundError):
            return False

    def _is_pinned(self, save: SaveId) -> bool:
        try:
            return is_pinned(self._catalog, save)
        except StorageError:
            return True  # cannot tell

    def _remove(self, save: SaveId, why: str, epoch: int, is_lost: bool = False) -> None:
        """A checkpoint, unless somebody is reading it.  Raises :class:`BusyError`, :class:`StorageError`.

        ``is_lost``: it has lost its label; the other ranks do not know, and leave their files to this one.
        """
        is_shared_work = save in self._own and not self._is_alone and not is_lost
        with exclusive(self._catalog, save) as is_free:
            if not is_free:
                return
            stays = set_aside(self._catalog, save, "pruned", epoch, why)
        self.forget(save)
        if stays:
            return  # if it is pinned, it will be looked at again
        if is_shared_work:
            self._left[save] = time.monotonic()
            labels.remove(self._catalog, save)
            remove_rank_files(self._catalog, save, self._rank, names.MANIFEST)
        else:
            remove_all(self._catalog, save, self._keeps_tombstones)
            if self._keeps_tombstones:
                self._tombstones.add(save)  # nothing else of it is there: it need not be looked at again

    def forget(self, save: SaveId) -> None:
        """Somebody has removed or quarantined it: what is known of it does not hold any more."""
        self._known.pop(save, None)
        self._own.discard(save)

    def _remove_leftover(self, save: SaveId, epoch: int | None) -> None:
        """A save of an earlier epoch that never became a checkpoint, or whose removal was interrupted."""
        aside = self._aside(save)
        if aside is None:
            if epoch is None or save.epoch >= epoch:
                return  # it may be under way
            if set_aside(self._catalog, save, "left over", epoch):
                return
        elif aside.reason == "quarantined":
            self._tombstones.add(save)
            return
        elif aside.was_committed and aside.epoch != epoch and not self._is_over(aside) and self._is_whole(save):
            return  # whoever set it aside may only be paused, and may yet withdraw that
        is_over = aside is not None and (self._is_over(aside) or (aside.was_committed and not self._keeps_tombstones))
        remove_all(self._catalog, save, keeps_tombstone=not is_over)
        if not is_over:
            self._tombstones.add(save)

    @property
    def _keeps_tombstones(self) -> bool:
        return self._is_tier or self._catalog.store.caps.lands_late

    def _is_whole(self, save: SaveId) -> bool:
        """Its manifest is still there, so nothing of it has been removed."""
        return self._catalog.store.head(self._catalog.commit_key(save)) is not None

    @staticmethod
    def _is_over(aside: Aside) -> bool:
        return time.time() - aside.unix_s > TOMBSTONE_S

    def _aside(self, save: SaveId) -> Aside | None:
        try:
            return self._catalog.aside(save)
        except (IntegrityError, VersionError) as error:
            raise StorageError(f"{self._catalog.dir(save)} stays: {error}") from error


@contextlib.contextmanager
def _collected(problems: list[StorageError]) -> Iterator[None]:
    """One save that cannot be read keeps nobody from tidying the others."""
    try:
        yield
    except StorageError as error:
        problems.append(error)


def remove_spares(catalog: Catalog, rank: int, world_size: int) -> None:
    """Remove what a killed keeper of this rank was setting aside; on rank 0 also the spares of ranks that only an
    earlier, larger run had.  Raises :class:`StorageError`."""
    for name in catalog.store.list():
        whose, is_unfinished = names.parse_spare(name) or (-1, False)
        if (whose == rank and is_unfinished) or (rank == 0 and catalog.rank is None and whose >= world_size):
            catalog.store.delete([name])
