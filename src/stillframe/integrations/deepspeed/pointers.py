"""The files of a tag that DeepSpeed looks for: each says in which save, and of which rank, its content is stored.

A file begins with a pickle that raises, with advice, if somebody reads it with ``torch.load``; its last line is the
alias that a label's file ends with.
"""

from __future__ import annotations

import pickle
from typing import Any

from stillframe import spi
from stillframe.errors import FormatError, NotFoundError, StorageError
from stillframe.store import files

_MAX_BYTES = 4096
_MARK = b"only_through_stillframe"


class _Advice:
    def __reduce__(self) -> Any:
        return only_through_stillframe, ()


def only_through_stillframe() -> None:
    """What ``torch.load`` calls."""
    raise FormatError(
        "this file belongs to a checkpoint of stillframe: put "
        '"datastates_ckpt": {} into the DeepSpeed config and call stillframe.integrations.deepspeed.install(), or '
        "write DeepSpeed's own files with stillframe.integrations.deepspeed.export(save_dir, tag, to)"
    )


CONTENT = pickle.dumps(_Advice())


def follow(path: str) -> tuple[Any, int]:
    """Which save, and which rank of it, a file stands for.  Raises: :class:`NotFoundError`; :class:`FormatError`."""
    try:
        data = files.read_file(path, _MAX_BYTES)
    except StorageError as error:
        raise NotFoundError(f"{error}; is a rank's file missing?") from error
    found = spi.read_alias(data)
    if found is None or _MARK not in data:
        raise FormatError(
            f"{path} is damaged"
            if _MARK in data
            else f"{path} was not written by stillframe; if it is DeepSpeed's own, load it once without "
            '"datastates_ckpt" in the config, and save it with it'
        )
    return found
