"""DeepSpeed's fast checkpoint writer (FastPersist), blocking and decoupled."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from benchmarks.systems.base import State, System, copy_into, init_alone, map_tensors

LIBAIO = "libaio.so.1"


class DeepSpeedFast(System):
    """The engine is made as DeepSpeedEngine makes it for ZeRO-3: every rank writes a file of its own.

    On its CPU accelerator the writer does not run: "This op had not been implemented on CPU backend."  No code of it
    needs a GPU, though, so DeepSpeed is told to take its CUDA accelerator, and to lock pages itself rather than ask
    CUDA.  Built without a GPU its extension lacks the link to libaio, which is therefore loaded first.
    """

    name = "deepspeed-fast"
    label = "DeepSpeed fast writer"
    packages = ("deepspeed", "torch")
    is_decoupled = False
    start_s = 300
    accelerator = "cuda"
    how = (
        "FastCheckpointEngine.save with the fast writer (libaio, O_DIRECT, double buffer of 64 MiB) under "
        "DS_ACCELERATOR=cuda and DS_PIN_MEMORY_BACKEND=native, without which it has no CPU backend; "
        "restored with torch.load(mmap=True, weights_only=True) and copy_"
    )

    def __init__(self, directory: Path, state: State, rank: int = 0) -> None:
        super().__init__(directory, state, rank)
        os.environ.update(DS_ACCELERATOR=self.accelerator, DS_PIN_MEMORY_BACKEND="native")
        for name, value in (("LOCAL_RANK", str(rank)), ("CROSS_RANK", "0"), ("CROSS_SIZE", "1")):
            os.environ.setdefault(name, value)
        ctypes.CDLL(LIBAIO, mode=ctypes.RTLD_GLOBAL)

        import deepspeed
        from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo, create_checkpoint_engine
        from deepspeed.runtime.config import DeepSpeedConfig
        from deepspeed.utils import groups, logger

        logger.setLevel("ERROR")
        init_alone()
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
        self.info: Any = CheckpointCommitInfo
        config = DeepSpeedConfig(
            {
                "train_micro_batch_size_per_gpu": 1,
                "checkpoint": {
                    "writer": {"type": "fast", "decoupled": self.is_decoupled, "io_buffer_size": 64 * 2**20}
                },
                "aio": {"block_size": 2**20, "queue_depth": 8, "intra_op_parallelism": 1},
            }
        )
        with quiet(), writer_environment():
            self.engine: Any = create_checkpoint_engine(config, groups, 3, False, False)
        self.committing: Any = None
        # The first save builds an extension, and what does not run is to fail here.
        self.write(f"start-{rank}", {"nothing": torch.zeros(1)})
        self.finish()
        shutil.rmtree(directory / f"start-{rank}")

    def file(self, tag: str) -> Path:
        return self.directory / tag / f"rank-{self.rank}.pt"

    def write(self, tag: str, state: State) -> None:
        self.file(tag).parent.mkdir(exist_ok=True)
        self.committing = self.info(tag=tag, save_dir=str(self.directory), save_latest=False)
        self.engine.create(self.committing)
        self.engine.save(state, str(self.file(tag)))

    def save(self, step: int) -> None:
        self.write(f"step-{step}", map_tensors(self.state, lambda tensor: tensor))
        self.finish()

    def finish(self) -> None:
        if self.committing is not None:
            with quiet():
                self.engine.commit(self.committing)
            self.committing = None

    def restore(self, step: int) -> None:
        copy_into(self.state, torch.load(self.file(f"step-{step}"), mmap=True, weights_only=True))

    def close(self) -> None:
        self.engine.cleanup()


class DeepSpeedDecoupled(DeepSpeedFast):
    """A process writes from the live tensors, which are moved into shared memory by the first save.

    Only that process needs the CUDA accelerator; this one needs the CPU's, as the engine puts a number on a device.
    """

    name = "deepspeed-decoupled"
    label = "DeepSpeed decoupled"
    is_async = True
    is_decoupled = True
    accelerator = "cpu"
    how = (
        "DecoupledCheckpointEngine.save with the fast writer set as for deepspeed-fast; the update waits in commit, as "
        "DeepSpeedEngine.step does, for the whole write"
    )

    def fence(self) -> None:
        self.finish()

    def save(self, step: int) -> None:
        self.finish()
        self.write(f"step-{step}", map_tensors(self.state, lambda tensor: tensor))


def quiet() -> contextlib.redirect_stdout[io.StringIO]:
    """Without what the engine prints at every commit."""
    return contextlib.redirect_stdout(io.StringIO())


@contextlib.contextmanager
def writer_environment() -> Iterator[None]:
    """Processes started within have what the fast writer needs: the CUDA accelerator and libaio."""
    before = dict(os.environ)
    os.environ["DS_ACCELERATOR"] = "cuda"
    os.environ["LD_PRELOAD"] = ":".join(filter(None, (before.get("LD_PRELOAD"), LIBAIO)))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


if __name__ == "__main__":  # builds the extension, which takes minutes, before anything is measured
    with tempfile.TemporaryDirectory() as directory:
        DeepSpeedFast(Path(directory), {"nothing": torch.zeros(1)}).close()
