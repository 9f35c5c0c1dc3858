"""A checkpoint of many ranks is read with a few of their seals in memory, and without reading one over and over."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import stillframe
from stillframe.checkpoint import opened
from stillframe.checkpoint.opened import PARSED, RankPart
from stillframe.format import names, records
from stillframe.format.digest import digest
from stillframe.format.records import SealBrief, SealDraft, Segment, encode_manifest, encode_seal, make_manifest
from stillframe.format.segment import BoxOf, Shard, encode_header
from stillframe.format.tree import DictNode, RankBox, ShardedNode, TensorNode, ValueNode
from stillframe.model import CHUNK_BYTES, SaveId
from tests.unit.saved import begun

RANKS = 300
ROWS, TENSORS = 2, 3
SAVE = SaveId(7)


def write_rank(directory: Path, rank: int) -> tuple[SealBrief, str]:
    """Rows of sharded tensors, and a tensor and a value of its own."""
    whole, offset, own = (RANKS * ROWS, 4), (rank * ROWS, 0), (ROWS, 4)
    tensors = [f"w{number}" for number in range(TENSORS)]
    size = ROWS * 4 * 4
    data = b"".join(np.full(own, rank + at / 10, np.float32).tobytes() for at in range(TENSORS + 1))
    shards = [
        Shard(name, "F32", own, at * size, (at + 1) * size, box_of=BoxOf(name, whole, offset))
        for at, name in enumerate(tensors)
    ]
    shards.append(Shard("mine", "F32", own, TENSORS * size, (TENSORS + 1) * size))
    nodes = [ShardedNode(name, "F32", whole, [RankBox(rank, offset, own)]) for name in tensors]
    mine = DictNode([f"rank {rank}"], [DictNode(["tensor", "number"], [TensorNode(TENSORS), ValueNode(0)])])
    draft = SealDraft(
        rank, RANKS, 0.0, records.encode_shards(shards),
        records.encode_tree(DictNode(["model", "mine"], [DictNode(list(tensors), list(nodes)), mine])),
        msgspec.Raw(msgspec.json.encode([rank])), [],
    )  # fmt: skip
    header = encode_header(shards, {})
    segment = Segment(len(header) + len(data), len(header), digest(header), CHUNK_BYTES, [digest(data)])
    seal, brief, known_by = encode_seal(draft, SAVE, None, segment)
    (directory / names.segment(rank)).write_bytes(header + data)
    (directory / names.seal(rank)).write_bytes(seal)
    return brief, known_by


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("many")
    assert begun(root) == SAVE.epoch
    directory = root / names.step_dir(SAVE)
    directory.mkdir()
    seals = [write_rank(directory, rank) for rank in range(RANKS)]
    (directory / names.MANIFEST).write_bytes(encode_manifest(make_manifest(seals, {})))
    return root


def load(root: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = stillframe.load(root)
    return loaded


def reshard(root: Path) -> dict[str, Any]:
    """Onto one rank."""
    state: dict[str, Any] = {
        "model": {f"w{number}": torch.zeros(RANKS * ROWS, 4) for number in range(TENSORS)},
        "mine": {f"rank {rank}": {"tensor": torch.zeros(ROWS, 4), "number": -1} for rank in range(RANKS)},
    }
    assert stillframe.restore(root, state, rank=0, world_size=1).step == SAVE.step
    return state


@pytest.mark.parametrize("read", [load, reshard])
def test_few_seals_are_in_memory_and_none_is_read_often(
    root: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], dict[str, Any]]
) -> None:
    parts: weakref.WeakSet[RankPart] = weakref.WeakSet()
    most, seals = 0, []
    reads: Counter[int] = Counter()
    read_seal = opened._read_seal

    def counting(store: Any, manifest: Any, entry: Any) -> Any:
        reads[entry.rank] += 1
        if entry.rank % 100 == 99:
            seals.append(sum(type(each) is records.Seal for each in gc.get_objects()))
        return read_seal(store, manifest, entry)

    class Counted(RankPart):
        def __init__(self, *args: Any) -> None:
            nonlocal most
            super().__init__(*args)
            parts.add(self)
            most = max(most, len(parts))

    monkeypatch.setattr(opened, "_read_seal", counting)
    monkeypatch.setattr(opened, "RankPart", Counted)
    state = read(root)
    rows = torch.arange(RANKS, dtype=torch.float32).repeat_interleave(ROWS).unsqueeze(1).expand(-1, 4)
    for number in range(TENSORS):
        assert torch.equal(state["model"][f"w{number}"], (rows.double() + number / 10).float())
    for rank in range(RANKS):
        own = state["mine"][f"rank {rank}"]
        assert own["number"] == rank
        assert torch.equal(own["tensor"], torch.full((ROWS, 4), rank + TENSORS / 10))
    readers = 5
    assert most <= PARSED + readers
    assert max(seals) <= PARSED + readers + 1
    assert set(reads.values()) <= {1, 2}
