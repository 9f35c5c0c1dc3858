"""A job of up to 16,384 ranks without the machines: ``python -m benchmarks.simulated [--ranks 64 … 16384] [--out DIR]``.

The keeper's and the restore's own code, on the store in memory, goes through the life of a job: the ranks meet, rank 0
claims an epoch, all save, one is late, a node dies, the job is started again, and is restored onto other meshes.  No
trainers and no data: each rank's segment holds a few kilobytes.  The seals of all ranks are real.  Rank 0 and one member
are played in full; the other members would do what that one does, so of these only the seals are put.

Measured, of the rank that is played: calls of the store by verb, bytes read and written, the time of its own code (what
the store in memory takes is not counted: a real one has round trips instead), and the most memory that a phase takes.
"""

from __future__ import annotations

import argparse
import gc
import json
import secrets
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from benchmarks.scale import ITEMS, PARTS, make_content
from rich.console import Console
from rich.table import Table
from torch._C._distributed_c10d import TCPStore

from stillframe.checkpoint.catalog import Catalog, Checkpoint
from stillframe.checkpoint.contents import items_of
from stillframe.checkpoint.stored import Located, Stored
from stillframe.errors import DeadlineError
from stillframe.format import names
from stillframe.format.digest import digest
from stillframe.format.epochs import Outcome
from stillframe.format.records import Segment, encode_seal
from stillframe.keeper.commit import Coordinator, Member, UpdateCounts
from stillframe.keeper.epochs import CurrentEpoch
from stillframe.keeper.outcomes import OutcomeBook
from stillframe.keeper.retention import Pruner
from stillframe.keeper.segment import SegmentWriter
from stillframe.keeper.terms import Terms
from stillframe.link import messages
from stillframe.model import CHUNK_BYTES, SaveId
from stillframe.ranks.agreement import agree_on_run
from stillframe.ranks.group import _CALL_BYTES, Group
from stillframe.restoring.place import Placement
from stillframe.retention import KeepLast
from stillframe.state.boxes import Box
from stillframe.store.memory import MemoryBackend, MemoryStore
from stillframe.units import MIB

SIZES = (64, 256, 1024, 4096, 16384)
PARAMETERS = 20
"""Each with two moments: 60 tensors, so that the seals of 16,384 ranks fit into memory.  A commit reads none of them."""
WAVES = 16
"""Seals come in so many waves, with a look of rank 0's behind each."""
LOOKS = 10
NODE = 8
"""Ranks that die together."""
LONG_S = 3600.0
_T = TypeVar("_T")


@dataclass
class Phase:
    """What one rank did."""

    name: str
    seconds: float = 0.0
    """Of its own code."""
    calls: dict[str, int] = field(default_factory=dict)
    read_bytes: int = 0
    written_bytes: int = 0
    memory_bytes: int = 0
    """The most that was allocated at a time, beyond what was there before."""
    seals: int = 0
    """How many seals a restore has read as a whole."""

    @property
    def total(self) -> int:
        return sum(self.calls.values())


class CountedStore(MemoryStore):
    """A client whose calls are counted, and whose time is."""

    def __init__(self, backend: MemoryBackend) -> None:
        super().__init__(backend)
        self.calls: Counter[str] = Counter()
        self.seals: set[str] = set()
        self.read_bytes = self.written_bytes = 0
        self.seconds = 0.0

    def perform(self, verb: str, key: str, work: Callable[[], _T]) -> _T:
        self.calls[verb] += 1
        began = time.process_time()
        try:
            return super().perform(verb, key, work)
        finally:
            self.seconds += time.process_time() - began

    def read(self, key: str, start: int, into: memoryview) -> int:
        count = super().read(key, start, into)
        self.read_bytes += count
        if "/seal-" in key:
            self.seals.add(key)
        return count

    def put(self, key: str, data: Any, durable: bool = True) -> None:
        self.written_bytes += len(data)
        super().put(key, data, durable)

    def put_new(self, key: str, data: Any) -> bool:
        self.written_bytes += len(data)
        return super().put_new(key, data)

    def reset(self) -> None:
        self.calls.clear()
        self.seals.clear()
        self.read_bytes = self.written_bytes = 0
        self.seconds = 0.0


class Played:
    """One rank: its store, and what it has done."""

    def __init__(self, backend: MemoryBackend, rank: int) -> None:
        self.rank = rank
        self.store = CountedStore(backend)
        self.catalog = Catalog(self.store)
        self.phases: list[Phase] = []
        self.is_noted = True

    @contextmanager
    def doing(self, name: str) -> Iterator[Phase]:
        """May be done several times under one name: then it is added up."""
        known = [each for each in self.phases if each.name == name and self.is_noted]
        phase = known[0] if known else Phase(name)
        if not known and self.is_noted:
            self.phases.append(phase)
        self.store.reset()
        began = time.process_time()
        yield phase
        phase.seconds += time.process_time() - began - self.store.seconds
        phase.calls = dict(Counter(phase.calls) + self.store.calls)
        phase.read_bytes += self.store.read_bytes
        phase.written_bytes += self.store.written_bytes
        phase.seals = max(phase.seals, len(self.store.seals))


