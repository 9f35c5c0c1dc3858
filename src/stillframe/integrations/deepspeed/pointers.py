"""The files of a tag that DeepSpeed looks for: small, and each stands for what a rank has saved as this file.

Its last line is the alias that a label's file ends with: which save, which rank.  The line before it names the run, so
that a file that was copied to another root is noticed.  Before these stands an archive as ``torch.save`` writes it: its
one object is a call of :func:`content`.  So whoever opens the file with ``torch.load`` gets what was saved: DeepSpeed
itself (stage 3 without optimizer states, an engine without the key), ``zero_to_fp32``, ``ds_to_universal``.  That needs
no hook in these, and no second copy of the data; but it needs stillframe, and the root around the tag.
"""

from __future__ import annotations

import inspect
import io
import os
from typing import Any

import torch

from stillframe import spi
from stillframe.errors import FormatError, NotFoundError
from stillframe.integrations.pickled import from_leaves, read_pickled_file, register_deepspeed_types
from stillframe.store import files

FILES, RUN = "files", "run"
"""Where in a saved state the content of the files is, by name; and the name of the run."""
_MAX_BYTES = 4096
_MARK = b"stillframe.integrations.deepspeed.pointers"


class _Call:
    def __reduce__(self) -> Any:
        return content, ()


def content() -> Any:
    """What ``torch.load(path, weights_only=False)`` calls for a file of a tag: what the file stands for.

    The file cannot hold its own path, since a root may be moved.  So the path is taken from the call of ``torch.load``.
    """
    frame = inspect.currentframe()
    while frame and (frame.f_code.co_name, frame.f_globals.get("__name__")) != ("load", "torch.serialization"):
        frame = frame.f_back
    file = frame.f_locals["f"] if frame else None
    path = file if isinstance(file, str | os.PathLike) else getattr(file, "name", None)
    if frame is None or not isinstance(path, str | os.PathLike) or not (file is path or files.is_open_at(file, path)):
        raise FormatError(
            "this file belongs to a checkpoint of stillframe, which cannot tell where it is: give torch.load its path, "
            "or write DeepSpeed's own files with stillframe.integrations.deepspeed.export(save_dir, tag, to)"
        )
    register_deepspeed_types()
    return read(os.fspath(path), frame.f_locals["map_location"], None)  # it is unpickling already


def _archive() -> bytes:
    data = io.BytesIO()
    torch.save(_Call(), data)
    return data.getvalue()


_ARCHIVE = _archive()


def content_of(run: str) -> bytes:
    """What the files of a tag hold, before the alias."""
    return _ARCHIVE + b"\n" + run.encode()


def read(path: str, map_location: Any, advice: str | None) -> Any:
    """What was saved as this file of a tag, verified; or the content of a file of DeepSpeed's own.

    ``advice``: how the user can allow pickle, for the error; ``None``: it is allowed.
    Raises: :class:`NotFoundError`; :class:`StorageError` if that cannot be determined; :class:`FormatError`;
    :class:`IntegrityError`; :class:`UnsupportedStateError`.
    """
    found = _follow(path)
    if found is None:
        return read_pickled_file(path, map_location, advice)
    save, rank, run = found
    root, name = os.path.dirname(os.path.dirname(os.path.abspath(path))), os.path.basename(path)
    lost = f"{path} stands for {save}, which is not in {root}: copy a whole save_dir, or what export() writes"
    try:
        state = spi.load_rank(root, save, rank, only=[RUN, f"{FILES}/{name}"])
    except NotFoundError as error:
        raise NotFoundError(f"{lost} ({error})") from error
    if state[RUN] != run:
        raise FormatError(lost)
    if name not in state.get(FILES, {}):
        raise NotFoundError(f"{path} was renamed: rank {rank} has saved no {name!r} in {save}")
    return from_leaves(state[FILES][name], map_location or "cpu", advice is not None, advice or "", (name,))


def _follow(path: str) -> tuple[Any, int, str] | None:
    """Which save, which rank of it, and of which run, a file stands for; ``None`` if it is not one of ours."""
    if files.kind_of(path) == "nothing":
        raise NotFoundError(f"{path} does not exist; is a rank's file missing?")
    data = files.read_file(path, _MAX_BYTES)
    if _MARK not in data:
        return None
    found = spi.read_alias(data)
    if found is None:
        raise FormatError(f"{path} is damaged")
    return (*found, data.rsplit(b"\n", 2)[1].decode(errors="replace"))
