"""Kills at random moments of promotions to an object store: what was reported stays whole, nothing is left over."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

import stillframe
from stillframe import Catalog, Checkpointer, IntegrityError, KeepLast, NotFoundError, Tier
from stillframe.checkpoint.verify import verify
from tests.servers.ceph import Ceph
from tests.servers.gcs import Gcs
from tests.servers.shared import SOURCE, Server, is_right, keys, new_url, small

pytestmark = pytest.mark.timeout(240)
TIERED = """
import sys, torch
from stillframe import Checkpointer, KeeperError, KeepLast, Tier, spi
root, url, count = sys.argv[1:]
state = {"w": torch.zeros(int(count)), "step": 0}
checkpointer = Checkpointer(root, keep=KeepLast(2), tiers=[Tier(url, every=2, keep=KeepLast(2))], on_error="warn")
begin = checkpointer.restore(state).step or 0
assert state["step"] == begin and bool((state["w"] == begin).all())
print(spi.keeper_pid(checkpointer), begin, flush=True)
for step in range(begin + 1, 10_000):
    checkpointer.fence()
    state["w"].fill_(step)
    state["step"] = step
    try:
        checkpointer.save(step, state).wait()
    except KeeperError:
        continue  # the next save starts another
    print(step, checkpointer.stats().tiers[0].committed_step or 0, flush=True)
"""
CHUNKS = 5_000_000
"""Numbers in two chunks: a part is an index and three objects."""
VICTIMS = {"trainer": (0,), "both": (1, 0), "keeper": (1,)}


def check_whole(catalog: Catalog) -> None:
    """Every checkpoint there, by every byte, beside a keeper that may be carrying and removing."""
    for save in catalog.committed():
        try:
            with catalog.open_save(save) as checkpoint:
                is_whole = verify(checkpoint).is_whole
        except (NotFoundError, IntegrityError):
            is_whole = False
        assert is_whole or not catalog.is_committed(save), save


def torment(server: Server, url: str, root: Path, rounds: int, seed: int) -> None:
    """Kill trainer, keeper, or both, at random moments of promotions; nothing that was reported is lost."""
    rng = random.Random(seed)
    environment = {**os.environ, **server.environment, "PYTHONPATH": str(SOURCE / "src")}
    catalog = Catalog(url, storage_options=server.options)
    committed = carried = 0
    killed = Counter[str]()
    for number in range(rounds):
        with subprocess.Popen(
            [sys.executable, "-c", TIERED, root, url, str(CHUNKS)], stdout=subprocess.PIPE, text=True, env=environment
        ) as child:
            assert child.stdout is not None
            keeper, begin = map(int, child.stdout.readline().split())
            assert begin >= committed, "a step that was reported is gone"
            time.sleep(rng.uniform(0.1, 1.5))
            whom = [*VICTIMS][number % len(VICTIMS)]
            killed[whom] += 1
            for each in VICTIMS[whom]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill((child.pid, keeper)[each], signal.SIGKILL)
            if child.poll() is None:
                time.sleep(rng.uniform(0.0, 1.0))
                child.kill()
            told = [line.split() for line in child.stdout.read().splitlines()]
        committed = max([begin, *(int(words[0]) for words in told if len(words) == 2)])
        carried = max([carried, *(int(words[1]) for words in told if len(words) == 2)])
        check_whole(catalog)
        assert (catalog.latest() or 0) >= carried
    sys.stdout.write(f"seed {seed}: {dict(killed)}; step {committed} in the root, {carried} in the tier\n")
    live = small(-1, CHUNKS)
    tier = Tier(url, every=2, keep=KeepLast(1), storage_options=server.options)
    with Checkpointer(root, keep=KeepLast(2), tiers=[tier]) as checkpointer:
        found = checkpointer.restore(live).step
        assert found is not None
        assert found >= committed
        assert is_right(live, found)
        last = found + 2 - found % 2
        checkpointer.save(last, small(last, CHUNKS)).wait(tier=tier, timeout_s=120)
    live = small(-1, CHUNKS)
    assert stillframe.restore(url, live, storage_options=server.options).step == last
    assert is_right(live, last)
    objects = [each for each in keys(server, url) if each.startswith("step-")]
    # A killed keeper's tombstone, with what is beside it, is left alone for a day: it might only be paused.
    tombstones = {each.split("/")[0] for each in objects if each.endswith("/aside.json")}
    files = [each for each in objects if each.split("/")[0] not in tombstones]
    assert len({each.split("/")[0] for each in files}) == 1, files
    assert len({each.split(".")[2] for each in files if ".parts/" in each}) == 1, "parts nobody refers to"


def test_kills_at_any_moment_of_a_promotion_lose_nothing(ceph: Ceph, tmp_path: Path) -> None:
    torment(ceph, new_url("s3"), tmp_path / "root", rounds=5, seed=2)


def test_kills_at_any_moment_of_a_promotion_to_google_lose_nothing(gcs: Gcs, tmp_path: Path) -> None:
    torment(gcs, new_url("gs"), tmp_path / "root", rounds=3, seed=2)


@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_100_kills_at_any_moment_of_a_promotion_lose_nothing(ceph: Ceph, tmp_path: Path) -> None:
    torment(ceph, new_url("s3"), tmp_path / "root", rounds=100, seed=int(time.time()))
