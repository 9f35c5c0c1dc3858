"""NVIDIA's Resiliency Extension: its asynchronous writer of torch.distributed.checkpoint's format."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.systems.base import State, System, init_alone, tensors_of


class NvrxAsync(System):
    """Its persistent worker process writes; what it does for a GPU's tensors is done here for a CPU's.

    Its own staging calls torch.cuda.synchronize and cannot run, and CPU tensors it does not copy at all.  So the copy
    into host memory is made here, into shared buffers kept from save to save, and its request comes without preload_fn.
    Its other two ways (TorchAsyncCheckpoint and the forking caller) call torch.cuda.synchronize in every save.
    """

    name = "nvrx"
    label = "NVRx async"
    is_async = True
    packages = ("nvidia-resiliency-ext", "torch")
    how = (
        "copy_ into shared buffers kept from save to save, then FileSystemWriterAsync with save_state_dict_async_plan "
        "(cached plan) and AsyncCallsQueue(persistent=True); a save waits for the one before; restored with dcp.load"
    )

    def __init__(self, directory: Path, state: State, rank: int = 0) -> None:
        super().__init__(directory, state, rank)
        import nvidia_resiliency_ext.checkpointing.async_ckpt.core as core
        import nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async as filesystem
        import nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver as saver
        import torch.distributed.checkpoint as dcp

        init_alone()
        self.dcp: Any = dcp
        self.core: Any = core
        self.filesystem: Any = filesystem
        self.saver: Any = saver
        self.queue: Any = core.AsyncCallsQueue(persistent=True)
        # The worker and the process of its result queue take seconds to start.
        self.schedule(directory / "start", {"nothing": torch.zeros(1)}, None)
        self.finish()
        if rank == 0:
            shutil.rmtree(directory / "start")
        self.plans: Any = saver.CheckpointMetadataCache()
        self.buffers = shared_like(state)

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step}"

    def save(self, step: int) -> None:
        self.finish()
        copies = dict(tensors_of(self.buffers))
        for path, tensor in tensors_of(self.state):
            copies[path].copy_(tensor)
        self.schedule(self.path(step), with_values_of(self.state, self.buffers), self.plans)

    def schedule(self, path: Path, state: State, plans: Any) -> None:
        writer = self.filesystem.FileSystemWriterAsync(path, thread_count=2)
        planned = self.saver.save_state_dict_async_plan(state, writer, enable_cache=True, metadata_cache=plans)
        function, _, arguments = writer.get_save_function_and_args()
        finalize = [lambda: self.saver.save_state_dict_async_finalize(*planned)]
        self.queue.schedule_async_request(self.core.AsyncRequest(function, arguments, finalize))

    def finish(self) -> None:
        while self.queue.get_num_unfinalized_calls():
            if not self.queue.maybe_finalize_async_calls(no_dist=True):
                time.sleep(0.005)

    def restore(self, step: int) -> None:
        self.dcp.load(self.state, checkpoint_id=self.path(step))

    def close(self) -> None:
        self.queue.close()


def shared_like(state: Any) -> Any:
    """The same nested dict with a tensor in shared memory for every tensor (a DTensor for a DTensor)."""
    if isinstance(state, torch.Tensor):
        empty = torch.empty_like(state, requires_grad=False)
        for _, local in tensors_of(empty):
            local.share_memory_()
        return empty
    if isinstance(state, dict):
        return {key: shared_like(value) for key, value in state.items()}
    return state


def with_values_of(state: Any, buffers: Any) -> Any:
    """The buffers, with the plain values that the state has now."""
    if isinstance(state, dict):
        return {key: with_values_of(value, buffers[key]) for key, value in state.items()}
    return buffers if isinstance(state, torch.Tensor) else state
