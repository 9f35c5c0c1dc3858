"""What the writer and the reader share: the root that DCP calls a checkpoint id."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from torch.distributed.checkpoint.metadata import StorageMeta

from stillframe.errors import ConfigError
from stillframe.store import files, is_url, root_address


@dataclass(eq=False)
class Place:
    """What DCP asks of readers and writers alike, and what it takes to make one."""

    path: str | os.PathLike[str]
    _: KW_ONLY
    step: int | None = None
    allow_pickle: bool = False
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    save_id: str | None = field(default=None, init=False)
    """Of the last save that was read, or written on this rank."""
    load_id: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        super().__init__()  # of who is a stager, too
        self.reset(self.path)

    @property
    def checkpoint_id(self) -> str:
        return os.fspath(self.path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.path = root_address(checkpoint_id)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(self.checkpoint_id, self.save_id, self.load_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        try:
            return bool(root_address(checkpoint_id))
        except ConfigError:
            return False


def refuse_dcps_own(path: str, advice: str) -> None:
    """Raises :class:`ConfigError` for a directory that DCP's own storage has written to."""
    if not is_url(path) and files.is_taken(os.path.join(path, ".metadata")):
        raise ConfigError(f"{path} holds a checkpoint that DCP itself wrote: {advice}")
