"""The random number generators of this process as one object with a state."""

from __future__ import annotations

import random
import sys
import warnings
from array import array
from typing import Any

import torch


class Devices:
    """The generators of this process's accelerators, by the index of the device; all that is asked of torch."""

    def __init__(self) -> None:
        module = torch.get_device_module()
        has_generators = hasattr(module, "get_rng_state") and hasattr(module, "set_rng_state")
        self._module = module
        self.count = torch.accelerator.device_count() if torch.accelerator.is_available() and has_generators else 0

    @property
    def current(self) -> int:
        return torch.accelerator.current_device_index()

    def get(self, index: int) -> torch.Tensor:
        # A module that knows one device only (MPS) takes no index.
        state: torch.Tensor = self._module.get_rng_state(index) if self.count > 1 else self._module.get_rng_state()
        return state

    def set(self, index: int, state: torch.Tensor) -> None:
        self._module.set_rng_state(state, index) if self.count > 1 else self._module.set_rng_state(state)


class RNG:
    """Put ``"rng": stillframe.RNG()`` in the state: a resumed run then draws the same random numbers.

    Covers Python's ``random``, torch's generator on the CPU and on every accelerator device (if its module has
    ``get_rng_state``), and, if numpy is loaded, its global generator.  Put generators that your program
    made itself into the state, too.

    Where other devices are visible than at save time, the current device takes the state of the one that was current
    then, and the others take theirs by index.  A warning says what was not used.

    ``iter(DataLoader)`` draws a random number, also after a restore, where the first run drew none.  Iterate over
    :class:`Batches`, which handles that; or, with a loader that keeps its own position, call :meth:`again`.
    """

    def __init__(self) -> None:
        self._restored: dict[str, Any] | None = None

    def again(self) -> None:
        """Restore the same generators once more: call it when the first batch after a restore has come."""
        if self._restored is not None:
            self.load_state_dict(self._restored)

    def state_dict(self) -> dict[str, Any]:
        version, internal, gauss = random.getstate()
        state: dict[str, Any] = {
            "python": {"version": version, "internal": array("Q", internal).tobytes(), "gauss": gauss},
            "torch": torch.get_rng_state(),
        }
        devices = Devices()
        if devices.count:
            state["accelerator"] = [devices.get(index) for index in range(devices.count)]
            state["device"] = devices.current
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            name, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
            state["numpy"] = {
                "name": str(name), "keys": keys, "position": int(position),
                "has_gauss": int(has_gauss), "cached": float(cached),
            }  # fmt: skip
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._restored = state
        python = state["python"]
        random.setstate((python["version"], tuple(array("Q", python["internal"])), python["gauss"]))
        torch.set_rng_state(state["torch"].cpu())
        if "numpy" in state:
            import numpy

            saved = state["numpy"]
            numpy.random.set_state(
                (saved["name"], saved["keys"], saved["position"], saved["has_gauss"], saved["cached"])
            )
        _load_devices(Devices(), [each.cpu() for each in state.get("accelerator", ())], state.get("device", 0))


def _load_devices(devices: Devices, saved: list[torch.Tensor], was_current: int) -> None:
    """Comes last: where warnings are errors, everything else has been restored."""
    sources = {index: index for index in range(min(devices.count, len(saved)))}
    if devices.count and was_current < len(saved):
        sources[devices.current] = was_current
    for index, source in sources.items():
        devices.set(index, saved[source])
    unused = sorted(set(range(len(saved))) - set(sources.values()))
    kept = sorted(set(range(devices.count)) - set(sources))
    parts = [
        f"{what} {', '.join(map(str, indexes))}"
        for what, indexes in (("no accelerator here took the state of number", unused), ("unchanged is number", kept))
        if indexes
    ]
    if parts and devices.count != len(saved):
        warnings.warn(
            f"RNG: saved with {len(saved)} accelerators, restored with {devices.count}: {'; '.join(parts)}",
            RuntimeWarning, stacklevel=3,
        )  # fmt: skip
