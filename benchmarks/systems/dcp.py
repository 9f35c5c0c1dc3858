"""torch.distributed.checkpoint: its save, and its async_save in the three ways that it offers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from benchmarks.systems.base import State, System, init_alone


class DcpSave(System):
    name = "dcp"
    label = "dcp.save"
    how = "dcp.save with FileSystemWriter(thread_count=2) and a gloo group; restored with dcp.load"

    def __init__(self, directory: Path, state: State, rank: int = 0) -> None:
        import torch.distributed.checkpoint as dcp

        super().__init__(directory, state, rank)
        init_alone()
        self.dcp: Any = dcp

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step}"

    def save(self, step: int) -> None:
        self.dcp.save(self.state, storage_writer=self.writer(step))

    def writer(self, step: int) -> Any:
        """With a thread for each core: about twice as fast here as its default of one."""
        return self.dcp.FileSystemWriter(self.path(step), thread_count=2)

    def restore(self, step: int) -> None:
        self.dcp.load(self.state, checkpoint_id=self.path(step))


class DcpAsync(DcpSave):
    """Staging blocks; one save waits for the one before, as torchtitan and the tutorial have it."""

    name = "dcp-async"
    label = "dcp.async_save"
    is_async = True
    how = "dcp.async_save with its defaults: copied before it returns, written on a thread"
    options: dict[str, Any]

    def __init__(self, directory: Path, state: State, rank: int = 0) -> None:
        super().__init__(directory, state, rank)
        self.options = {}
        self.group: Any = torch.distributed.new_group(backend="gloo")  # for the thread; training has its own
        self.uploading: Any = None
        self.staging: Any = None

    def fence(self) -> None:
        if self.staging is not None:
            self.staging.result()
            self.staging = None

    def save(self, step: int) -> None:
        self.finish()
        where = {"storage_writer": self.writer(step)} if self.options else {"checkpoint_id": self.path(step)}
        response = self.dcp.async_save(self.state, **where, **self.options, process_group=self.group)
        if hasattr(response, "staging_completion"):
            self.staging, self.uploading = response.staging_completion, response.upload_completion
        else:
            self.uploading = response

    def finish(self) -> None:
        if self.uploading is not None:
            self.uploading.result()
            self.uploading = None

    def close(self) -> None:
        stager = self.options.get("async_stager")
        if stager is not None:
            stager.close()


class DcpAsyncThread(DcpAsync):
    name = "dcp-async-thread"
    label = "dcp.async_save\nthread, lazy staging"
    how = (
        "dcp.async_save on a thread with DefaultStager(use_async_staging=True), pinned and non-blocking copies off "
        "(no CUDA), FileSystemWriter(thread_count=2); the update waits for staging_completion"
    )

    def __init__(self, directory: Path, state: State, rank: int = 0) -> None:
        super().__init__(directory, state, rank)
        self.options = {"async_stager": self.stager(is_shared=False)}

    def stager(self, is_shared: bool) -> Any:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        return DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=is_shared,
                use_async_staging=True,
                use_non_blocking_copy=False,
            )
        )


class DcpAsyncProcess(DcpAsyncThread):
    name = "dcp-async-process"
    label = "dcp.async_save\nprocess, shared memory"
    how = (
        "dcp.async_save in a process with DefaultStager(use_async_staging=True, use_shared_memory=True), "
        "FileSystemWriter(thread_count=2); the update waits for staging_completion"
    )

    def __init__(self, directory: Path, state: State, rank: int = 0) -> None:
        super().__init__(directory, state, rank)
        self.options = {
            "async_stager": self.stager(is_shared=True),
            "async_checkpointer_type": self.dcp.state_dict_saver.AsyncCheckpointerType.PROCESS,
        }
