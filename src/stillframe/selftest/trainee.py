"""A small training on the device, to be killed while it saves; and its state, restored.

It says the digest of the state before each save, so that whoever restores a step can be compared with it.
"""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any

import torch

from stillframe.checkpointer import Checkpointer
from stillframe.selftest.checks import Check, tell

_WIDTH = 512
_MAX_STEPS = 10_000


def _state(device: torch.device) -> dict[str, Any]:
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.GELU(), torch.nn.Linear(_WIDTH, _WIDTH))
    model.to(device)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3)}


def _update(state: dict[str, Any], device: torch.device) -> None:
    state["model"](torch.randn(8, _WIDTH, device=device)).square().mean().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def digest(state: dict[str, Any]) -> str:
    """Of every byte of the model and of the optimizer's state.  Waits for the device."""
    said = hashlib.sha256()
    tensors = dict(state["model"].state_dict())
    for number, values in state["optimizer"].state_dict()["state"].items():
        tensors |= {f"{number}/{name}": value for name, value in values.items()}
    for name in sorted(tensors):
        said.update(name.encode())
        tensor = tensors[name].detach().cpu().contiguous()
        said.update(ctypes.string_at(tensor.data_ptr(), tensor.nbytes))
    return said.hexdigest()


def train(root: str, device: torch.device) -> None:
    """Until it is killed."""
    state = _state(device)
    with Checkpointer(root) as checkpointer:
        for step in range(1, _MAX_STEPS):
            _update(state, device)
            tell(Check("state", "pass", digest(state), {"step": step}))
            checkpointer.save(step, state)
            if step >= 3:  # the first ones are there, so that there is something to restore
                tell(Check("saved", "pass", "", {"step": step}))
            else:
                checkpointer.wait()


def resume(root: str, device: torch.device) -> None:
    state = _state(device)
    _update(state, device)  # so that the optimizer has a state
    with Checkpointer(root) as checkpointer:
        step = checkpointer.restore(state).step
        tell(Check("state", "pass", digest(state), {"step": step}))
