"""TorchSnapshot: its async_take."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from benchmarks.systems.base import State, System, init_alone, tensors_of


class TorchSnapshot(System):
    """Small tensors are copied into slabs before async_take returns; one as large as a slab is not copied.

    It means to copy that one too, but compares a string with an enum, and so writes it in the background from where it
    lies.  Slabs are therefore made larger than the largest tensor, with the variable that it has for that: then
    everything is a copy, and there is no fence to wait at.
    """

    name = "torchsnapshot"
    label = "TorchSnapshot"
    is_async = True
    packages = ("torchsnapshot", "torch")
    how = (
        "Snapshot.async_take of a StateDict, in slabs of 128 MiB or of the largest tensor, so that all is copied "
        "before it returns; a save waits for the one before; restored with Snapshot.restore"
    )

    def __init__(self, directory: Path, state: State, rank: int = 0) -> None:
        super().__init__(directory, state, rank)
        import torchsnapshot

        init_alone()
        largest = max(tensor.nbytes for _, tensor in tensors_of(state))
        if largest >= 128 * 2**20:
            os.environ["TORCHSNAPSHOT_SLAB_SIZE_THRESHOLD_BYTES_OVERRIDE"] = str(largest + 1)
        self.library: Any = torchsnapshot
        self.pending: Any = None
        self.try_dtensor()

    def try_dtensor(self) -> None:
        """It knows ShardedTensor, not DTensor; what it says to one is raised here and not in the middle of a run."""
        from torch.distributed.tensor import DTensor
        from torch.utils._pytree import tree_leaves

        for leaf in tree_leaves(self.state):
            if isinstance(leaf, DTensor):
                trial = {"state": self.library.StateDict(tensor=leaf.detach())}
                self.library.Snapshot.take(str(self.directory / "trial"), trial)
                return

    def path(self, step: int) -> str:
        return str(self.directory / f"step-{step}")

    def save(self, step: int) -> None:
        self.finish()
        self.pending = self.library.Snapshot.async_take(self.path(step), self.app_state())

    def finish(self) -> None:
        if self.pending is not None:
            self.pending.wait()
            self.pending = None

    def restore(self, step: int) -> None:
        app_state = self.app_state()
        self.library.Snapshot(self.path(step)).restore(app_state)
        self.state.update(app_state["state"])

    def app_state(self) -> dict[str, Any]:
        return {"state": self.library.StateDict(self.state)}
