"""Which part of a state is restored: ``restore(only=…, exclude=…)``.

Patterns are those of ``load(only=…)``: the path of something in the state, of something above it, or a glob over paths.
They choose leaves: a tensor (one that wraps others as a whole), an array, a plain value, a registered type.  What is
not chosen stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from stillframe.checkpoint.contents import items_of
from stillframe.checkpoint.stored import Located
from stillframe.errors import ConfigError
from stillframe.format import tree, values
from stillframe.model import check_step
from stillframe.state.train_state import TrainState
from stillframe.state.walk import is_stateful

Patterns = tuple[str, ...]
Share = Literal["all", "some", "none"]


class Selection:
    """Notes which patterns have met a path, on either side."""

    def __init__(self, only: Patterns | None = None, exclude: Patterns = ()) -> None:
        self.only = only
        self.exclude = exclude
        self._is_everything = only is None and not exclude
        self._idle = {*(only or ()), *exclude}
        self._paths: list[str] = []

    @property
    def idle(self) -> list[str]:
        """The patterns that have met nothing: misspelt, or about another rank's part."""
        return sorted(self._idle)

    @property
    def some_paths(self) -> list[str]:
        """The first paths that were asked about, for messages."""
        return self._paths

    def has(self, path: tree.Path) -> bool:
        """Whether the leaf, or the empty container, at this path is chosen."""
        if self._is_everything:
            return True
        name = tree.render(path)
        if len(self._paths) < 5:
            self._paths.append(name)
        found = {each for each in (*(self.only or ()), *self.exclude) if tree.is_match(name, each)}
        self._idle -= found
        return (self.only is None or not found.isdisjoint(self.only)) and found.isdisjoint(self.exclude)

    def of_stored(self, located: Located, path: tree.Path) -> Share:
        return self._share(_stored_leaves(located, path))

    def of_live(self, live: Any, path: tree.Path) -> Share:
        return self._share(_live_leaves(live, path))

    def _share(self, leaves: Iterator[tree.Path]) -> Share:
        if self._is_everything:
            return "all"
        found = {self.has(path) for path in leaves}
        return "some" if len(found) > 1 else "all" if True in found else "none"


def patterns(name: str, given: str | Sequence[str] | None) -> Patterns | None:
    """An argument as it was given.  Raises :class:`ConfigError`."""
    if given is None:
        return None
    found = (given,) if isinstance(given, str) else tuple(given)
    if not all(isinstance(each, str) for each in found):
        raise ConfigError(f"{name}={given!r}: give a path or pattern, such as 'model/*.bias', or several in a list")
    return found


def _stored_leaves(located: Located, path: tree.Path) -> Iterator[tree.Path]:
    content = located.content
    is_whole = tree.is_leaf(content.node) or isinstance(content.node, tree.LeafNode | tree.WrapperNode)
    items = [] if is_whole else list(items_of(content))
    if not items:
        yield path
    for key, item in items:
        yield from _stored_leaves(item, (*path, key))


def _live_leaves(live: Any, path: tree.Path) -> Iterator[tree.Path]:
    if isinstance(live, TrainState):
        live = {"model": live.model, "optimizer": live.optimizer, **live.more}
    elif is_stateful(live):
        live = live.state_dict()
    if isinstance(live, dict) and live:
        for key, item in live.items():
            yield from _live_leaves(item, (*path, key))
    elif isinstance(live, list | tuple) and live and not (type(live) is list and values.is_plain_list(live)):
        for index, item in enumerate(live):
            yield from _live_leaves(item, (*path, index))
    else:
        yield path


class Wanted(msgspec.Struct, frozen=True):
    """The arguments of ``restore``; the same on all ranks."""

    step: int | None
    strict: bool
    only: Patterns | None
    exclude: Patterns

    @classmethod
    def given(
        cls, step: int | None, strict: bool, only: str | Sequence[str] | None, exclude: str | Sequence[str] | None
    ) -> Wanted:
        """Raises :class:`ConfigError`."""
        chosen = patterns("only", only), patterns("exclude", exclude) or ()
        return cls(None if step is None else check_step(step), strict, *chosen)