def memory_of(work: Callable[[], object]) -> int:
    """Done once more, since looking at every allocation takes its time."""
    gc.collect()
    tracemalloc.start()
    try:
        kept = work()
        del kept
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


class Crowd:
    """The store of torch.distributed.  All other ranks ask rank 0 for its name, and then say what rank 0 says."""

    def __init__(self, store: Any, world_size: int) -> None:
        self._store, self._world_size = store, world_size
        self._said: tuple[str, Any] | None = None
        self._answered = 0
        self.seconds = 0.0
        """What the others took."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def call(self, group: Group) -> None:
        self._store.set(f"{group._prefix}/calls", secrets.token_hex(_CALL_BYTES // 2 * (self._world_size - 1)))

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)
        path, _, said_by = key.rpartition("/")
        if said_by == "0":
            self._said = path, value

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        """Rank 0 answers: now they know where to say it."""
        self._store.multi_set(keys, values)
        self._answered += len(keys)
        if self._said is None or self._answered < self._world_size - 1:
            return
        began = time.process_time()
        path, value = self._said
        for rank in range(1, self._world_size):
            self._store.set(f"{path}/{rank}", value)
        self._store.check([path])  # an answer: the server has come so far
        self.seconds += time.process_time() - began


class Job:
    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.backend = MemoryBackend()
        self.crowd = MemoryStore(self.backend)
        self.leader = Played(self.backend, 0)
        self.member = Played(self.backend, ranks - 1)
        self.run = ""
        self.manifest_bytes = self.seal_bytes = 0

    # --- what a keeper does ----------------------------------------------------------------

    def terms(self, played: Played, deadline_s: float = LONG_S) -> Terms:
        return Terms(played.store, self.run, self.ranks, deadline_s)

    def seal(self, played: Played, epoch: CurrentEpoch, step: int) -> SegmentWriter:
        content = make_content(played.rank, self.ranks, step, PARAMETERS)
        size = PARAMETERS * len(PARTS) * ITEMS * 4
        begin = messages.Begin(
            save=step, step=step, attempt=1, requested_s=time.monotonic(), header_bytes=len(content.header),
            draft_bytes=len(content.draft_bytes), data_bytes=size, layout="simulated", lazy=((0, size),),
        )  # fmt: skip
        writer = SegmentWriter(begin, content.header, content.draft, played.catalog, epoch, played.rank != 0)
        writer.identify()
        span = bytearray(CHUNK_BYTES)
        with played.doing(f"{'rank 0' if played.rank == 0 else 'a member'} seals"):
            writer.write(messages.Chunk(step, 0, 0, size), memoryview(span))
            writer.seal()
        return writer

    def put_seals(self, save: SaveId, ranks: Sequence[int], parameters: int = 1) -> None:
        """As other keepers leave them."""
        size = parameters * len(PARTS) * ITEMS * 4
        for rank in ranks:
            content = make_content(rank, self.ranks, save.step, parameters)
            data = bytes(size)
            segment = Segment(
                len(content.header) + size, len(content.header), digest(content.header), CHUNK_BYTES, [digest(data)]
            )  # fmt: skip
            seal, _, _ = encode_seal(content.draft, save, None, segment)
            self.crowd.put(names.key(save, names.segment(rank)), content.header + data)
            self.crowd.put(names.key(save, names.seal(rank)), seal)

    def others(self) -> list[int]:
        return list(range(1, self.ranks - 1))

    # --- the life of the job ---------------------------------------------------------------

    def start(self, prefix: str = "") -> tuple[CurrentEpoch, CurrentEpoch]:
        made = TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
        crowd = Crowd(made, self.ranks)
        group = Group(0, self.ranks, crowd, LONG_S)
        crowd.call(group)
        with self.leader.doing(f"{prefix}the ranks meet") as phase:
            self.run = agree_on_run(group, self.leader.catalog, KeepLast(1))
        phase.seconds -= crowd.seconds
        leader = CurrentEpoch(self.leader.catalog, self.terms(self.leader), 0)
        with self.leader.doing(f"{prefix}rank 0 begins the epoch"):
            leader.current()
        member = CurrentEpoch(self.member.catalog, self.terms(self.member), self.member.rank)
        with self.member.doing("a member finds the epoch"):
            member.current()
        return leader, member

    def save(self, leader: CurrentEpoch, member: CurrentEpoch, step: int, is_noted: bool = True) -> SaveId:
        """All seal, one of them late."""
        self.leader.is_noted = self.member.is_noted = is_noted
        book = OutcomeBook(self.leader.store)
        own = self.seal(self.leader, leader, step)
        save = own.identify()
        commit = Coordinator(own, self.terms(self.leader), False, UpdateCounts())
        others = self.others()
        for wave in range(WAVES):
            self.put_seals(save, others[wave::WAVES], PARAMETERS if is_noted else 1)
            with self.leader.doing("rank 0 takes the seals as they come") as taking:
                assert not commit.poll(False)
        if is_noted:
            taking.memory_bytes = memory_of(lambda: self._taken(own))
        with self.leader.doing(f"{LOOKS} looks for a straggler"):
            for _ in range(LOOKS):
                assert not commit.poll(False)
        other = self.seal(self.member, member, step)
        waiting = Member(other, self.terms(self.member), False)
        with self.member.doing("a member looks, and is told"):
            assert not waiting.poll(False)
        with self.leader.doing("the last seal, and the commit"):
            assert commit.poll(False)
            book.tell(Outcome(save, "", ""))
        with self.member.doing("a member looks, and is told"):
            assert waiting.poll(False)
        self.leader.is_noted = self.member.is_noted = True
        self.manifest_bytes = len(self.backend.blobs[names.key(save, names.MANIFEST)])
        if is_noted:
            self.seal_bytes = len(self.backend.blobs[names.key(save, names.seal(1))])
        return save

    def _taken(self, own: SegmentWriter) -> Coordinator:
        commit = Coordinator(own, self.terms(self.leader), False, UpdateCounts())
        commit.poll(False)
        return commit

    def lose_a_node(self, leader: CurrentEpoch, member: CurrentEpoch, step: int) -> None:
        """Its ranks never seal: the save fails at the deadline, which names them, and every rank is told."""
        self.leader.is_noted = self.member.is_noted = False
        own, other = self.seal(self.leader, leader, step), self.seal(self.member, member, step)
        self.leader.is_noted = self.member.is_noted = True
        save = own.identify()
        self.put_seals(save, self.others()[NODE:])
        commit = Coordinator(own, self.terms(self.leader, deadline_s=0.0), False, UpdateCounts())
        with self.leader.doing("a node is dead: the save fails"):
            said = raised_by(lambda: commit.poll(False))
            OutcomeBook(self.leader.store).tell(Outcome(save, "DeadlineError", said))
            own.discard()
        assert f"ranks 1-{NODE}" in said, said
        with self.member.doing("a member hears of it, and removes its files"):
            said = raised_by(lambda: Member(other, self.terms(self.member), False).poll(False))
            other.discard()
        assert f"ranks 1-{NODE}" in said, said

    def prune(self, older: SaveId, newer: SaveId) -> None:
        """After the commit of the newer one: rank 0 sets the older aside, and each removes its own files."""
        pruner = Pruner(self.leader.catalog, KeepLast(1), 0, False, lambda: newer.epoch)
        member = Pruner(self.member.catalog, KeepLast(1), self.member.rank, False, lambda: newer.epoch)
        for each in (pruner, member):
            each.committed(older)
        with self.leader.doing("rank 0 sets the older save aside"):
            pruner.committed(newer)
        with self.member.doing("a member removes its files of the older save"):
            member.committed(newer)

    def remove_others(self, newer: SaveId) -> None:
        """After the first commit of another run: what the one before has left, rank 0 removes alone."""
        pruner = Pruner(self.leader.catalog, KeepLast(1), 0, False, lambda: newer.epoch)
        with self.leader.doing("rank 0 removes the saves of the run before"):
            pruner.committed(newer)

    # --- restoring -------------------------------------------------------------------------

    def choose(self) -> SaveId:
        """A new start: the newest on the branch, its manifest, and this rank's own seal."""
        with self.leader.doing("started again: rank 0 finds the newest save, and opens it") as phase:
            found = self.leader.catalog.newest()
            assert found is not None
            with self.leader.catalog.open_save(found) as checkpoint:
                checkpoint.of(0)

        def again() -> Checkpoint:
            with self.leader.catalog.open_save(found) as checkpoint:
                return checkpoint

        phase.memory_bytes = memory_of(again)
        return found

    def restore(self, save: SaveId, name: str, boxes: Callable[[int, int], tuple[int, int]], ranks: int) -> None:
        """Rank 0 of ``ranks``; ``boxes`` gives, for rank and number of rows, the first row and the end."""
        rows = self.ranks * ITEMS
        first, end = boxes(0, rows)

        def read() -> None:
            with self.leader.catalog.open_save(save) as checkpoint:
                stored = Stored(checkpoint, 0, is_merged=ranks != self.ranks)
                placement = Placement(stored)
                for leaf in leaves_of(stored.tree):
                    into = torch.empty(end - first)
                    placement.add_box(leaf, Box((first,), (end - first,), (0,)), into)
                placement.fill()

        with self.leader.doing(name) as phase:
            read()
        phase.memory_bytes = memory_of(read)


