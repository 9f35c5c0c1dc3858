"""A record is one JSON object, whoever writes it: spacing, line ends and the order of keys mean nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from stillframe import Catalog, Checkpointer, KeepLast, load
from stillframe.checkpoint import epochs, removal
from stillframe.checkpoint.seals import read_brief
from stillframe.format import names, records
from stillframe.format.digest import digest
from stillframe.format.records import SealDraft, Team
from stillframe.format.segment import encode_header
from stillframe.format.tree import ValueNode
from stillframe.keeper.commit import Coordinator, UpdateCounts
from stillframe.keeper.epochs import CurrentEpoch
from stillframe.keeper.segment import SegmentWriter
from stillframe.keeper.terms import Terms
from stillframe.link.messages import Begin
from stillframe.model import SaveId
from tests.support import assert_same

STATE = {"w": torch.arange(10.0), "n": 7, "body": {"body": [1, "body"]}}


def rewrite(data: bytes, dump: Callable[[Any], str], order: Callable[[list[str]], list[str]]) -> bytes:
    """The same record by another writer: ``dump`` writes the parts, the envelope's keys stand in another order."""
    parts = json.loads(data)
    parts["xxh3_128"] = digest(dump(parts["body"]).encode())
    inner = " ,\r\n\t".join(f'"{key}" : {dump(parts[key])}' for key in order(list(parts)))
    return f"\n {{ {inner} }}\n\n".encode()


WRITERS: dict[str, Callable[[bytes], bytes]] = {
    "indented": lambda data: rewrite(data, lambda part: json.dumps(part, indent=2), list),
    "sorted": lambda data: rewrite(data, lambda part: json.dumps(part, sort_keys=True), sorted),
    "reversed": lambda data: rewrite(data, json.dumps, lambda keys: keys[::-1]),
    "escaped": lambda data: rewrite(
        data, lambda part: json.dumps(part, separators=(" ,", " : ")), lambda k: k[1:] + k[:1]
    ),
    "brief far behind": lambda data: rewrite(data, json.dumps, list).replace(b"{", b"{" + b" " * 200_000, 1),
}


@pytest.fixture(params=WRITERS)
def writer(request: pytest.FixtureRequest) -> Callable[[bytes], bytes]:
    return WRITERS[request.param]


def rewrite_files(root: Path, pattern: str, writer: Callable[[bytes], bytes]) -> int:
    found = list(root.glob(pattern))
    for path in found:
        path.write_bytes(writer(path.read_bytes()))
    return len(found)


def rewrite_save(root: Path, save: SaveId, writer: Callable[[bytes], bytes]) -> None:
    """Seals and manifest; the manifest names the new digests of the seals."""
    directory = root / names.step_dir(save)
    manifest = json.loads((directory / names.MANIFEST).read_bytes())
    for entry in manifest["body"]["ranks"]:
        path = directory / names.seal(entry["rank"])
        path.write_bytes(writer(path.read_bytes()))
        entry["seal_digest"] = json.loads(path.read_bytes())["xxh3_128"]
    (directory / names.MANIFEST).write_bytes(writer(json.dumps(manifest).encode()))


def test_a_root_written_by_another_writer_is_read(tmp_path: Path, writer: Callable[[bytes], bytes]) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, STATE).wait()
        checkpointer.rewind(2)
    catalog = Catalog(tmp_path)
    removal.set_aside(catalog, SaveId(1), "quarantined", epoch=2)
    for save in catalog.look().saves:
        rewrite_save(tmp_path, save, writer)
    assert rewrite_files(tmp_path, "run/e*/claim.json", writer) == 2
    assert rewrite_files(tmp_path, "run/e*/parent.json", writer) == 2
    assert rewrite_files(tmp_path, "step-*/aside.json", writer) == 1
    assert catalog.steps() == [2]
    assert [save.step for save in catalog.look().off_branch] == [3]
    aside = catalog.aside(SaveId(1))
    assert aside is not None
    assert aside.reason == "quarantined"
    assert_same(load(tmp_path), STATE)
    run = json.loads((tmp_path / names.claim(2)).read_bytes())["body"]
    assert epochs.find_claim(catalog, run["run"], run["sequence"]) == 2


def test_a_run_goes_on_from_what_another_writer_wrote(tmp_path: Path, writer: Callable[[bytes], bytes]) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, STATE)
    rewrite_save(tmp_path, SaveId(1), writer)
    rewrite_files(tmp_path, "run/e*/*.json", writer)
    with Checkpointer(tmp_path, keep=KeepLast(1)) as checkpointer:
        assert checkpointer.restore({"w": torch.zeros(10), "n": 0, "body": {}}, strict=False).step == 1
        checkpointer.save(2, STATE)
        checkpointer.wait()
    assert Catalog(tmp_path).steps() == [2]
    assert Catalog(tmp_path).manifest(SaveId(2, 2)).parent == SaveId(1)


# --- a commit of several ranks -----------------------------------------------------------------


def sealed(catalog: Catalog, terms: Terms, rank: int, teams: int = 0) -> SegmentWriter:
    """A rank's part of step 7, without data, as its keeper leaves it."""
    value = msgspec.Raw(msgspec.json.encode([{"$": "path", "data": ',"body":{'}]))
    draft = SealDraft(
        rank, terms.world_size, 1.5, records.encode_shards([]), records.encode_tree(ValueNode(0)), value,
        [Team(digest(b"%d" % number), terms.world_size, digest(b"")) for number in range(teams)],
    )  # fmt: skip
    header = encode_header([], {})
    begin = Begin(1, 7, 1, 0.0, len(header), 0, 0, "", ())
    writer = SegmentWriter(begin, header, draft, catalog, CurrentEpoch(catalog, terms, rank), is_counted=rank > 0)
    writer.seal()
    return writer


@pytest.mark.parametrize("teams", [0, 60, 2000], ids=["brief in 4 KiB", "in 64 KiB", "beyond"])
def test_seals_of_another_writer_are_committed(tmp_path: Path, writer: Callable[[bytes], bytes], teams: int) -> None:
    catalog = Catalog(tmp_path)
    terms = Terms(catalog.store, "0123abcd", 2, 60.0)
    coordinator = Coordinator(sealed(catalog, terms, 0, teams), terms, True, UpdateCounts())
    save = sealed(catalog, terms, 1, teams).identify()
    path = tmp_path / names.key(save, names.seal(1))
    path.write_bytes(writer(path.read_bytes()))
    assert coordinator.poll(is_orphan=False)
    manifest = catalog.manifest(save)
    assert manifest.ranks[1].seal_digest == json.loads(path.read_bytes())["xxh3_128"]
    with catalog.open(7) as checkpoint:
        assert [len(checkpoint.of(rank).seal.teams) for rank in checkpoint.ranks] == [teams, teams]
    assert read_brief(catalog.store, save, 1) == read_brief(catalog.store, save, 1, path.read_bytes())
