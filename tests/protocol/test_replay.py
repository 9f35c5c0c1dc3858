"""The protocol: whatever happens to a writer's operations, every promise holds in every state of the store.

The keepers are real; the store is in memory.
"""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Iterator

from tests.protocol.scenarios import SCENES, Scene, events, new_judge, pauses, play
from tests.protocol.truth import Broken, Judge
from tests.protocol.world import Event


def plans(scene: Scene, every: int = 1, first: int = 0, is_brief: bool = False) -> Iterator[dict[int, Event]]:
    """One thing that happens at one operation; at each ``every``-th of them.  ``is_brief``: only at changes."""
    ops = play(scene, {}, new_judge(), is_after=False).ops
    for number in range(first, len(ops), every):
        if is_brief and not ops[number].changes:
            continue
        for event in events(ops[number], scene.lands_late, scene.watched.world_size):
            yield {number: event}
        yield from pauses(ops[number], number, scene.lands_late)


def replay(scene: Scene, every: int, first: int, judge: Judge) -> int:
    count = 0
    for plan in plans(scene, every, first):
        count += 1
        try:
            play(scene, plan, judge)
        except Broken as error:
            raise AssertionError(f"{plan}: {error}") from error
    return count


def test_every_state_keeps_the_promises() -> None:
    judge, began, lives = new_judge(), time.monotonic(), 0
    for name, scene in SCENES.items():
        lives += replay(scene, 797 if scene.is_long else 197, zlib.crc32(name.encode()) % 31, judge)
    took = f"{time.monotonic() - began:.1f} s"
    sys.stdout.write(f"{lives} lives, {judge.count} different states, {judge.checks} looks, {took}\n")
    assert judge.count >= 2_000
