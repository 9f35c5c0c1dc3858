"""Whether a tensor was changed in place between ``save()`` and its copy.

torch counts the operations that write to a tensor: ``tensor._version``.  Forward, backward and the wrappers of data
parallelism move the count of no parameter, so one that moved tells of an update that no fence held back.  Reading it
takes some 60 ns a tensor, and so every save is checked.

Views and detached tensors share the count of their base; a DTensor has one, and its local tensor another.  Not seen:
what is written through ``tensor.data``, and by operations that do not count (fused optimizers, ``torch._foreach_…`` on
DTensors, a CUDA graph) or count too early (compiled steps); inference tensors have no count.  ``audit=True`` compares
the bytes themselves.  Nor is an operation seen that is still writing, in another thread, at the very moment of the
check: it is counted at its end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stillframe.errors import TornError
from stillframe.save.compiled import memory_of_compiled
from stillframe.state.torch_internals import local_of, versions_of

_MAX_NAMES = 3
ADVICE = (
    "Earlier checkpoints are not affected. Call checkpointer.fence() right before the line that changes it, or change "
    "it in optimizer.step(). If forward changes it, make it a buffer and give save() the module, or give save() a "
    "clone()."
)
"""What to do."""


class Versions:
    """Of the tensors that one save stages lazily, at ``save()``.  Thread: any."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], names: Sequence[str], at_save: list[int | None] | None = None
    ) -> None:
        self._tensors: Sequence[torch.Tensor] = tensors
        self._names = names
        self._at_save = versions_of(tensors) if at_save is None else at_save
        self._changed: list[str] = []
        self._is_released = False

    def add(self, others: Versions) -> None:
        """Compare these, too: versions that were noted before ``save()``."""
        self._tensors = [*self._tensors, *others._tensors]
        self._names = [*self._names, *others._names]
        self._at_save += others._at_save

    def release(self) -> None:
        """A fence lets updates pass, as the copies are issued: what changes from here on is rightful.

        The training thread stands in the fence, so no change of its own is half done.
        """
        self._compare()
        self._is_released = True

    def drop(self) -> None:
        """They will not be asked again: keep no tensor alive."""
        self._is_released = True  # first: a fence may be comparing
        self._tensors = ()

    def check(self, step: int) -> None:
        """Raises :class:`TornError` if a tensor has changed since ``save()``, and before :meth:`release`."""
        self._compare()
        if self._changed:
            named = ", ".join(map(repr, self._changed[:_MAX_NAMES]))
            more = f" and {len(self._changed) - _MAX_NAMES} more" if len(self._changed) > _MAX_NAMES else ""
            raise TornError(
                f"step {step} is not saved: {named}{more} changed in place after save() and before the copy was made, "
                f"so that the copy may mix two steps. {ADVICE} audit=True finds also what is changed through "
                "tensor.data"
            )

    def _compare(self) -> None:
        if self._is_released:
            return
        now = versions_of(self._tensors)
        if now != self._at_save and not self._is_released:  # asked again: an update may have begun while we looked
            excused = memory_of_compiled()
            changed = (
                name
                for name, tensor, before, after in zip(self._names, self._tensors, self._at_save, now, strict=True)
                if before != after and not (excused and local_of(tensor).data_ptr() in excused)
            )
            self._changed = list(dict.fromkeys(changed))
