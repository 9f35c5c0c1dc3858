"""Every state that a power cut may have left of recorded runs, restored from, and compared with what was promised."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import warnings
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch

import stillframe
from stillframe import spi
from stillframe.format import names
from stillframe.model import SaveId
from stillframe.store.protocol import PARTIAL
from tests.layout import leftovers
from tests.store.crash import Disk, State
from tests.store.recording import Event
from tests.store.support import fast_directory
from tests.support import until
from tests.torture.power_cut import trainee
from tests.torture.power_cut.parse import Note

Saved: TypeAlias = "tuple[int, int]"
"""(life, step)."""
Files: TypeAlias = "tuple[tuple[str, bytes | None], ...]"
"""What a state holds: path and content; ``None``: a directory."""


_HINTS = r"^seen-|\.lock$|^outcomes\.json$"


class Truth:
    """What a restore may give, by what was asked for and told so far."""

    def __init__(self) -> None:
        self.allowed: list[Saved] = []
        """From the newest that was told to be committed on, in the order of the requests."""
        self.is_empty_allowed = True
        self._back: Saved | None = None
        """A run is going back there: it may have happened."""
        self._requested: list[Saved] = []
        self._life = 0
        self._heard: set[tuple[int, str]] = set()

    def hear(self, note: Note) -> None:
        if note.what == "life":
            self._life = max(self._life, note.number)
        elif note.what == "requested":
            save = (self._life, note.number)
            if save not in self._requested:
                self._requested.append(save)
                self.allowed.append(save)
        elif note.what == "committed":
            self._committed(self._newest(note.number))
        elif (self._life, note.what) not in self._heard:  # the first rank has said it
            self._heard.add((self._life, note.what))
            if note.what == "resumed":
                self._resumed(note.number)
            else:
                save = self._newest(note.number)
                self.allowed = [save] if note.what == "rewound" else self.allowed
                self._back = save if note.what == "back" else None

    def _newest(self, step: int) -> Saved:
        return max((save for save in self._requested if save[1] == step), key=self._requested.index)

    def _committed(self, save: Saved) -> None:
        self.is_empty_allowed = False
        if save in self.allowed:
            self.allowed = self.allowed[self.allowed.index(save) :]
        if save[0] == self._life:
            self._back = None

    def _resumed(self, step: int) -> None:
        """What a dead run had asked for beyond this will not be committed any more."""
        kept = self.allowed.index(self._newest(step)) + 1 if step else 0
        self.allowed = self.allowed[:kept]

    def judge(self, found: Saved | None) -> str:
        """``right``, ``lost`` or ``wrong``."""
        if found is None:
            return "right" if self.is_empty_allowed else "lost"
        if found in self.allowed or found == self._back:
            return "right"
        return "lost" if found in self._requested else "wrong"


@dataclass
class Report:
    points: int = 0
    states: int = 0
    distinct: int = 0
    essential: int = 0
    """Those that differ in the files of checkpoints and epochs, not just in hints and unfinished files."""
    runs: int = 0
    """New runs that were started on a state."""
    verdicts: Counter[str] = field(default_factory=Counter)
    """Of distinct states at distinct moments of what was promised."""
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.points} crash points, {self.states} states, {self.distinct} distinct ones restored from "
            f"({self.essential} without hints and unfinished files), {self.runs} new runs on top: "
            f"{self.verdicts['wrong']} wrong, {self.verdicts['lost']} lost"
        )


def replay(
    events: Sequence[Event],
    notes: Iterable[Note],
    *,
    ranks: int = 1,
    limit: int = 20,
    every: int = 1,
    runs: int = 0,
    seed: int = 0,
    most_faults: int = 20,
) -> Report:
    """Cut the power after each event, or ``every`` so many.  It ends early when it has found ``most_faults``.

    ``limit``: about so many states are drawn at each crash point; ``runs``: on so many a new run is started.
    """
    report, truth, chance = Report(), Truth(), random.Random(seed)
    disk = Disk(_HINTS, chance)
    left = deque(sorted(notes, key=lambda note: note.time))
    judge, threads = _Judge(ranks), torch.get_num_threads()
    torch.set_num_threads(1)  # so small tensors are not worth more
    spacing = (len(events) + 1) / runs if runs else 0
    try:
        for time in range(len(events) + 1):
            if time:
                disk.apply(events[time - 1])
            while left and left[0].time <= time:
                truth.hear(left.popleft())
            if time % every:
                continue
            if len(report.faults) >= most_faults:
                break
            states = list(drawn(disk, limit, chance))
            report.points, report.states = report.points + 1, report.states + len(states)
            for state in states:
                found = judge.restore(state)
                verdict = truth.judge(found) if not isinstance(found, str) else "wrong"
                report.verdicts[verdict] += 1
                if verdict != "right":
                    last = [(*event[:4], len(event[4])) for event in events[max(time - 3, 0) : time]]
                    report.faults.append(
                        f"{verdict} after {time} events, the last {last}: {found}, not {truth.allowed}"
                    )
            if runs and report.points * every > report.runs * spacing and not report.faults:
                report.runs += 1
                judge.go_on(chance.choice(states))
    finally:
        judge.close()
        torch.set_num_threads(threads)
    report.distinct, report.essential = len(judge.known), judge.count_essential()
    return report


def drawn(disk: Disk, limit: int, chance: random.Random) -> Iterator[State]:
    """Distinct states: with nothing and with all of what was not fsynced, with each piece lost or kept alone, and any.

    If there are few they are all there.
    """
    found: dict[State, None] = {}
    asked: list[int] = []

    def last(options: list[Any]) -> Any:
        asked.append(len(options))
        return options[-1]

    found[disk.state(last)] = found[disk.state(lambda options: options[0])] = None
    pieces = [at for at, count in enumerate(asked) if count > 1]
    for at in chance.sample(pieces, min(len(pieces), limit // 2)):
        for usual, other in ((-1, 0), (0, -1)):
            numbers = iter(range(1 << 30))
            found[disk.state(lambda options: options[other if next(numbers) == at else usual])] = None  # noqa: B023
    return iter(found | dict.fromkeys(disk.states(limit, chance)))


def files_of(state: State) -> Files:
    return tuple((path, content) for path, _, content in state)


class _Judge:
    """Rebuilds states in memory.  A file is a link to one of a pool: most are in many states."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._place = Path(fast_directory())
        self._pool: dict[bytes, str] = {}
        self.known: dict[Files, Saved | str | None] = {}
        self._whole: set[tuple[SaveId, Files]] = set()
        self._state = trainee.empty_state()
        (self._place / "pool").mkdir()

    def count_essential(self) -> int:
        def is_essential(path: str) -> bool:
            return not re.search(_HINTS, os.path.basename(path)) and not path.endswith((PARTIAL, ".spare"))

        return len({tuple(each for each in files if is_essential(each[0])) for files in self.known})

    def close(self) -> None:
        shutil.rmtree(self._place)

    def restore(self, state: State) -> Saved | str | None:
        """What a restore gives, if it is exactly what was saved; a text if not."""
        files = files_of(state)
        if files not in self.known:
            self._build(files)
            try:
                self.known[files] = self._restore(self._place / "top" / "root", files)
            finally:
                shutil.rmtree(self._place / "top")
        return self.known[files]

    def _restore(self, root: Path, files: Files) -> Saved | str | None:
        for each in self._state.values():
            if isinstance(each, torch.Tensor):
                each.zero_()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", RuntimeWarning)  # a damaged step was passed over
                step = stillframe.restore(root, self._state, rank=0, world_size=1).step
                for save in stillframe.Catalog(root).committed():
                    self._check_whole(root, save, files)
        except (stillframe.StillframeError, RuntimeWarning) as error:
            return f"{type(error).__name__}: {error}"
        if step is None:
            return None
        life = self._state["life"]
        is_same = self._state["step"] == step and _is_same(self._state, life, step, 0)
        return (life, step) if is_same else f"the bits of step {step} are not those that were saved"

    def _check_whole(self, root: Path, save: SaveId, files: Files) -> None:
        """All parts of all ranks, of every checkpoint that is there.  Raises."""
        part = f"root/{names.step_dir(save)}/"
        key = save, tuple(each for each in files if each[0].startswith(part))
        if key in self._whole:
            return
        for rank in range(self._ranks):
            found = spi.load_rank(root, save, rank)
            if not _is_same(found, found["life"], save.step, rank):
                raise stillframe.IntegrityError(f"the bits of {save} are not those that were saved by rank {rank}")
        self._whole.add(key)

    def go_on(self, state: State) -> None:
        """A new run resumes from it, saves, and leaves no leftovers.  Raises ``AssertionError``."""
        found = self.restore(state)
        self._build(files_of(state), is_copied=True)
        root = self._place / "top" / "root"
        try:
            live = trainee.empty_state()
            with stillframe.Checkpointer(root, rank=0, world_size=1, keep=stillframe.KeepLast(2), events=False) as each:
                step = each.restore(live).step
                assert (None if step is None else (live["life"], step)) == found
                each.save((step or 0) + 1, live)
            assert stillframe.Catalog(root).latest() == (step or 0) + 1
            with contextlib.suppress(AssertionError):  # close() does not wait for a keeper that only tidies up
                until(lambda: not _strange(root), "nothing is left over", 10)
            assert _strange(root) == [], f"{_strange(root)} left over after a new run on {found}"
        finally:
            shutil.rmtree(self._place / "top")

    def _build(self, files: Files, is_copied: bool = False) -> None:
        (self._place / "top").mkdir()
        for path, content in files:
            place = f"{self._place}/top/{path}"
            if content is None:
                os.mkdir(place)
            elif is_copied:
                Path(place).write_bytes(content)
            else:
                if content not in self._pool:
                    self._pool[content] = f"{self._place}/pool/{len(self._pool)}"
                    Path(self._pool[content]).write_bytes(content)
                os.link(self._pool[content], place)


def _strange(root: Path) -> list[str]:
    """Leftovers, but for a whole checkpoint that is set aside: who did so may only be paused, so it stays for a day."""
    whole = {
        each.parent.name for each in root.glob(f"step-*/{names.aside()}") if (each.parent / names.MANIFEST).exists()
    }
    return [each for each in leftovers(root) if Path(each).parent.name not in whole]


def _is_same(state: dict[str, Any], life: int, step: int, rank: int) -> bool:
    expected = {**trainee.values(life, step, rank), "sharded": trainee.whole(life, step)}
    return all(torch.equal(state[name].view(torch.uint8), each.view(torch.uint8)) for name, each in expected.items())
