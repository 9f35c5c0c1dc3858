"""What the tests of every kind of server need, and what holds for each of them."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import obstore
import pytest
import torch
from obstore.store import from_url

import stillframe
from stillframe import Catalog, Checkpointer, KeepLast
from stillframe.store.objects import open_objects
from stillframe.testing.store_contract import Clients, check_store
from tests.support import until

ITEMS = 9_000_000
PLACE = "stillframe"
"""The bucket, or container, that there is."""


class Server(Protocol):
    @property
    def options(self) -> dict[str, str]:
        """For ``storage_options=``."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def make_place(self, name: str) -> None: ...


_S = TypeVar("_S", bound=Server)


@contextlib.contextmanager
def running(kind: Callable[[Path], _S], prefix: str) -> Iterator[_S]:
    """In a directory with a short name: sockets in it have names of 107 bytes at most."""
    home = Path(tempfile.mkdtemp(prefix=prefix))
    server = kind(home)
    try:
        server.start()
        server.make_place(PLACE)
        yield server
    finally:
        server.stop()
        shutil.rmtree(home, ignore_errors=True)


def new_url(scheme: str, place: str = PLACE) -> str:
    """Of a root that nobody has used."""
    return f"{scheme}://{place}/{secrets.token_hex(4)}"


def make_state(fill: float = 0.0) -> dict[str, torch.Tensor]:
    return {"w": torch.full((ITEMS,), fill), "b": torch.full((5,), fill)}


def small(step: int, count: int = 1_000_000) -> dict[str, Any]:
    return {"w": torch.full((count,), float(step)), "step": step}


def is_right(state: dict[str, Any], step: int) -> bool:
    return state["step"] == step and bool((state["w"] == float(step)).all())


def keys(server: Server, url: str) -> list[str]:
    """Every object below a root, whatever it is called."""
    place, _, prefix = url.rpartition("/")
    store = from_url(place, config=server.options, client_options={"allow_http": True})  # type: ignore[call-overload]
    return sorted(each["path"].removeprefix(f"{prefix}/") for page in obstore.list(store, prefix) for each in page)


# --- what holds for each ------------------------------------------------------------------------


def check_contract(scheme: str, options: Mapping[str, str]) -> None:
    def make() -> Clients:
        url = new_url(scheme)
        return Clients((open_objects(url, options), open_objects(url, options)))

    check_store(make, examples=4, steps=15, shrinks=False)


def check_resumes(url: str, options: Mapping[str, str]) -> None:
    """A run is saved, pruned and resumed, bit for bit."""
    state = make_state()
    with Checkpointer(url, storage_options=options, keep=KeepLast(2), arena="64MiB") as checkpointer:
        assert checkpointer.restore(state).step is None
        for step in range(1, 5):
            checkpointer.fence()
            state["w"].add_(torch.randn(ITEMS))
            state["b"].fill_(step)
            checkpointer.save(step, state)
    catalog = Catalog(url, storage_options=options)
    until(lambda: catalog.steps() == [3, 4], "retention")
    found = make_state()
    with Checkpointer(url, storage_options=options) as checkpointer:
        assert checkpointer.restore(found).step == 4
    assert torch.equal(found["w"], state["w"])
    assert torch.equal(found["b"], state["b"])
    loaded = stillframe.load(url, 3, only="b", storage_options=options)
    assert loaded["b"].tolist() == [3.0] * 5


def check_stranger(url: str, options: Mapping[str, str]) -> None:
    """What somebody else has put there is an error, and no crash."""
    with Checkpointer(url, storage_options=options) as checkpointer:
        checkpointer.save(1, make_state()).wait(timeout_s=60)
    open_objects(url, options).put("step-000000000001-e0001-1/manifest.json", b"\xff" * 100)
    with pytest.raises(stillframe.StillframeError, match=f"{url}/step-"):
        stillframe.load(url, 1, storage_options=options)
