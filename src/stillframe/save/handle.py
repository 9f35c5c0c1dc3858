"""What ``save()`` returns: one requested checkpoint, as its owner sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stillframe.errors import ConfigError, StillframeError
from stillframe.model import Phase, Progress, SaveId, TierPhase, Times
from stillframe.tiers import TierName

if TYPE_CHECKING:
    from stillframe.save.saves import Saves


class Save:
    """One requested checkpoint, on its way through the phases.  Thread: safe from any."""

    def __init__(
        self, saves: Saves, number: int, step: int, attempt: int, total_bytes: int, requested_s: float
    ) -> None:
        self.step = step
        """As given to ``save()``."""
        self.attempt = attempt
        """1, unless earlier saves of the step have failed."""
        self.number = number
        self._files_stay = True
        """If it has failed: it may be, or become, a checkpoint.  Of rank 0's saves, its keeper says which cannot."""
        self._is_suspect = False
        """Its bytes should differ from those of the save before."""
        self._sequence = 0
        self.epoch: int | None = None
        """Which start of the run has saved it; known once it is sealed."""
        self._saves = saves
        self._total_bytes = total_bytes
        self._staged_bytes = 0
        self._flushed_bytes = 0
        self._phase: Phase = "captured"
        self._error: StillframeError | None = None
        self._times = Times(requested_s)
        self._awaited: tuple[int, ...] = ()
        self.job: Any = None  # the stager's: what is to be copied, and how far it is
        self._then: list[Callable[[Save], object]] = []
        self._over: list[Callable[[Save], object]] = []
        """Called also if it fails."""

    @property
    def id(self) -> SaveId | None:
        """Its step, epoch and attempt: no other save in the root has the same.  Known once it is sealed."""
        return None if self.epoch is None else SaveId(self.step, self.epoch, self.attempt)

    @property
    def phase(self) -> Phase:
        """How far it is; ``"failed"`` and ``"skipped"`` end it early."""
        return self._phase

    @property
    def error(self) -> StillframeError | None:
        """Why it failed; ``None`` if it has not."""
        return self._error

    @property
    def progress(self) -> Progress:
        """How many of its bytes are copied, and written."""
        return Progress(self._total_bytes, self._staged_bytes, self._flushed_bytes)

    @property
    def times(self) -> Times:
        """When it reached which phase."""
        return self._times

    @property
    def tiers(self) -> dict[str, TierPhase]:
        """Its progress in each tier: ``"waiting"``, ``"carrying"``, ``"committed"`` or ``"not carried"``."""
        tiers = self._saves.tiers
        return {} if tiers is None else tiers.phases(self)

    def wait(
        self,
        phase: Phase = "committed",
        timeout_s: float | None = None,
        *,
        tier: TierName | None = None,
    ) -> None:
        """Block until this save has reached ``phase``; with ``tier``, until it is committed there, too.

        Raises: its error, if it failed; :class:`BusyError` if it was skipped; :class:`DeadlineError`;
        :class:`NotFoundError` if it is not carried to that tier.
        """
        self._saves.wait_for(self, phase, timeout_s, tier)

    def then(self, function: Callable[[Save], object]) -> None:
        """Call ``function(save)`` once this save is committed (at once if it already is); not if it fails.

        Thread: one of stillframe's own; functions of a checkpointer run one after the other, in the order of commits.
        The function may block: only later functions wait for it.  What it raises is logged.  ``close()`` waits until
        all have returned.  A process that ends without ``close()`` calls no more of them, although its keeper still
        commits what is staged.
        """
        if not callable(function):
            raise ConfigError(f"then({function!r}): give a function that takes the save")
        self._saves.then(self, function)

    def __repr__(self) -> str:
        return f"<Save step={self.step} {self._phase}>"
