"""A small transformer, and how it is trained: the same bits every time, however far the host is ahead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

Kind = Literal["plain", "foreach", "fused", "in_backward", "offloaded"]


class Block(torch.nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.mix = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.inner = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width),
            torch.nn.Dropout(dropout),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.mix(self.norm(x)).chunk(3, -1)
        weights = torch.softmax(query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5, -1)
        x = x + self.out(weights @ value)
        return x + self.inner(x)  # type: ignore[no-any-return]


class Transformer(torch.nn.Module):
    """Its halves may lie on two devices.  The norm has buffers that forward changes."""

    def __init__(self, width: int, devices: tuple[str, ...], dropout: float) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(97, width).to(devices[0])
        self.first = Block(width, dropout).to(devices[0])
        self.second = Block(width, dropout).to(devices[-1])
        self.norm = torch.nn.BatchNorm1d(width).to(devices[-1])
        self.head = torch.nn.Linear(width, 97).to(devices[-1])
        self.device = devices[-1]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(self.embed(tokens)).to(self.device))
        return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2)).clone()  # type: ignore[no-any-return]


class Data:
    """Batches, and where they have got to."""

    def __init__(self) -> None:
        self._random = torch.Generator().manual_seed(13)

    def next(self) -> torch.Tensor:
        return torch.randint(0, 97, (4, 16), generator=self._random)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"random": self._random.get_state()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self._random.set_state(state["random"])


@dataclass(frozen=True)
class Recipe:
    kind: Kind = "plain"
    devices: tuple[str, ...] = ("queued:0",)
    accumulate: int = 1
    width: int = 64
    dropout: float = 0.0


class Training:
    """``state`` is what is saved.  ``step()`` queues one update, and waits for nothing on a device."""

    def __init__(self, recipe: Recipe) -> None:
        torch.manual_seed(11)
        self._recipe = recipe
        self._data = Data()
        self.model = Transformer(recipe.width, recipe.devices, recipe.dropout)
        self.state: dict[str, Any] = {"model": self.model, "data": self._data}
        self._optimizers: list[torch.optim.Optimizer] = []
        parameters = list(self.model.parameters())
        if recipe.kind == "in_backward":
            for number, parameter in enumerate(parameters):
                own = torch.optim.AdamW([parameter], lr=1e-2)
                self.state[f"optimizer{number}"] = own
                parameter.register_post_accumulate_grad_hook(_stepper(own))
            return
        if recipe.kind == "offloaded":  # the device holds the parameters, the host all else
            self._host = [torch.nn.Parameter(each.detach().cpu()) for each in parameters]
            self.state["host"] = self._host
            parameters = self._host
        kind = recipe.kind
        optimizer = torch.optim.AdamW(parameters, lr=1e-2, foreach=kind == "foreach", fused=kind == "fused")
        self.state["optimizer"] = optimizer
        self._optimizers.append(optimizer)

    def step(self, between: Callable[[int], None] = lambda part: None) -> None:
        """``between`` is called before each part of the batch."""
        for part in range(self._recipe.accumulate):
            between(part)
            tokens = self._data.next()
            found = self.model(tokens.to(self._recipe.devices[0], non_blocking=True))
            wanted = tokens.to(self._recipe.devices[-1], non_blocking=True)
            torch.nn.functional.cross_entropy(found.flatten(0, 1), wanted.flatten()).backward()
        if self._recipe.kind == "offloaded":
            for own, parameter in zip(self._host, self.model.parameters(), strict=True):
                assert parameter.grad is not None
                own.grad = parameter.grad.cpu()
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if self._recipe.kind == "offloaded":
            with torch.no_grad():
                for own, parameter in zip(self._host, self.model.parameters(), strict=True):
                    parameter.copy_(own.pin_memory(), non_blocking=True)
                    parameter.grad = None


def _stepper(optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], None]:
    def step(parameter: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


def on_cpu(state: Any) -> Any:
    """A copy of what a checkpoint of it must hold."""
    if hasattr(state, "state_dict"):
        return on_cpu(state.state_dict())
    if isinstance(state, dict):
        return {key: on_cpu(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(on_cpu(each) for each in state)
    return state.detach().to("cpu", copy=True) if isinstance(state, torch.Tensor) else state


At = Callable[[dict[str, Any], int, int], None]


def _nothing(state: dict[str, Any], number: int, part: int) -> None:
    pass


def train(
    recipe: Recipe, steps: int, before: At = _nothing, after: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """The state at the end.  ``before`` each part of a batch it is called with the state, the number of the step and
    that of the part; ``after`` when all of a step is queued."""
    training = Training(recipe)
    for number in range(steps):
        training.step(lambda part, number=number: before(training.state, number, part))  # type: ignore[misc]
        after()
    end: dict[str, Any] = on_cpu(training.state)
    return end


def states(recipe: Recipe, steps: int) -> dict[tuple[int, int], Any]:
    """What the state is before each part of each step: waits for the device to tell."""
    found: dict[tuple[int, int], Any] = {}

    def note(state: dict[str, Any], number: int, part: int) -> None:
        found[number, part] = on_cpu(state)

    train(recipe, steps, note)
    return found
