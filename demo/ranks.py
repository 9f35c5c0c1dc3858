"""The demo on ranks: train a GPT sharded over 2 ranks, kill one of them, and restore the result on 1.

    A   2 ranks with FSDP2 that save nothing and are left alone
    B   the same with a checkpoint at every step; rank 1 is killed with SIGKILL inside a step, and torchrun
        starts both again
    C   the last checkpoint of B in a plain model: one process, no shards

All three must have the same bits in every parameter and all of the optimizer's state, and A and B also in what
each rank has for itself; the exit code is 1 if they do not.  Everything is written to runs/demo-ranks, which is
emptied first.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a script, from anywhere

from demo import show
from demo.gpt import GPT
from demo.ranks_train import SIZES, make_state, rank_fingerprint, unseen_loss
from demo.record import Record, Started, Step, fingerprint
from demo.trainer import Trainer, run_demo

import stillframe
from stillframe.units import format_bytes

_HOME = Path(__file__).resolve().parent.parent / "runs" / "demo-ranks"
_ROOT = _HOME / "checkpoints"
_STEPS = 160
_RANKS = 2
_KILLED_RANK = 1
_TORCHRUN = (
    sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(_RANKS),
    "--max-restarts", "1", "--monitor-interval", "0.1", str(Path(__file__).resolve().parent / "ranks_train.py"),
)  # fmt: skip
_PROMPT = "The "
_WRITTEN_BYTES = 150


@dataclass(frozen=True, slots=True)
class Killed:
    """Run B: what was told before and after a rank was killed."""

    before: list[Step]
    killed_s: float
    record: Record
    """Of the ranks that were started again."""

    @property
    def steps(self) -> list[Step]:
        return self.before + self.record.steps


@dataclass(frozen=True, slots=True)
class Restored:
    """Run C."""

    seconds: float
    fingerprint: dict[str, str]
    unseen_loss: float
    text: str


def run_alone(console: Console) -> Record:
    with Trainer(_HOME, "alone", _STEPS, "--no-save", command=_TORCHRUN) as trainer:
        with show.Bar(console, "A  left alone", _STEPS) as bar:
            for line in trainer.lines():
                bar.show(line)
        return trainer.record()


def run_killed(console: Console) -> Killed:
    """One torchrun, and a rank of it killed on the way."""
    with Trainer(_HOME, "killed", _STEPS, command=_TORCHRUN) as trainer:
        lines = trainer.lines()
        before, killed_s = run_until_killed(console, lines)
        into_s = killed_s - before[-1].begun_s - before[-1].seconds
        console.print(
            f"   [bold red]SIGKILL[/] to rank {_KILLED_RANK}, {into_s * 1e3:.0f} ms into step {before[-1].step + 1}; "
            "torchrun starts both ranks again",
            highlight=False,
        )
        has_restarted = False
        with show.Bar(console, "B  started again", _STEPS) as bar:
            for line in lines:
                has_restarted = has_restarted or isinstance(line, Started)
                if has_restarted:
                    bar.show(line)
                elif isinstance(line, Step):  # the other rank was already past its last word with the killed one
                    before.append(line)
        return Killed(before, killed_s, trainer.record())


def run_until_killed(console: Console, lines: Iterator[Started | Step]) -> tuple[list[Step], float]:
    """The steps told, and when the rank was killed: at a random moment inside a step near the middle."""
    steps: list[Step] = []
    pids: dict[int, int] = {}
    kill_after = random.randint(_STEPS * 2 // 5, _STEPS * 3 // 5)
    with show.Bar(console, "B  saving every step", _STEPS) as bar:
        for line in lines:
            bar.show(line)
            if isinstance(line, Started):
                pids[line.rank] = line.pid
                continue
            steps.append(line)
            if line.step == kill_after:
                time.sleep(random.uniform(0.1, 0.9) * line.seconds)
                os.kill(pids[_KILLED_RANK], signal.SIGKILL)
                break
    return steps, time.monotonic()


def restore_on_one() -> Restored:
    """The last checkpoint in a plain model of this process."""
    torch.set_num_threads(1)  # as the ranks: the same order of sums
    state = make_state(_STEPS)
    began_s = time.monotonic()
    with stillframe.Checkpointer(_ROOT) as checkpointer:
        checkpointer.restore(state, step=_STEPS)
    seconds = time.monotonic() - began_s
    assert isinstance(state.model, GPT)
    return Restored(seconds, rank_fingerprint(0, state), unseen_loss(state.model), write(state.model))


def write(model: GPT) -> str:
    """A little text, each byte drawn as the model finds it likely."""
    dice = torch.Generator().manual_seed(0)
    text = torch.tensor([list(_PROMPT.encode())])
    model.eval()
    with torch.no_grad():
        for _ in range(_WRITTEN_BYTES):
            likely = (model.scores(text[:, -SIZES.context :])[:, -1] / 0.5).softmax(dim=1)
            text = torch.cat([text, torch.multinomial(likely, 1, generator=dice)], dim=1)
    return bytes(text[0].tolist()).decode(errors="replace")


def compare_ranks(console: Console, alone: Record, killed: Killed) -> bool:
    """A's last state on each rank with B's last checkpoint, and the losses on the way; tells whether all agree."""
    saved = fingerprint({f"rank {rank}": stillframe.load(_ROOT, _STEPS, rank=rank) for rank in range(_RANKS)})
    wrong = show.differences(alone.fingerprint, saved) + show.wrong_losses(alone, killed.steps)
    return show.verdict(console, ["A", "B"], alone, wrong)


def compare_one(console: Console, alone: Record, one: Restored) -> bool:
    """A's last state as rank 0 had it with what one process restored, and how well both know unseen text."""
    expected = {path: leaf for path, leaf in alone.fingerprint.items() if path.startswith("rank 0/")}
    wrong = show.differences(expected, one.fingerprint)
    if one.unseen_loss != alone.unseen_loss:
        wrong.append(f"the loss on unseen text: {alone.unseen_loss} and {one.unseen_loss}")
    if wrong:
        return show.verdict(console, ["A", "C"], alone, wrong)
    console.print(
        "[bold green]A = C, bit for bit[/]: the same state, whole, in one process; its loss on\n"
        f"unseen text is {one.unseen_loss:.9g}, the same to the last bit, and it writes:",
        highlight=False,
    )
    console.print(Padding(Text(f"{one.text} …", style="italic"), (0, 3)))
    return True


