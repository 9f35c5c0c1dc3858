"""Small tensor subclasses that wrap others, as quantised weights and optimizer states do."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import torch

from stillframe.state.wrappers import is_wrapper, take_apart

aten = torch.ops.aten
CPU = torch.device("cpu")
Rounding = namedtuple("Rounding", ["mode", "bits"])


@dataclass(frozen=True)
class Recipe:
    """A context that is not a plain value."""

    rounding: Rounding
    device: torch.device = CPU
    requires_grad: bool = False


NEAREST = Recipe(Rounding("nearest", 8))


class Scaled(torch.Tensor):
    """Codes of one byte and one scale; operations that are not known here see plain numbers."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, context: Any = NEAREST) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, context: Any = NEAREST) -> None:
        self.codes, self.scale, self.context = codes, scale, context

    @classmethod
    def of(cls, values: torch.Tensor, context: Any = NEAREST) -> Any:
        scale = (values.detach().abs().amax() if values.numel() else torch.ones(())).clamp(min=1e-12) / 127
        return cls((values.detach() / scale).round().to(torch.int8), scale, context)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], self.context

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["codes"], inner["scale"], context)

    def plain(self) -> torch.Tensor:
        return self.codes.float() * self.scale

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.plain()})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        first = args[0]
        if function in (aten.detach.default, aten.alias.default):
            return cls(first.codes.detach(), first.scale.detach(), first.context)
        if function is aten.view.default and tuple(args[1]) == tuple(first.shape):
            return cls(first.codes.detach(), first.scale.detach(), first.context)
        if function is aten.clone.default:
            return cls(first.codes.clone(), first.scale.clone(), first.context)
        if function is aten.copy_.default:
            other = cls.of(args[1].plain() if isinstance(args[1], Scaled) else args[1])  # quantises anew
            first.codes.copy_(other.codes)
            first.scale.copy_(other.scale + 1)  # and not exactly: a restore that goes through copy_ is found out
            return first
        plain = [each.plain() if isinstance(each, Scaled) else each for each in args]
        result = function(*plain, **(kwargs or {}))
        if function._schema.name.endswith("_") and isinstance(first, Scaled):
            new = cls.of(result)
            first.codes.copy_(new.codes)
            first.scale.copy_(new.scale)
            return first
        return result


class Shifted(torch.Tensor):
    """A wrapper of a wrapper."""

    @staticmethod
    def __new__(cls, base: torch.Tensor, shift: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, base.shape, dtype=torch.float32, device=base.device)

    def __init__(self, base: torch.Tensor, shift: torch.Tensor) -> None:
        self.base, self.shift = base, shift

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["base", "shift"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["base"], inner["shift"])

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Shifted({self.base}, {self.shift})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if function in (aten.detach.default, aten.alias.default):
            return cls(args[0].base.detach(), args[0].shift.detach())
        raise NotImplementedError(f"{function}")


class Closed(torch.Tensor):
    """Has no ``__tensor_flatten__``."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __repr__(self) -> str:  # type: ignore[override]
        return "Closed()"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{function}")


class Layer(torch.nn.Module):
    """A weight that is a wrapper, a plain bias, and a buffer that is a wrapper and changes in forward."""

    seen: torch.Tensor

    def __init__(self, seed: int, width: int = 48) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.weight = torch.nn.Parameter(Scaled.of(torch.randn(width, width)))
        self.bias = torch.nn.Parameter(torch.randn(width))
        self.register_buffer("seen", Scaled.of(torch.randn(width, width)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.codes.add_(1)  # type: ignore[attr-defined]
        return torch.nn.functional.linear(x, self.weight, self.bias)


class Momentum(torch.optim.Optimizer):
    """Keeps its state in wrappers, made at the first step."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum" not in state:
                    # a context of plain values: such a wrapper can be made anew from what is stored
                    state["momentum"] = Scaled.of(torch.zeros_like(parameter.grad), ["momentum", 8])
                state["momentum"].add_(parameter.grad)
                parameter.add_(state["momentum"].plain(), alpha=-group["lr"])


def apart(value: Any) -> Any:
    """A copy in which every wrapper, also as the local tensor of a DTensor, is its class, context and inner tensors."""
    local = getattr(value, "_local_tensor", value)
    if is_wrapper(local):
        found = take_apart(local)
        inner = {name: apart(each) for name, each in zip(found.names, found.tensors, strict=True)}
        return {"kind": found.kind, "context": repr(found.context), **inner}
    if isinstance(local, torch.Tensor):
        return local.detach().clone()
    if isinstance(value, dict):
        return {key: apart(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [apart(item) for item in value]
    return apart(dict(value.state_dict())) if hasattr(value, "state_dict") else value
