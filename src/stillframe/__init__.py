"""stillframe: lazy, asynchronous checkpointing for training.

checkpointer   the facade: save, fence, wait, restore
stage          live objects → chunks in the arena            (torch)
keeper         arena → segments, seals, manifests            (a process without torch)
restore        checkpoints → live objects                    (torch)
inspect        what lies in a root, and is it whole
convert        checkpoints ↔ safetensors, torch.save, DCP     (torch)
cli            the stillframe command
start, group   what ranks agree on, and how                  (torch)
catalog        what is a checkpoint
events         what happened in a run
link           the arena and the messages between the two processes
format         bytes ↔ structures
storage        names ↔ bytes, durably
model, retention, units, errors
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from stillframe.errors import (
    BusyError,
    ConfigError,
    DeadlineError,
    ExistsError,
    FormatError,
    IntegrityError,
    KeeperError,
    MismatchError,
    NotFoundError,
    StateError,
    StillframeError,
    StorageError,
    TornError,
    UnsupportedStateError,
    VersionError,
)

if TYPE_CHECKING:
    from stillframe.catalog import Catalog, Checkpoint
    from stillframe.checkpointer import Checkpointer
    from stillframe.format.leaves import register_leaf
    from stillframe.format.values import ELSEWHERE
    from stillframe.model import Label, Progress, RestoreReport, Stats, Times
    from stillframe.restore.load import load
    from stillframe.restore.parts import PartReader
    from stillframe.retention import KeepEvery, KeepLast
    from stillframe.stage.ledger import Save
    from stillframe.stage.part import Part
    from stillframe.stage.rng import RNG
    from stillframe.stage.train_state import TrainState
    from stillframe.stage.walk import storable

__version__ = "0.1.0"

__all__ = [
    "ELSEWHERE",
    "RNG",
    "BusyError",
    "Catalog",
    "Checkpoint",
    "Checkpointer",
    "ConfigError",
    "DeadlineError",
    "ExistsError",
    "FormatError",
    "IntegrityError",
    "KeepEvery",
    "KeepLast",
    "KeeperError",
    "Label",
    "MismatchError",
    "NotFoundError",
    "Part",
    "PartReader",
    "Progress",
    "RestoreReport",
    "Save",
    "StateError",
    "Stats",
    "StillframeError",
    "StorageError",
    "Times",
    "TornError",
    "TrainState",
    "UnsupportedStateError",
    "VersionError",
    "load",
    "register_leaf",
    "storable",
]

# Looked up when first used: the keeper imports this package too, and must not import torch.
_HOMES = {
    "Catalog": "catalog",
    "Checkpoint": "catalog",
    "ELSEWHERE": "format.values",
    "Checkpointer": "checkpointer",
    "KeepEvery": "retention",
    "KeepLast": "retention",
    "Label": "model",
    "Part": "stage.part",
    "PartReader": "restore.parts",
    "Progress": "model",
    "RNG": "stage.rng",
    "RestoreReport": "model",
    "Save": "stage.ledger",
    "Stats": "model",
    "Times": "model",
    "TrainState": "stage.train_state",
    "load": "restore.load",
    "register_leaf": "format.leaves",
    "storable": "stage.walk",
}


def __getattr__(name: str) -> object:
    if name == "integrations":
        return importlib.import_module("stillframe.integrations")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'stillframe' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"stillframe.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
