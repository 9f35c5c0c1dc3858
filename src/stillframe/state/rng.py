"""The random number generators of this process as one object with a state."""

from __future__ import annotations

import random
import sys
from array import array
from typing import Any

import torch


class RNG:
    """Put ``"rng": stillframe.RNG()`` in the state, and a resumed run draws what the first would have drawn.

    Covers Python's ``random``, torch's generator on the CPU and on every accelerator device, and, if numpy
    is loaded, its global generator.  Generators that the program made itself go into the state by their own state.
    """

    def state_dict(self) -> dict[str, Any]:
        version, internal, gauss = random.getstate()
        state: dict[str, Any] = {
            "python": {"version": version, "internal": array("Q", internal).tobytes(), "gauss": gauss},
            "torch": torch.get_rng_state(),
        }
        get_all = getattr(torch.get_device_module(), "get_rng_state_all", None)
        if torch.accelerator.is_available() and get_all is not None:
            state["accelerator"] = list(get_all())
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            name, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
            state["numpy"] = {
                "name": str(name), "keys": keys, "position": int(position),
                "has_gauss": int(has_gauss), "cached": float(cached),
            }  # fmt: skip
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        python = state["python"]
        random.setstate((python["version"], tuple(array("Q", python["internal"])), python["gauss"]))
        torch.set_rng_state(state["torch"].cpu())
        if "accelerator" in state and torch.accelerator.is_available():
            torch.get_device_module().set_rng_state_all([each.cpu() for each in state["accelerator"]])
        if "numpy" in state:
            import numpy

            saved = state["numpy"]
            numpy.random.set_state(
                (saved["name"], saved["keys"], saved["position"], saved["has_gauss"], saved["cached"])
            )
