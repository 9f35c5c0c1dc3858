"""DeepSpeed's plain files, written by ``torch.save``: each appears whole and durable, or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from stillframe.store import files


def write_object(path: str | os.PathLike[str], value: Any) -> None:
    """One file, in the place of what was there; raises :class:`StorageError`."""
    with files.replacing(Path(path)) as partial:
        torch.save(value, partial)


def write_objects(directory: str | os.PathLike[str], values: Mapping[str, Callable[[], Any]]) -> None:
    """A new directory of them, one value in memory at a time.

    Raises: :class:`ExistsError` if it is there; :class:`StorageError`.
    """
    with files.publishing(Path(directory)) as partial:
        files.make_directory(partial)
        for name, value in values.items():
            torch.save(value(), partial / name)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """A small file, in the place of what was there; raises :class:`StorageError`."""
    files.write_file(path, text.encode(), is_forced=True)
