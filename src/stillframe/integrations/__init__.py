"""stillframe inside other loops, a folder each: their interfaces above, stillframe's public names below.

They start no threads, and leave all checkpoint bytes to stillframe.  Files of their own there are only for DeepSpeed:
``deepspeed`` reads the small ones that name a tag, and exports plain ones.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stillframe.integrations import accelerate as accelerate
    from stillframe.integrations import dcp as dcp
    from stillframe.integrations import deepspeed as deepspeed
    from stillframe.integrations import lightning as lightning
    from stillframe.integrations import megatron as megatron
    from stillframe.integrations import ray as ray
    from stillframe.integrations import torchtitan as torchtitan
    from stillframe.integrations import transformers as transformers
else:

    def __getattr__(name: str) -> ModuleType:
        """Each is imported when first used: it needs the loop that it serves."""
        if name in ("accelerate", "dcp", "deepspeed", "lightning", "megatron", "ray", "torchtitan", "transformers"):
            return importlib.import_module(f"stillframe.integrations.{name}")
        raise AttributeError(f"module 'stillframe.integrations' has no attribute {name!r}")
