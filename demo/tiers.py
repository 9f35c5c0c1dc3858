"""The demo of tiers: two nodes with disks of their own, a directory that both see, and an object store.

    A   2 ranks that save nothing and are left alone
    B   the same with a checkpoint at every step; everything is killed with SIGKILL inside a step (torchrun, the
        ranks, their keepers), and the directory of one node is removed
    C   started again: the node that is left reads its own disk, the new one the shared directory
    D   both nodes and the shared directory are removed, and it is started once more: from the object store

A, C and D must end with the same bits; the exit code is 1 if they do not.  The object store is a real S3 server, Ceph's
gateway on this machine (``make test-servers`` installs it); without it only the nodes are removed before D.
Everything is written to runs/demo-tiers, which is emptied first.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a script, from anywhere

from demo import show
from demo.record import Record, Started, Step
from demo.tiers_train import KEPT, SHARED_EVERY, STORE_EVERY
from demo.trainer import Trainer, run_demo

from stillframe import Catalog
from stillframe.checkpoint.verify import verify_save
from stillframe.units import format_bytes

_HOME = Path(__file__).resolve().parent.parent / "runs" / "demo-tiers"
_ROOT = _HOME / "checkpoints"
_SHARED = _ROOT / "shared"
_STEPS = 28
_RANKS = 2
_LOST_NODE = 1
_BUCKET = "demo"
_STORE = f"s3://{_BUCKET}/gpt"
_TORCHRUN = (
    sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(_RANKS),
    "--monitor-interval", "0.1", str(Path(__file__).resolve().parent / "tiers_train.py"),
)  # fmt: skip


class ObjectStore:
    """A real S3 server, started beside other work.  ``trouble``: why there is none; known when :meth:`wait` returns."""

    def __init__(self) -> None:
        self.trouble = ""
        self.seconds = 0.0
        self._home = Path(tempfile.mkdtemp(prefix="sf-ceph-"))  # short: sockets have names of 107 bytes at most
        self._server: object = None
        self._thread = threading.Thread(target=self._start, daemon=True)
        self._thread.start()

    def _start(self) -> None:
        began_s = time.monotonic()
        try:
            from tests.servers.ceph import Ceph, missing  # obstore may not be installed

            self.trouble = missing()
            if not self.trouble:
                self._server = server = Ceph(self._home)
                server.start()
                server.make_place(_BUCKET)
                os.environ.pop("AWS_PROFILE", None)
                os.environ.update(server.environment)
        except Exception as error:  # whatever keeps it from running here, the demo goes on without
            self.trouble = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        self.seconds = time.monotonic() - began_s

    def wait(self) -> None:
        self._thread.join()

    def stop(self) -> None:
        self._thread.join(60)
        if self._server is not None:
            self._server.stop()  # type: ignore[attr-defined]
        shutil.rmtree(self._home, ignore_errors=True)


def node(rank: int) -> Path:
    return _ROOT / f"node{rank}"


def tiers(has_store: bool) -> list[str]:
    return [str(_SHARED), *([_STORE] if has_store else [])]


def run(console: Console, name: str, title: str, *options: str) -> Record:
    return run_told(console, name, title, *options)[0]


def run_told(console: Console, name: str, title: str, *options: str) -> tuple[Record, list[Started]]:
    started: list[Started] = []
    with Trainer(_HOME, name, _STEPS, *options, command=_TORCHRUN) as trainer:
        with show.Bar(console, title, _STEPS) as bar:
            for line in trainer.lines():
                bar.show(line)
                started += [line] if isinstance(line, Started) else []
        return trainer.record(), sorted(started, key=lambda each: each.rank)


def run_killed(console: Console, has_store: bool, *options: str) -> list[Step]:
    """The steps told until everything was killed, at a random moment inside a step near the middle.

    Not before every tier has a step: a part that is lost on its way to one is waited for, for two minutes.
    """
    steps: list[Step] = []
    started: list[Started] = []
    kill_after = random.randint(_STEPS * 2 // 5, _STEPS * 3 // 5)
    with Trainer(_HOME, "killed", _STEPS, *options, command=_TORCHRUN) as trainer:
        lines = trainer.lines()
        with show.Bar(console, "B  saving every step", _STEPS) as bar:
            for line in lines:
                bar.show(line)
                if isinstance(line, Started):
                    started.append(line)
                    continue
                steps.append(line)
                if line.step >= kill_after and all(Catalog(tier).steps() for tier in tiers(has_store)):
                    time.sleep(random.uniform(0.1, 0.9) * line.seconds)
                    break
        into_s = time.monotonic() - steps[-1].begun_s - steps[-1].seconds
        trainer.kill()
        for pid in [pid for each in started for pid in (each.pid, each.keeper)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        last = steps[-1].step
        steps += [line for line in lines if isinstance(line, Step)]  # told before, not heard yet
    console.print(
        f"   [bold red]SIGKILL[/] to torchrun, both ranks and their keepers, {into_s * 1e3:.0f} ms after step {last}",
        highlight=False,
    )
    return steps


def tell_sources(console: Console, started: Sequence[Started]) -> None:
    for each in started:
        size = format_bytes(each.restored_bytes)
        console.print(
            f"   rank {each.rank} went on from step {each.restored_step}: {size} from [bold]{short(each.source)}[/], "
            f"ready after {each.restore_s:.1f} s",
            highlight=False,
        )


def tell_places(console: Console, has_store: bool) -> bool:
    """Where each step lies; every byte is read.  Tells whether all of it is whole."""
    is_whole = True
    for rank in range(_RANKS):
        steps = sorted(each.step for each in Catalog(node(rank), rank).committed())
        console.print(f"   {node(rank).name:<14} rank {rank}'s part of {ranges(steps)}", highlight=False)
    for root in tiers(has_store):
        catalog = Catalog(root)
        found = {save.step: verify_save(catalog, save).is_whole for save in catalog.committed()}
        damaged = sorted(step for step, whole in found.items() if not whole)
        verdict = f", [bold red]damaged[/]: {ranges(damaged)}" if damaged else ", whole" if found else ""
        console.print(f"   {short(root):<14} {ranges(sorted(found))}{verdict}", highlight=False)
        is_whole = is_whole and not damaged
    return is_whole


def short(root: str) -> str:
    return root if "://" in root else Path(root).name


def ranges(steps: Sequence[int]) -> str:
    """``steps 3–5, 10, 15``."""
    found: list[list[int]] = []
    for step in steps:
        if found and found[-1][1] == step - 1:
            found[-1][1] = step
        else:
            found.append([step, step])
    return f"steps {', '.join(_range(*each) for each in found)}" if found else "no step"


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}–{last}"


def lose(console: Console, *directories: Path) -> None:
    for each in directories:
        shutil.rmtree(each)
    names = [each.name for each in directories]
    console.print(f"   [bold red]rm -rf[/] {' '.join(names)}", highlight=False)


def compare(console: Console, alone: Record, steps: Sequence[Step], others: dict[str, Record]) -> bool:
    """The last states, and the losses on the way."""
    wrong = [f"B: {each}" for each in show.wrong_losses(alone, steps)]
    for name, record in others.items():
        found = show.differences(alone.fingerprint, record.fingerprint) + show.wrong_losses(alone, record.steps)
        wrong += [f"{name}: {each}" for each in found]
    return show.verdict(console, ["A", *others], alone, wrong)


def demo(console: Console, store: ObjectStore) -> int:
    console.print(
        f"a GPT sharded over {_RANKS} ranks with FSDP2; a checkpoint at every step\n"
        f"   node0, node1   a disk of each rank's own: the last {KEPT} steps that both have\n"
        f"   shared         a directory that both see: every {SHARED_EVERY}th\n"
        f"   {_STORE:<14} Ceph's S3 gateway on this machine: every {STORE_EVERY}th",
        highlight=False,
    )
    alone = run(console, "alone", "A  left alone", "--no-save")
    with console.status("waiting for the object store"):
        store.wait()
    has_store = not store.trouble
    if has_store:
        console.print(f"   the object store was ready after {store.seconds:.0f} s", highlight=False)
    else:
        console.print(f"   [yellow]no object store here[/]: {escape(store.trouble)}", highlight=False)
    options = ["--store", _STORE] if has_store else []
    before = run_killed(console, has_store, *options)
    is_whole = tell_places(console, has_store)
    lose(console, node(_LOST_NODE))
    again, started = run_told(console, "node-lost", "C  started again", *options)
    tell_sources(console, started)
    is_whole = tell_places(console, has_store) and is_whole
    lose(console, *map(node, range(_RANKS)), *([_SHARED] if has_store else []))
    once_more, started_last = run_told(console, "all-lost", "D  started once more", *options)
    tell_sources(console, started_last)
    is_equal = compare(console, alone, before, {"C": again, "D": once_more})
    has_resumed = all(each.restored_step is not None for each in [*started, *started_last])
    if not has_resumed:
        console.print("[bold red]a run found no checkpoint[/]")
    return 0 if is_equal and is_whole and has_resumed else 1


@contextlib.contextmanager
def object_store() -> Iterator[ObjectStore]:
    store = ObjectStore()
    try:
        yield store
    finally:
        store.stop()


def main(console: Console) -> int:
    for number in (signal.SIGTERM, signal.SIGHUP):  # the server must not be left behind
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    with object_store() as store:
        return demo(console, store)


if __name__ == "__main__":
    sys.exit(run_demo(main, _HOME, node(0), _SHARED))
