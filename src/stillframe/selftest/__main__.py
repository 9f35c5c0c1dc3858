"""``python -m stillframe.selftest WHAT ROOT``: one part of the self-test, in a process of its own."""

from __future__ import annotations

import platform
import sys

import torch

from stillframe.selftest import checks, copies, order, trainee
from stillframe.state.torch_internals import built_for
from stillframe.version import VERSION


def device_of_torch() -> torch.device | None:
    """The current device of the accelerator; ``None`` if there is none."""
    accelerator = built_for()
    if accelerator is None or not torch.accelerator.is_available():
        return None
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def describe(device: torch.device) -> checks.Check:
    """What a report must say so that it tells others something."""
    module = torch.get_device_module(device)
    name = module.get_device_name(device) if hasattr(module, "get_device_name") else device.type
    figures = {
        "stillframe": VERSION,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": getattr(torch.version, "hip", None),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "device": f"{device}: {name}",
        "devices": torch.accelerator.device_count(),
    }
    said = ", ".join(f"{key} {value}" for key, value in figures.items() if value is not None)
    return checks.Check("machine", "pass", said, {**figures})


def main(what: str, root: str) -> None:
    checks.take_output()
    device = device_of_torch()
    if device is None:
        said = f"torch {torch.__version__} sees no accelerator on this machine"
        checks.tell(checks.Check("machine", "none", said))
    elif what == "checks":
        checks.tell(describe(device))
        copies.check_copies(device)
        order.check_order(root, device)
    else:
        {"train": trainee.train, "resume": trainee.resume}[what](root, device)


if __name__ == "__main__":
    main(*sys.argv[1:])
