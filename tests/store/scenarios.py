"""Short sequences of verbs of two clients, for the replay of crashes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from tests.store.recording import BLOCK, Scenario
from tests.store.support import SPARE

Ops = Sequence[tuple[Any, ...]]
A, B, C = b"A" * 700, b"B" * (BLOCK + 700), b"C" * (2 * BLOCK)
EMPTY = b""

IN_TURN: dict[str, Ops] = {
    "one key": [
        (0, "put", "x", A), (1, "put", "x", B), (0, "delete", "x"), (1, "put_new", "x", C), (0, "put_new", "x", A),
    ],
    "an empty value": [(0, "put", "x", EMPTY), (1, "put", "x", A), (0, "put", "x", EMPTY), (1, "delete", "x")],
    "the other made the directory": [
        (0, "hint", "d/hint", A), (1, "put", "d/x", B), (0, "put", "d/y", A), (1, "delete", "d/x", b"", "d/y"),
        (1, "delete", "d/hint"), (0, "put", "d/x", C),
    ],
    "removed and made again": [
        (0, "put", "d/x", A), (1, "delete", "d/x"), (0, "put", "d/x", B), (1, "put_new", "d/y", A),
    ],
    "deep": [
        (0, "put", "d/e/x", A), (1, "put_new", "d/e/y", B), (0, "delete", "d/e/x", b"", "d/e/y"), (1, "put", "d/z", A),
    ],
    "blobs": [(0, "write", "d/x", C + A), (1, "write", "d/x", B), (0, "abort", "d/x", A), (1, "delete", "d/x")],
    "a hint that is claimed": [(0, "hint", "x", A), (1, "put_new", "x", A), (0, "put", "y", B), (0, "put_new", "y", B)],
    "adopted": [(0, "put", "d/s", A), (1, "adopt", "d/x", A, "d/s"), (0, "put", "d/s", B)],
    "linked": [(0, "put", "d/x", A), (1, "link", "d/x", A, "e/y"), (0, "put", "e/z", B)],
    "renamed": [(0, "put", "d/x", A), (0, "put", "e/z", B), (1, "rename", "d/x", A, "e/y"), (0, "put", "e/y", B)],
}  # fmt: skip
WITH_SPARE: dict[str, Ops] = {
    "written over": [
        (0, "write", "d/x", C), (0, "write", "d/y", B), (0, "delete", "d/x"), (1, "write", "d/z", B + A),
        (0, "delete", "d/z"), (1, "write", "x", C), (0, "put", "x", A),
    ],
}  # fmt: skip
AT_ONCE: dict[str, Ops] = {
    "put and put": [(0, "put", "d/x", A), (1, "put", "d/x", B), (1, "put", "d/y", A)],
    "equal claims": [(0, "put_new", "d/x", B), (1, "put_new", "d/x", B), (1, "put", "d/y", A)],
    "other claims": [(0, "put_new", "x", A), (1, "put_new", "x", B), (0, "put", "y", A)],
    "put and claim": [(0, "put", "x", A), (0, "put", "x", B), (1, "put_new", "x", B), (1, "put_new", "x", A)],
    "put and delete": [(0, "put", "d/x", A), (0, "put", "d/x", B), (1, "delete", "d/x"), (1, "delete", "d/x")],
    "a new directory": [(0, "put", "d/e/x", A), (1, "put", "d/e/y", A), (0, "delete", "d/e/x"), (1, "delete", "d/e/y")],
}  # fmt: skip
SEEN: Ops = [(1, "put", "d/x", B), (0, "put_new", "d/y", C)]
"""The claim sees a put that has not returned yet."""
AT_ONCE_WITH_SPARE: dict[str, Ops] = {
    "removed and taken": [(0, "write", "d/x", C), (0, "delete", "d/x"), (1, "write", "y", B), (1, "write", "y", C)],
}  # fmt: skip


def scenarios(seeds: int, step: int = 1) -> dict[str, Scenario]:
    """Those in turn; those at once, where either client stops once for the other, at every ``step``-th system call, and
    where both do so some times, at random."""
    found = {name: Scenario(ops) for name, ops in IN_TURN.items()}
    found |= {name: Scenario(ops, spare=SPARE) for name, ops in WITH_SPARE.items()}
    found["no links"] = Scenario(IN_TURN["one key"], has_links=False)
    found |= {f"seen {calls}": Scenario(SEEN, (0, calls)) for calls in range(15, 30)}
    for switches in [*_stops(step), *(_switches(random.Random(seed)) for seed in range(seeds))]:
        found |= {f"{name} {switches}": Scenario(ops, switches) for name, ops in AT_ONCE.items()}
        found |= {
            f"{name} {switches}": Scenario(ops, switches, spare=SPARE) for name, ops in AT_ONCE_WITH_SPARE.items()
        }
        found[f"no links {switches}"] = Scenario(AT_ONCE["other claims"], switches, has_links=False)
    return found


def _stops(step: int) -> list[tuple[int, ...]]:
    return [(*before, calls) for calls in range(0, 60, step) for before in ((), (0,))]


def _switches(chance: random.Random) -> tuple[int, ...]:
    longest = chance.choice([3, 10, 30])
    return tuple(chance.randrange(longest) for _ in range(90 // longest))


def random_scenario(seed: int) -> Scenario:
    """Any seven operations; every second one of two clients at once."""
    chance = random.Random(seed)
    ops = [
        (
            chance.randrange(2),
            chance.choice(["put", "put", "put_new", "write", "write", "delete", "delete", "hint", "abort"]),
            chance.choice(["x", "d/x", "d/y"]),
            bytes([65 + number]) * chance.choice([0, 700, BLOCK + 700, 2 * BLOCK]),
        )
        for number in range(7)
    ]
    return Scenario(
        [*ops, (0, "put", "d/x", b"0"), (1, "put", "x", b"1")],
        _switches(chance) if seed % 2 else (),
        has_links=chance.random() < 0.8,
        spare=chance.choice(["", SPARE]),
    )
