"""What the writer and the reader share: the root that DCP calls a checkpoint id."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from stillframe.errors import ConfigError
from stillframe.store import files, is_url, root_address

PathLike = str | os.PathLike[str]


class Place:
    """What DCP asks of readers and writers alike."""

    def __init__(
        self, path: PathLike, step: int | None, allow_pickle: bool, storage_options: Mapping[str, Any] | None
    ) -> None:
        super().__init__()
        self.path = root_address(path)
        self.step, self.allow_pickle, self.storage_options = step, allow_pickle, storage_options

    @property
    def checkpoint_id(self) -> str:
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathLike) -> bool:
        try:
            return bool(root_address(checkpoint_id))
        except ConfigError:
            return False

    def reset(self, checkpoint_id: PathLike | None = None) -> None:
        if checkpoint_id is not None:
            self.path = root_address(checkpoint_id)

    def refuse_dcps_own(self, advice: str) -> None:
        """Raises :class:`ConfigError` for a directory that DCP's own storage has written to."""
        if not is_url(self.path) and files.is_taken(os.path.join(self.path, ".metadata")):
            raise ConfigError(f"{self.path} holds a checkpoint that DCP itself wrote: {advice}")

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan


def id_of(save: Any) -> str:
    """Of a save, for DCP's ``save_id``: no other has the same in this root."""
    return f"{save.step}-e{save.epoch}-{save.attempt}"
