"""stillframe, as its README shows it."""

from __future__ import annotations

from pathlib import Path

from benchmarks.systems.base import State, System

import stillframe


class Stillframe(System):
    name = "stillframe"
    label = "stillframe"
    is_async = True
    packages = ("stillframe", "torch")
    how = "Checkpointer(directory) with its defaults; every checkpoint is kept, as with the others"

    def __init__(self, directory: Path, state: State, rank: int = 0) -> None:
        super().__init__(directory, state, rank)
        self.checkpointer = stillframe.Checkpointer(directory, arena=self.host_bytes or "auto")

    def fence(self) -> None:
        self.checkpointer.fence()

    def save(self, step: int) -> None:
        self.checkpointer.save(step, self.state)

    def finish(self) -> None:
        self.checkpointer.wait()

    def restore(self, step: int) -> None:
        self.checkpointer.restore(self.state, step=step)

    def close(self) -> None:
        self.checkpointer.close()
