"""What was written once stays readable; what is written now has exactly these bytes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors import safe_open

import stillframe
from stillframe import Catalog, Checkpointer
from stillframe.format import records
from stillframe.format.records import Manifest, RankEntry, SealBrief, SealDraft, Segment, Team
from stillframe.format.segment import BoxOf, Shard, encode_header
from stillframe.format.tree import (
    ArrayNode,
    DictNode,
    LeafNode,
    ListNode,
    ObjectNode,
    RankBox,
    ShardedNode,
    TensorNode,
    TupleNode,
    ValueNode,
    View,
)
from tests.golden import make
from tests.property.exact import exact
from tests.support import run_child

STEP_DIR = make.ROOT / "step-000000001234"
(SEGMENT,) = STEP_DIR.glob("*.safetensors")
(SEAL,) = STEP_DIR.glob("*.seal.json")


def comparable(state: dict[str, Any]) -> Any:
    """The golden state with its one leaf taken apart."""
    point = state["leaf"]
    return exact({**state, "leaf": [type(point).__name__, point.name, point.at]})


def test_the_golden_checkpoint_loads_exactly() -> None:
    assert comparable(stillframe.load(make.ROOT)) == comparable(make.loaded_state())


def test_its_tied_tensors_are_tied_again() -> None:
    tied = stillframe.load(make.ROOT, only="tied")["tied"]
    tied["transposed"][3, 2] = -1.0
    assert tied["weight"][2, 3] == tied["again"][2, 3] == tied["part"][0, 3] == -1.0


def test_its_step_is_found() -> None:
    assert Catalog(make.ROOT).steps() == [make.STEP]


def test_it_is_restored_in_place(tmp_path: Path) -> None:
    shutil.copytree(make.ROOT, tmp_path / "root")
    live = {"strided": torch.zeros(34, dtype=torch.int16), "values": {}, "names": {}}
    with Checkpointer(tmp_path / "root") as checkpointer:
        assert checkpointer.restore(live, strict=False) == make.STEP
    assert exact(live["strided"]) == exact(make.saved_state()["strided"])


def test_the_segment_opens_with_safetensors() -> None:
    state = make.saved_state()
    with safe_open(SEGMENT, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "stillframe": "1"}
        for dtype in make.DTYPES:
            assert exact(file.get_tensor(f"dtypes/{dtype}")) == exact(state["dtypes"][str(dtype)])
        assert exact(file.get_tensor("tied/weight")) == exact(state["tied"]["weight"])
        assert exact(file.get_tensor("conjugate")) == exact(state["conjugate"])
        assert file.get_slice("shapes/2").get_shape() == [2, 3, 4]


def test_the_segment_opens_where_stillframe_is_not_loaded() -> None:
    code = (
        "import sys; from safetensors import safe_open; file = safe_open(sys.argv[1], framework='np');"
        "print(file.get_tensor('array').tolist()); assert 'stillframe' not in sys.modules"
    )
    assert json.loads(run_child(code, SEGMENT)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


@pytest.fixture(scope="module")
def written_now(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("golden") / "v1"
    make.write(root)
    return root / STEP_DIR.name


def test_the_segment_written_now_has_the_same_bytes(written_now: Path) -> None:
    (segment,) = written_now.glob("*.safetensors")
    assert segment.read_bytes() == SEGMENT.read_bytes()


def test_the_seal_written_now_has_the_same_body_but_for_the_attempt(written_now: Path) -> None:
    (seal,) = written_now.glob("*.seal.json")
    bodies = [json.loads(path.read_bytes())["body"] for path in (seal, SEAL)]
    for body in bodies:
        assert body["segment"].pop("file") == f"rank-00000-{body.pop('attempt')}.safetensors"
    assert bodies[0].pop("teams") == []  # new in version 2, as is "whole"
    assert [shard.pop("whole") for shard in bodies[0]["shards"]] == [None] * len(bodies[0]["shards"])
    assert bodies[0] == bodies[1]


# --- exact bytes ---------------------------------------------------------------------------

SHARDS = [Shard("m/w", "F32", (2, 3), 0, 24, "cuda", BoxOf("m/w", (4, 3), (2, 0))), Shard("é", "BOOL", (), 24, 25)]
TREE = DictNode(
    ["a", 7, {"$": "tuple", "items": [1, 2]}, "s"],
    [
        ObjectNode("torch.nn.Linear", DictNode(["w"], [TensorNode(0)], is_ordered=True)),
        ListNode([TensorNode(1), TensorNode(0, View("F32", (3,), (2,), 1)), ArrayNode(1, "|b1")]),
        LeafNode("point", TupleNode([ValueNode(0)])),
        ShardedNode("m/w", "F32", (4, 3), [RankBox(0, (2, 0), (2, 3))]),
    ],
)
ZEROS = "0" * 32
GOLDEN_SEAL = (
    '{"stillframe":2,"kind":"seal","xxh3_128":"19660344844dd94cdbcc4b7d1ac87b28",'
    '"brief":{"step":7,"rank":0,"world_size":1,"attempt":"0123abcd","segment_bytes":4121,"teams":[{'
    '"ranks":"00000000000000000000000000000000","size":2,"tensors":"00000000000000000000000000000000"}]},"body":{'
    '"step":7,"rank":0,"world_size":1,"attempt":"0123abcd",'
    '"shards":[{"name":"m/w","dtype":"F32","shape":[2,3],"start":0,"end":24,"device":"cuda",'
    '"whole":{"tensor":"m/w","shape":[4,3],"offset":[2,0]}},'
    '{"name":"é","dtype":"BOOL","shape":[],"start":24,"end":25,"device":"cpu","whole":null}],'
    '"tree":{"kind":"dict","keys":["a",7,{"$":"tuple","items":[1,2]},"s"],"items":['
    '{"kind":"object","type":"torch.nn.Linear","item":{"kind":"dict","keys":["w"],'
    '"items":[{"kind":"tensor","shard":0,"view":null}],"is_ordered":true}},'
    '{"kind":"list","items":[{"kind":"tensor","shard":1,"view":null},'
    '{"kind":"tensor","shard":0,"view":{"dtype":"F32","shape":[3],"stride":[2],"offset":1}},'
    '{"kind":"array","shard":1,"dtype":"|b1"}]},'
    '{"kind":"leaf","name":"point","item":{"kind":"tuple","items":[{"kind":"value","value":0}]}},'
    '{"kind":"sharded","tensor":"m/w","dtype":"F32","shape":[4,3],"parts":[{"rank":0,"offset":[2,0],"shape":[2,3]}]}],'
    '"is_ordered":false},'
    '"values":[{"$":"float","bits":"7ff8000000000000"}],'
    '"teams":[{"ranks":"00000000000000000000000000000000","size":2,"tensors":"00000000000000000000000000000000"}],'
    '"segment":{"file":"rank-00000-0123abcd.safetensors","bytes":4121,"data_start":4096,'
    '"header":"00000000000000000000000000000000","chunk_bytes":16777216,'
    '"chunks":["00000000000000000000000000000000"]}}}\n'
)
GOLDEN_MANIFEST = (
    '{"stillframe":2,"kind":"manifest","xxh3_128":"d1a892968abb78a38f38c2b6043ff31a","body":{'
    '"step":7,"attempt":"0123abcd","world_size":1,"created_unix_s":1700000000.5,"stage_s":0.25,"commit_s":1.5,'
    '"ranks":[{"rank":0,"segment":"rank-00000-0123abcd.safetensors","segment_bytes":4121,'
    '"seal":"rank-00000-0123abcd.seal.json","seal_digest":"00000000000000000000000000000000"}],"seal_s":0.75,"rank":null}}\n'
)


def test_a_header_has_exactly_these_bytes() -> None:
    header = encode_header(SHARDS, {"stillframe": "1"})
    text = (
        '{"__metadata__":{"format":"pt","stillframe":"1"},'
        '"m/w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},'
        '"é":{"dtype":"BOOL","shape":[],"data_offsets":[24,25]}}'
    ).encode()
    assert header == b"\xf8\x0f\x00\x00\x00\x00\x00\x00" + text + b" " * (4096 - 8 - len(text))


def test_a_seal_has_exactly_these_bytes() -> None:
    draft = SealDraft(
        step=7,
        rank=0,
        world_size=1,
        attempt="0123abcd",
        shards=records.encode_shards(SHARDS),
        tree=records.encode_tree(TREE),
        values=msgspec.Raw(b'[{"$":"float","bits":"7ff8000000000000"}]'),
        teams=[Team(ZEROS, 2, ZEROS)],
    )
    segment = Segment("rank-00000-0123abcd.safetensors", 4121, 4096, ZEROS, 16777216, [ZEROS])
    data, known_by = records.encode_seal(draft, segment)
    assert data.decode() == GOLDEN_SEAL
    assert f'"xxh3_128":"{known_by}"' in GOLDEN_SEAL
    assert records.decode_seal_head(data[:400], file="f") == (
        SealBrief(7, 0, 1, "0123abcd", 4121, draft.teams),
        known_by,
    )


def test_a_manifest_has_exactly_these_bytes() -> None:
    entry = RankEntry(0, "rank-00000-0123abcd.safetensors", 4121, "rank-00000-0123abcd.seal.json", ZEROS)
    manifest = Manifest(7, "0123abcd", 1, 1700000000.5, 0.25, 1.5, [entry], 0.75)
    assert records.encode_manifest(manifest).decode() == GOLDEN_MANIFEST
