"""stillframe inside other loops: their interfaces above, stillframe's public names below; no I/O, no threads."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name in ("dcp", "deepspeed"):
        return importlib.import_module(f"stillframe.integrations.{name}")
    raise AttributeError(f"module 'stillframe.integrations' has no attribute {name!r}")
