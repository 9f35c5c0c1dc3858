"""Reading every checkpoint of a root, and setting aside those that are damaged."""

from __future__ import annotations

import os
from collections.abc import Callable

from stillframe.checkpoint.catalog import Catalog
from stillframe.checkpoint.quarantine import confirm, quarantine
from stillframe.checkpoint.survey import survey
from stillframe.checkpoint.verify import Verdict
from stillframe.errors import BusyError, NotFoundError, StorageError, VersionError
from stillframe.model import SaveId
from stillframe.observe.doctor import Finding
from stillframe.units import format_bytes, format_count

Read = Callable[[Catalog, SaveId], Verdict]


def treat(root: str | os.PathLike[str], read: Read) -> list[Finding]:
    """``read`` verifies a checkpoint.  Raises :class:`NotFoundError` if it is no root.

    What is set aside is not among the findings: :func:`stillframe.observe.doctor.examine` tells of it.
    """
    found = survey(root)
    catalog = Catalog(found.root)
    findings: list[Finding] = []
    bytes_read = aside = count = 0
    for each in found.with_state("committed", "abandoned", "superseded", "damaged", "unreadable"):
        try:
            verdict = read(catalog, each.save)
            count, bytes_read = count + 1, bytes_read + verdict.bytes
            if not verdict.is_whole:
                finding = _set_aside(catalog, verdict)
                findings += [finding] if finding is not None else []
                aside += finding is None
        except NotFoundError:
            continue  # a run has removed it in the meantime
        except (StorageError, VersionError, BusyError) as error:
            what = f"step {each.step} could not be verified, and was not set aside: {error}"
            findings.append(Finding("problem", what, "fix the cause, and try again"))
    what = f"read {format_bytes(bytes_read)} of {format_count(count, 'checkpoint')}; {aside or 'nothing'} set aside"
    return [Finding("fine", what), *findings]


def _set_aside(catalog: Catalog, verdict: Verdict) -> Finding | None:
    """``None``: it is set aside.  Raises: as :func:`verify_save`."""
    confirmed = confirm(catalog, verdict)
    if not confirmed:
        what = f"step {verdict.step} was damaged when it was read, and whole when it was read again"
        advice = f"check the memory and the storage of this machine: {verdict.damages[0].message}"
        return Finding("problem", what, advice)
    quarantine(catalog, verdict.save, confirmed)
    return None