def table(killed: Killed, one: Restored) -> Table:
    """The figures."""
    record = killed.record
    commits_s = [save.times.committed_s - save.times.requested_s for save in record.saves if save.times.committed_s]
    blocked_s = statistics.median(step.blocked_s for step in killed.steps)
    with stillframe.Catalog(_ROOT).open(_STEPS) as checkpoint:
        segments = [entry.segment_bytes for entry in checkpoint.manifest.ranks]
    back_s = record.steps[0].begun_s - killed.killed_s

    rows = Table(title="a checkpoint at every step", title_justify="left", show_header=False, pad_edge=False)
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column(justify="right", no_wrap=True)
    rows.add_column()
    rows.add_row("blocked per save, median", show.ms(blocked_s), "in save() and at the fence, on rank 0")
    rows.add_row("time to commit, median", show.ms(statistics.median(commits_s)), "until it is durable on every rank")
    each = " + ".join(map(format_bytes, segments))
    rows.add_row("size of a checkpoint", format_bytes(sum(segments)), f"{each}: a segment of each rank")
    rows.add_section()
    rows.add_row("from SIGKILL to training", f"{back_s:.1f} s", "torchrun starts both again, they restore")
    rows.add_row(f"time to restore, {_RANKS} ranks", show.ms(record.started.restore_s), "after the SIGKILL, on rank 0")
    rows.add_row("time to restore, 1 rank", show.ms(one.seconds), "shards put together")
    return rows


def demo(console: Console) -> int:
    console.print(f"a GPT sharded over {_RANKS} ranks with FSDP2, under torchrun", highlight=False)
    alone = run_alone(console)
    killed = run_killed(console)
    restored = killed.record.started.restored_step
    if restored is None:
        console.print("[bold red]run B found no checkpoint after the kill[/]")
        return 1
    console.print(f"   both ranks went on from step {restored}", highlight=False)
    with console.status("C  restoring on 1 rank"):
        one = restore_on_one()
    console.print("C  restored on 1 rank  a plain model in this process, no shards\n", highlight=False)
    is_equal = all([compare_ranks(console, alone, killed), compare_one(console, alone, one)])
    console.print()
    console.print(table(killed, one))
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(run_demo(demo, _HOME, _ROOT))
