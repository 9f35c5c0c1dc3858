"""Orders for two ranks: loops of DDP and FSDP2 that change nothing without a fence, and one that does."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import stillframe
from stillframe.save.device import HostDevice
from stillframe.state.torch_internals import local_of
from tests.support import assert_same

WIDTH = 24


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(64, WIDTH, max_norm=1.0)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        found: torch.Tensor = self.layers(self.norm(self.embedding(tokens)))
        return found


def made(kind: str) -> torch.nn.Module:
    """``kind``: ddp, fsdp, or fsdp kept (parameters stay gathered between forward and backward)."""
    torch.manual_seed(3)
    model: torch.nn.Module = Net()
    if kind == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    options: dict[str, Any] = {"reshard_after_forward": kind == "fsdp"}
    if kind == "fsdp":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert isinstance(model, Net)
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


class Gate:
    """Copies wait for it while it is closed."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.event.set()
        self._plain = HostDevice.copy

    def __enter__(self) -> Gate:
        gate, plain = self.event, self._plain

        def gated(device: HostDevice, sources: Any, into: torch.Tensor) -> None:
            assert gate.wait(60)
            plain(device, sources, into)

        HostDevice.copy = gated  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        self.event.set()
        HostDevice.copy = self._plain  # type: ignore[method-assign]


def values_of(state: dict[str, Any]) -> dict[str, Any]:
    """What this rank holds now."""
    tensors = dict(state["model"].state_dict())
    for number, each in enumerate(state["optimizer"].state.values()):
        tensors.update({f"{number}/{key}": value for key, value in each.items()})
    return {key: local_of(value).detach().clone() for key, value in tensors.items()}


def iterate(model: torch.nn.Module, is_ddp: bool) -> None:
    """All that comes before the update."""
    for is_last in (False, False, True):
        if is_ddp:
            assert isinstance(model, DistributedDataParallel)
            model.require_backward_grad_sync = is_last
        else:
            model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
        with torch.autocast("cpu", torch.bfloat16, enabled=is_ddp):
            loss = model(torch.randint(64, (8,))).square().mean()
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False)
    model.eval()
    with torch.no_grad():
        model(torch.arange(8))
    model.train()


def save_sound_loops(root: Path) -> list[int]:
    """Everything up to the update happens before the copy begins.  Gives the steps that were committed.

    What is saved is restored and compared; weights that a rank scales down for itself differ between ranks.
    """
    step = 0
    with Gate() as gate:
        for kind in ("ddp", "fsdp", "fsdp kept"):
            model = made(kind)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=kind != "fsdp")
            state = {"model": model, "optimizer": optimizer}
            with stillframe.Checkpointer(root / kind) as checkpointer:
                for _ in range(3):
                    step += 1
                    gate.event.clear()
                    before = values_of(state)
                    save = checkpointer.save(step, state)
                    try:
                        iterate(model, kind == "ddp")
                    finally:
                        gate.event.set()
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=step % 2 == 0)
                    save.wait()
                checkpointer.restore(state)
                assert_same(values_of(state), before)
    return [step for kind in ("ddp", "fsdp", "fsdp kept") for step in stillframe.Catalog(root / kind).steps()]


def save_changed_by_hand(root: Path) -> list[str]:
    """The error of each save: a parameter that is a DTensor, its local tensor, and a replica were changed."""
    told = []
    with Gate() as gate:
        for step, kind in enumerate(("fsdp", "fsdp local", "ddp")):
            model = made(kind.split()[0])
            average = copy.deepcopy(dict(model.named_parameters())) if kind == "ddp" else {}
            with stillframe.Checkpointer(root / kind, on_error="warn") as checkpointer:
                gate.event.clear()
                save = checkpointer.save(step, {"model": model, "average": average})
                changed: Any = average["module.layers.0.weight"] if average else model.get_parameter("layers.0.weight")
                with torch.no_grad():
                    (changed.to_local() if kind == "fsdp local" else changed).mul_(2)
                gate.event.set()
                try:
                    save.wait()
                except stillframe.StillframeError as error:
                    told.append(f"{type(error).__name__}: {error}")
    return told
