"""Audit: proof, for one save, that nothing it staged lazily changed between ``save()`` and the fence.

Each piece is hashed as it lies in the arena, and again, from the live tensors, when the fence is reached:
the training thread stands still then.  The save counts as staged only after that, so a torn one is never
committed.  ``tensor._version`` would be cheaper but is no guard: fused optimizers do not move it.
"""

from __future__ import annotations

import bisect

import torch

from stillframe.errors import TornError
from stillframe.format.digest import digest
from stillframe.model import CHUNK_BYTES
from stillframe.stage.plan import Plan
from stillframe.storage.direct import aligned_buffer


class Audit:
    """Thread: the stager's."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._staged: dict[int, list[str]] = {}

    def note(self, chunk: int, memory: torch.Tensor) -> None:
        """Remember what each lazily staged piece of a chunk looks like in the arena."""
        copy = aligned_buffer(memory.numel())
        torch.frombuffer(copy, dtype=torch.uint8)[: memory.numel()].copy_(memory)
        self._staged[chunk] = self._digests(chunk, memoryview(copy))

    def check(self, step: int) -> None:
        """Raises :class:`TornError` naming the first tensor that is not what was staged."""
        buffer = aligned_buffer(CHUNK_BYTES)
        scratch = torch.frombuffer(buffer, dtype=torch.uint8)
        for chunk, staged in self._staged.items():
            for run in self._plan.chunks[chunk].runs:
                if run.captured is None:
                    run.device.copy(run.sources, scratch[run.offset : run.offset + run.nbytes])
                    ticket = run.device.ticket()
                    if ticket is not None:
                        ticket.wait()
            live = self._digests(chunk, memoryview(buffer))
            for index, (before, now) in enumerate(zip(staged, live, strict=True)):
                if before != now:
                    raise TornError(
                        f"step {step}: {self._name(chunk, index)!r} changed between save() and the fence; "
                        "the copy may be torn. "
                        "Change the state only in optimizer.step(), or inside `with checkpointer.fence():`"
                    )

    def _pieces(self, chunk: int) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for run in self._plan.chunks[chunk].runs:
            at = run.offset
            for source in run.sources if run.captured is None else ():
                found.append((at, at + source.nbytes))
                at += source.nbytes
        return found

    def _digests(self, chunk: int, memory: memoryview) -> list[str]:
        return [digest(memory[start:end]) for start, end in self._pieces(chunk)]

    def _name(self, chunk: int, piece: int) -> str:
        at = chunk * CHUNK_BYTES + self._pieces(chunk)[piece][0]
        starts = [shard.start for shard in self._plan.shards]
        return self._plan.shards[bisect.bisect_right(starts, at) - 1].name
