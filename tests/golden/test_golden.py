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
from stillframe.format import epochs, records
from stillframe.format.layout import Layout
from stillframe.format.records import Manifest, RankEntry, SealBrief, SealDraft, Segment, Team
from stillframe.format.segment import BoxOf, Shard, encode_header
from stillframe.format.tree import (
    ArrayNode,
    DictNode,
    LeafNode,
    ListNode,
    ObjectNode,
    PartBox,
    PartOf,
    RankBox,
    ShardedNode,
    TensorNode,
    TupleNode,
    ValueNode,
    View,
    WrapperNode,
    structure_of,
)
from stillframe.lineage import Branch, Row
from stillframe.model import SaveId
from tests.golden import make
from tests.property.exact import exact
from tests.support import run_fresh

SAVE = SaveId(make.STEP)
STEP_DIR = make.ROOT / "step-000000001234-e0001-1"
SEGMENT = STEP_DIR / "rank-00000.safetensors"
SEAL = STEP_DIR / "seal-00000.json"
MANIFEST = STEP_DIR / "manifest.json"


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
    assert Catalog(make.ROOT).look().branch == Branch(1)


def test_its_step_is_found_where_the_files_of_the_run_are_lost(tmp_path: Path) -> None:
    shutil.copytree(STEP_DIR, tmp_path / STEP_DIR.name)
    assert Catalog(tmp_path).steps() == [make.STEP]
    assert Catalog(tmp_path).look().branch == Branch(1)


def test_its_metadata_is_told() -> None:
    assert Catalog(make.ROOT).manifest(SAVE).metadata == make.METADATA


def test_its_manifest_can_be_made_again_from_the_seals() -> None:
    """It holds nothing but what they say, so whoever publishes it publishes the same bytes."""
    seal, known_by = records.decode_seal(SEAL.read_bytes(), file="f")
    manifest = records.make_manifest([(seal.brief, known_by)], seal.metadata)
    assert records.encode_manifest(manifest) == MANIFEST.read_bytes()


def test_its_seal_can_be_made_again_from_what_it_says() -> None:
    seal, known_by = records.decode_seal(SEAL.read_bytes(), file="f")
    draft = SealDraft(
        seal.rank, seal.world_size, seal.saved_unix_s, records.encode_shards(seal.shards),
        records.encode_tree(seal.tree), msgspec.Raw(msgspec.json.encode(seal.values)), seal.teams, seal.metadata,
        seal.updates, seal.layouts, seal.structure,
    )  # fmt: skip
    assert records.encode_seal(draft, seal.save, seal.parent, seal.segment) == (SEAL.read_bytes(), seal.brief, known_by)


