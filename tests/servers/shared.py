"""What the tests of every kind of server need, and what holds for each of them."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import obstore
import pytest
import torch
from obstore.store import from_url

import stillframe
from stillframe import Catalog, Checkpointer, KeepLast, Tier
from stillframe.checkpoint.verify import verify
from stillframe.store.objects import open_objects
from stillframe.testing.store_contract import Clients, check_store
from tests.servers.proxy import Fault, Proxy
from tests.support import until

SOURCE = Path(__file__).parents[2]
ITEMS = 9_000_000
PLACE = "stillframe"
"""The bucket, or container, that there is."""


class Server(Protocol):
    @property
    def options(self) -> dict[str, str]:
        """For ``storage_options=``."""

    @property
    def environment(self) -> dict[str, str]:
        """The same for programs."""

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


def check_whole(server: Server, url: str, since: int = 0) -> list[int]:
    """Every checkpoint there, by every byte (of the steps from ``since`` on), past the proxy; gives their steps."""
    catalog = Catalog(url, storage_options=server.options)
    found = [*catalog.committed()]
    for each in found:
        if each.step >= since:
            with catalog.open_save(each) as checkpoint:
                assert verify(checkpoint).is_whole, each
    return sorted(each.step for each in found)


def left_over(server: Server, url: str) -> list[str]:
    """Objects of saves that are none, parts that no index names, probes.  A tombstone stays for a day."""
    there = keys(server, url)
    committed = {key.partition("/")[0] for key in there if key.endswith("/manifest.json")}
    found = [key for key in there if "probe" in key]
    nonces: dict[str, set[str]] = {}
    for key in there:
        directory, _, name = key.partition("/")
        if directory.startswith("step-") and directory not in committed and name != "aside.json":
            found.append(key)
        elif ".parts/" in name:
            nonces.setdefault(directory, set()).add(name.split(".")[2])
    return [*found, *(directory for directory, seen in nonces.items() if len(seen) > 1)]


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


_TRAINEE = """
import sys, torch
from stillframe import Checkpointer
state = {"w": torch.zeros(%d), "n": 0}
checkpointer = Checkpointer(sys.argv[1])
begin = checkpointer.restore(state).next_step or 1
for step in range(begin, 1000):
    checkpointer.fence()
    state["w"].fill_(step)
    state["n"] = step
    save = checkpointer.save(step, state)
    save.wait("staged")
    print(step, flush=True)
"""


def check_killed_trainer(server: Server, url: str) -> None:
    """Nothing that was staged is lost."""
    environment = {**os.environ, **server.environment, "PYTHONPATH": str(SOURCE / "src")}
    for _ in range(2):
        with subprocess.Popen(
            [sys.executable, "-c", _TRAINEE % ITEMS, url], stdout=subprocess.PIPE, text=True, env=environment
        ) as trainee:
            assert trainee.stdout is not None
            staged = [int(trainee.stdout.readline()) for _ in range(3)][-1]
            trainee.kill()
        state: dict[str, Any] = {"w": torch.zeros(ITEMS), "n": 0}
        catalog = Catalog(url, storage_options=server.options)
        until(lambda: (catalog.latest() or 0) >= staged, "the keeper commits", timeout_s=60)  # noqa: B023
        report = stillframe.restore(url, state, storage_options=server.options)
        assert report.step is not None
        assert report.step >= staged
        assert state["n"] == report.step
        assert bool((state["w"] == report.step).all())


def check_lost_root(server: Server, url: str, root: Path) -> None:
    """It comes back from the tier, where retention has kept what it should."""
    tier = Tier(url, every=2, keep=KeepLast(2), storage_options=server.options)
    with Checkpointer(root, keep=KeepLast(1), tiers=[tier]) as checkpointer:
        for step in range(1, 7):
            checkpointer.save(step, small(step)).wait()
            checkpointer.wait(tier=url, timeout_s=60)
    catalog = Catalog(url, storage_options=server.options)
    until(lambda: catalog.steps() == [4, 6], "retention there")
    shutil.rmtree(root)
    live = small(-1)
    with Checkpointer(root, keep=KeepLast(1), tiers=[tier]) as checkpointer:
        report = checkpointer.restore(live)
        assert (report.step, report.source) == (6, url)
        assert is_right(live, 6)
        checkpointer.save(8, small(8)).wait(tier=tier, timeout_s=60)
    steps = {each.split("/")[0] for each in keys(server, url) if each.startswith("step-") and "parts/" in each}
    assert steps == {"step-000000000006-e0001-1", "step-000000000008-e0002-1"}


def check_outages(server: Server, url: str) -> None:
    """A server that ends and comes back amid saves costs time alone."""

    def outages() -> None:
        for _ in range(2):
            time.sleep(1.0)
            server.stop()
            time.sleep(0.5)
            server.start()

    state, step = make_state(), 0
    thread = threading.Thread(target=outages)
    with Checkpointer(url, storage_options=server.options) as checkpointer:
        thread.start()
        try:
            while thread.is_alive():
                step += 1
                checkpointer.fence()
                state["w"].fill_(step)
                checkpointer.save(step, state).wait(timeout_s=120)
        finally:
            thread.join()
    assert check_whole(server, url) == [*range(1, step + 1)]
    for each in range(1, step + 1):
        found = stillframe.load(url, each, only="w", storage_options=server.options)
        assert bool((found["w"] == each).all())


def check_tier_goes_away(
    server: Server, url: str, root: Path, end: Callable[[], None], begin: Callable[[], None], last: int
) -> None:
    """As a tier it costs nothing but age: saves go on, and it catches up."""
    tier = Tier(url, storage_options=server.options)
    with Checkpointer(root, keep=KeepLast(2), tiers=[tier]) as checkpointer:
        checkpointer.save(1, small(1)).wait(tier=tier, timeout_s=60)
        end()
        try:
            for step in range(2, last + 1):
                checkpointer.save(step, small(step)).wait(timeout_s=30)
            assert checkpointer.stats().failed == 0
            assert checkpointer.stats().tiers[0].committed_step == 1
        finally:
            begin()
        checkpointer.wait(tier=tier, timeout_s=150)
        assert checkpointer.stats().tiers[0].committed_step == last
    live = small(-1)
    assert stillframe.restore(url, live, storage_options=server.options).step == last
    assert is_right(live, last)


def check_passing_faults(server: Server, url: str, proxy: Proxy, overload: str) -> None:
    """Each is over before the server is given up; the saves and the restore notice nothing.

    ``overload``: how such a server calls it.
    """
    options = {**proxy.options, "timeout": "1s", "retry_timeout": 20}
    passing = [
        Fault(times=3, status=503, code=overload),
        Fault(times=1, hangs=True),
        Fault(times=2, methods="PUT", only=".parts/", cut_request=1_000_000),
        Fault(times=2, conditional=True, cut_request=0),
        Fault(times=2, conditional=True, cut_answer=0, only="manifest.json"),
    ]
    with Checkpointer(url, storage_options=options) as checkpointer:
        for step, fault in enumerate(passing, 1):
            with proxy.doing(fault):
                checkpointer.save(step, small(step)).wait(timeout_s=30)
            assert fault.met, fault
    for fault in (
        Fault(times=3, methods="GET", only=".parts/", cut_answer=1_000_000),
        Fault(times=3, status=503, code=overload),
    ):
        live = small(-1)
        with proxy.doing(fault):
            assert stillframe.restore(url, live, storage_options=options).step == len(passing)
        assert is_right(live, len(passing))
        assert fault.met == fault.times, fault
    assert check_whole(server, url) == [*range(1, len(passing) + 1)]
    assert not left_over(server, url)
