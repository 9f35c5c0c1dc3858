"""A measured process: ``python -m benchmarks.worker CASE DIRECTORY RESULT``.

Writes its figures, or the error, to the file RESULT as JSON.  What a peer prints goes to this process's own output,
which the harness keeps in a log.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import traceback
from pathlib import Path

import msgspec
from benchmarks.case import Case

_SUBREAPER = 36


def main() -> int:
    case = msgspec.json.decode(sys.argv[1].encode(), type=Case)
    directory, result = Path(sys.argv[2]), Path(sys.argv[3])
    ctypes.CDLL(None).prctl(_SUBREAPER, 1)  # processes that detach themselves stay ours, so that their CPU time counts
    try:
        from benchmarks.tasks import tasks

        figures = tasks()[case.task](case, directory)
        told = {"figures": gather(figures)}
    except BaseException as error:
        traceback.print_exc()
        told = {"error": f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]}
    if os.environ.get("RANK", "0") == "0" or "error" in told:
        mine = result.with_suffix(f".{os.getpid()}")
        mine.write_bytes(msgspec.json.encode(told))
        with contextlib.suppress(FileExistsError):  # of several ranks that fail, the first knows why
            os.link(mine, result)
    return 1 if "error" in told else 0


def gather(figures: dict[str, object]) -> object:
    """With several ranks, the figures of all, those of rank 0 first."""
    if "RANK" not in os.environ:
        return figures
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    everyone: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, figures)
    dist.barrier()
    return {"ranks": everyone, "is_right": all(each["is_right"] for each in everyone)}  # type: ignore[index]


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a peer's thread or process that does not end is no matter here; the harness ends them
