"""The files of a tag that DeepSpeed looks for: small, and each stands for what a rank has saved as this file.

Its last line is the alias that a label's file ends with: which save, which rank.  The line before it names the run, so
that a file that was copied to another root is noticed.  Before these stands an archive as ``torch.save`` writes it: its
one object is a call of :func:`content`.  So whoever opens the file with ``torch.load`` gets what was saved: DeepSpeed
itself (stage 3 without optimizer states, an engine without the key), ``zero_to_fp32``, ``ds_to_universal``.  That needs
no hook in these, and no second copy of the data; but it needs stillframe, and the root around the tag.
"""

from __future__ import annotations

import functools
import io
import os
from pathlib import Path
from typing import Any

import torch

from stillframe import spi
from stillframe.errors import FormatError, NotFoundError
from stillframe.integrations.pickled import from_leaves, register_deepspeed_types, unpickled
from stillframe.state.torch_internals import call_of_load
from stillframe.store import directory_address, files

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
    file, map_location = call_of_load() or (None, None)
    path = file if isinstance(file, str | os.PathLike) else getattr(file, "name", None)
    if not isinstance(path, str | os.PathLike) or not (file is path or files.is_open_at(file, path)):
        raise FormatError(
            "this file belongs to a checkpoint of stillframe, which cannot tell where it is: give torch.load its path, "
            "or write DeepSpeed's own files with stillframe.integrations.deepspeed.export(save_dir, tag, to)"
        )
    return read(os.fspath(path), map_location, None)  # it is unpickling already


@functools.cache
def content_of(run: str) -> bytes:
    """What the files of a tag hold, before the alias."""
    data = io.BytesIO()
    torch.save(_Call(), data)
    return data.getvalue() + b"\n" + run.encode()


def read(path: str, map_location: Any, advice: str | None) -> Any:
    """What was saved as this file of a tag, verified; or the content of a file of DeepSpeed's own.

    ``advice``: how the user can allow pickle, for the error; ``None``: it is allowed.
    Raises: :class:`NotFoundError`; :class:`StorageError` if that cannot be determined; :class:`FormatError`;
    :class:`IntegrityError`; :class:`UnsupportedStateError`.
    """
    if files.kind_of(path) == "nothing":
        raise NotFoundError(f"{path} does not exist; is a rank's file missing?")
    data = files.read_file(path, _MAX_BYTES)
    if _MARK not in data:
        if advice is not None:
            raise FormatError(
                f"{path} was not written by stillframe; if it is DeepSpeed's own, and you trust it, {advice}: loading "
                "it runs code from it"
            )
        return unpickled(path, map_location, False, f"{path} was not written by stillframe")
    alias = spi.read_alias(data)
    if alias is None:
        raise FormatError(f"{path} is damaged")
    register_deepspeed_types()
    (save, rank), run = alias, data.rsplit(b"\n", 2)[1].decode(errors="replace")
    root, name = os.path.dirname(os.path.dirname(os.path.abspath(path))), os.path.basename(path)
    lost = f"{path} stands for {save}, which is not (yet) in {root}: copy a whole save_dir, or what export() writes"
    try:
        state = spi.load_rank(root, save, rank, only=[RUN, f"{FILES}/{name}"])
    except NotFoundError as error:
        raise NotFoundError(f"{lost} ({error})") from error
    if state[RUN] != run:
        raise FormatError(lost)
    if name not in state.get(FILES, {}):
        raise NotFoundError(f"{path} was renamed: rank {rank} has saved no {name!r} in {save}")
    return from_leaves(state[FILES][name], map_location or "cpu", advice is not None, advice or "", (name,))


def export(
    save_dir: str | os.PathLike[str], tag: str | None, to: str | os.PathLike[str], *, allow_pickle: bool = False
) -> str:
    """Write a tag (the latest if none is given) as DeepSpeed itself would, to ``<to>/<tag>`` with ``<to>/latest``, for
    ``zero_to_fp32``, ``ds_to_universal`` and engines without stillframe.  One file at a time is in memory.

    Raises: :class:`NotFoundError`; :class:`ExistsError`; :class:`IntegrityError`; :class:`UnsupportedStateError`.
    """
    directory_address(save_dir)
    if tag is None:
        latest = Path(save_dir, "latest")
        if files.kind_of(latest) != "file":
            raise NotFoundError(f"there is no file 'latest' in {save_dir}: give a tag")
        tag = files.read_file(latest).decode().strip()
    directory = Path(save_dir, tag)
    is_there = files.kind_of(directory) == "directory"
    names = [name for name in files.names_in(directory) if name.endswith(".pt")] if is_there else []
    if not names:
        raise NotFoundError(f"{directory} is not the tag of a checkpoint")
    advice = None if allow_pickle else "give allow_pickle=True"
    with files.publishing(Path(to, tag)) as partial:
        files.make_directory(partial)
        for name in names:
            torch.save(read(str(directory / name), None, advice), partial / name)
    files.write_file(Path(to, "latest"), tag.encode(), is_forced=True)
    return tag
