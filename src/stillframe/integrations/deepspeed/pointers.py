"""The files of a tag that DeepSpeed looks for: each says in which step, and of which rank, its content is stored.

A file begins with a pickle that raises, with advice, if somebody reads it with ``torch.load``.
"""

from __future__ import annotations

import json
import pickle
from typing import Any

from stillframe.errors import FormatError, NotFoundError, StorageError
from stillframe.store import files

_MAX_BYTES = 4096


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


def pointer(step: int, rank: int) -> bytes:
    where = json.dumps({"stillframe": 1, "step": step, "rank": rank})
    return pickle.dumps(_Advice()) + b"\n" + where.encode()


def follow(path: str) -> tuple[int, int]:
    """Step and rank of a file.  Raises: :class:`NotFoundError`; :class:`FormatError`."""
    try:
        data = files.read_file(path, _MAX_BYTES)
    except StorageError as error:
        raise NotFoundError(f"{error}; is a rank's file missing?") from error
    try:
        where = json.loads(data.rpartition(b"\n")[2])
        return int(where["step"]), int(where["rank"])
    except (ValueError, TypeError, LookupError):
        is_ours = b"only_through_stillframe" in data
        raise FormatError(
            f"{path} is damaged"
            if is_ours
            else f"{path} was not written by stillframe; if it is DeepSpeed's own, load it once without "
            '"datastates_ckpt" in the config, and save it with it'
        ) from None