def raised_by(work: Callable[[], object]) -> str:
    try:
        work()
    except DeadlineError as error:
        return str(error)
    raise AssertionError("the save did not fail")


def leaves_of(located: Located) -> Iterator[Located]:
    if located.is_tensor:
        yield located
    for _, item in items_of(located):
        yield from leaves_of(item)


def simulate(ranks: int) -> Job:
    job = Job(ranks)
    leader, member = job.start()
    first = job.save(leader, member, 10, is_noted=False)
    second = job.save(leader, member, 20)
    job.prune(first, second)
    job.crowd.delete([key for key in job.backend.blobs if key.startswith(names.step_dir(first))])  # as all members do
    job.lose_a_node(leader, member, 30)
    leader, member = job.start("started again: ")
    save = job.choose()
    assert save == second

    def share(parts: int) -> Callable[[int, int], tuple[int, int]]:
        return lambda rank, rows: (rank * rows // parts, (rank + 1) * rows // parts)

    job.restore(save, "restored onto as many ranks", share(ranks), ranks)
    job.restore(save, "restored onto half of the ranks", share(ranks // 2), ranks // 2)
    job.restore(save, "restored onto a sixteenth of the ranks", share(ranks // 16), ranks // 16)
    job.remove_others(job.save(leader, member, 40, is_noted=False))
    return job


# --- what came out -----------------------------------------------------------------------------


def table(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """A row for each phase of each size."""
    return [
        {"ranks": job.ranks, "who": who, **asdict(phase), "total": phase.total}
        for job in jobs
        for who, played in (("rank 0", job.leader), ("a member", job.member))
        for phase in played.phases
    ]


def show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    shown = Table("ranks", "phase", "own time", "calls", "read", "written", "memory", "seals")
    for row in rows:
        calls = ", ".join(f"{count:,} {verb}" for verb, count in row["calls"].items())
        shown.add_row(
            f"{row['ranks']:,}", row["name"], f"{row['seconds'] * 1000:.1f} ms", calls,
            f"{row['read_bytes'] / 1024:,.0f} KiB", f"{row['written_bytes'] / 1024:,.0f} KiB",
            f"{row['memory_bytes'] / MIB:.1f} MiB" if row["memory_bytes"] else "", str(row["seals"] or ""),
        )  # fmt: skip
    console.print(shown)


def plot(rows: Sequence[dict[str, Any]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(15, 5.2), layout="constrained")
    measures = (("seconds", "own time, s"), ("total", "calls of the store"), ("memory_bytes", "memory, bytes"))
    handles: dict[str, Any] = {}
    for place, (measure, label) in zip(axes, measures, strict=True):
        for number, name in enumerate(dict.fromkeys(row["name"] for row in rows if row["who"] == "rank 0")):
            found = [(row["ranks"], row[measure]) for row in rows if row["name"] == name and row[measure] > 0]
            if found:
                style = {"color": f"C{number % 10}", "linestyle": "-" if number < 10 else "--"}
                handles[name] = place.plot(*zip(*found, strict=True), marker="o", markersize=4, **style)[0]
        ends = sorted({row["ranks"] for row in rows})
        place.set(xscale="log", yscale="log", xlabel="ranks", title=label, xticks=ends, xticklabels=map(str, ends))
        place.minorticks_off()
        place.grid(alpha=0.3)
        if measure == "seconds":
            handles["the limit, 5 s"] = place.axhline(5.0, color="black", linewidth=1)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, fontsize=8)
    figure.suptitle("Rank 0 of a simulated job")
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--out", type=Path, help="where to put simulated.json and simulated.png")
    options = parser.parse_args()
    console = Console(width=160)
    rows: list[dict[str, Any]] = []
    for ranks in options.ranks:
        began = time.perf_counter()
        job = simulate(ranks)
        rows += table([job])
        console.print(
            f"{ranks:,} ranks: {time.perf_counter() - began:.0f} s; a manifest of {job.manifest_bytes / 1024:,.0f} KiB, "
            f"seals of {job.seal_bytes / 1024:,.0f} KiB",
            highlight=False,
        )
    show(rows, console)
    if options.out is not None:
        (options.out / "simulated.json").write_text(json.dumps(rows, indent=1) + "\n")
        plot(rows, options.out / "simulated.png")


if __name__ == "__main__":
    main()
