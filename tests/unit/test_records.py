"""Seals and manifests: what is written is read back; what is not what it says is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest

from stillframe.errors import FormatError, UnsupportedStateError, VersionError
from stillframe.format import envelope as envelopes
from stillframe.format import epochs, limits, records
from stillframe.format.digest import digest
from stillframe.format.layout import Layout
from stillframe.format.records import Manifest, RankEntry, Seal, SealDraft, Segment
from stillframe.format.segment import Shard
from stillframe.format.tree import (
    ArrayNode,
    DictNode,
    LeafNode,
    ListNode,
    ObjectNode,
    ShardedNode,
    TensorNode,
    TupleNode,
    ValueNode,
    View,
)
from stillframe.lineage import Row
from stillframe.model import BLOCK_BYTES, CHUNK_BYTES, MAX_STEP, SaveId

SAVE, PARENT = SaveId(7, 2), SaveId(5, 1)
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
        "bytes": BLOCK_BYTES + 25,
        "data_start": BLOCK_BYTES,
        "header": DIGEST,
        "chunk_bytes": CHUNK_BYTES,
        "chunks": [DIGEST],
    }
    return Segment(**{**fields, **changes})


def make_draft(**changes: Any) -> SealDraft:
    fields = {
        "rank": 0,
        "world_size": 1,
        "saved_unix_s": 1700000000.25,
        "shards": records.encode_shards(SHARDS),
        "tree": records.encode_tree(TREE),
        "values": msgspec.Raw(msgspec.json.encode(VALUES)),
        "metadata": {"loss": 0.5},
        "updates": 12,
    }
    return SealDraft(**{**fields, **changes})


def seal_bytes(
    segment: dict[str, Any] | None = None, save: SaveId = SAVE, parent: SaveId | None = PARENT, **draft: Any
) -> bytes:
    return records.encode_seal(make_draft(**draft), save, parent, make_segment(**(segment or {})))[0]


def make_manifest(**changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "save": SAVE,
        "parent": PARENT,
        "world_size": 2,
        "saved_unix_s": 1700000000.25,
        "metadata": {"loss": 0.5},
        "ranks": [make_entry(0), make_entry(1)],
    }
    return Manifest(**{**fields, **changes})


def make_entry(rank: int, **changes: Any) -> RankEntry:
    return RankEntry(**{"rank": rank, "segment_bytes": 5000, "seal_digest": DIGEST, **changes})


def envelope(data: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(data)
    return found


def test_a_seal_is_read_back() -> None:
    assert records.decode_seal(seal_bytes(), file="f")[0] == Seal(
        SAVE, 0, 1, PARENT, 1700000000.25, 12, [], {"loss": 0.5}, make_segment(), SHARDS, TREE, VALUES
    )


def test_a_manifest_is_read_back() -> None:
    manifest = make_manifest()
    assert records.decode_manifest(records.encode_manifest(manifest), file="f") == manifest


def test_a_manifest_knows_how_many_bytes_its_segments_have() -> None:
    assert make_manifest().bytes == 10_000


def test_a_manifest_says_what_the_seals_say_and_nothing_else() -> None:
    """So whoever writes it, and whenever, writes the same bytes."""
    sealed = [records.encode_seal(make_draft(rank=rank, world_size=2), SAVE, PARENT, make_segment()) for rank in (0, 1)]
    read = [records.decode_seal(data, file="f") for data, _, _ in sealed]
    by_the_writer = records.make_manifest([(brief, known_by) for _, brief, known_by in sealed], {"loss": 0.5})
    by_a_reader = records.make_manifest([(seal.brief, known_by) for seal, known_by in read], read[0][0].metadata)
    assert records.encode_manifest(by_the_writer) == records.encode_manifest(by_a_reader)
    assert by_a_reader == make_manifest(
        ranks=[make_entry(rank, segment_bytes=make_segment().bytes, seal_digest=read[rank][1]) for rank in (0, 1)]
    )


def test_a_manifest_says_which_ranks_have_trees_alike() -> None:
    def like(*structures: str) -> list[int | None]:
        made = [
            records.encode_seal(make_draft(rank=rank, world_size=5, structure=each), SAVE, PARENT, make_segment())
            for rank, each in enumerate(structures)
        ]
        manifest = records.make_manifest([(brief, known_by) for _, brief, known_by in made], {})
        assert records.decode_manifest(records.encode_manifest(manifest), file="f") == manifest
        return [entry.like for entry in manifest.ranks]

    assert like("a", "b", "a", "b", "c") == [None, None, 0, 1, None]
    assert like("", "", "a", "", "a") == [None, None, None, None, 2], "what is not known is like nothing"


@pytest.mark.parametrize("like", [[None, 1], [None, 2], [None, -1], [0, None]])
def test_ranks_that_cannot_be_alike_are_refused(like: list[int | None]) -> None:
    entries = [make_entry(rank, like=each) for rank, each in enumerate(like)]
    with pytest.raises(FormatError, match="cannot be like"):
        records.decode_manifest(records.encode_manifest(make_manifest(ranks=entries)), file="f")


LAYOUT = Layout((2, 3), (0, None), first=1, strides=(3, 1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mesh": (2, 0)}, "impossible mesh"),
        ({"mesh": (100_000, 100_000)}, "impossible mesh"),
        ({"mesh": (2,) * 65, "dims": (None,) * 65, "strides": (1,) * 65}, "impossible mesh"),
        ({"dims": (0,)}, "impossible mesh"),
        ({"factors": (1, 0)}, "impossible mesh"),
        ({"factors": (1 << 40, 1)}, "impossible mesh"),
        ({"strides": (3,)}, "names 0 ranks"),
        ({"ranks": (1, 2)}, "names 2 ranks"),
        ({"ranks": (1, 2, 3, 4, 5, 9)}, "has rank 9 of 8"),
        ({"strides": (3, -1)}, "has rank -1 of 8"),
        ({"first": 5}, "has rank 10 of 8"),
        ({"dims": (0, 1)}, "divides"),
        ({"dims": (-1, None)}, "divides"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    node = records.encode_tree(ShardedNode("t", "F32", (8,), [], 0))

    def read(layout: Layout) -> None:
        data = seal_bytes(
            {"bytes": 4096, "chunks": []}, world_size=8, shards=records.encode_shards([]), tree=node, layouts=[layout]
        )
        records.decode_seal(data, file="f")

    read(LAYOUT)
    with pytest.raises(FormatError, match=message):
        read(msgspec.structs.replace(LAYOUT, **changes))


def test_a_layout_that_is_not_there_is_refused() -> None:
    node = records.encode_tree(ShardedNode("t", "F32", (8,), [], 1))
    with pytest.raises(FormatError, match="layout 1 of 1"):
        records.decode_seal(seal_bytes(world_size=8, tree=node, layouts=[LAYOUT]), file="f")


def test_the_envelope_says_version_kind_and_checksum_of_the_body() -> None:
    data = seal_bytes()
    body = data[data.index(b'"body":') + len(b'"body":') : -2]
    assert data.endswith(b"}\n")
    assert envelope(data) == {
        "stillframe": limits.VERSION,
        "kind": "seal",
        "xxh3_128": digest(body),
        "brief": {
            "save": {"step": 7, "epoch": 2, "attempt": 1},
            "rank": 0,
            "world_size": 1,
            "parent": {"step": 5, "epoch": 1, "attempt": 1},
            "saved_unix_s": 1700000000.25,
            "updates": 12,
            "segment_bytes": make_segment().bytes,
            "teams": [],
            "structure": "",
        },
        "body": json.loads(body),
    }


def test_the_head_of_a_seal_tells_what_a_commit_needs() -> None:
    data = seal_bytes()
    head = records.decode_seal_head(data[:400], file="f")
    assert head is not None
    assert (head[0].save, head[0].rank, head[0].segment_bytes) == (SAVE, 0, make_segment().bytes)
    assert head[1] == records.decode_seal(data, file="f")[1]
    for length in range(data.index(b'"body":')):
        assert records.decode_seal_head(data[:length], file="f") is None
    with pytest.raises(VersionError, match="f has format version 2"):
        records.decode_seal_head(data.replace(b'"stillframe":1', b'"stillframe":2'), file="f")


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
    data = seal_bytes().replace(b'"stillframe":1', b'"stillframe":' + json.dumps(version).encode())
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
    monkeypatch.setitem(envelopes._MAX_BYTES, "manifest", len(data) - 1)
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
        {"save": SaveId(-1, 2)}, {"save": SaveId(MAX_STEP + 1, 2)}, {"save": SaveId(7, 0), "parent": None},
        {"save": SaveId(7, 2, 0)}, {"parent": SAVE}, {"parent": SaveId(1, 3)}, {"parent": SaveId(-1, 1)},
        {"world_size": 0}, {"world_size": limits.MAX_RANKS + 1}, {"rank": 1}, {"rank": -1}, {"rank": "0"},
        {"save": SaveId("7", 2)}, {"updates": "many"}, {"saved_unix_s": None},  # type: ignore[arg-type]
        {"tree": records.encode_tree(TensorNode(2))}, {"tree": records.encode_tree(TensorNode(-1))},
        {"tree": records.encode_tree(ValueNode(2))}, {"tree": records.encode_tree(ArrayNode(9, "<f4"))},
        {"tree": records.encode_tree(DictNode(["a", "b"], [ValueNode(0)]))},
        {"tree": msgspec.Raw(b'{"kind":"pickle","data":"x"}')}, {"tree": msgspec.Raw(b'{"kind":"value"}')},
        {"tree": msgspec.Raw(b'{"kind":"value","value":0,"more":1}')},
        {"shards": msgspec.Raw(b"[]")}, {"shards": records.encode_shards(list(reversed(SHARDS)))},
    ],
    ids=lambda change: re.sub(" object at 0x[^>]*", "", repr(change)),
)  # fmt: skip
def test_a_seal_that_cannot_be_true_is_refused_by_name(change: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match=r"^f"):
        records.decode_seal(seal_bytes(**change), file="f")


@pytest.mark.parametrize(
    "change",
    [
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
        {"save": SaveId(-1, 2)}, {"save": SaveId(7, 1)}, {"world_size": 1}, {"world_size": 3}, {"ranks": []},
        {"ranks": [make_entry(1), make_entry(0)]}, {"ranks": [make_entry(0), make_entry(0)]}, {"metadata": None},
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
    too_deep, _, _ = records.encode_seal(nested(limits.MAX_DEPTH + 10), SAVE, PARENT, segment)
    with pytest.raises(FormatError, match="deeper"):
        records.decode_seal(too_deep, file="f")
    records.decode_seal(records.encode_seal(nested(limits.MAX_DEPTH), SAVE, PARENT, segment)[0], file="f")


@pytest.mark.parametrize(
    ("view", "message"),
    [
        (View("F32", (2**20, 2**20), (0, 0), 0), "repeats its 24 bytes"),
        (View("F32", (2**61, 2**61), (0, 0), 0), "repeats its 24 bytes"),
        (View("F32", (16 * 2**20 + 1,), (0,), 5), "repeats its 24 bytes"),
        (View("F32", (7,), (1,), 0), "reaches outside"),
        (View("F32", (1,), (1,), 6), "reaches outside"),
        (View("F64", (2, 2), (2, 1), 1), "reaches outside"),
        (View("F32", (0, 3), (1, 1), 0), "reaches outside"),
        (View("F32", (1,) * 65, (1,) * 65, 0), "reaches outside"),
        (View("F32", (2,), (), 0), "malformed"),
        (View("F32", (-1,), (1,), 3), "malformed"),
        (View("F32", (2**80,), (0,), 3), "malformed"),
        (View("X", (2,), (1,), 0), "unknown dtype"),
    ],
)
def test_a_view_that_its_shard_cannot_give_is_refused(view: View, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        records.decode_seal(seal_bytes(tree=records.encode_tree(TensorNode(0, view))), file="f")


def test_a_view_may_repeat_its_shard_up_to_a_limit() -> None:
    for view in (
        View("F32", (1000, 6), (0, 1), 0),
        View("F32", (16 * 2**20,), (0,), 5),
        View("F32", (3, 3), (1, 1), 1),
    ):
        records.decode_seal(seal_bytes(tree=records.encode_tree(TensorNode(0, view))), file="f")


def test_a_sharded_tensor_of_an_impossible_shape_is_refused() -> None:
    for shape in ((2**40, 2**40), (2**61, 2**61, 0), (-1,), (2**80,)):
        with pytest.raises(FormatError):
            records.decode_seal(seal_bytes(tree=records.encode_tree(ShardedNode("t", "F32", shape, []))), file="f")


# --- what a root says of a run -----------------------------------------------------------------

PARENT_OF = epochs.Parent(4, "0123abcd", 1, True, SaveId(9, 3), [Row(3, 9), Row(1, 5)])
NOTES: list[tuple[Any, Any, Any]] = [
    (epochs.encode_claim, epochs.decode_claim, epochs.Claim(4, "0123abcd", 1)),
    (epochs.encode_parent, epochs.decode_parent, PARENT_OF),
    (epochs.encode_parent, epochs.decode_parent, epochs.Parent(1, "0123abcd", 0, False, None)),
    (
        epochs.encode_outcomes,
        epochs.decode_outcomes,
        epochs.Outcomes(4, [epochs.Outcome(SAVE, "StorageError", "full")]),
    ),
    (epochs.encode_aside, epochs.decode_aside, epochs.Aside("pruned", True, 4, 1700000000.5, "not kept")),
    (epochs.encode_request, epochs.decode_request, epochs.Request("0123abcd", 1.5, [SAVE], "KeepLast")),
    (
        epochs.encode_answer,
        epochs.decode_answer,
        epochs.Answer("0123abcd", True, [epochs.Gone(SAVE, "asked for", 5)], [epochs.Stays(PARENT, "pinned")]),
    ),
    (records.encode_failure, records.decode_failure, records.Failure(SAVE, 3, "StorageError", "full")),
]


@pytest.mark.parametrize(("encode", "decode", "note"), NOTES)
def test_a_note_is_read_back(encode: Any, decode: Any, note: Any) -> None:
    data = encode(note)
    assert decode(data, file="f") == note
    for length in range(len(data) - 1):
        with pytest.raises(FormatError, match=r"^f "):
            decode(data[:length], file="f")


@pytest.mark.parametrize(
    "change",
    [
        {"parent": None}, {"lineage": []}, {"lineage": [Row(3, 8), Row(1, 5)]}, {"lineage": [Row(3, 9), Row(3, 5)]},
        {"lineage": [Row(3, 9), Row(0, 5)]}, {"epoch": 3}, {"parent": SaveId(9, 4)}, {"parent": SaveId(-1, 3)},
        {"lineage": [Row(3, 9), Row(2, "5")]},  # type: ignore[arg-type]
        {"lineage": [Row(3, 9)] * (limits.MAX_LINEAGE_ROWS + 1)},
    ],
)  # fmt: skip
def test_a_parent_that_cannot_be_true_is_refused_by_name(change: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match=r"^f"):
        epochs.decode_parent(epochs.encode_parent(msgspec.structs.replace(PARENT_OF, **change)), file="f")


def test_a_tombstone_of_an_unknown_reason_is_refused() -> None:
    data = epochs.encode_aside(epochs.Aside("because", True, 4, 1.0))  # type: ignore[arg-type]
    with pytest.raises(FormatError, match=r"^f "):
        epochs.decode_aside(data, file="f")


@pytest.mark.parametrize("save", [SaveId(-1), SaveId(1, 0), SaveId(1, 1, 0), SaveId(MAX_STEP + 1)], ids=str)
def test_a_request_to_remove_what_no_save_can_be_is_refused(save: SaveId) -> None:
    with pytest.raises(FormatError, match=r"^f: impossible"):
        epochs.decode_request(epochs.encode_request(epochs.Request("0123abcd", 1.5, [save])), file="f")
