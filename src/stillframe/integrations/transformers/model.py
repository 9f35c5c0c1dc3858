"""What of a model is saved: its weights, under the names that ``from_pretrained`` looks for, and files beside them."""

from __future__ import annotations

import copy
import os
import sys
from typing import Any

import torch

from stillframe import spi
from stillframe.store import files


class ModelPart:
    """Of one trainer's model: all of it, or the adapter if it is one of PEFT's."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._buffers = spi.LiveState()
        self._files: tuple[tuple[str, bytes], ...] | None = None

    @property
    def _model(self) -> Any:
        return self._trainer.model

    @property
    def _is_adapter(self) -> bool:
        peft = sys.modules.get("peft")
        return peft is not None and isinstance(self._model, peft.PeftModel)

    @property
    def file_name(self) -> str:
        return "adapter_model.safetensors" if self._is_adapter else "model.safetensors"

    def live(self) -> dict[str, torch.Tensor]:
        """The live tensors, by name.  Of tied weights the first: ``from_pretrained`` ties them itself."""
        if self._is_adapter:
            named = sys.modules["peft"].get_peft_model_state_dict(self._model)
        else:
            named = self._model.state_dict(keep_vars=True)
        found: dict[Any, tuple[str, torch.Tensor]] = {}
        for name, tensor in named.items():
            memory = tensor.data_ptr(), tensor.shape, tensor.dtype
            found.setdefault(memory if tensor.numel() else name, (name, tensor))
        return dict(found.values())

    def still(self) -> dict[str, torch.Tensor]:
        """The same, safe until the next update: forward may change what is no parameter, so that is copied.

        Call it behind a fence: the copies of the time before are used again.
        """
        live = self.live()
        parameters = {each.data_ptr() for each in self._model.parameters()}
        others = {name: each for name, each in live.items() if each.data_ptr() not in parameters}
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
        if self._is_adapter:
            model.peft_config[model.active_adapter].save_pretrained(place)
        elif hasattr(model, "config") and hasattr(model.config, "save_pretrained"):
            config = copy.deepcopy(model.config)
            config.architectures = [type(model).__name__]
            config.dtype = str(model.dtype).removeprefix("torch.")
            config.save_pretrained(place)
            if model.can_generate() and model.generation_config is not None:
                model.generation_config.save_pretrained(place)
        words = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
        if words is not None:
            words.save_pretrained(place)
        torch.save(trainer.args, os.path.join(place, "training_args.bin"))
