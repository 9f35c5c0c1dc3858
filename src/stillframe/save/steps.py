"""Which steps cannot be saved, because they are checkpoints already or are being saved."""

from __future__ import annotations

from stillframe.checkpoint.catalog import Catalog
from stillframe.errors import ExistsError
from stillframe.save.saves import Saves


class TakenSteps:
    """The steps that had a directory when first asked, and all that were saved since: a new step needs no look.

    Names are enough for that: a directory of another step that cannot be looked into keeps no save back.

    Several ranks save a step at most once in a run: files of a first try could pass for those of a second.
    """

    def __init__(self, catalog: Catalog, saves: Saves, has_other_ranks: bool) -> None:
        self._catalog = catalog
        self._saves = saves
        self._has_other_ranks = has_other_ranks
        self._known: set[int] | None = None
        self._tried: set[int] = set()

    def check_free(self, step: int) -> None:
        """Raises :class:`ExistsError` if the step is a checkpoint, or a save of ours; retention may have removed it."""
        if step in self._tried and self._has_other_ranks:
            raise ExistsError(f"step {step} has been saved in this run already: save the next one instead")
        if step in self._known_steps() and (
            self._catalog.is_committed(step) or any(save.step == step for save in self._saves.in_flight)
        ):
            raise ExistsError(
                f"step {step} is already a checkpoint in {self._catalog.root}, or is being saved right now: "
                "restore() first and go on after the step it returns, or use another root"
            )

    def take(self, step: int) -> None:
        self._known_steps().add(step)
        self._tried.add(step)

    def look_again(self) -> None:
        """Others may have added or removed checkpoints: ask the catalog at the next save."""
        self._known = None

    def _known_steps(self) -> set[int]:
        if self._known is None:
            self._known = set(self._catalog.step_dirs())
        return self._known
