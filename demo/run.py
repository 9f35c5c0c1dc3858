"""The demo: train a small GPT, kill it in the middle, resume it, and compare it with a run left alone.

    A   a run that saves nothing and is left alone
    B   the same run with a checkpoint at every step, killed with SIGKILL inside a step, and started again
    C   what that costs: a few steps with saves, a few without, in turns (:mod:`demo.turns`)

A and B must end with the same bits in every parameter and all of the optimizer's state; the exit code is 1
if they do not.  Everything is written to runs/demo, which is emptied first.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a script, from anywhere

from demo import show, timeline, turns
from demo.load import OtherLoad
from demo.record import Record, Step, fingerprint
from demo.trainer import Trainer, run_demo

import stillframe

_HOME = Path(__file__).resolve().parent.parent / "runs" / "demo"
_ROOT = _HOME / "checkpoints"
_STEPS = 40


def run(console: Console, title: str, name: str, steps: int, *options: str) -> Record:
    with Trainer(_HOME, name, steps, *options) as trainer, show.Bar(console, title, steps) as bar:
        for line in trainer.lines():
            bar.show(line)
        return trainer.record()


def measure(console: Console) -> show.Cost:
    """In a root of its own."""
    load = OtherLoad()
    options = ("--turns", "--root", str(_HOME / "turns"))
    record = run(console, "C  saving in turns", "turns", turns.STEPS, *options)
    return show.Cost(turns.Overhead(record.steps), load.cores())


def run_until_killed(console: Console, title: str) -> tuple[list[Step], float]:
    """The steps it finished, and when it was killed: at a random moment inside a step near the middle."""
    steps: list[Step] = []
    kill_after = random.randint(_STEPS * 2 // 5, _STEPS // 2)
    killed_s = 0.0
    with Trainer(_HOME, "killed", _STEPS) as trainer, show.Bar(console, title, _STEPS) as bar:
        for line in trainer.lines():
            bar.show(line)
            if isinstance(line, Step):
                steps.append(line)
                if line.step == kill_after:
                    time.sleep(random.uniform(0.1, 0.9) * line.seconds)
                    killed_s = time.monotonic()
                    trainer.kill()
    return steps, killed_s


def compare(console: Console, alone: Record, steps: list[Step]) -> bool:
    """Run A's last state with run B's last checkpoint, and the losses on the way; tells whether all are the same."""
    saved = fingerprint(stillframe.load(_ROOT, _STEPS))
    wrong = show.differences(alone.fingerprint, saved) + show.wrong_losses(alone, steps)
    return show.verdict(console, ["A", "B"], alone, wrong)


def demo(console: Console) -> int:
    alone = run(console, "A  left alone", "alone", _STEPS, "--no-save")
    before, killed_s = run_until_killed(console, "B  saving every step")
    last = before[-1]
    into_s = killed_s - last.begun_s - last.seconds
    console.print(f"   [bold red]SIGKILL[/] {into_s * 1e3:.0f} ms into step {last.step + 1}", highlight=False)
    resumed = run(console, "B  started again", "resumed", _STEPS)
    restored = resumed.started.restored_step
    if restored is None:
        console.print("[bold red]run B found no checkpoint after the kill[/]")
        return 1
    console.print(f"   went on from step {restored}", highlight=False)
    cost = measure(console)
    console.print()
    is_equal = compare(console, alone, before + resumed.steps)
    console.print()
    kill = show.Kill(last.step, restored, resumed.started.restore_s)
    console.print(show.table(alone, before + resumed.steps, resumed, kill, cost))
    picture = _HOME / "timeline.png"
    timeline.draw(resumed, picture)
    console.print(f"\ntimeline: {os.path.relpath(picture)}", highlight=False, soft_wrap=True)
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(run_demo(demo, _HOME, _ROOT))
