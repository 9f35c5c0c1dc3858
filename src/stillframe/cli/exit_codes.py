"""The exit codes of the command: one for each kind of error, and a few for answers."""

from __future__ import annotations

from stillframe import errors

STORAGE, DAMAGED, DIFFERENT, TO_DO, NO_DEVICE, BAD_DEVICE = 6, 4, 10, 11, 12, 13

EXIT_CODES: list[tuple[int, str, tuple[type[errors.StillframeError], ...]]] = [
    (0, "success, and nothing is wrong", ()),
    (1, "a bug: please report the traceback", ()),
    (2, "the command line is wrong", (errors.ConfigError,)),
    (3, "there is no such root, step or entry", (errors.NotFoundError,)),
    (DAMAGED, "damaged: stored bytes are not those that were written", (errors.IntegrityError,)),
    (5, "written by a newer version of stillframe", (errors.VersionError,)),
    (STORAGE, "the storage failed: full, read-only, no permission, an I/O error", (errors.StorageError,)),
    (7, "busy: a run is active in the root", (errors.BusyError, errors.KeeperError, errors.DeadlineError)),
    (8, "what is stored does not fit the request", (errors.StateError,)),
    (9, "the target exists already and was not changed", (errors.ExistsError,)),
    (DIFFERENT, "`diff`: the checkpoints differ", ()),
    (TO_DO, "`doctor`, `copy`: something needs to be done, or is still missing", ()),
    (NO_DEVICE, "`doctor --device`: there is no accelerator here", ()),
    (BAD_DEVICE, "`doctor --device`: a check of the accelerator failed", ()),
    (130, "interrupted (Ctrl-C)", ()),
]


def exit_code(error: errors.StillframeError) -> int:
    return next((code for code, _, kinds in EXIT_CODES if isinstance(error, kinds)), 1)
