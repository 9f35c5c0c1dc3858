"""What goes from a root while a run lives: old checkpoints, what earlier runs have left, what somebody asks for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from stillframe import errors
from stillframe.checkpoint import labels
from stillframe.checkpoint.catalog import Catalog
from stillframe.errors import StillframeError
from stillframe.keeper.commit_loop import or_die
from stillframe.keeper.epochs import CurrentEpoch
from stillframe.keeper.journal import forget
from stillframe.keeper.requests import RequestDesk
from stillframe.keeper.retention import Pruner, remove_spares
from stillframe.keeper.terms import COORDINATOR, Terms
from stillframe.latch import Latch
from stillframe.model import SaveId
from stillframe.retention import Keep

_REMOVAL_S = 1.0
"""So long a new segment, or epoch, waits for a removal under way: writing over a removed segment is faster than fresh
blocks, and what an epoch has not removed stays until the next commit."""


class Upkeep:
    """Thread: safe from any.  ``notice`` is told what could not be removed; that keeps no save from being made.

    ``kept``: what is being carried to other tiers.
    """

    def __init__(
        self,
        catalog: Catalog,
        terms: Terms,
        rank: int,
        keep: Keep | None,
        epoch: CurrentEpoch,
        notice: Callable[[str], None],
        kept: Callable[[], set[SaveId]] = set,
    ) -> None:
        self._catalog = catalog
        self._terms = terms
        self._rank = rank
        self._epoch = epoch
        self._notice = notice
        is_alone = terms.world_size == 1 or catalog.rank is not None
        self._pruner = Pruner(catalog, keep, rank, is_alone, lambda: epoch.number, kept)
        self._lock = threading.Lock()
        self._desk = RequestDesk(catalog, self._pruner, epoch.number_to_remove_by, self._lock)
        self._clearer = ThreadPoolExecutor(1, "stillframe-clear")
        self._is_cleared = False
        self._complete_step = -1
        self._removal = Latch()
        """The newest: open when it is done.  No lock: who waits must not be able to hold up who removes."""
        self._removal.unlock()

    def start(self) -> None:
        """The root is ours: answer requests.  May be called again."""
        if self._rank == COORDINATOR and self._catalog.rank is None:
            self._desk.start()

    def save_begins(self, complete_step: int) -> None:
        """``complete_step``: in a root that is not shared, the newest of this epoch that all ranks have sealed."""
        self._complete_step = complete_step
        if not self._is_cleared:
            self._is_cleared = True
            self._clearer.submit(or_die, self._clear)

    def _clear(self) -> None:
        """What earlier epochs have left.  Once, beside the first save: it holds nobody up."""
        try:
            with self._lock, contextlib.ExitStack() as stack:
                stack.callback(remove_spares, self._catalog, self._rank, self._terms.world_size)
                if self._epoch.decides:
                    epoch = self._epoch.current().epoch  # nothing of the past goes before this epoch has begun
                    stack.callback(forget, self._terms.store, self._terms.run)
                    stack.callback(self._pruner.prune, None, self._complete())
                    labels.finish(self._catalog, epoch)
        except StillframeError as error:
            self._notice(f"what earlier runs have left could not all be removed: {errors.text_of(error)}")

    @contextlib.contextmanager
    def after_commit(self, save: SaveId) -> Iterator[None]:
        """At its end, remove what the policy lets go.  :meth:`wait_for_removal` knows of it from its beginning on."""
        removal = self._removal = Latch()
        try:
            yield
            try:
                with self._lock:
                    self._pruner.committed(save, self._complete())
            except StillframeError as error:
                self._notice(f"old checkpoints could not be removed: {errors.text_of(error)}")
        finally:
            removal.unlock()

    def wait_for_removal(self) -> None:
        """Until a removal that is under way is done, but not long.

        For a new segment: one that was set aside can be written over.  For a new epoch: the old one may not remove any
        more once that is claimed.
        """
        self._removal.wait(_REMOVAL_S)

    def _complete(self) -> int:
        """The newest step that every rank is known to have, in a root that is not shared; -1 if there is none."""
        return max(self._complete_step, self._epoch.agreed_step)

    def tidy(self) -> bool:
        """Remove what has waited for other ranks; returns whether there may be more."""
        if self._pruner.has_work:
            with contextlib.suppress(StillframeError), self._lock:
                self._pruner.tidy()
        return self._pruner.has_work

    def close(self) -> None:
        """Blocks until what has begun is done."""
        self._desk.close()
        self._clearer.shutdown()
