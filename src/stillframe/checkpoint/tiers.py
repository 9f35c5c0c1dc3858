"""The tiers behind a root, seen from outside: which there are, and what each holds of which save.

Looks at names; reads a manifest only of what the root does not have.  A tier that cannot be read is a finding, not
an error, and holds nobody up for long.  Its credentials come from the environment: the root does not tell them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from stillframe.checkpoint.catalog import Catalog
from stillframe.checkpoint.notes import read_target, read_tiers
from stillframe.checkpoint.promote import check_same_run, missing_parts
from stillframe.checkpoint.survey import Survey
from stillframe.errors import ConfigError, IntegrityError, NotFoundError, StillframeError, VersionError, text_of
from stillframe.format import names
from stillframe.format.epochs import TierNote
from stillframe.format.records import Manifest
from stillframe.lineage import Branch
from stillframe.model import SaveId
from stillframe.retention import decode_policy
from stillframe.store import endpoint_of, is_url, open_store, root_address, silence
from stillframe.units import format_ranks
from stillframe.waits import Wait

PATIENCE_S = 20.0
"""So long a tier may take for one answer."""

Holding = Literal["whole", "damaged", "carrying", "partial"]
"""``carrying``: in part, and a living run goes on with it; ``partial``: in part, and nobody is known to."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a tier holds of one save."""

    state: Holding
    parts: int
    """Of ranks."""
    of: int | None
    """So many there should be; ``None`` if nothing tells."""
    manifest: Manifest | None = None
    """Of one that the root does not have."""


@dataclass(slots=True)
class TierView:
    """A tier as it was found."""

    note: TierNote
    held: dict[SaveId, Held] = field(default_factory=dict)
    trouble: str = ""
    """Why it could not be looked at; then nothing is known to be held."""
    left: tuple[int, ...] = ()
    """Steps of the root that do not count: in this tier, another run has gone on from an older one."""

    @property
    def why(self) -> str:
        """The trouble, and where its address and its keys are looked for, if that may be the reason."""
        is_known = is_url(self.root) and endpoint_of(self.root, {}) and "credentials" not in self.trouble
        hint = "; of storage_options= nothing is known here: address and credentials come from the environment"
        return self.trouble if is_known or not is_url(self.root) else f"{self.trouble}{hint}"

    @property
    def root(self) -> str:
        return self.note.root

    @property
    def newest(self) -> int | None:
        return max((save.step for save, held in self.held.items() if held.state == "whole"), default=None)


def do_not_count(steps: Sequence[int], root: str, tier: str = "a tier") -> str:
    """Of steps that are whole in a root, for people to read."""
    is_one = len(steps) == 1
    which = f"{format_ranks(steps, 'step')} of {root} {'does' if is_one else 'do'} not count"
    return f"{which}: in {tier}, another run has gone on from an older one"


def policy_text(note: TierNote) -> str:
    """For people to read; empty if everything is kept, or nothing can be told."""
    try:
        keep = decode_policy(note.keep)
    except ConfigError:
        return ""
    return "" if keep is None else repr(keep)


def look_at_tiers(found: Survey) -> list[TierView]:
    """Every tier of a root that was surveyed, all at once.  Blocks, but for none longer than it gets on."""
    notes = read_tiers(open_store(found.root))
    looks = [_Look(note, found) for note in notes]
    return [look.result() for look in looks]


class _Look:
    """At one tier, on a thread of its own: storage that hangs keeps neither the others nor the process."""

    def __init__(self, note: TierNote, found: Survey) -> None:
        self._note = note
        self._found = found
        self._held: dict[SaveId, Held] = {}
        self._left: tuple[int, ...] = ()
        self._trouble = "the look at it broke off"
        self._is_target_known = False
        self._heard_s = time.monotonic()
        self._is_done = threading.Event()
        threading.Thread(target=self._run, name="stillframe-look", daemon=True).start()

    def result(self) -> TierView:
        wait = Wait(self._note.root, None)
        while not self._is_done.wait(0.2):
            left_s = self._heard_s + PATIENCE_S - time.monotonic()
            if left_s < 0:
                return TierView(self._note, {}, self._silence())
            wait.until(left_s)
            wait.turn("what does it hold?")
        return TierView(self._note, {} if self._trouble else self._held, self._trouble, self._left)

    def _silence(self) -> str:
        with contextlib.suppress(StillframeError):
            return silence(open_store(self._note.root), PATIENCE_S)
        return f"it has not answered for {PATIENCE_S:g} s"

    def _run(self) -> None:
        try:
            self._held.update(self._look())
            self._guess()
            self._trouble = ""
        except StillframeError as error:
            self._trouble = text_of(error)
        except ImportError as error:  # what object stores need is not installed
            self._trouble = str(error)
        finally:
            self._is_done.set()

    def _guess(self) -> None:
        """A run of one rank has nobody to tell what it carries: it is the newest that is half there."""
        newest = max(self._held, default=None)
        if newest is None or self._is_target_known or not self._found.owners:
            return
        if self._held[newest].state == "partial":
            self._held[newest] = replace(self._held[newest], state="carrying")

    def _left_by(self, branch: Branch) -> tuple[int, ...]:
        own = self._found.branch
        if (branch.epoch or 0) <= (own.epoch or 0):
            return ()
        here = (each.save for each in self._found.with_state("committed"))
        return tuple(sorted(save.step for save in here if own.has(save) and not branch.has(save)))

    def _look(self) -> Iterator[tuple[SaveId, Held]]:
        if root_address(self._note.root) != self._note.root:  # such a thing no run has put there
            raise ConfigError(f"{self._note.root!r} is not the whole name of a place")
        tier = Catalog(self._note.root)
        check_same_run(Catalog(self._found.root), tier)
        known = {each.save: each.manifest for each in self._found.saves if each.manifest is not None}
        said = read_target(tier) if self._found.owners else None
        target = (
            said.save if said is not None and said.run in {each.run for each in self._found.owners.values()} else None
        )
        self._is_target_known = target is not None
        view = tier.look()
        self._left = self._left_by(view.branch)
        listed = set(view.saves)
        for save in listed if target is None else {*listed, target}:
            held = _held(tier, save, known.get(save), save == target)
            self._heard_s = time.monotonic()
            if held is not None:
                yield save, held


def _held(tier: Catalog, save: SaveId, known: Manifest | None, is_target: bool) -> Held | None:
    """``None``: nothing, or what is left of a removal.  ``known``: the manifest in the root.

    ``is_target``: a living run carries it, if it is not whole; of an object store's blob nothing shows before its end.
    """
    listed = set(tier.store.list(names.step_dir(save)))
    files = [file for name in listed if (file := names.parse_rank_file(name)) is not None]
    parts = len({file.rank for file in files if file.kind == "seal" and not file.is_partial})
    if names.aside() in listed and not tier.is_void(save):
        return None
    if names.MANIFEST not in listed:
        if not is_target and not any(file.kind in ("seal", "segment") for file in files):
            return None
        of = known.world_size if known is not None else _world_size(tier, save)
        return Held("carrying" if is_target else "partial", parts, of)
    try:
        manifest = known or tier.manifest(save)
    except NotFoundError:
        return None
    except (IntegrityError, VersionError):
        return Held("damaged", parts, None)
    state: Holding = "whole" if parts >= manifest.world_size else "damaged"
    return Held(state, parts, manifest.world_size, None if known is not None else manifest)


def _world_size(tier: Catalog, save: SaveId) -> int | None:
    try:
        _, seals = missing_parts(tier, save)
    except (IntegrityError, VersionError):
        return None
    return max((brief.world_size for brief, _ in seals.values()), default=None)
