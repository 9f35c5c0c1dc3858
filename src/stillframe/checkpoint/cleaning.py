"""What goes when somebody cleans a root: which saves, why, and how large they are.

The same plan is printed by a dry run, and carried out by a command where no run lives, by the keeper of rank 0 where
one does.  A policy counts only checkpoints whose files are all there; one that lacks something stays for a person to
look at.  The newest checkpoint of the branch never goes by a policy.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stillframe.checkpoint import labels, removal
from stillframe.checkpoint.catalog import Catalog, View
from stillframe.checkpoint.notes import read_carrying
from stillframe.errors import BusyError, IntegrityError, NotFoundError, StillframeError, StorageError, VersionError
from stillframe.format import names
from stillframe.format.epochs import Gone, Reason, Stays
from stillframe.model import SaveId
from stillframe.retention import Keep, Known, garbage
from stillframe.store import infos
from stillframe.store.posix import PosixStore
from stillframe.store.protocol import NotOurs

_MOST = 10_000
"""Of one plan: an answer has to fit into a small file."""


@dataclass(slots=True)
class Plan:
    """What is to go, and what stays although it was asked for; after :func:`carry_out`, what went and what stayed."""

    gone: list[Gone] = field(default_factory=list)
    stays: list[Stays] = field(default_factory=list)
    error: StillframeError | None = None
    """It was not carried out to its end."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What somebody wants to be removed: these saves, or what the policy does not keep."""

    saves: tuple[SaveId, ...] = ()
    keep: Keep | None = None

    @property
    def reason(self) -> Reason:
        return "removed" if self.keep is None else "pruned"


def plan(catalog: Catalog, wanted: Wanted) -> Plan:
    """Reads only.  Raises :class:`StorageError`."""
    if wanted.keep is not None:
        going = _let_go(catalog, catalog.look(), wanted.keep)
    else:
        going = dict.fromkeys(wanted.saves, "")
    carried = read_carrying(catalog.store) if wanted.keep is not None else set()
    made = Plan()
    for save, why in list(going.items())[:_MOST]:
        if wanted.keep is None and not is_removable(catalog, save):  # it may be being saved just now
            made.stays.append(Stays(save, "it is no checkpoint"))
        elif removal.is_pinned(catalog, save):
            made.stays.append(Stays(save, removal.PINNED))
        elif save in carried:
            made.stays.append(Stays(save, "it is being carried to a tier, or was when the run ended"))
        elif any(removal.is_read(part, save) for part in parts_of(catalog, save)):
            made.stays.append(Stays(save, removal.READ))
        elif (size := _size(catalog, save)) is not None:
            made.gone.append(Gone(save, why, size))
    return made


def is_removable(catalog: Catalog, save: SaveId) -> bool:
    """Whether it can be removed by hand: a checkpoint, or one that is quarantined.  Raises :class:`StorageError`."""
    return catalog.is_committed(save) or any(_is_quarantined(part, save) for part in parts_of(catalog, save))


def _is_quarantined(catalog: Catalog, save: SaveId) -> bool:
    try:
        aside = catalog.aside(save)
    except (IntegrityError, VersionError, NotOurs):
        return False
    return aside is not None and aside.reason == "quarantined"


def parts_of(catalog: Catalog, save: SaveId) -> Sequence[Catalog]:
    """The catalogs that set a save aside, each its part: of every rank here, where the ranks do not share the root."""
    if catalog.rank is not None or catalog.is_shared(save.epoch):
        return [catalog]
    found = [names.parse_rank_file(name) for name in catalog.store.list(names.step_dir(save))]
    return [Catalog(catalog.store, rank) for rank in sorted({file.rank for file in found if file is not None})]


def _let_go(catalog: Catalog, view: View, keep: Keep) -> dict[SaveId, str]:
    """What the policy does not keep, of the checkpoints that are whole, in the order of their steps."""
    whole = {save: known for save in view.saves if (known := _whole(catalog, save)) is not None}
    branch: list[Known] = []
    others = [save for save in view.off_branch if save in whole]
    for saves in view.on_branch.values():
        found = [save for save in saves if save in whole]
        branch += [whole[save] for save in found[:1]]
        others += found[1:]
    return garbage(branch, others, keep, (), time.time())


def _whole(catalog: Catalog, save: SaveId) -> Known | None:
    """``None`` if it is no checkpoint, or one that lacks something, is damaged, or of a newer format."""
    try:
        if not catalog.is_committed(save):
            return None
        manifest = catalog.manifest(save)
        return None if catalog.lacks(manifest) else Known(save, manifest.saved_unix_s, manifest.metadata)
    except (NotFoundError, IntegrityError, VersionError):
        return None


def _size(catalog: Catalog, save: SaveId) -> int | None:
    """Of its files; ``None`` if there is nothing of it."""
    found = infos(catalog.store, names.step_dir(save))
    return sum(info.size for name, info in found.items() if names.is_ours(name)) if found else None


def carry_out(
    catalog: Catalog,
    planned: Plan,
    reason: Reason,
    epoch: int,
    tell: Callable[[Plan], None] = lambda _plan: None,
    lock: contextlib.AbstractContextManager[object] | None = None,
) -> Plan:
    """Remove what was planned, in the name of ``epoch``.  The result says how far it came; errors are in it.

    ``tell`` is called with what has been done so far, after each save.  ``lock`` is held while one is removed.
    """
    done = Plan(stays=list(planned.stays))
    for each in planned.gone:
        try:
            with lock or contextlib.nullcontext():
                stays = [why for part in parts_of(catalog, each.save) if (why := _remove(part, each, reason, epoch))]
        except (StorageError, BusyError) as error:
            done.error = done.error or error
            if isinstance(error, BusyError):
                break  # another run has taken over
            continue
        if stays:
            done.stays.append(Stays(each.save, stays[0]))
        else:
            done.gone.append(each)
        tell(done)
    if done.gone and isinstance(catalog.store, PosixStore):
        with contextlib.suppress(StillframeError):
            labels.follow_branch(catalog)
    return done


def _remove(catalog: Catalog, each: Gone, reason: Reason, epoch: int) -> str:
    return removal.remove(catalog, each.save, reason, epoch, each.why)
