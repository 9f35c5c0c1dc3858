"""What of a model is saved: its weights, under the names that ``from_pretrained`` looks for, and files beside them."""

from __future__ import annotations

import copy
import os
import sys
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from stillframe import spi
from stillframe.store import files

OURS = "trainer"
"""Under this name a state holds what is not a weight of the model; these have their own names."""


class ModelPart:
    """Of one trainer's model: all of it, or the adapter if it is one of PEFT's.  Rank 0 saves it."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._buffers = spi.LiveState()
        self._files: tuple[tuple[str, bytes], ...] | None = None

    @property
    def _model(self) -> Any:
        return self._trainer.model

    @property
    def is_adapter(self) -> bool:
        peft = sys.modules.get("peft")
        return peft is not None and isinstance(self._model, peft.PeftModel)

    @property
    def segments(self) -> tuple[str, ...]:
        """The names that the segments of ranks 0, 1, … have in a checkpoint; those of the others have none there."""
        return ("adapter_model.safetensors" if self.is_adapter else "model.safetensors",)

    def saved(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What this rank saves: weights, by name, and what it keeps for itself.

        Call it behind a fence: the copies of the time before are used again.
        """
        return (self.still() if self._trainer.args.process_index == 0 else {}), {}

    def restore_own(self, root: str, step: int) -> None:
        """After the weights were restored: what this rank has kept for itself."""

    def live(self) -> dict[str, torch.Tensor]:
        """The live tensors, by name.  Of tied weights the first: ``from_pretrained`` ties them itself."""
        if self.is_adapter:
            named = sys.modules["peft"].get_peft_model_state_dict(self._model)
        else:
            named = self._model.state_dict(keep_vars=True)
        found: dict[Any, tuple[str, torch.Tensor]] = {}
        for name, tensor in named.items():
            # Of a DTensor this rank may hold nothing, and the ranks must find the same.
            is_here = not isinstance(tensor, DTensor)
            memory = (tensor.data_ptr(), tensor.shape, tensor.dtype) if is_here else id(tensor)
            found.setdefault(memory if tensor.numel() else name, (name, tensor))
        return dict(found.values())

    def still(self) -> dict[str, torch.Tensor]:
        """The same, safe until the next update: forward may change what is no parameter, so that is copied."""
        live = self.live()
        parameters = {each.data_ptr() for each in self._model.parameters()}
        others = {
            name: each
            for name, each in live.items()
            if not isinstance(each, DTensor) and each.data_ptr() not in parameters
        }
        return {**live, **self._buffers.state(others)}

    def files(self) -> tuple[tuple[str, bytes], ...]:
        """Configuration, tokenizer and arguments, by name; they do not change while the trainer trains."""
        if self._files is None:
            with files.scratch_directory("stillframe-files-") as place:
                self._write(place)
                paths = {name: os.path.join(place, name) for name in files.names_in(place)}
                self._files = tuple(
                    (name, files.read_file(path)) for name, path in paths.items() if files.kind_of(path) == "file"
                )
        return self._files

    def _write(self, place: str) -> None:
        model, trainer = self._model, self._trainer
        if self.is_adapter:
            model.peft_config[model.active_adapter].save_pretrained(place)
        elif hasattr(model, "config") and hasattr(model.config, "save_pretrained"):
            config = copy.deepcopy(model.config)
            name = type(model).__name__
            config.architectures = [name.removeprefix("FSDP") if isinstance(model, FSDPModule) else name]
            config.dtype = str(model.dtype).removeprefix("torch.")
            config.save_pretrained(place)
            if model.can_generate() and model.generation_config is not None:
                model.generation_config.save_pretrained(place)
        words = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
        if words is not None:
            words.save_pretrained(place)
        torch.save(trainer.args, os.path.join(place, "training_args.bin"))
