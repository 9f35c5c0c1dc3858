"""Where training is in its loaders, and in its random numbers: what Lightning does not save.

Lightning makes the iterators of its loaders before the first epoch begins, and some not again after a resume.  Those of
:class:`Loader` do nothing until the first batch is asked for; then they put everything back in its order.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

from stillframe import RNG, Batches


class Loader:
    """A loader of training batches whose position is saved; in all else the loader that it holds."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        is_stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self._passes: _Stateful | Batches[Any] = _Stateful(loader) if is_stateful else Batches(loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._passes)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # a copy that is not made yet
            raise AttributeError(name)
        return getattr(self.loader, name)

    def state_dict(self) -> dict[str, Any]:
        """What Lightning saves itself: of a loader that has no state, nothing."""
        return dict(self.loader.state_dict()) if isinstance(self._passes, _Stateful) else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state and isinstance(self._passes, _Stateful):
            self.loader.load_state_dict(state)

    def position(self, rng: dict[str, Any] | None, is_over: bool, ahead: int) -> dict[str, Any]:
        """``rng``: in the place of the present numbers.  ``is_over``: Lightning takes no more batches of this pass.
        ``ahead``: so many were taken, and not trained on yet."""
        state = self._passes.state_dict()
        if isinstance(self._passes, _Stateful):
            return {**state, "is_begun": state["is_begun"] and not is_over, "rng": rng or state["rng"]}
        now = state["now"] if rng is None else {**state["now"], "rng": rng}
        batch = 0 if is_over else max(state["batch"] - ahead, 0)
        return {**state, "batch": batch, "begun": state["begun"] if batch else now, "now": now}

    def go_to(self, position: dict[str, Any]) -> None:
        self._passes.load_state_dict(position)


class _Stateful:
    """Passes over a loader that keeps its own position; the random numbers are added."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._is_begun = False
        self._restored: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        rng = self._restored or RNG().state_dict()
        return {"loader": self._loader.state_dict(), "is_begun": self._is_begun, "rng": rng}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state["loader"])
        self._is_begun, self._restored = state["is_begun"], state["rng"]

    def __iter__(self) -> Iterator[Any]:
        restored, self._restored = self._restored, None
        iterator = iter(self._loader)
        if restored is not None and self._is_begun:
            first = [next(iterator)] if inspect.isgenerator(iterator) else []  # it finds its place only now
            RNG().load_state_dict(restored)
            yield from first
        elif restored is not None:  # its pass was over: the loader has taken that in, and the next begins
            RNG().load_state_dict(restored)
            iterator = iter(self._loader)
        for batch in iterator:
            self._is_begun = True
            yield batch
        self._is_begun = False


class Position:
    """Of one rank's training: its loaders, and the random numbers that training draws."""

    def __init__(self) -> None:
        self._loaders: list[Loader] = []
        self._restored: dict[str, Any] | None = None
        self._training: dict[str, Any] | None = None
        """The numbers of training, while validation draws its own."""

    def of(self, loaders: Iterable[Any]) -> list[Loader]:
        """The loaders of the fit that begins; and those that were restored go to their places with :meth:`begin`."""
        self._loaders = [each if isinstance(each, Loader) else Loader(each) for each in loaders]
        return self._loaders

    def begin(self) -> None:
        restored, self._restored = self._restored, None
        if restored is not None and len(restored["loaders"]) == len(self._loaders):
            for loader, position in zip(self._loaders, restored["loaders"], strict=True):
                loader.go_to(position)

    def state(self, is_over: bool, ahead: int) -> dict[str, Any]:
        loaders = [each.position(self._training, is_over, ahead) for each in self._loaders]
        return {"rng": self._training or RNG().state_dict(), "loaders": loaders}

    def restore(self, state: dict[str, Any] | None) -> None:
        """Of a checkpoint without, ``None``: then training goes on as Lightning has it."""
        self._restored = state
        if state is not None:
            RNG().load_state_dict(state["rng"])

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """What is drawn in the block is not missing afterwards: Lightning leaves out a validation after a resume."""
        self._training = RNG().state_dict()
        try:
            yield
        finally:
            training, self._training = self._training, None
            RNG().load_state_dict(training)

    def forget(self) -> None:
        self._loaders, self._restored = [], None
