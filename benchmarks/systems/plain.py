"""Not saving, and what everybody writes first: torch.save, safetensors, and a copy with a thread behind it."""

from __future__ import annotations

import copy
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from benchmarks.systems.base import State, System, copy_into, map_tensors, tensors_of


class NoSaving(System):
    name = "none"
    label = "not saving"
    how = "the same loop without any save"

    def save(self, step: int) -> None:
        pass


class TorchSave(System):
    name = "torch-save"
    label = "torch.save"
    how = "torch.save(state, path); restored with torch.load(path, mmap=True, weights_only=True) and copy_"

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step}-rank-{self.rank}.pt"

    def save(self, step: int) -> None:
        torch.save(map_tensors(self.state, lambda tensor: tensor), self.path(step))

    def restore(self, step: int) -> None:
        copy_into(self.state, torch.load(self.path(step), mmap=True, weights_only=True))


class CloneAndThread(TorchSave):
    """The snapshot of CheckFreq: copy in the foreground, write in the background, one write at a time."""

    name = "clone-thread"
    label = "clone + thread"
    is_async = True
    how = "copy_ into buffers kept from save to save, then torch.save on a thread; a save waits for the one before"

    def __init__(self, directory: Path, state: State, rank: int = 0) -> None:
        super().__init__(directory, state, rank)
        self.buffers = map_tensors(state, torch.empty_like)
        self.pool = ThreadPoolExecutor(1)
        self.writing: Future[None] | None = None

    def save(self, step: int) -> None:
        self.finish()
        copies = dict(tensors_of(self.buffers))
        for path, tensor in tensors_of(self.state):
            copies[path].copy_(tensor)
        self.writing = self.pool.submit(torch.save, _taken(self.state, self.buffers), self.path(step))

    def finish(self) -> None:
        if self.writing:
            self.writing.result()

    def close(self) -> None:
        self.pool.shutdown()


def _taken(state: Any, buffers: Any) -> Any:
    """The copies of the tensors, and copies of everything else."""
    if isinstance(state, dict):
        return {key: _taken(item, buffers[key]) for key, item in state.items()}
    return buffers if isinstance(state, torch.Tensor) else copy.deepcopy(state)


def _has_values(state: Any) -> bool:
    if isinstance(state, dict):
        return any(map(_has_values, state.values()))
    return not isinstance(state, torch.Tensor)


class SafetensorsSave(System):
    name = "safetensors"
    label = "safetensors"
    packages = ("torch", "safetensors")
    how = "safetensors.torch.save_file of the flat dict; restored with safe_open, get_tensor and copy_"

    def __init__(self, directory: Path, state: State, rank: int = 0) -> None:
        import safetensors.torch

        super().__init__(directory, state, rank)
        if _has_values(state):
            raise TypeError("safetensors holds tensors only; this state has Python values")
        self.library = safetensors

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step}-rank-{self.rank}.safetensors"

    def save(self, step: int) -> None:
        self.library.torch.save_file(dict(tensors_of(self.state)), self.path(step))

    def restore(self, step: int) -> None:
        with self.library.safe_open(self.path(step), framework="pt") as file:
            for path, tensor in tensors_of(self.state):
                tensor.copy_(file.get_tensor(path))
