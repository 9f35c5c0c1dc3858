"""Model and optimizer as one entry of a state, under names that do not depend on how the model is wrapped.

The keys are those of ``torch.distributed.checkpoint.state_dict``: parameters and optimizer state by the
parameter's full name, without the prefixes of DDP, ``torch.compile`` and activation checkpointing.  So what one
wrapping saved, another restores.  Unlike ``get_state_dict``, it never runs a step of the optimizer to fill it.
"""

from __future__ import annotations

from typing import Any

import torch

from stillframe.errors import ConfigError
from stillframe.state.owners import has_own_layout
from stillframe.state.torch_internals import compiled_module

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


class TrainState:
    """``TrainState(model, optimizer, scheduler=scheduler)``: give it to ``save`` and ``restore`` as the state.

    model: plain, DDP, FSDP2 (``fully_shard``), tensor parallel, compiled, or several of these at once.
    optimizer: of parameters of that model.
    more: anything else that a state may hold.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, **more: Any) -> None:
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"TrainState: model is a {type(model).__name__}, not a torch.nn.Module")
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(f"TrainState: optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer")
        self.model = model
        self.optimizer = optimizer
        self.more = more
        self._names: dict[int, str] = {}
        self._kept: list[torch.nn.Parameter] = []

    @property
    def module(self) -> torch.nn.Module:
        """The model without data parallelism or compilation around it."""
        return innermost(self.model)[-1]

    def model_state(self) -> dict[str, Any]:
        """The live parameters and buffers, by name."""
        module = self.module
        is_plain = type(module).state_dict is torch.nn.Module.state_dict
        state = module.state_dict(keep_vars=True) if is_plain else module.state_dict()
        return {clean(name): value for name, value in state.items()}

    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's state dict with names in place of its numbers."""
        assert self.optimizer is not None
        plain = self.optimizer.state_dict()
        if has_own_layout(plain):
            kind = type(self.optimizer).__name__
            raise ConfigError(
                f"TrainState: state_dict() of {kind} has a layout of its own, so TrainState cannot name what is in it; "
                f"give it under another name, as TrainState(model, {kind.lower()}=…)"
            )
        by_number = self.parameter_names()
        return {
            "state": {by_number[number]: state for number, state in plain["state"].items()},
            "param_groups": [
                {**group, "params": [by_number[number] for number in group["params"]]}
                for group in plain["param_groups"]
            ],
        }

    def load_optimizer_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Give the optimizer what :meth:`optimizer_state` gave; tells it in the optimizer's own numbers.

        torch takes the numbers of a group by their order, so that has to be the live one, whatever the saved one was.
        """
        assert self.optimizer is not None
        numbers = {name: number for number, name in enumerate(self.parameter_names())}
        live = self.optimizer.state_dict()["param_groups"]
        plain = {
            "state": {numbers[name]: each for name, each in state["state"].items()},
            "param_groups": [
                {**saved, "params": list(own["params"])} for saved, own in zip(state["param_groups"], live, strict=True)
            ],
        }
        self.optimizer.load_state_dict(plain)
        return plain

    def parameter_names(self) -> list[str]:
        """Of the optimizer's parameters, in the order of its own numbers.  Raises :class:`ConfigError`."""
        assert self.optimizer is not None
        parameters = [each for group in self.optimizer.param_groups for each in group["params"]]
        if any(id(each) not in self._names for each in parameters):
            self._kept = list(self.module.parameters())
            self._names = {id(each): clean(name) for name, each in self.module.named_parameters()}
        try:
            return [self._names[id(each)] for each in parameters]
        except KeyError:
            raise ConfigError(
                "TrainState: the optimizer has a parameter that is not one of the model's; make it from "
                "model.parameters() after the model has been wrapped"
            ) from None

    def parameters(self) -> dict[str, torch.Tensor]:
        """The optimizer's parameters by name."""
        assert self.optimizer is not None
        live = [each for group in self.optimizer.param_groups for each in group["params"]]
        return dict(zip(self.parameter_names(), live, strict=True))


def innermost(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The model, what is in it if it is a wrapper, and so on."""
    found = [model]
    while True:
        model = found[-1]
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            found.append(model.module)
            continue
        compiled = compiled_module(model)
        if compiled is None:
            return found
        found.append(compiled)


def clean(name: str) -> str:
    """A parameter's name without what wrappers have put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
