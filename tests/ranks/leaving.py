"""How a worker whose ranks share a device mesh ends."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import NoReturn

import torch.distributed as dist


def leave() -> NoReturn:
    """The process ends as one does that has run to its end, but the interpreter is not taken down.

    A mesh keeps its group, and gloo's threads, beyond ``destroy_process_group``.  One of these that lets go of the
    tensors of the last collective while the interpreter is taken down aborts the process: torch's own programs do, four
    of eight that exchanged tensors as the last thing they did (pytorch/pytorch#190489, torch 2.13.0).
    """
    dist.destroy_process_group()
    threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter does: threads first, then what is registered
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
