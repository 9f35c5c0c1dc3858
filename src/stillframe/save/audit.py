"""Audit: proof, for one save, that nothing it staged lazily changed between ``save()`` and the fence.

Every source of a lazy copy is hashed three times: in the live tensors when ``save()`` is called, in the arena when
its chunk has been copied, and in the live tensors again when the fence is reached.  All three must be equal.  The
save counts as staged only after that, so a torn one is never committed; and a change that came by luck after the
copy is found as well.  ``tensor._version``, which every save compares, is cheaper but does not move with every write.
"""

from __future__ import annotations

import bisect
import mmap

import torch

from stillframe.errors import TornError
from stillframe.format.digest import digest
from stillframe.model import CHUNK_BYTES
from stillframe.save.places import Sources
from stillframe.save.plan import Plan
from stillframe.save.versions import ADVICE
from stillframe.store.blob import aligned_buffer


class Audit:
    """Thread: the stager's; :meth:`check_copy` on that of the arrivals.

    The training thread stands still in :meth:`begin` and :meth:`end`.
    """

    def __init__(self, plan: Plan, step: int, sources: Sources) -> None:
        self._plan = plan
        self._live_sources = sources
        self._step = step
        self._at_save: dict[int, list[str]] = {}

    def begin(self) -> None:
        """Remember what every source is at ``save()``."""
        buffer = aligned_buffer(CHUNK_BYTES)
        for chunk in range(len(self._plan.chunks)):
            self._at_save[chunk] = self._live(chunk, buffer)

    def check_copy(self, chunk: int, memory: torch.Tensor) -> None:
        """Raises :class:`TornError` if the arena holds something else."""
        buffer = aligned_buffer(memory.numel())
        torch.frombuffer(buffer, dtype=torch.uint8)[: memory.numel()].copy_(memory)
        self._compare(chunk, self._digests(chunk, buffer))

    def end(self) -> None:
        """Raises :class:`TornError` if a live tensor is not what it was."""
        buffer = aligned_buffer(CHUNK_BYTES)
        for chunk in self._at_save:
            self._compare(chunk, self._live(chunk, buffer))

    def _live(self, chunk: int, buffer: mmap.mmap) -> list[str]:
        scratch = torch.frombuffer(buffer, dtype=torch.uint8)
        for copy in self._plan.chunks[chunk].copies:
            if copy.captured is None:
                copy.device.copy(
                    self._live_sources.rows(copy.sources), scratch[copy.offset : copy.offset + copy.nbytes]
                )
                ticket = copy.device.ticket()
                if ticket is not None:
                    ticket.wait()
        return self._digests(chunk, buffer)

    def _compare(self, chunk: int, now: list[str]) -> None:
        for source, (before, after) in enumerate(zip(self._at_save[chunk], now, strict=True)):
            if before != after:
                raise TornError(
                    f"step {self._step} is not saved: {self._name(chunk, source)!r} changed between save() and the "
                    f"fence, so that the copy may mix two steps. {ADVICE}"
                )

    def _sources(self, chunk: int) -> list[tuple[int, int]]:
        """The range of the chunk that each source fills."""
        found: list[tuple[int, int]] = []
        for copy in self._plan.chunks[chunk].copies:
            at = copy.offset
            for source in copy.sources if copy.captured is None else ():
                found.append((at, at + source.nbytes))
                at += source.nbytes
        return found

    def _digests(self, chunk: int, buffer: mmap.mmap) -> list[str]:
        with memoryview(buffer) as memory:
            return [digest(memory[start:end]) for start, end in self._sources(chunk)]

    def _name(self, chunk: int, source: int) -> str:
        at = chunk * CHUNK_BYTES + self._sources(chunk)[source][0]
        starts = [shard.start for shard in self._plan.shards]
        return self._plan.shards[bisect.bisect_right(starts, at) - 1].name
