"""What the ways into training frameworks have in common: versions, refusals, a class in between, ranks together."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from stillframe import Save, spi
from stillframe.errors import ConfigError, StillframeError, StorageError, from_record, text_of, to_record
from stillframe.open_roots import Admission, How, admitting, seat

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


def together(work: Callable[[], _T], doing: str = "save") -> list[_T]:
    """What it returns on every rank, in their order.  A collective.

    If it fails on one rank, raises on all, where it did not fail an error of the same kind: they would train on, and
    hang in their next collective.
    """
    own: Exception | None = None
    value: _T | None = None
    try:
        value = work()
    except Exception as error:
        own = error
    said: list[Any] = [(value, None if own is None else (_kind_of(own), f"{type(own).__name__}: {text_of(own)}"))]
    if dist.is_available() and dist.is_initialized():
        mine, said = said[0], [None] * dist.get_world_size()
        dist.all_gather_object(said, mine)
    if own is not None:
        raise own
    for rank, (_, failed) in enumerate(said):
        if failed is not None:
            raise from_record(failed[0], f"rank {rank} could not {doing}: {failed[1]}")
    return [each for each, _ in said]


def _kind_of(error: Exception) -> str:
    """The public error that says what to do about it: a caller that catches one must do so on every rank."""
    return to_record(error)[0] if isinstance(error, StillframeError | OSError) else "StateError"


def here(work: Callable[[], _T], doing: str = "save") -> _T:
    """What it returns on this rank; raises on all ranks if it fails on one, as :func:`together` does.  A collective.

    While nothing fails it is one number that the ranks compare, however many they are.
    """
    own: Exception | None = None
    found: list[_T] = []
    try:
        found.append(work())
    except Exception as error:
        own = error

    def failed() -> None:
        if own is not None:
            raise own

    if dist.is_available() and dist.is_initialized() and not _is_any(own is not None):
        return found[0]
    together(failed, doing)
    return found[0]


def _is_any(is_so: bool) -> bool:
    """Whether it is so on any rank.  A collective."""
    on_host = "cpu" in dist.get_backend_config()
    device = "cpu" if on_host else torch.accelerator.current_accelerator()
    flag = torch.tensor([int(is_so)], dtype=torch.int32, device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item())


class Entrance(Protocol):
    """Where ranks save together."""

    def admitting(self, least: int) -> contextlib.AbstractContextManager[Any]:
        """On rank 0: a word for the next save, for all ranks.  If the block raises, the save is given up."""

    def entering(self, word: Any) -> contextlib.AbstractContextManager[Callable[..., Save]]:
        """What saves under this word: it takes the state, and more arguments of ``spi.save``.

        If the block raises, the other ranks are told.
        """


class SharedRoot:
    """A root that all ranks see; it is open as long as somebody in this process saves to it."""

    def __init__(self, root: str, how: How) -> None:
        self.root, self._how = root, how
        self._run: spi.Run | None = None

    def admitting(self, least: int) -> contextlib.AbstractContextManager[Admission]:
        return admitting(self.root, seat()[1], self._how, least=least)

    @contextlib.contextmanager
    def entering(self, word: Admission) -> Iterator[Callable[..., Save]]:
        admission = word.of(seat()[0])
        with admission.enter(self.root, self._how) as opened:
            self._run = opened.run
            yield functools.partial(opened.save, admission.ticket)


def save_together(
    where: Entrance,
    name: str,
    begin: Callable[[], _T],
    state: Callable[[Any, list[_T]], tuple[Any, dict[str, Any]]],
) -> Save:
    """Request a save on every rank.  If that fails on one, raises on all, and nothing is saved.  A collective.

    ``name``: as people see it; a number at its end is the least step.  ``begin``: comes first, and all learn what it
    returns on each rank.  ``state``: takes the word for the save, and these; gives the state of this rank, and more
    arguments of ``spi.save``.
    """
    number = re.search(r"(\d{1,11})$", name)
    with contextlib.ExitStack() as stack:

        def admitted() -> tuple[Any, _T]:
            begun = begin()
            if seat()[0] != 0:
                return None, begun
            return stack.enter_context(where.admitting(int(number[1]) if number else 0)), begun

        said = together(admitted)
        word = said[0][0]

        def prepared() -> tuple[Callable[..., Save], tuple[Any, dict[str, Any]]]:
            return stack.enter_context(where.entering(word)), state(word, [begun for _, begun in said])

        save, (made, more) = here(prepared)  # first: a rank that saved would wait for one that could not even try
        return here(lambda: save(made, **more))
