"""What a commit costs in requests on an object store: ``python -m benchmarks.requests [--ranks 1000]``.

The keeper's own code commits a save of so many ranks, whose seals are real, in obstore's store in memory; every request
is counted, a listing as one for each 1,000 names, as S3 bills it.

1. A root on an object store: rank 0 takes the seals and commits; a look before that.
2. A tier: the commit of a promotion; a look while a part is missing; and what carrying one rank's part costs.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import obstore
import torch
from benchmarks.scale import COMMITTED, RUN, STEP_S, encode_rank, seal_rank_0
from obstore.store import MemoryStore
from rich.console import Console

from stillframe import Catalog, Checkpointer
from stillframe.checkpoint.promote import promote, publish
from stillframe.format import names
from stillframe.keeper.commit import Coordinator, UpdateCounts
from stillframe.keeper.terms import Terms
from stillframe.store.objects import ObjectStore
from stillframe.units import MIB

_PAGE = 1000
_SEGMENT_BYTES = 4096


class Counting:
    """obstore, with every request counted by its kind."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        request = getattr(obstore, name)

        def call(*arguments: Any, **options: Any) -> Any:
            is_head = name == "get" and bool((options.get("options") or {}).get("head"))
            kind, count = "HEAD" if is_head else name.partition("_")[0].upper(), 1
            try:
                answer = request(*arguments, **options)
                if name == "list_with_delimiter":
                    count = _pages(len(answer["objects"]) + len(answer["common_prefixes"]))
                elif name == "list":
                    answer = [*answer]
                    count = _pages(sum(map(len, answer)))
                elif name == "delete" and not isinstance(arguments[1], str):
                    count = _pages(len(arguments[1]))
            finally:  # one that is refused counts, too
                self.counts[kind] += count
            return answer

        return call

    def during(self, work: Callable[[], object]) -> Counter[str]:
        self.counts.clear()
        work()
        return Counter(self.counts)


def _pages(count: int) -> int:
    return max(-(-count // _PAGE), 1)


def counted_store() -> tuple[ObjectStore, Counting]:
    store, counting = ObjectStore(MemoryStore(), "memory://bucket/root"), Counting()
    store.server._obstore = counting  # type: ignore[assignment]
    return store, counting


def requests(ranks: int) -> dict[str, Counter[str]]:
    """By what was done."""
    store, counting = counted_store()
    catalog = Catalog(store)
    save = seal_rank_0(catalog, ranks)
    for rank in range(1, ranks):
        writer = store.writer(names.key(COMMITTED, names.segment(rank)), _SEGMENT_BYTES)
        writer.write_at(memoryview(bytes(_SEGMENT_BYTES)), 0)
        writer.finish()
    seals = {names.key(COMMITTED, names.seal(rank)): encode_rank(rank, ranks) for rank in range(1, ranks)}
    *most, last = seals
    for key in most:
        store.put(key, seals[key])
    found: dict[str, Counter[str]] = {}
    terms = Terms(store, RUN, ranks, STEP_S)
    coordinator = Coordinator(save, terms, False, UpdateCounts())
    found["root: rank 0 takes all seals but the last"] = counting.during(lambda: coordinator.poll(False))
    found["root: a look that finds nothing new"] = counting.during(lambda: coordinator.poll(False))
    found["tier: a look while a part is missing"] = counting.during(lambda: publish(catalog, COMMITTED))
    store.put(last, seals[last])
    found["root: the last seal, and the commit"] = counting.during(lambda: coordinator.poll(False))
    store.delete([names.key(COMMITTED, names.MANIFEST)])
    found["tier: the commit"] = counting.during(lambda: publish(catalog, COMMITTED))
    assert catalog.is_committed(COMMITTED)
    return found


def carrying(mib: int) -> Counter[str]:
    """A whole promotion of one rank: the fixed cost is what is left when the parts are taken away."""
    with tempfile.TemporaryDirectory() as home:
        with Checkpointer(Path(home)) as checkpointer:
            checkpointer.save(1, {"w": torch.zeros(mib * MIB // 4)}).wait()
        source = Catalog(home)
        saved = source.newest()
        assert saved is not None
        store, counting = counted_store()
        return counting.during(lambda: promote(source, Catalog(store), saved))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1000)
    options = parser.parse_args()
    console = Console()
    began = time.perf_counter()
    found = requests(options.ranks) | {"promotion of one rank, 2 chunks": carrying(32)}
    for what, counts in found.items():
        told = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
        console.print(f"{what}: {counts.total()} ({told})", highlight=False)
    console.print(f"{options.ranks} ranks, {time.perf_counter() - began:.1f} s", highlight=False)


if __name__ == "__main__":
    main()
