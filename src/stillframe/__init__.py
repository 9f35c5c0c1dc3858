"""stillframe: lazy, asynchronous checkpointing for training::

    with stillframe.Checkpointer("runs/gpt") as checkpointer:
        report = checkpointer.restore(state)             # a dict of the live objects: model, optimizer, …
        for step in range(report.next_step, steps):
            ...
            optimizer.step()
            checkpointer.save(step, state)

Its parts:

cli            the stillframe command
integrations   DCP, DeepSpeed, Trainer, Accelerate, Lightning (torch)
convert        checkpoints ↔ safetensors, torch.save, DCP    (torch)
observe        what a run does and did
preemption     jobs that are told to end                     (torch)
checkpointer   the facade: save, fence, wait, restore        (torch)
save           live objects → chunks in the arena            (torch)
restoring      checkpoints → live objects                    (torch)
keeper         arena → segments, seals, manifests            (a process without torch)
ranks          how ranks agree                               (torch)
checkpoint     what is stored, read
state          what a state is                               (torch)
link           the arena and the messages between the two processes
tiers          where else checkpoints are carried
format         bytes ↔ structures
store          names ↔ bytes
model, retention, schedule, units, errors, version
testing        for tests
"""

from __future__ import annotations

import importlib
import sys
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
    from stillframe.model import Phase, Progress, RestoreReport, SkippedStep, Stats, TierStats, Times
    from stillframe.preemption import Preemption, on_preemption
    from stillframe.restoring.load import load
    from stillframe.restoring.resume import restore
    from stillframe.retention import Keep, KeepBest, KeepEvery, KeepFor, KeepLast
    from stillframe.save.saves import Save
    from stillframe.schedule import Every
    from stillframe.state.batches import Batches
    from stillframe.state.codecs import register_leaf
    from stillframe.state.rng import RNG
    from stillframe.state.train_state import TrainState
    from stillframe.tiers import Tier

__version__ = VERSION


def _check_platform(platform: str) -> None:
    if platform != "linux":
        raise ImportError(
            f"stillframe needs Linux (memfd, pidfd, O_DIRECT); this is {platform!r}. On another system use a container "
            "or a virtual machine, or import stillframe only where it saves"
        )


_check_platform(sys.platform)

__all__ = [
    "RNG",
    "Batches",
    "BusyError",
    "Catalog",
    "Checkpoint",
    "Checkpointer",
    "ConfigError",
    "DeadlineError",
    "Every",
    "ExistsError",
    "FormatError",
    "IntegrityError",
    "Keep",
    "KeepBest",
    "KeepEvery",
    "KeepFor",
    "KeepLast",
    "KeeperError",
    "MismatchError",
    "NotFoundError",
    "Phase",
    "Preemption",
    "Progress",
    "RestoreReport",
    "Save",
    "SkippedStep",
    "StateError",
    "Stats",
    "StillframeError",
    "StorageError",
    "Tier",
    "TierStats",
    "Times",
    "TornError",
    "TrainState",
    "UnsupportedStateError",
    "VersionError",
    "load",
    "on_preemption",
    "register_leaf",
    "restore",
]

# Looked up when first used: the keeper imports this package too, and must not import torch.
_HOMES = {
    "Batches": "state.batches",
    "Catalog": "checkpoint.catalog",
    "Checkpoint": "checkpoint.catalog",
    "Checkpointer": "checkpointer",
    "Every": "schedule",
    "Keep": "retention",
    "KeepBest": "retention",
    "KeepEvery": "retention",
    "KeepFor": "retention",
    "KeepLast": "retention",
    "Phase": "model",
    "Preemption": "preemption",
    "Progress": "model",
    "RNG": "state.rng",
    "RestoreReport": "model",
    "Save": "save.saves",
    "SkippedStep": "model",
    "Stats": "model",
    "Tier": "tiers",
    "TierStats": "model",
    "Times": "model",
    "TrainState": "state.train_state",
    "load": "restoring.load",
    "on_preemption": "preemption",
    "register_leaf": "state.codecs",
    "restore": "restoring.resume",
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
