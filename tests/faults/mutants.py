"""Mutated files of a real root, and everything that reads them.

    python -m tests.faults.mutants SEED COUNT [AT_ONCE]

A mutant is one file whose bytes were changed at random, or whose meaning was changed and its checksums made right
again.  Whatever it is, opening, listing, verifying, loading and restoring end with a :class:`StillframeError` or
succeed, in bounded memory and time.  Bytes changed at random never change what is loaded.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import stillframe
from stillframe import Catalog, Checkpointer, KeepEvery, KeepLast, StillframeError
from stillframe.checkpoint import epochs, events, removal
from stillframe.checkpoint.cleaning import Wanted, plan
from stillframe.checkpoint.contents import entries_of_all, text_of
from stillframe.checkpoint.lock import owner_of
from stillframe.checkpoint.stored import Stored
from stillframe.checkpoint.survey import survey
from stillframe.checkpoint.verify import verify
from stillframe.format import limits, names, records
from stillframe.format.epochs import (
    Answer,
    Gone,
    Outcome,
    Outcomes,
    Request,
    decode_answer,
    decode_request,
    encode_answer,
    encode_outcomes,
    encode_request,
)  # fmt: skip
from stillframe.keeper.outcomes import read_outcome
from stillframe.model import SaveId
from stillframe.observe.doctor import examine
from stillframe.observe.history import histories
from stillframe.restoring import resume
from stillframe.restoring.load import pull
from stillframe.restoring.statistics import statistics
from stillframe.retention import decode_policy, encode_policy
from stillframe.spi import TensorBox
from stillframe.store.posix import PosixStore
from stillframe.store.protocol import read_all
from stillframe.units import GIB, MIB
from tests.faults.mutations import Mutator
from tests.support import bytes_of

HANG_S = 20
TICKET = "0123abcd"
ROOM_BYTES = 2 * GIB
"""Of address space, beyond what the process has when it begins."""
GROWTH_BYTES = 400 * MIB


class Hang(BaseException):
    """An operation took too long."""


def make_state(step: int) -> dict[str, Any]:
    base = torch.arange(step, step + 1000, dtype=torch.float32)
    whole = torch.arange(60.0).view(6, 10) + step
    return {
        "base": base, "window": base[10:30].view(4, 5).t(), "again": base,
        "box": TensorBox(whole, whole.shape, (0, 0)),
        "small": [torch.tensor(step), torch.zeros(0, 3), torch.full((6,), step, dtype=torch.bfloat16)],
        "array": torch.arange(6).numpy() + step,
        "values": {"n": step, (1, "a"): 2.5, "t": (1, None, b"x"), "s": {1, 2}, "nan": math.nan, "d": torch.bfloat16},
    }  # fmt: skip


def make_root(root: Path) -> None:
    """Three epochs: two steps, a restore and a step, a rewind and a step; one is set aside, one is pinned."""
    with Checkpointer(root) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, make_state(step), metadata={"loss": 0.5, "name": "x"})
        checkpointer.restore({"base": torch.zeros(1000)}, only="base")
        checkpointer.save(3, make_state(3))
        checkpointer.wait()
        checkpointer.rewind(2)
        for step in (3, 4):
            checkpointer.save(step, make_state(step))
    catalog = Catalog(root)
    removal.set_aside(catalog, SaveId(4, 3), "quarantined", epoch=3, message="for the test")
    outcomes = Outcomes(3, [Outcome(SaveId(3, 3)), Outcome(SaveId(4, 3), "StorageError", "full")])
    catalog.store.put(names.outcomes(3), encode_outcomes(outcomes))
    catalog.store.put(names.key(SaveId(4, 3), names.PIN), b"{}\n")
    request = Request(TICKET, 1.5, [SaveId(1), SaveId(4, 3)], encode_policy(KeepLast(2) | KeepEvery(5)))
    catalog.store.put(names.request(TICKET), encode_request(request))
    catalog.store.put(names.answer(TICKET), encode_answer(Answer(TICKET, True, [Gone(SaveId(1), "x", 1)], [])))
    failure = records.Failure(SaveId(4, 3), 1, "StorageError", "full")
    catalog.store.put(names.key(SaveId(4, 3), names.failure(1)), records.encode_failure(failure))


# --- everything that reads a root --------------------------------------------------------------


def flat(state: Any) -> Any:
    """A loaded state in a form that can be compared."""
    if isinstance(state, dict):
        return [[repr(key), flat(value)] for key, value in state.items()]
    if isinstance(state, list | tuple):
        return [type(state).__name__, *map(flat, state)]
    if isinstance(state, torch.Tensor):
        return [str(state.dtype), list(state.shape), bytes_of(state).hex()]
    return [type(state).__name__, state.tobytes().hex() if hasattr(state, "tobytes") else repr(state)]


def look(root: Path) -> None:
    catalog = Catalog(root)
    for save in catalog.look().saves:
        for ask in (catalog.is_committed, catalog.manifest, catalog.aside):
            with contextlib.suppress(StillframeError):
                ask(save)
    catalog.steps()
    catalog.find(2)


def read_run(root: Path) -> None:
    catalog = Catalog(root)
    epochs.find_claim(catalog, "00000000", 0)
    read_outcome(catalog.store, SaveId(3, 3))
    owner_of(catalog.store, 0)
    with contextlib.suppress(StillframeError):
        epochs.find_parent(catalog, "00000000", 0)
    for found in events.event_files(PosixStore(root)).values():
        sum(1 for _ in events.read_events(catalog.store, found))
    histories(root)


def read_asked(root: Path) -> None:
    store = Catalog(root).store
    with contextlib.suppress(StillframeError):
        decode_answer(read_all(store, names.answer(TICKET), limits.MAX_NOTE_BYTES), file="answer")
    request = decode_request(read_all(store, names.request(TICKET), limits.MAX_NOTE_BYTES), file="request")
    decode_policy(request.policy)
    plan(Catalog(root), Wanted(tuple(request.saves)))


def check(root: Path) -> None:
    for save in (SaveId(3, 3), SaveId(2)):
        with contextlib.suppress(StillframeError), Catalog(root).open_save(save) as checkpoint:
            verify(checkpoint)


def show(root: Path) -> None:
    with Catalog(root).open() as checkpoint:
        found = entries_of_all(checkpoint)
        for entry in found:
            text_of(entry.value)
        stored = Stored(checkpoint, checkpoint.ranks[0], is_merged=True)
        for tensor in pull(stored, [entry.leaf for entry in found if entry.kind == "tensor"]):
            if not tensor.is_complex():
                statistics(tensor)


def restore(root: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        resume.restore(root, {key: value for key, value in make_state(9).items() if key != "box"}, strict=False)


OPERATIONS: dict[str, Callable[[Path], object]] = {
    "look": look, "survey": survey, "examine": examine, "run": read_run, "asked": read_asked, "verify": check,
    "show": show, "restore": restore, "load 2": lambda root: stillframe.load(root, 2),
}  # fmt: skip


class Campaign:
    def __init__(self, root: Path) -> None:
        self._root = root
        make_root(root)
        self._good = [json.dumps(flat(stillframe.load(root, step))) for step in (1, 2, 3)]
        self._mutator = Mutator(root)
        self.failures: dict[str, str] = {}
        """One for each place in the code."""
        self.refused = 0
        self.grown_bytes = 0
        """By what the operations have needed; what it takes to make a mutant does not count."""

    def run(self, seed: int, count: int, at_once: int) -> None:
        """``at_once``: so many of the operations see each mutant, and the load of the newest always does."""
        for number in range(count):
            rng = random.Random(f"{seed}/{number}")
            done, is_forged = self._mutator.write(rng)
            for name in rng.sample(list(OPERATIONS), at_once):
                self._try(f"{seed}/{number} {name}: {done}", OPERATIONS[name])
            self._try(f"{seed}/{number} load: {done}", self._load if is_forged else self._load_exactly)
            self._mutator.take_back()

    def _load(self, root: Path) -> str:
        return json.dumps(flat(stillframe.load(root)))

    def _load_exactly(self, root: Path) -> None:
        if self._load(root) not in self._good:
            raise AssertionError("something else than what was saved")

    def _try(self, what: str, operation: Callable[[Path], object]) -> None:
        signal.alarm(HANG_S)
        before = _peak_bytes()
        try:
            operation(self._root)
        except StillframeError:
            self.refused += 1
        except (Exception, Hang):
            trace = traceback.format_exc(limit=-6)
            where = [line for line in trace.splitlines() if line.lstrip().startswith("File")][-1]
            self.failures.setdefault(where, f"{what}\n{trace}")
        finally:
            signal.alarm(0)
            self.grown_bytes += _peak_bytes() - before


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(seed: int, count: int, at_once: int = len(OPERATIONS)) -> None:
    """Prints, as JSON, what went wrong and how much memory it took."""

    def ring(_number: int, _frame: object) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, ring)
    place = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    try:
        campaign = Campaign(place / "root")
        campaign.run(seed - 1, 20, len(OPERATIONS))  # so that everything is imported
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + ROOM_BYTES, resource.RLIM_INFINITY))
        campaign.grown_bytes = 0
        campaign.run(seed, count, at_once)
        told = {
            "failures": list(campaign.failures.values()), "refused": campaign.refused,
            "grown_bytes": campaign.grown_bytes,
        }  # fmt: skip
        json.dump(told, sys.stdout)
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
