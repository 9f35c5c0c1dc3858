"""stillframe: lazy, asynchronous checkpointing for training.

cli            the stillframe command
integrations   DCP, DeepSpeed                                (torch)
convert        checkpoints ↔ safetensors, torch.save, DCP    (torch)
observe        what a run does and did
checkpointer   the facade: save, fence, wait, restore        (torch)
save           live objects → chunks in the arena            (torch)
restoring      checkpoints → live objects                    (torch)
keeper         arena → segments, seals, manifests            (a process without torch)
ranks          how ranks agree                               (torch)
checkpoint     what is stored, read
state          what a state is                               (torch)
link           the arena and the messages between the two processes
format         bytes ↔ structures
store          names ↔ bytes
model, retention, units, errors, version
testing        for tests
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
from stillframe.version import VERSION

if TYPE_CHECKING:
    from stillframe import integrations as integrations
    from stillframe.checkpoint.catalog import Catalog, Checkpoint
    from stillframe.checkpointer import Checkpointer
    from stillframe.format.values import ELSEWHERE
    from stillframe.model import Label, Progress, RestoreReport, Stats, Times
    from stillframe.restoring.boxes import BoxReader
    from stillframe.restoring.load import load
    from stillframe.restoring.resume import restore
    from stillframe.retention import KeepBest, KeepEvery, KeepFor, KeepLast
    from stillframe.save.saves import Save
    from stillframe.state.boxes import TensorBox
    from stillframe.state.codecs import register_leaf
    from stillframe.state.rng import RNG
    from stillframe.state.train_state import TrainState
    from stillframe.state.walk import storable

__version__ = VERSION

__all__ = [
    "ELSEWHERE",
    "RNG",
    "BoxReader",
    "BusyError",
    "Catalog",
    "Checkpoint",
    "Checkpointer",
    "ConfigError",
    "DeadlineError",
    "ExistsError",
    "FormatError",
    "IntegrityError",
    "KeepBest",
    "KeepEvery",
    "KeepFor",
    "KeepLast",
    "KeeperError",
    "Label",
    "MismatchError",
    "NotFoundError",
    "Progress",
    "RestoreReport",
    "Save",
    "StateError",
    "Stats",
    "StillframeError",
    "StorageError",
    "TensorBox",
    "Times",
    "TornError",
    "TrainState",
    "UnsupportedStateError",
    "VersionError",
    "load",
    "register_leaf",
    "restore",
    "storable",
]

# Looked up when first used: the keeper imports this package too, and must not import torch.
_HOMES = {
    "Catalog": "checkpoint.catalog",
    "Checkpoint": "checkpoint.catalog",
    "ELSEWHERE": "format.values",
    "Checkpointer": "checkpointer",
    "KeepBest": "retention",
    "KeepEvery": "retention",
    "KeepFor": "retention",
    "KeepLast": "retention",
    "Label": "model",
    "TensorBox": "state.boxes",
    "BoxReader": "restoring.boxes",
    "Progress": "model",
    "RNG": "state.rng",
    "RestoreReport": "model",
    "Save": "save.saves",
    "Stats": "model",
    "Times": "model",
    "TrainState": "state.train_state",
    "load": "restoring.load",
    "register_leaf": "state.codecs",
    "restore": "restoring.resume",
    "storable": "state.walk",
}


if not TYPE_CHECKING:  # a type checker sees the imports above, and takes any other name for the mistake it is

    def __getattr__(name: str) -> object:
        if name == "integrations":
            return importlib.import_module("stillframe.integrations")
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module 'stillframe' has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(f"stillframe.{home}"), name)
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
