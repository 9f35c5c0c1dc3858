"""The epoch that this keeper saves in: claimed by rank 0's keeper, found by the others in the store.

In a root that the ranks do not share every keeper claims, in its own root, the number that the ranks have agreed on.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence

from stillframe.checkpoint import epochs
from stillframe.checkpoint.catalog import Catalog
from stillframe.checkpoint.removal import superseded
from stillframe.errors import BusyError, DeadlineError, MismatchError, StorageError
from stillframe.format.epochs import Parent
from stillframe.keeper.terms import COORDINATOR, Terms
from stillframe.link.messages import Enter
from stillframe.model import SaveId

_FIRST_S, _LONGEST_S = 0.005, 0.5
_SLOWER = 1.5
_HURRIED_S = 10.0


class CurrentEpoch:
    """Thread: safe from any.

    The trainer says when another begins (a restore): :meth:`enter`, and what it goes on from: :meth:`resume`.  If it
    says nothing, the first save begins one that goes on from the newest checkpoint.
    """

    def __init__(
        self,
        catalog: Catalog,
        terms: Terms,
        rank: int,
        on_claim: Callable[[int, int], None] = lambda *_: None,
        tiers: Sequence[Catalog] = (),
    ) -> None:
        self._tiers = tiers
        self._on_claim = on_claim
        self._catalog = catalog
        self._terms = terms
        self._claims = rank == COORDINATOR or catalog.rank is not None
        self._lock = threading.RLock()
        self._wanted = Enter(0)
        self._number: int | None = None
        self._parent: SaveId | None = None
        self._is_parent_known = False
        self._is_choice_safe = True
        self._begun: Parent | None = None
        self._is_hurried = False
        self._before: int | None = None
        """The epoch of this run before."""
        self._is_over = False
        """Another run has taken over: no save of this epoch needs to be begun."""

    @property
    def decides(self) -> bool:
        """Whether this keeper claims epochs, and says what goes."""
        return self._claims

    @property
    def number(self) -> int | None:
        """Of the epoch, if it is known by now."""
        begun = self._begun
        return begun.epoch if begun is not None else self._number

    @property
    def to_promote_in(self) -> int | None:
        """As :attr:`number`; of a keeper that was replaced, the one that its predecessor had claimed.

        ``None`` while a restore chooses, in a root of this rank's own: which saves are whole is known after it.
        """
        is_choosing = bool(self._wanted.sequence) and not self._is_parent_known and self._begun is None
        return None if is_choosing and self._catalog.rank is not None else self.number or self._wanted.number

    @property
    def agreed(self) -> SaveId | None:
        """What the ranks have restored together, and the epoch goes on from."""
        with self._lock:
            return self._parent if self._is_parent_known else None

    @property
    def agreed_step(self) -> int:
        """As :attr:`agreed`; -1 if there is none."""
        agreed = self.agreed
        return -1 if agreed is None else agreed.step

    def enter(self, wanted: Enter) -> None:
        """Saves from now on belong to another epoch.  No I/O."""
        with self._lock:
            if wanted.sequence != self._wanted.sequence:
                self._before = self.number
                self._number, self._begun, self._parent, self._is_parent_known = None, None, None, False
                self._is_over = False
            self._wanted = wanted

    def claim(self) -> None:
        """Before anybody looks for what to go on from.  May be repeated; a member has nothing to claim.

        Raises: :class:`StorageError`, :class:`BusyError`: it is tried again at the next save.
        """
        with self._lock:
            self._claim()

    def number_to_remove_by(self) -> int:
        """The number of the epoch, begun: nothing goes before that.  For who decides.

        Raises: as :meth:`current`; :class:`BusyError` if the run has restored an older step and saved nothing since:
        it may only be looking, and must not leave the later steps behind because of a removal.
        """
        with self._lock:
            is_looking = self._begun is None and self._is_parent_known and self._catalog.newest() != self._parent
        if is_looking:
            raise BusyError(
                f"the run in {self._catalog.root} has gone back to an older step and saved nothing since: "
                "ask again after its next save"
            )
        return self.current().epoch

    def resume(self, parent: SaveId | None, is_claimed: bool = True) -> None:
        """The epoch goes on from this checkpoint (``None``: from nothing).  No I/O.

        ``is_claimed``: it was chosen after the epoch was claimed; otherwise it is looked at again when that is done.
        """
        with self._lock:
            self._parent, self._is_parent_known, self._is_choice_safe = parent, True, is_claimed

    def hurry(self) -> None:
        """The trainer is gone: do not wait for rank 0 as long as it would have."""
        self._is_hurried = True

    def current(self, while_waiting: Callable[[float], None] = lambda _waited_s: None) -> Parent:
        """The epoch, begun.  Blocks: a member, until rank 0 has put it down.

        ``while_waiting`` is called with the time waited so far, now and then; what it raises ends the wait.
        Raises: :class:`DeadlineError`; :class:`StorageError`; :class:`BusyError`; :class:`MismatchError`.
        """
        with self._lock:
            if self._begun is None and self._claims:
                self._begun = self._begin()
            begun, wanted = self._begun, self._wanted
            if begun is not None and self._is_over:
                raise superseded(self._catalog, begun.epoch)
        return begun if begun is not None else self._find(wanted, while_waiting)

    def check_newest(self, epoch: int) -> None:
        """After a manifest.  Raises :class:`BusyError` if another run has taken over."""
        if not epochs.is_newest(self._catalog, epoch):
            with self._lock:
                self._is_over = self._begun is not None and self._begun.epoch == epoch
            raise superseded(self._catalog, epoch)

    def _claim(self) -> int | None:
        if self._claims and self._number is None:
            wanted = self._wanted
            self._number = epochs.claim(self._catalog, self._terms.run, wanted.sequence, wanted.number, self._tiers)
            self._on_claim(self._wanted.sequence, self._number)
        return self._number

    def _begin(self) -> Parent:
        number = self._claim()
        assert number is not None
        found = self._catalog.parent(number)
        if found is not None:  # by an earlier keeper of this run
            return found
        self._check_kind()
        parent = self._parent if self._is_parent_known else self._catalog.newest()
        if parent is not None and parent.epoch >= number:
            number = self._claim_above(parent, number)
        is_safe = self._is_choice_safe or (self._before is not None and number == self._before + 1)  # nobody between
        if self._is_parent_known and not is_safe and self._catalog.newest() != parent:
            raise BusyError(
                f"{self._catalog.root} could not be written when this run restored, and another run may have saved "
                "there since: restore() again"
            )
        is_shared = self._catalog.rank is None
        run, sequence = self._terms.run, self._wanted.sequence
        begun = epochs.begin(self._catalog, number, run, sequence, parent, is_shared, self._tiers)
        with contextlib.suppress(StorageError):  # they are tried again by the next run
            epochs.forget(self._catalog, begun)
        return begun

    def _claim_above(self, parent: SaveId, number: int) -> int:
        """The parent comes from a tier that could not be asked for its epochs when this one was claimed."""
        if max(self._catalog.epochs(), default=0) > number:  # chosen after another run had claimed a later epoch
            raise superseded(self._catalog, number)
        run, sequence = self._terms.run, self._wanted.sequence
        self._number = epochs.claim_number(self._catalog, run, sequence, parent.epoch + 1)
        self._on_claim(sequence, self._number)
        return self._number

    def _check_kind(self) -> None:
        view = self._catalog.look()
        if view.saves and view.branch.epoch is not None and view.is_shared != (self._catalog.rank is None):
            other = "all ranks shared it" if view.is_shared else "the ranks did not share it"
            raise MismatchError(f"{self._catalog.root} holds checkpoints of a run in which {other}: use another root")

    def _find(self, wanted: Enter, while_waiting: Callable[[float], None]) -> Parent:
        """Without the lock: the keeper goes on listening meanwhile."""
        began, pause_s = time.monotonic(), _FIRST_S
        while True:
            found = epochs.find_parent(self._catalog, self._terms.run, wanted.sequence)
            if found is not None:
                with self._lock:
                    if self._wanted == wanted:
                        self._begun = found
                return found
            limit_s = min(self._terms.deadline_s, _HURRIED_S) if self._is_hurried else self._terms.deadline_s
            if time.monotonic() - began > limit_s:
                raise DeadlineError(
                    f"rank 0 did not begin to save in {self._catalog.root} within {self._terms.deadline_s:g} s; "
                    "every rank must save the same steps, and see the same root"
                )
            while_waiting(time.monotonic() - began)
            time.sleep(pause_s)
            pause_s = min(pause_s * _SLOWER, _LONGEST_S)
