"""One mutation of one file of a root: bytes changed at random, or a meaning changed and the checksums made right."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stillframe.format import names
from stillframe.format.digest import digest

NEWEST = "step-000000000003-e0003"
"""What most operations read."""

ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 255, 4096, 2**31, 2**40, 2**62, 2**63, 2**64, 2**80, -(2**63), 0.5, -1.0, 1e308,
    5e-324, "", "x", "../../etc/passwd", "/", "\x00", "F32", "BOOL", "F8_E4M3", "C64", "é" * 40, "0" * 32, "tensor",
    "sharded", "list", "dict", "array", "value", "x" * 100_000, [], [0], [-1], [2**40, 2**40], [0] * 70, [[]], {},
    {"$": "tuple", "items": []}, {"$": "enum", "type": "enum:Enum", "name": "x"},
    {"$": "numpy", "dtype": "<f4", "data": ""}, {"$": "float", "bits": "7ff8000000000000"},
    {"kind": "tensor", "shard": 0}, {"kind": "list", "items": []},
    {"kind": "sharded", "tensor": "box", "dtype": "F32", "shape": [2**30, 2**30], "parts": []},
    {"dtype": "F32", "shape": [2**30, 2**30], "stride": [0, 0], "offset": 0},
    {"step": 1, "epoch": 1, "attempt": 1}, {"rank": 0, "offset": [0, 0], "shape": [6, 10]},
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


SHARP = {"shape", "stride", "offset", "start", "end", "dtype", "view", "whole", "parts", "tensor", "shard", "lineage"}
"""Keys whose values say how much there is, and where."""


def mutate_value(rng: random.Random, top: Any) -> str:
    """Change one thing in nested JSON values; tells what."""
    every = list(places(top))
    sharp = [path for path in every if SHARP.intersection(map(str, path[-2:]))]
    path = rng.choice(sharp if sharp and rng.random() < 0.5 else every)
    within = top
    for key in path[:-1]:
        within = within[key]
    key, old = path[-1], within[path[-1]]
    kind = rng.choice(["odd", "odd", "odd", "near", "gone", "twice", "deep", "moved"])
    if kind == "near" and isinstance(old, int) and not isinstance(old, bool):
        within[key] = old + rng.choice([-1, 1, 8, 4096, -4096, 10**6]) if rng.random() < 0.8 else old * 2**30
    elif kind == "gone":
        del within[key]
    elif kind == "twice" and isinstance(within, list):
        often = [1, 3, 2000] if len(str(old)) < 1000 else [1]  # the mutant itself is to take little memory
        within[key:key] = [copy.deepcopy(old)] * rng.choice(often)
    elif kind == "deep":
        for _ in range(rng.choice([3, 120, 400])):
            old = [old] if rng.random() < 0.5 else {"kind": "list", "items": [old]}
        within[key] = old
    elif kind == "moved":
        other = rng.choice(list(places(top)))
        found = top
        for each in other:
            found = found[each]
        within[key] = copy.deepcopy(found)
    else:
        within[key] = copy.deepcopy(rng.choice(ODD))
    return f"{kind} at {'/'.join(map(str, path))}"


def mutate_bytes(rng: random.Random, data: bytes, others: list[bytes]) -> tuple[bytes, str]:
    kind = rng.choice(["flip", "flip", "byte", "cut", "tail", "insert", "repeat", "empty", "swap", "junk", "grow"])
    at, end = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
    changed = bytearray(data)
    if kind == "flip" and data:
        for _ in range(rng.choice([1, 1, 8, 100])):
            changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == "byte" and data:
        changed[rng.randrange(len(data))] = rng.choice(b'\x00\xff"{}[],:0-9\\\n ')
    elif kind == "cut":
        del changed[at:end]
    elif kind == "tail":
        del changed[at:]
    elif kind == "insert":
        changed[at:at] = rng.choice(
            [b"\x00" * 5000, b"[" * 20_000, b'{"a":' * 20_000, b"9" * 5000, b"\xff\xfe", b" \n"]
        )
    elif kind == "repeat":
        changed[at:at] = data[at:end]
    elif kind == "empty":
        changed.clear()
    elif kind == "swap":
        changed = bytearray(rng.choice(others))
    elif kind == "junk":
        changed[at:end] = rng.randbytes(end - at)
    else:
        changed += bytes(rng.choice([1, 4096, 300_000]))
    return bytes(changed), f"{kind} at {at}-{end}"


class Mutator:
    """Writes a mutant into a root, and takes it back."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files = {path: path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}
        small = [data for data in self._files.values() if len(data) < 100_000]
        self._small = small
        self._records = [path for path in self._files if path.suffix == ".json" and path.name != names.PIN]
        self._weights = {path: 8 if NEWEST in str(path) else 1 for path in self._files}

    def write(self, rng: random.Random) -> tuple[str, bool]:
        """What was done, and whether checksums were made right again."""
        is_forged = rng.random() < 0.6
        among = self._records if is_forged else list(self._files)
        path = rng.choices(among, [self._weights[each] for each in among])[0]
        try:
            done = self._forge(rng, path) if is_forged else self._damage(rng, path)
        except (RecursionError, MemoryError):  # nested deeper than json itself can write, or grown by several changes
            self.take_back()
            done, is_forged = self._damage(rng, path), False
        return f"{path.relative_to(self._root)}: {done}", is_forged

    def take_back(self) -> None:
        for path, data in self._files.items():
            if not path.is_file() or path.stat().st_size != len(data) or path.read_bytes() != data:
                path.write_bytes(data)

    def _damage(self, rng: random.Random, path: Path) -> str:
        data, done = mutate_bytes(rng, self._files[path], self._small)
        path.write_bytes(data)
        return done

    def _forge(self, rng: random.Random, path: Path) -> str:
        record = json.loads(self._files[path])
        done = [mutate_value(rng, record["body"] if rng.random() < 0.9 else record)]
        while rng.random() < 0.3:
            with contextlib.suppress(IndexError, KeyError, TypeError):
                done.append(mutate_value(rng, record["body"]))
        if path.name.startswith("seal") and rng.random() < 0.8:
            self._agree(rng, record, path)
        known_by = self._write(path, record)
        if path.name.startswith("seal") and rng.random() < 0.95:
            manifest = json.loads(self._files[path.parent / names.MANIFEST])
            manifest["body"]["ranks"][0]["seal_digest"] = known_by
            with contextlib.suppress(KeyError, TypeError):
                manifest["body"]["ranks"][0]["segment_bytes"] = record["body"]["segment"]["bytes"]
            self._write(path.parent / names.MANIFEST, manifest)
        return ", ".join(done)

    def _agree(self, rng: random.Random, record: dict[str, Any], path: Path) -> None:
        """The brief says what the body says, and the segment's header may be changed, too."""
        body: dict[str, Any] = record.get("body", {})
        with contextlib.suppress(KeyError, TypeError):
            brief = {key: body[key] for key in record["brief"] if key != "segment_bytes"}
            record["brief"] = {**brief, "segment_bytes": body["segment"]["bytes"]}
        if rng.random() < 0.1:
            segment = path.parent / names.segment(0)
            data = bytearray(self._files[segment])
            data[:8] = struct.pack("<Q", rng.choice([0, 1, 4088, 2**31, 2**63, 2**64 - 1]))
            segment.write_bytes(data)
            with contextlib.suppress(KeyError, TypeError):
                body["segment"]["header"] = digest(data[: body["segment"]["data_start"]])

    def _write(self, path: Path, record: dict[str, Any]) -> str:
        body = json.dumps(record.get("body")).encode()
        if "xxh3_128" in record:
            record = {**record, "xxh3_128": digest(body)}
        path.write_bytes(json.dumps(record).encode())
        return digest(body)
