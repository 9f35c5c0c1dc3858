"""Seals and manifests: what is written is read back; what is not what it says is refused."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from stillframe.errors import FormatError, UnsupportedStateError, VersionError
from stillframe.format import limits, names, records
from stillframe.format.digest import digest
from stillframe.format.records import Manifest, RankEntry, Seal, SealDraft, Segment
from stillframe.format.segment import Shard
from stillframe.format.tree import (
    ArrayNode,
    DictNode,
    LeafNode,
    ListNode,
    ObjectNode,
    TensorNode,
    TupleNode,
    ValueNode,
    View,
)
from stillframe.model import BLOCK_BYTES, CHUNK_BYTES, MAX_STEP

ATTEMPT = "0123abcd"
DIGEST = digest(b"anything")
SHARDS = [Shard("w", "F32", (3, 2), 0, 24), Shard("step", "I8", (), 24, 25, "cuda")]
TREE = DictNode(
    ["w", {"$": "tuple", "items": [1]}, 3],
    [
        TensorNode(0, View("F32", (2,), (1,), 1)),
        ObjectNode("torch.optim.Adam", ListNode([TensorNode(1), ValueNode(0)])),
        LeafNode("point", TupleNode([ArrayNode(1, "|i1"), ValueNode(1)])),
    ],
    is_ordered=True,
)
VALUES: list[Any] = [2**70, {"$": "tuple", "items": [1.5, None]}]


def make_segment(**changes: Any) -> Segment:
    fields = {
        "file": names.segment(0, ATTEMPT),
        "bytes": BLOCK_BYTES + 25,
        "data_start": BLOCK_BYTES,
        "header": DIGEST,
        "chunk_bytes": CHUNK_BYTES,
        "chunks": [DIGEST],
    }
    return Segment(**{**fields, **changes})


def make_draft(**changes: Any) -> SealDraft:
    fields = {
        "step": 7,
        "rank": 0,
        "world_size": 1,
        "attempt": ATTEMPT,
        "shards": records.encode_shards(SHARDS),
        "tree": records.encode_tree(TREE),
        "values": msgspec.Raw(msgspec.json.encode(VALUES)),
    }
    return SealDraft(**{**fields, **changes})


def seal_bytes(segment: dict[str, Any] | None = None, **draft: Any) -> bytes:
    return records.encode_seal(make_draft(**draft), make_segment(**(segment or {})))[0]


def make_manifest(**changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "step": 7,
        "attempt": ATTEMPT,
        "world_size": 2,
        "created_unix_s": 1700000000.25,
        "stage_s": 0.125,
        "commit_s": 0.5,
        "ranks": [make_entry(0), make_entry(1)],
    }
    return Manifest(**{**fields, **changes})


def make_entry(rank: int, **changes: Any) -> RankEntry:
    fields: dict[str, Any] = {
        "rank": rank,
        "segment": names.segment(rank, ATTEMPT),
        "segment_bytes": 5000,
        "seal": names.seal(rank, ATTEMPT),
        "seal_digest": DIGEST,
    }
    return RankEntry(**{**fields, **changes})


def envelope(data: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(data)
    return found


def test_a_seal_is_read_back() -> None:
    assert records.decode_seal(seal_bytes(), file="f")[0] == Seal(
        7, 0, 1, ATTEMPT, make_segment(), SHARDS, TREE, VALUES
    )


def test_a_manifest_is_read_back() -> None:
    manifest = make_manifest()
    assert records.decode_manifest(records.encode_manifest(manifest), file="f") == manifest


def test_a_manifest_knows_how_many_bytes_its_segments_have() -> None:
    assert make_manifest().bytes == 10_000


def test_the_envelope_says_version_kind_and_checksum_of_the_body() -> None:
    data = seal_bytes()
    body = data[data.index(b'"body":') + len(b'"body":') : -2]
    assert data.endswith(b"}\n")
    assert envelope(data) == {
        "stillframe": limits.VERSION,
        "kind": "seal",
        "xxh3_128": digest(body),
        "brief": {
            "step": 7,
            "rank": 0,
            "world_size": 1,
            "attempt": ATTEMPT,
            "segment_bytes": make_segment().bytes,
            "teams": [],
        },
        "body": json.loads(body),
    }


def test_the_head_of_a_seal_tells_what_a_commit_needs() -> None:
    data = seal_bytes()
    brief, known_by = records.decode_seal_head(data[:300], file="f")
    assert (brief.step, brief.rank, brief.segment_bytes) == (7, 0, make_segment().bytes)
    assert known_by == records.decode_seal(data, file="f")[1]
    with pytest.raises(FormatError, match="f cannot be read"):
        records.decode_seal_head(data[:100], file="f")
    with pytest.raises(FormatError, match="no seal of this version"):
        records.decode_seal_head(data.replace(b'"stillframe":2', b'"stillframe":1'), file="f")


def test_a_brief_that_differs_from_its_body_is_refused() -> None:
    with pytest.raises(FormatError, match="brief and body differ"):
        records.decode_seal(seal_bytes().replace(b'"step":7', b'"step":8', 1), file="f")


def test_a_record_of_the_other_kind_is_refused() -> None:
    with pytest.raises(FormatError, match="f is a 'seal', not a manifest"):
        records.decode_manifest(seal_bytes(), file="f")
    with pytest.raises(FormatError, match="f is a 'manifest', not a seal"):
        records.decode_seal(records.encode_manifest(make_manifest()), file="f")


@pytest.mark.parametrize("change", [{"body": "from the future"}, {"xxh3_128": 5}, {"kind": "tome"}, {"more": 1}])
def test_a_newer_version_is_a_version_error_whatever_else_it_holds(change: dict[str, Any]) -> None:
    data = json.dumps({**envelope(seal_bytes()), **change, "stillframe": limits.VERSION + 1}).encode()
    with pytest.raises(VersionError, match="upgrade"):
        records.decode_seal(data, file="f")


@pytest.mark.parametrize("version", [0, -1, 1.5, "1", None, True])
def test_a_version_that_never_was_is_refused(version: Any) -> None:
    data = seal_bytes().replace(b'"stillframe":2', b'"stillframe":' + json.dumps(version).encode())
    with pytest.raises(FormatError):
        records.decode_seal(data, file="f")


def test_every_changed_byte_is_noticed() -> None:
    data = seal_bytes()
    for index in range(len(data) - 1):
        damaged = data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :]
        with pytest.raises((FormatError, VersionError)):
            records.decode_seal(damaged, file="f")


def test_a_record_cut_short_anywhere_is_refused() -> None:
    data = records.encode_manifest(make_manifest())
    for length in range(len(data) - 1):
        with pytest.raises(FormatError, match=r"^f "):
            records.decode_manifest(data[:length], file="f")


@pytest.mark.parametrize(
    "data", [b"", b"null", b"[]", b"\xff\xfe", b"{}", b'{"stillframe":1}', b"[" * 100_000, b"\x00" * 64]
)
def test_what_is_no_record_at_all_is_a_format_error(data: bytes) -> None:
    with pytest.raises(FormatError):
        records.decode_seal(data, file="f")


def test_a_record_beyond_the_limit_is_refused_by_reader_and_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = make_manifest()
    data = records.encode_manifest(manifest)
    monkeypatch.setitem(records._MAX_BYTES, "manifest", len(data) - 1)
    with pytest.raises(FormatError, match="more than the format allows"):
        records.decode_manifest(data, file="f")
    with pytest.raises(UnsupportedStateError, match="the format allows"):
        records.encode_manifest(manifest)


def test_a_state_too_large_for_its_seal_is_refused_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = make_draft(values=msgspec.Raw(b'["' + b"x" * 10_000 + b'"]'))
    records.check_draft(draft)
    monkeypatch.setattr(limits, "MAX_SEAL_BYTES", 10_000)
    with pytest.raises(UnsupportedStateError, match="large Python values"):
        records.check_draft(draft)


@pytest.mark.parametrize(
    "change",
    [
        {"step": -1}, {"step": MAX_STEP + 1}, {"world_size": 0}, {"world_size": limits.MAX_RANKS + 1}, {"rank": 1},
        {"rank": -1}, {"attempt": "../../xx"}, {"attempt": "0123ABCD"}, {"attempt": ""}, {"step": "7"},
        {"tree": records.encode_tree(TensorNode(2))}, {"tree": records.encode_tree(TensorNode(-1))},
        {"tree": records.encode_tree(ValueNode(2))}, {"tree": records.encode_tree(ArrayNode(9, "<f4"))},
        {"tree": records.encode_tree(DictNode(["a", "b"], [ValueNode(0)]))},
        {"tree": msgspec.Raw(b'{"kind":"pickle","data":"x"}')}, {"tree": msgspec.Raw(b'{"kind":"value"}')},
        {"tree": msgspec.Raw(b'{"kind":"value","value":0,"more":1}')},
        {"shards": msgspec.Raw(b"[]")}, {"shards": records.encode_shards(list(reversed(SHARDS)))},
    ],
    ids=repr,
)  # fmt: skip
def test_a_seal_that_cannot_be_true_is_refused_by_name(change: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match=r"^f"):
        records.decode_seal(seal_bytes(**change), file="f")


@pytest.mark.parametrize(
    "change",
    [
        {"file": "../x.safetensors"}, {"file": names.segment(1, ATTEMPT)}, {"file": names.segment(0, "ffffffff")},
        {"bytes": BLOCK_BYTES - 1}, {"bytes": BLOCK_BYTES + 26}, {"bytes": -1}, {"data_start": 0}, {"data_start": 100},
        {"data_start": 2 * BLOCK_BYTES}, {"data_start": -BLOCK_BYTES}, {"chunk_bytes": 0}, {"chunk_bytes": 100},
        {"chunk_bytes": -CHUNK_BYTES}, {"chunks": []}, {"chunks": [DIGEST, DIGEST]}, {"chunks": ["0" * 31]},
        {"chunks": [DIGEST.upper()]}, {"header": ""},
    ],
    ids=repr,
)  # fmt: skip
def test_a_segment_that_cannot_be_true_is_refused_by_name(change: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match=r"^f"):
        records.decode_seal(seal_bytes(change), file="f")


@pytest.mark.parametrize(
    "change",
    [
        {"step": -1}, {"world_size": 1}, {"world_size": 3}, {"ranks": []}, {"ranks": [make_entry(1), make_entry(0)]},
        {"ranks": [make_entry(0), make_entry(0)]}, {"attempt": "ffffffff"},
        {"ranks": [make_entry(0), make_entry(1, segment="../x")]},
        {"ranks": [make_entry(0), make_entry(1, seal=names.seal(0, ATTEMPT))]},
        {"ranks": [make_entry(0), make_entry(1, segment_bytes=-1)]},
        {"ranks": [make_entry(0), make_entry(1, seal_digest="no digest")]},
    ],
    ids=repr,
)  # fmt: skip
def test_a_manifest_that_cannot_be_true_is_refused_by_name(change: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match=r"^f"):
        records.decode_manifest(records.encode_manifest(make_manifest(**change)), file="f")


def nested(depth: int) -> records.SealDraft:
    tree: Any = ValueNode(0)
    for _ in range(depth - 1):
        tree = ListNode([tree])
    return make_draft(tree=records.encode_tree(tree))


def test_nesting_is_read_up_to_the_limit_and_no_deeper() -> None:
    segment = make_segment()
    too_deep, _ = records.encode_seal(nested(limits.MAX_DEPTH + 10), segment)
    with pytest.raises(FormatError, match="deeper"):
        records.decode_seal(too_deep, file="f")
    records.decode_seal(records.encode_seal(nested(limits.MAX_DEPTH), segment)[0], file="f")
