"""Finishing by hand what is half there in a tier.

A promotion that was interrupted leaves parts without a manifest.  The run that comes next goes on with the step that
was under way if it is still due, and removes others; where none comes, somebody finishes them here.
"""

from __future__ import annotations

import os

from stillframe.checkpoint.catalog import Catalog
from stillframe.checkpoint.cleaning import Wanted
from stillframe.checkpoint.promote import OnBytes, promote, publish
from stillframe.checkpoint.requests import ask, check_free
from stillframe.checkpoint.survey import Survey, survey
from stillframe.checkpoint.tiers import look_at_tiers
from stillframe.errors import BusyError, IntegrityError, NotFoundError, StillframeError, VersionError, text_of
from stillframe.model import SaveId
from stillframe.observe.doctor import Finding
from stillframe.units import format_ranks


def finish(root: str | os.PathLike[str], on_bytes: OnBytes = lambda _count: None) -> list[Finding]:
    """Commit in the tiers what is half there, with parts of the root if some are missing.  May be repeated.  Blocks.

    What cannot be finished is told by :func:`stillframe.observe.doctor.examine` as before.
    Raises: :class:`NotFoundError` if it is no root; :class:`BusyError` if a run is at work there: it does that itself;
    :class:`StorageError` if the root cannot be read.
    """
    found = survey(root)
    views = look_at_tiers(found)
    half = [
        (Catalog(view.root), save)
        for view in views
        for save, held in sorted(view.held.items())
        if held.state in ("partial", "carrying")
    ]
    unseen = [
        Finding("problem", f"the tier {view.root} could not be read: {view.trouble}") for view in views if view.trouble
    ]
    if not half:
        return unseen or [Finding("fine", "no step in the tiers is incomplete")]
    source = Catalog(found.root)
    _check_nobody(source, found)
    return [*(_finish(source, tier, save, on_bytes) for tier, save in half), *unseen]


def _check_nobody(source: Catalog, found: Survey) -> None:
    """A run that removes what is half there must not meet somebody who finishes it."""
    if not found.is_shared:
        check_free(source)
    elif found.owners or ask(source, Wanted()) is not None:
        raise BusyError(f"a run is active in {source.root}: it finishes or removes incomplete steps itself")


def _finish(source: Catalog, tier: Catalog, save: SaveId, on_bytes: OnBytes) -> Finding:
    what = f"step {save.step} in {tier.root}"
    why = f"{source.root} does not have them"
    try:
        missing = publish(tier, save)
        if missing:
            try:
                missing = promote(source, tier, save, on_bytes=on_bytes)
            except (NotFoundError, IntegrityError, VersionError) as error:
                why = text_of(error)
    except StillframeError as error:
        return Finding("problem", f"{what} could not be finished: {text_of(error)}", "fix the cause, and try again")
    if missing:
        return Finding("note", f"{what} is not finished: the parts of {format_ranks(missing)} are missing; {why}")
    return Finding("fine", f"{what} is finished: it is a checkpoint there")
