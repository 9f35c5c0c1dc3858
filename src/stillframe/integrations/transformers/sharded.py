"""What a rank saves of a model that FSDP2 has divided: ``state_dict_type`` says in which form.

``SHARDED_STATE_DICT``: each rank its part, in place.  No file holds a whole tensor then, so ``checkpoint-N`` has no
weights that ``from_pretrained`` opens, as with Trainer alone; ``stillframe export`` writes them.

``FULL_STATE_DICT``: each weight is made whole at every save, on the one rank that saves it, while training waits.  So
the ranks' segments are the files of a model as Hugging Face divides it, with an index beside them.

Either is restored on any number of ranks.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from stillframe import spi
from stillframe.errors import NotFoundError
from stillframe.integrations.transformers.model import OURS, ModelPart
from stillframe.integrations.transformers.wholes import Wholes

_INDEX = "model.safetensors.index.json"
_BUFFERS = "buffers"


class ShardedPart(ModelPart):
    """Of this rank."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self._rank = dist.get_rank()
        self._is_full = "FULL_STATE_DICT" in str(trainer.accelerator.state.fsdp_plugin.state_dict_type)
        self._wholes = Wholes()

    def saved(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Where weights are made whole, a collective: it blocks until they have been sent to their ranks."""
        still = self.still()
        divided = {name: each for name, each in still.items() if isinstance(each, DTensor)}
        buffers = {name: each for name, each in still.items() if name not in divided}
        weights = self._wholes.make(divided, is_one_file=self.is_adapter) if self._is_full else divided
        if self._rank == 0:
            return {**weights, **buffers}, {}
        return weights, {_BUFFERS: buffers} if buffers else {}

    @property
    def segments(self) -> tuple[str, ...]:
        if not self._is_full:
            return ()
        count = max(self._wholes.owners.values(), default=0) + 1
        several = tuple(f"model-{rank + 1:05d}-of-{count:05d}.safetensors" for rank in range(count))
        return super().segments if count == 1 else several

    def files(self) -> tuple[tuple[str, bytes], ...]:
        if len(self.segments) < 2:
            return super().files()
        named = self.live()
        where = {name: self.segments[self._wholes.owners.get(name, 0)] for name in named}
        index = {"metadata": {"total_size": sum(each.nbytes for each in named.values())}, "weight_map": where}
        return (*super().files(), (_INDEX, json.dumps(index, indent=2, sort_keys=True).encode()))

    def restore_own(self, root: str, step: int) -> None:
        """What is not divided may differ between the ranks.  One that was not there keeps what rank 0 had."""
        live = {name: each for name, each in self.live().items() if not isinstance(each, DTensor)}
        if not live or self._rank == 0:
            return
        with contextlib.suppress(NotFoundError), torch.no_grad():
            found = spi.load_rank(root, step, self._rank, only=f"{OURS}/{_BUFFERS}")
            for name, each in found[OURS][_BUFFERS].items():
                live[name].copy_(each)
