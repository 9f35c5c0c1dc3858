"""torch_checkpointing, PyTorch's library of 2026: its CheckpointManager."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from benchmarks.systems.base import State, System


class TorchCheckpointing(System):
    """Copied on a thread into shared memory kept from save to save, written by a process: ``lock`` is the fence."""

    name = "torch-checkpointing"
    label = "torch_checkpointing"
    is_async = True
    packages = ("torch-checkpointing", "torch")
    how = (
        "CheckpointManager.save with the CPU settings of its troubleshooting page (no pinned memory, no non-blocking "
        "copy, no direct I/O), staging prewarmed; the update waits in manager.lock(); restored with manager.load"
    )

    def __init__(self, directory: Path, state: State, rank: int = 0) -> None:
        super().__init__(directory, state, rank)
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
        self.manager: Any = CheckpointManager(
            CheckpointManager.Config(
                save=AsyncCheckpointSaverConfig(staging_config=staging),
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )
        self.writing: Any = None
        # A save of nothing waits for the process, which takes seconds to start; then the buffers are made.
        self.manager.save(str(directory / "start"), {"nothing": 0}).result()
        if rank == 0:
            shutil.rmtree(directory / "start")
        self.manager.prewarm_staging(state)

    def path(self, step: int) -> str:
        return str(self.directory / f"step-{step}")

    def fence(self) -> None:
        with self.manager.lock():
            pass

    def save(self, step: int) -> None:
        self.writing = self.manager.save(self.path(step), self.state)

    def finish(self) -> None:
        if self.writing is not None:
            self.writing.result()

    def restore(self, step: int) -> None:
        self.state.update(self.manager.load(self.path(step), into=self.state))

    def close(self) -> None:
        self.manager.close()
