"""DeepSpeed's own files, written by ``torch.save``: each appears whole and durable, or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from stillframe.errors import NotFoundError
from stillframe.integrations.deepspeed.pointers import read
from stillframe.integrations.pickled import register_deepspeed_types
from stillframe.store import directory_address, files


def export(
    save_dir: str | os.PathLike[str], tag: str | None, to: str | os.PathLike[str], *, allow_pickle: bool = False
) -> str:
    """Write a tag (the latest if none is given) as DeepSpeed itself would, to ``<to>/<tag>`` with ``<to>/latest``, for
    ``zero_to_fp32``, ``ds_to_universal`` and engines without stillframe.  One file at a time is in memory.

    Raises: :class:`NotFoundError`; :class:`ExistsError`; :class:`IntegrityError`; :class:`UnsupportedStateError`.
    """
    directory_address(save_dir)
    register_deepspeed_types()
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


def write_object(path: str, value: Any) -> None:
    """One file, in the place of what was there; raises :class:`StorageError`."""
    with files.replacing(Path(path)) as partial:
        torch.save(value, partial)