def test_it_is_restored_in_place(tmp_path: Path) -> None:
    shutil.copytree(make.ROOT, tmp_path / "root")
    live = {"strided": torch.zeros(34, dtype=torch.int16), "values": {}, "names": {}}
    with Checkpointer(tmp_path / "root") as checkpointer, pytest.warns(RuntimeWarning, match="restored in part"):
        assert checkpointer.restore(live, strict=False).step == make.STEP
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
    assert json.loads(run_fresh(code, SEGMENT)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


@pytest.fixture(scope="module")
def written_now(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("golden") / "v1"
    make.write(root)
    return root / STEP_DIR.name


def test_the_segment_written_now_has_the_same_bytes(written_now: Path) -> None:
    assert (written_now / SEGMENT.name).read_bytes() == SEGMENT.read_bytes()


def test_the_seal_written_now_has_the_same_body_but_for_the_time(written_now: Path) -> None:
    bodies = [json.loads((path / SEAL.name).read_bytes())["body"] for path in (written_now, STEP_DIR)]
    times = [body.pop("saved_unix_s") for body in bodies]
    assert times[0] > times[1]
    assert bodies[0] == bodies[1]


def test_the_manifest_written_now_follows_from_the_seal(written_now: Path) -> None:
    seal, known_by = records.decode_seal((written_now / SEAL.name).read_bytes(), file="f")
    manifest = records.make_manifest([(seal.brief, known_by)], seal.metadata)
    assert records.encode_manifest(manifest) == (written_now / MANIFEST.name).read_bytes()


# --- exact bytes ---------------------------------------------------------------------------

SHARDS = [Shard("m/w", "F32", (2, 3), 0, 24, "cuda", BoxOf("m/w", (4, 3), (2, 0))), Shard("é", "BOOL", (), 24, 25)]
TREE = DictNode(
    ["a", 7, {"$": "tuple", "items": [1, 2]}, "s"],
    [
        ObjectNode("torch.nn.Linear", DictNode(["w"], [TensorNode(0)], is_ordered=True)),
        ListNode([TensorNode(1), TensorNode(0, View("F32", (3,), (2,), 1)), ArrayNode(1, "|b1")]),
        LeafNode("point", TupleNode([ValueNode(0)])),
        ShardedNode("m/w", "F32", (4, 3), [RankBox(0, (2, 0), (2, 3))], 0),
    ],
)
ZEROS = "0" * 32
GOLDEN_SEAL = (
    '{"stillframe":1,"kind":"seal","xxh3_128":"1acd7497a9346fe61bc4f76b578d2136",'
    '"brief":{"save":{"step":7,"epoch":3,"attempt":2},"rank":0,"world_size":1,"parent":{"step":5,'
    '"epoch":1,"attempt":1},"saved_unix_s":1700000000.5,"updates":12,"segment_bytes":4121,'
    '"teams":[{"ranks":"00000000000000000000000000000000","size":2,'
    '"tensors":"00000000000000000000000000000000"}],"structure":"72e79c59421bf603a744307de220ac8b"},'
    '"body":{"save":{"step":7,"epoch":3,"attempt":2},'
    '"rank":0,"world_size":1,"parent":{"step":5,"epoch":1,"attempt":1},"saved_unix_s":1700000000.5,'
    '"updates":12,"teams":[{"ranks":"00000000000000000000000000000000","size":2,'
    '"tensors":"00000000000000000000000000000000"}],"structure":"72e79c59421bf603a744307de220ac8b",'
    '"metadata":{"loss":0.5},"segment":{"bytes":4121,'
    '"data_start":4096,"header":"00000000000000000000000000000000","chunk_bytes":16777216,'
    '"chunks":["00000000000000000000000000000000"]},"shards":[{"name":"m/w","dtype":"F32","shape":[2,3],'
    '"start":0,"end":24,"device":"cuda","whole":{"tensor":"m/w","shape":[4,3],"offset":[2,0]}},'
    '{"name":"é","dtype":"BOOL","shape":[],"start":24,"end":25,"device":"cpu","whole":null}],'
    '"tree":{"kind":"dict","keys":["a",7,{"$":"tuple","items":[1,2]},"s"],"items":[{"kind":"object",'
    '"type":"torch.nn.Linear","item":{"kind":"dict","keys":["w"],"items":[{"kind":"tensor","shard":0,'
    '"view":null}],"is_ordered":true}},{"kind":"list","items":[{"kind":"tensor","shard":1,"view":null},'
    '{"kind":"tensor","shard":0,"view":{"dtype":"F32","shape":[3],"stride":[2],"offset":1}},'
    '{"kind":"array","shard":1,"dtype":"|b1"}]},{"kind":"leaf","name":"point","item":{"kind":"tuple",'
    '"items":[{"kind":"value","value":0}]}},{"kind":"sharded","tensor":"m/w","dtype":"F32",'
    '"shape":[4,3],"parts":[{"rank":0,"offset":[2,0],"shape":[2,3]}],"layout":0}],'
    '"is_ordered":false},"values":[{"$":"float","bits":"7ff8000000000000"}],"layouts":[{"mesh":[1,1],'
    '"dims":[0,null],"factors":[2,1],"strides":[0,0]}]}}\n'
)
GOLDEN_MANIFEST = (
    '{"stillframe":1,"kind":"manifest","xxh3_128":"3ad9822436c2cf73739e5b276b2e8727",'
    '"body":{"save":{"step":7,"epoch":3,"attempt":2},"parent":{"step":5,"epoch":1,"attempt":1},'
    '"world_size":1,"saved_unix_s":1700000000.5,"metadata":{"loss":0.5},"ranks":[{"rank":0,'
    '"segment_bytes":4121,"seal_digest":"1acd7497a9346fe61bc4f76b578d2136"}]}}\n'
)
GOLDEN_NOTES = {
    "claim": (
        '{"stillframe":1,"kind":"claim","xxh3_128":"1d6b755d9d051876c31435401a75fc88","body":{"epoch":3,'
        '"run":"0123abcd","sequence":1}}\n'
    ),
    "parent": (
        '{"stillframe":1,"kind":"parent","xxh3_128":"d62fdf5548266fd32226530f7d1073ff","body":{"epoch":3,'
        '"run":"0123abcd","sequence":1,"is_shared":true,"parent":{"step":5,"epoch":1,"attempt":1},'
        '"lineage":[[1,5]],"is_by_hand":false,"is_carried":false}}\n'
    ),
    "outcomes": (
        '{"stillframe":1,"kind":"outcomes","xxh3_128":"d8377fc2bc08b49d8b97fccc41fafab6","body":{"epoch":3,'
        '"ended":[{"save":{"step":7,"epoch":3,"attempt":2},"error":"StorageError","message":"full",'
        '"files_stay":false}]}}\n'
    ),
    "aside": (
        '{"stillframe":1,"kind":"aside","xxh3_128":"9d5d6a39be5fca0ebeb4e1015726dc74",'
        '"body":{"reason":"pruned","was_committed":true,"epoch":3,"unix_s":1700000000.5,'
        '"message":"not kept"}}\n'
    ),
    "failure": (
        '{"stillframe":1,"kind":"failure","xxh3_128":"06bc71b9ad49488aa6ed017787f6f20e",'
        '"body":{"save":{"step":7,"epoch":3,"attempt":2},"rank":3,"error":"StorageError","message":"full"}}\n'
    ),
}


def test_a_header_has_exactly_these_bytes() -> None:
    header = encode_header(SHARDS, {"stillframe": "1"})
    text = (
        '{"__metadata__":{"format":"pt","stillframe":"1"},'
        '"m/w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},'
        '"é":{"dtype":"BOOL","shape":[],"data_offsets":[24,25]}}'
    ).encode()
    assert header == b"\xf8\x0f\x00\x00\x00\x00\x00\x00" + text + b" " * (4096 - 8 - len(text))


IDS = SaveId(7, 3, 2), SaveId(5, 1)
SEGMENT_OF = Segment(4121, 4096, ZEROS, 16777216, [ZEROS])
DRAFT = SealDraft(
    rank=0,
    world_size=1,
    saved_unix_s=1700000000.5,
    shards=records.encode_shards(SHARDS),
    tree=records.encode_tree(TREE),
    values=msgspec.Raw(b'[{"$":"float","bits":"7ff8000000000000"}]'),
    teams=[Team(ZEROS, 2, ZEROS)],
    metadata={"loss": 0.5},
    updates=12,
    layouts=[Layout((1, 1), (0, None), (2, 1), 0, (0, 0))],
    structure=structure_of(TREE),
)


def test_a_seal_has_exactly_these_bytes() -> None:
    data, brief, known_by = records.encode_seal(DRAFT, *IDS, SEGMENT_OF)
    assert data.decode() == GOLDEN_SEAL
    assert f'"xxh3_128":"{known_by}"' in GOLDEN_SEAL
    assert brief == SealBrief(*IDS[:1], 0, 1, IDS[1], 1700000000.5, 12, 4121, DRAFT.teams, DRAFT.structure)
    assert records.decode_seal_head(data[:500], file="f") == (brief, known_by)


def test_a_manifest_has_exactly_these_bytes() -> None:
    _, brief, known_by = records.encode_seal(DRAFT, *IDS, SEGMENT_OF)
    manifest = records.make_manifest([(brief, known_by)], {"loss": 0.5})
    assert manifest == Manifest(*IDS, 1, 1700000000.5, {"loss": 0.5}, [RankEntry(0, 4121, known_by)])
    assert records.encode_manifest(manifest).decode() == GOLDEN_MANIFEST


NOTES = {
    "claim": epochs.encode_claim(epochs.Claim(3, "0123abcd", 1)),
    "parent": epochs.encode_parent(epochs.Parent(3, "0123abcd", 1, True, IDS[1], [Row(1, 5)])),
    "outcomes": epochs.encode_outcomes(epochs.Outcomes(3, [epochs.Outcome(IDS[0], "StorageError", "full")])),
    "aside": epochs.encode_aside(epochs.Aside("pruned", True, 3, 1700000000.5, "not kept")),
    "failure": records.encode_failure(records.Failure(IDS[0], 3, "StorageError", "full")),
}


@pytest.mark.parametrize("kind", NOTES)
def test_a_note_has_exactly_these_bytes(kind: str) -> None:
    assert NOTES[kind].decode() == GOLDEN_NOTES[kind]


def test_a_wrapper_and_4_bit_numbers_have_exactly_these_bytes() -> None:
    box = PartBox((2, 0), (2, 3), (0, 0))
    context = {"$": "dict", "items": [["bits", 8]]}
    node = WrapperNode("a.B", "float32", (2, 3), ["q"], [TensorNode(0)], context, PartOf((4, 3), [box]))
    assert bytes(records.encode_tree(node)) == (
        b'{"kind":"wrapper","type":"a.B","dtype":"float32","shape":[2,3],"names":["q"],"items":[{"kind":"tensor",'
        b'"shard":0,"view":null}],"context":{"$":"dict","items":[["bits",8]]},"part_of":{"shape":[4,3],'
        b'"boxes":[{"offset":[2,0],"shape":[2,3],"local":[0,0]}]}}'
    )
    shards = [Shard("w", "F4", (2, 3), 0, 6), Shard("s", "F4", (), 6, 7), Shard("e", "F8_E8M0", (2,), 7, 9)]
    assert encode_header(shards, {})[8:].rstrip() == (
        b'{"__metadata__":{"format":"pt"},"w":{"dtype":"F4","shape":[2,6],"data_offsets":[0,6]},'
        b'"s":{"dtype":"F4","shape":[2],"data_offsets":[6,7]},"e":{"dtype":"F8_E8M0","shape":[2],"data_offsets":[7,9]}}'
    )
