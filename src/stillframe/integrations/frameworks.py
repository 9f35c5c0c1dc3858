"""What the ways into training frameworks have in common: versions, refusals, a class in between, what rank 0 finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from stillframe.errors import ConfigError, StillframeError, StorageError

_T = TypeVar("_T")


def check_version(module: Any, tested: str, instead: str) -> None:
    """Raises :class:`ConfigError` for another minor version of a package than the one that is tested.

    ``instead``: what one can do but install that.
    """
    name, version = module.__name__, module.__version__
    if version.split(".")[:2] != tested.split("."):
        raise ConfigError(
            f"{name} {version} was not tested with stillframe, which uses parts of it that have no promise to stay: "
            f"install {name} {tested}, or {instead}"
        )


def refuse(call: str, wrong: dict[str, tuple[bool, str]]) -> None:
    """``wrong``: whether something is set that our call does not support, and a hint.  Raises :class:`ConfigError`."""
    for name, (is_set, hint) in wrong.items():
        if is_set:
            raise ConfigError(f"{name} is not supported by stillframe's {call}: {hint}")


def put_between(thing: Any, ours: type, stock: type) -> None:
    """Give an object a class of its own: its present one, and ours right before the framework's in the order of bases.

    So overrides of the user and of other packages stay in force.
    """
    kind = type(thing)
    bases = (ours,) if kind is stock else (kind, ours)
    thing.__class__ = type(kind.__name__, bases, {"__module__": kind.__module__, "__doc__": kind.__doc__})


def agreed(find: Callable[[], _T]) -> _T:
    """What rank 0 finds, on every rank; if it raises, so do all.  A collective."""
    is_alone = not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1
    found: list[Any] = [None]
    if is_alone or dist.get_rank() == 0:
        try:
            found = [find()]
        except StillframeError as error:
            found = [error]
        except Exception as error:  # the other ranks are waiting for a word
            if not is_alone:
                dist.broadcast_object_list([StorageError(f"on rank 0: {type(error).__name__}: {error}")], 0)
            raise
    if not is_alone:
        dist.broadcast_object_list(found, 0)
    if isinstance(found[0], StillframeError):
        raise found[0]
    result: _T = found[0]
    return result
