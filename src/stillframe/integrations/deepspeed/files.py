"""DeepSpeed's plain files, written by ``torch.save``: each appears whole and durable, or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from stillframe.convert.export import publishing
from stillframe.format import names
from stillframe.store import durable


def write_object(path: str | os.PathLike[str], value: Any) -> None:
    """One file, in the place of what was there; raises :class:`StorageError`."""
    to = Path(path)
    partial = to.with_name(to.name + names.PARTIAL)
    with durable.storage_errors(f"writing {to}"):
        durable.make_dirs(to.parent)
        torch.save(value, partial)
        durable.sync_file(partial)
        durable.publish(partial, to)


def write_objects(directory: str | os.PathLike[str], files: Mapping[str, Callable[[], Any]]) -> None:
    """A new directory of them, one value in memory at a time.

    Raises: :class:`ExistsError` if it is there; :class:`StorageError`.
    """
    with publishing(Path(directory)) as partial:
        durable.make_dir(partial)
        for name, value in files.items():
            torch.save(value(), partial / name)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """A small file, in the place of what was there; raises :class:`StorageError`."""
    to = Path(path)
    partial = to.with_name(to.name + names.PARTIAL)
    with durable.storage_errors(f"writing {to}"):
        durable.write_partial(partial, text.encode())
        durable.publish(partial, to)
