"""This process's place in a run: which rank it is, of how many, and through which store it reaches the others."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from stillframe.errors import ConfigError, DeadlineError
from stillframe.ranks.group import Group
from stillframe.state.torch_internals import default_store


def join_group(rank: int | None, world_size: int | None, deadline_s: float, talks: bool = True) -> Group:
    """This process's place in the run: as given, or of torch.distributed, or of its environment, or alone.

    Groups are told apart by their number; ranks may make different numbers of groups in which nobody ``talks``.
    Raises: :class:`ConfigError`.
    """
    if (rank is None) != (world_size is None):
        raise ConfigError(f"rank={rank!r}, world_size={world_size!r}: give both, or neither")
    is_initialized = dist.is_available() and dist.is_initialized()
    if rank is None or world_size is None:
        if is_initialized:
            rank, world_size = dist.get_rank(), dist.get_world_size()
        else:
            rank, world_size = _from_environment()
    for name, number in (("rank", rank), ("world_size", world_size)):
        if isinstance(number, bool) or not isinstance(number, int):
            raise ConfigError(f"{name}={number!r}: give a whole number")
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank={rank}, world_size={world_size}: the rank must be at least 0 and below the world size")
    if world_size == 1:
        return Group(rank, 1, None, deadline_s)
    return Group(rank, world_size, _store(rank, world_size, is_initialized, deadline_s), deadline_s, talks)


def _from_environment() -> tuple[int, int]:
    texts = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if texts[0] is None or texts[1] is None:
        return 0, 1
    try:
        return int(texts[0]), int(texts[1])
    except ValueError:
        raise ConfigError(f"RANK={texts[0]!r}, WORLD_SIZE={texts[1]!r} in the environment are not numbers") from None


def _store(rank: int, world_size: int, is_initialized: bool, deadline_s: float) -> Any:
    if is_initialized:
        return default_store()
    if not dist.is_available() or "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        raise ConfigError(
            f"rank {rank} of {world_size} cannot find the others: call torch.distributed.init_process_group first, "
            "start with torchrun, or set MASTER_ADDR and MASTER_PORT"
        )
    url = f"env://?rank={rank}&world_size={world_size}"
    try:
        store, _, _ = next(iter(rendezvous(url, timeout=timedelta(seconds=deadline_s))))
    except (RuntimeError, ValueError, OSError) as error:
        raise DeadlineError(
            f"rank {rank} of {world_size} could not reach the others at {os.environ['MASTER_ADDR']}:"
            f"{os.environ['MASTER_PORT']} within {deadline_s:g} s: {error}"
        ) from error
    _kept[os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]] = store
    return PrefixStore("stillframe", store)


_kept: dict[tuple[str, str], Any] = {}
"""Rank 0 serves the store as long as somebody in its process has it: others may still ask when its group is gone."""
