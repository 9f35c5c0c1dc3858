"""Where the data of Megatron's checkpoints goes: to a root that all ranks share, or to the nodes' own disks.

On disks of their own no node sees another's part, and Megatron's directories are for all.  So a save stands for a
checkpoint when the first tier has it, and the directories name that tier.  Every save has to get there: one that comes
before the last is on its way would take its turn, so it waits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from stillframe import Catalog, Checkpointer, Keep, KeepLast, Save, Tier, spi
from stillframe.errors import ConfigError, NotFoundError, StillframeError
from stillframe.integrations.frameworks import Entrance, SharedRoot
from stillframe.open_roots import How, close_root
from stillframe.open_roots import fence as fence_shared
from stillframe.store import root_address

_LOOK_S = 0.05
_UNPUBLISHED = KeepLast(3)
"""So many saves, at most, are in the tier before their directories name them: two that :meth:`OwnDisks.make_room` lets
be under way, and one before them whose directory is being written."""


class Place(Entrance, Protocol):
    """Thread: the training thread's; :meth:`wait` from any."""

    root: str
    """What the directories name: all ranks see it."""
    storage_options: Mapping[str, Any] | None

    def make_room(self) -> None:
        """Before a save, on every rank.  Blocks while earlier ones have to go first.  Raises nothing."""

    def wait(self, save: Save) -> None:
        """Block until it is committed where all ranks see it.  Raises why it is not."""

    def remove(self, catalog: Catalog, steps: Sequence[int]) -> None:
        """On rank 0: these steps need not stay."""

    def close(self) -> None: ...


class SharedPlace(SharedRoot):
    """A root that all ranks see."""

    def __init__(self, root: str, how: How) -> None:
        super().__init__(root, how)
        self.storage_options = how.storage_options

    def make_room(self) -> None:
        pass

    def wait(self, save: Save) -> None:
        save.wait("committed")

    def remove(self, catalog: Catalog, steps: Sequence[int]) -> None:
        assert self._run is not None
        spi.remove(self._run, steps)

    def close(self) -> None:
        close_root(self.root)


@dataclasses.dataclass(frozen=True)
class Disks:
    """How a root on the nodes' own disks is opened.  ``tiers``: if there are none, one beside the directories."""

    root: str
    tiers: tuple[Tier, ...]
    options: dict[str, Any]

    def tiers_beside(self, beside: str) -> list[Tier]:
        """Those of a checkpointer.  In the first, what directories name is pinned, and stays."""
        first, *others = self.tiers or (Tier(beside),)
        keep = _UNPUBLISHED if first.keep is None else first.keep | _UNPUBLISHED
        return [dataclasses.replace(first, keep=keep), *others]


def check_disks(
    root: str | os.PathLike[str] | None,
    shared: bool | None,
    tiers: Sequence[Tier],
    keep: Keep | None,
    options: dict[str, Any],
) -> Disks | None:
    """``None`` if all ranks share the root.  Raises :class:`ConfigError`."""
    if "{node}" not in str(root) and shared is not False:
        if tiers or keep is not None:
            raise ConfigError(
                "SaveStrategy(tiers=…, keep=…): these are for a root on the nodes' own disks ({node} in it, or "
                "shared=False); of a root that all ranks see, only the directories decide what stays"
            )
        return None
    if root is None or shared is True:
        raise ConfigError(f"SaveStrategy({root!r}, shared={shared}): give a root on the nodes' own disks")
    if not isinstance(tiers, Sequence) or not all(isinstance(each, Tier) for each in tiers):
        raise ConfigError(f"SaveStrategy(tiers={tiers!r}): give a list of Tier(…)")
    if tiers and tiers[0].every != 1:
        raise ConfigError(
            f"SaveStrategy(tiers=[Tier({str(tiers[0].root)!r}, every={tiers[0].every!r}), …]): every checkpoint of "
            "Megatron's is for all nodes, so the first tier gets each; save less often, or give every= to the others"
        )
    return Disks(os.fspath(root), tuple(tiers), {**options, "keep": keep or KeepLast(2), "shared": False})


class OwnDisks:
    """The nodes' own disks, open for saving, and the tier behind them.  Every rank makes it; blocks until all have.

    The run goes on from the newest checkpoint that every rank can read, from its disk or from a tier.
    Raises: as :class:`stillframe.Checkpointer`, and its ``restore``.
    """

    def __init__(self, disks: Disks, beside: str) -> None:
        tiers = disks.tiers_beside(beside)
        self._tier = tiers[0]
        self.root, self.storage_options = root_address(self._tier.root), self._tier.storage_options
        self._run = Checkpointer(disks.root, tiers=tiers, on_error="warn", **disks.options)
        try:
            spi.go_on(self._run)
        except BaseException:
            self._run.close()
            raise
        _open.add(self)
        self._pending: dict[Save, None] = {}
        """Those that the tier may yet get, in their order."""

    def settle(self) -> None:
        """On every rank: block until the tier has all that the disks have.  Raises: :class:`StorageError`."""
        spi.settle_tier(self._run, self._tier)

    def make_room(self) -> None:
        while (left := list(self._pending)) and (len(left) > 1 or left[0].tiers[self.root] == "waiting"):
            time.sleep(_LOOK_S)  # each ends: it is committed, fails, or is given up when nothing moves

    @contextlib.contextmanager
    def admitting(self, least: int) -> Iterator[Any]:
        ticket = spi.issue(self._run, least=least)
        with self._redeeming(ticket):
            yield ticket

    @contextlib.contextmanager
    def entering(self, word: Any) -> Iterator[Callable[..., Save]]:
        def save(state: Any, **more: Any) -> Save:
            made.append(spi.save(self._run, state, word, **more))
            self._pending[made[0]] = None
            spi.when_over(made[0], self._settled)
            return made[0]

        made: list[Save] = []
        try:
            with self._redeeming(word):
                yield save
        except BaseException:
            for each in made:
                self._pending.pop(each, None)
            raise

    @contextlib.contextmanager
    def _redeeming(self, ticket: spi.Ticket) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            spi.withdraw(self._run, ticket, error)
            raise

    def wait(self, save: Save) -> None:
        save.wait("committed", tier=self._tier)

    def _settled(self, save: Save) -> None:
        """It is over on this disk, perhaps before anybody has asked to publish it: it is pending until the tier has it.

        Thread: that of the commits, where publishing it comes right before or right after this.
        """
        with contextlib.suppress(StillframeError):
            self.wait(save)
        self._pending.pop(save, None)

    def remove(self, catalog: Catalog, steps: Sequence[int]) -> None:
        for step in steps:
            with contextlib.suppress(NotFoundError):  # the keeper has pruned it: it was not pinned
                catalog.unpin(step)

    def fence(self) -> None:
        self._run.fence()

    def close(self) -> None:
        _open.discard(self)
        self._run.close()


_open: weakref.WeakSet[OwnDisks] = weakref.WeakSet()
os.register_at_fork(after_in_child=_open.clear)  # they are the parent's


def fence() -> None:
    """Wait until everything that was requested in this process has been copied."""
    fence_shared()
    for each in list(_open):
        each.fence()
