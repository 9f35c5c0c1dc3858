"""Files that lie: their checksums are right, and what they say is meant to hurt.

What is promised, of every file that anybody could put into a root: reading it ends in a :class:`StillframeError`;
no code runs because it names some; nothing outside the root is opened, changed or deleted; memory stays bounded.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import xxhash

from stillframe import (
    Catalog,
    Checkpointer,
    FormatError,
    IntegrityError,
    KeepLast,
    MismatchError,
    NotFoundError,
    StillframeError,
    StorageError,
    UnsupportedStateError,
    VersionError,
    load,
    spi,
)
from stillframe.model import CHUNK_BYTES
from stillframe.units import GIB, MIB
from tests import layout
from tests.support import assert_same, kill, run_fresh, start_child

SPLICE = "@splice@"
"""A value that stands for bytes which ``json`` itself could not write."""


def make_state(step: int) -> dict[str, Any]:
    """One of each kind of leaf; ``window`` shares its memory with ``base``, so it is stored as a view."""
    base = torch.arange(step, step + 1000, dtype=torch.float32)
    return {
        "base": base,
        "window": base[10:20],
        "odd": torch.tensor([1, 2, step], dtype=torch.uint8),
        "none": torch.zeros(0, 4),
        "half": torch.full((6,), step, dtype=torch.bfloat16),
        "array": numpy.arange(6, dtype=numpy.int64) + step,
        "value": step,
    }


def envelope(kind: str, body: bytes, version: int = 1, brief: bytes = b"") -> bytes:
    """Written by hand, so that the checksum is right whatever the body says."""
    head = f'{{"stillframe":{version},"kind":"{kind}","xxh3_128":"{xxhash.xxh3_128_hexdigest(body)}",'.encode()
    head += b'"brief":' + brief + b"," if brief else b""
    return head + b'"body":' + body + b"}\n"


BRIEF = ("save", "rank", "world_size", "parent", "saved_unix_s", "updates", "teams", "structure")
"""What the brief of a seal repeats."""


class Forged:
    """The seal and the manifest of one step, to be changed at will; the checksums follow."""

    def __init__(self, root: Path, step: int) -> None:
        self.root = root
        self.paths = {kind: layout.file(root, step, kind) for kind in ("segment", "seal", "manifest")}
        self.seal: dict[str, Any] = json.loads(self.paths["seal"].read_bytes())["body"]
        self.manifest: dict[str, Any] = json.loads(self.paths["manifest"].read_bytes())["body"]
        self.seal["save"]["step"] = self.manifest["save"]["step"] = step
        self.segment: dict[str, Any] = self.seal["segment"]
        self.rank: dict[str, Any] = self.manifest["ranks"][0]
        self.tree: dict[str, Any] = self.seal["tree"]
        self.splice = b"null"
        self.seal_version = self.manifest_version = 1
        self.brief: dict[str, Any] = {}
        """What it says otherwise than the body."""

    def node(self, key: str) -> dict[str, Any]:
        node: dict[str, Any] = self.tree["items"][self.tree["keys"].index(key)]
        return node

    def shard(self, key: str) -> dict[str, Any]:
        shard: dict[str, Any] = self.seal["shards"][self.node(key)["shard"]]
        return shard

    def write(self) -> None:
        body, brief = self._bytes(self.seal), {name: self.seal[name] for name in BRIEF}
        brief = {**brief, "segment_bytes": self.segment["bytes"], **self.brief}
        self.paths["seal"].write_bytes(envelope("seal", body, self.seal_version, json.dumps(brief).encode()))
        self.rank["seal_digest"] = xxhash.xxh3_128_hexdigest(body)
        manifest = envelope("manifest", self._bytes(self.manifest), self.manifest_version)
        self.paths["manifest"].write_bytes(manifest)

    def _bytes(self, body: dict[str, Any]) -> bytes:
        return json.dumps(body).encode().replace(json.dumps(SPLICE).encode(), self.splice)


@dataclass(frozen=True)
class Case:
    name: str
    forge: Callable[[Forged], object]
    error: type[StillframeError] = FormatError
    then: Callable[[Forged], object] = field(default=lambda forged: None)
    """Done to the files, after they are written."""

    def __str__(self) -> str:
        return self.name


# --- the gallery -------------------------------------------------------------------------------


def segment(**fields: Any) -> Callable[[Forged], object]:
    return lambda forged: forged.segment.update(fields)


def shard(key: str, **fields: Any) -> Callable[[Forged], object]:
    return lambda forged: forged.shard(key).update(fields)


def node(key: str, **fields: Any) -> Callable[[Forged], object]:
    return lambda forged: forged.node(key).update(fields)


def view(**fields: Any) -> Callable[[Forged], object]:
    return lambda forged: forged.node("window")["view"].update(fields)


def keys(*last: Any) -> Callable[[Forged], object]:
    def forge(forged: Forged) -> None:
        forged.tree["keys"][-len(last) :] = last

    return forge


def value(value: Any, splice: bytes = b"") -> Callable[[Forged], object]:
    def forge(forged: Forged) -> None:
        forged.seal["values"] = [value]
        forged.splice = splice

    return forge


def manifest(**fields: Any) -> Callable[[Forged], object]:
    return lambda forged: forged.manifest.update(fields)


def rank(**fields: Any) -> Callable[[Forged], object]:
    return lambda forged: forged.rank.update(fields)


def spliced_tree(forged: Forged) -> None:
    forged.seal["tree"] = SPLICE
    forged.splice = b'{"kind":"list","items":[' * 100_000 + b"]}" * 100_000


def all_of_a_huge_segment(forged: Forged) -> None:
    """Consistent in itself; only the file is not that long."""
    chunks = 1000
    data = chunks * CHUNK_BYTES
    forged.seal["shards"] = [{"name": "base", "dtype": "U8", "shape": [data], "start": 0, "end": data}]
    forged.seal["tree"] = {"kind": "tensor", "shard": 0}
    forged.segment.update(bytes=data + 4096, chunks=["0" * 32] * chunks)
    forged.rank["segment_bytes"] = data + 4096


def as_array(key: str, dtype: str) -> Callable[[Forged], object]:
    def forge(forged: Forged) -> None:
        number = forged.node(key)["shard"]
        forged.tree["items"][forged.tree["keys"].index(key)] = {"kind": "array", "shard": number, "dtype": dtype}

    return forge


def odd_as_half(forged: Forged) -> None:
    """Two items of two bytes in three bytes."""
    forged.node("odd")["view"] = {"dtype": "F16", "shape": [2], "stride": [1], "offset": 0}


def outside(forged: Forged) -> Path:
    """Beside the root: what a step's directory must not reach."""
    path = forged.root.parent / "outside"
    path.mkdir(exist_ok=True)
    return path


def name_outside(key: str, make: Callable[[str], str]) -> Callable[[Forged], object]:
    """The manifest names a good file, which lies outside."""

    def forge(forged: Forged) -> None:
        path = shutil.copy2(forged.paths[key], outside(forged))
        forged.rank[key] = make(str(path))

    return forge


def link_outside(which: str) -> Callable[[Forged], object]:
    def then(forged: Forged) -> None:
        path = forged.paths[which]
        target = outside(forged) / f"{path.parent.name}-{path.name}"
        shutil.move(path, target)
        path.symlink_to(target)

    return then


def sparse(which: str) -> Callable[[Forged], object]:
    return lambda forged: os.truncate(forged.paths[which], 40 * GIB)


def directory(which: str) -> Callable[[Forged], object]:
    def then(forged: Forged) -> None:
        forged.paths[which].unlink()
        forged.paths[which].mkdir()

    return then


def nothing(forged: Forged) -> None:
    pass


DEEP = 100_000
CASES = [
    # names
    Case("segment-above", segment(file=f"../{layout.segment_name()}")),
    Case("segment-absolute", segment(file="/etc/passwd")),
    Case("segment-below", segment(file=f"a/{layout.segment_name()}")),
    Case("seal-of-an-attempt-above", lambda forged: forged.seal["save"].update(attempt="../../..")),
    Case("seal-of-another-attempt", lambda forged: forged.seal["save"].update(attempt=2)),
    Case("seal-of-another-epoch", lambda forged: forged.seal["save"].update(epoch=2)),
    Case("seal-of-another-step", lambda forged: forged.seal["save"].update(step=7)),
    Case("seal-of-another-rank", lambda forged: forged.seal.update(rank=1, world_size=2)),
    Case("seal-with-another-brief", lambda forged: forged.brief.update(world_size=2)),
    Case("seal-with-a-brief-that-is-none", lambda forged: forged.brief.update(nothing=1)),
    Case("manifest-names-segment-above", name_outside("segment", lambda path: f"../../outside/{Path(path).name}")),
    Case("manifest-names-segment-absolute", name_outside("segment", str)),
    Case("manifest-names-seal-above", name_outside("seal", lambda path: f"../../outside/{Path(path).name}")),
    Case("manifest-names-seal-absolute", name_outside("seal", str)),
    Case("manifest-names-nothing", rank(seal="")),
    Case("manifest-attempt-above", lambda forged: forged.manifest["save"].update(attempt="../../../x")),
    Case("manifest-of-another-step", lambda forged: forged.manifest["save"].update(step=7)),
    Case("manifest-of-another-epoch", lambda forged: forged.manifest["save"].update(epoch=2)),
    Case("manifest-of-attempt-0", lambda forged: forged.manifest["save"].update(attempt=0)),
    Case("manifest-of-an-epoch-beyond-any-int", lambda forged: forged.manifest["save"].update(epoch=2**80)),
    Case("manifest-that-goes-on-from-its-own-epoch", manifest(parent={"step": 1, "epoch": 1, "attempt": 1})),
    Case("manifest-that-goes-on-from-nowhere", manifest(parent={"step": -1, "epoch": 0, "attempt": 1})),
    Case("manifest-with-metadata-that-is-none", manifest(metadata=[])),
    Case("manifest-without-ranks", manifest(ranks=[])),
    Case("manifest-of-too-many-ranks", manifest(world_size=2**60)),
    Case("manifest-of-no-rank", manifest(world_size=0, ranks=[])),
    Case("manifest-with-unknown-field", manifest(run="rm -rf /")),
    Case("manifest-rank-twice", lambda forged: forged.manifest["ranks"].append(forged.rank)),
    # sizes
    Case("manifest-segment-huge", rank(segment_bytes=2**60), IntegrityError),
    Case("manifest-segment-negative", rank(segment_bytes=-1)),
    Case("segment-bytes-huge", segment(bytes=2**60)),
    Case("segment-bytes-negative", segment(bytes=-4096)),
    Case("segment-huge-throughout", all_of_a_huge_segment, IntegrityError),
    Case("data-start-zero", segment(data_start=0)),
    Case("data-start-negative", segment(data_start=-4096)),
    Case("data-start-huge", segment(data_start=2**60)),
    Case("data-start-beyond-any-int", segment(data_start=2**80)),
    Case("chunk-bytes-zero", segment(chunk_bytes=0)),
    Case("chunk-bytes-negative", segment(chunk_bytes=-4096)),
    Case("chunk-bytes-odd", segment(chunk_bytes=CHUNK_BYTES + 1)),
    Case("chunk-bytes-terabyte", segment(chunk_bytes=2**40)),
    Case("chunk-bytes-huge", segment(chunk_bytes=2**62)),
    Case("chunk-bytes-beyond-any-int", segment(chunk_bytes=2**80)),
    Case("chunks-many", segment(chunks=["0" * 32] * 100_000)),
    Case("chunks-none", segment(chunks=[])),
    Case("chunk-checksum-malformed", segment(chunks=["../" + "0" * 29])),
    # shards
    Case("shape-huge", shard("base", shape=[2**40, 2**40])),
    Case("shape-negative", shard("base", shape=[-1000])),
    Case("shape-twice-negative", shard("base", shape=[-10, -100])),
    Case("shape-huge-times-zero", shard("none", shape=[2**40, 2**40, 0])),
    Case("shape-beyond-any-int-times-zero", shard("none", shape=[2**80, 0])),
    Case("shape-of-65-dimensions", shard("base", shape=[1] * 64 + [1000])),
    Case("shape-of-floats", shard("base", shape=[1000.5])),
    Case("shard-start-negative", shard("base", start=-4)),
    Case("shard-end-huge", shard("base", end=2**60)),
    Case("shard-over-another", lambda forged: forged.seal["shards"].append(forged.shard("base"))),
    Case("shard-dtype-object", shard("base", dtype="O")),
    # views
    Case("view-offset-negative", view(offset=-1)),
    Case("view-offset-outside", view(offset=995)),
    Case("view-offset-beyond-any-int", view(offset=2**80)),
    Case("view-stride-outside", view(stride=[200])),
    Case("view-stride-huge", view(stride=[2**62])),
    Case("view-stride-negative", view(stride=[-1])),
    Case("view-stride-beyond-any-int", view(shape=[1], stride=[2**80])),
    Case("view-shape-beyond-any-int", view(shape=[2**80], stride=[0])),
    Case("view-shape-overflowing", view(shape=[2**62, 2**62], stride=[0, 0])),
    Case("view-shape-negative", view(shape=[-10])),
    Case("view-without-strides", view(stride=[])),
    Case("view-dtype-unknown", view(dtype="O")),
    Case("view-of-a-part-of-an-item", odd_as_half),
    # the tree
    Case("tree-shard-out-of-range", node("base", shard=99)),
    Case("tree-shard-negative", node("base", shard=-1)),
    Case("tree-value-out-of-range", node("value", value=1)),
    Case("tree-value-negative", node("value", value=-1)),
    Case("tree-of-unknown-kind", node("value", kind="pickle")),
    Case("tree-nested-deeply", spliced_tree),
    Case("dict-with-more-keys-than-items", lambda forged: forged.tree["keys"].append("x")),
    Case("dict-with-a-key-twice", keys("base")),
    Case("dict-with-an-unhashable-key", keys([1])),
    Case("dict-with-a-dict-as-key", keys({"a": 1})),
    Case("dict-with-a-deep-key", lambda forged: (keys(SPLICE)(forged), value(1, b"[" * 900 + b"]" * 900)(forged))),
    Case("array-of-objects", as_array("array", "|O")),
    Case("array-of-another-dtype", as_array("array", "<f8")),
    Case("array-of-a-type-numpy-lacks", as_array("half", "<f2")),
    # values
    Case("value-of-unknown-tag", value({"$": "pickle", "data": "gASVAAAA"})),
    Case("value-of-no-tag", value({"data": 1})),
    Case("value-tagged-with-a-list", value({"$": ["bytes"]})),
    Case("value-without-its-fields", value({"$": "bytes"})),
    Case("bytes-not-base64", value({"$": "bytes", "data": "%%%%"})),
    Case("bytes-not-text", value({"$": "bytes", "data": 5})),
    Case("float-not-hexadecimal", value({"$": "float", "bits": "zz"})),
    Case("set-of-unhashables", value({"$": "set", "items": [[1]]})),
    Case("range-of-text", value({"$": "range", "items": ["a"]})),
    Case("numpy-object", value({"$": "numpy", "dtype": "O", "data": "AAAAAAAAAAA="})),
    Case("numpy-dtype-that-is-no-syntax", value({"$": "numpy", "dtype": "f4,(", "data": ""})),
    Case("numpy-dtype-huge", value({"$": "numpy", "dtype": "S2147483647", "data": ""})),
    Case("torch-dtype-that-is-none", value({"$": "torch.dtype", "name": "load"})),
    Case("torch-dtype-that-is-a-lazy-module", value({"$": "torch.dtype", "name": "_inductor"})),
    Case("torch-device-unknown", value({"$": "torch.device", "name": "../../etc"})),
    Case("torch-size-beyond-any-int", value({"$": "torch.Size", "items": [2**80]})),
    Case("int-of-a-million-digits", value(SPLICE, b"9" * 1_000_000)),
    Case("list-nested-deeper-than-allowed", value(SPLICE, b"[" * 400 + b"]" * 400)),
    Case("list-nested-deeply", value(SPLICE, b"[" * 900 + b"]" * 900)),
    Case("list-nested-very-deeply", value(SPLICE, b"[" * DEEP + b"]" * DEEP)),
    Case("tuple-nested-deeply", value(SPLICE, b'{"$":"tuple","items":[' * 300 + b"1" + b"]}" * 300)),
    Case("dict-nested-very-deeply", value(SPLICE, b'{"a":' * DEEP + b"1" + b"}" * DEEP)),
    # versions there never were
    Case("manifest-version-zero", lambda forged: setattr(forged, "manifest_version", 0)),
    Case("seal-version-negative", lambda forged: setattr(forged, "seal_version", -1)),
    # not even files
    *(
        Case(f"{which}-{how}", nothing, IntegrityError, then(which))
        for which in ("manifest", "seal", "segment")
        for how, then in {"linked-outside": link_outside, "of-40-GiB": sparse, "a-directory": directory}.items()
    ),
]
FIRST = 10
"""Step of the first case; step 1 is whole."""
STEPS = {FIRST + number: case for number, case in enumerate(CASES)}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2, as saved."""
    root = tmp_path_factory.mktemp("good") / "root"
    with Checkpointer(root) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, make_state(step))
            checkpointer.wait()
    return root


def hang_up(good: Path, into: Path) -> Path:
    """A root with the good step 1, and a step for every case."""
    root = into / "root"
    layout.copy_step(good, 1, root, 1)
    for step, case in STEPS.items():
        layout.copy_step(good, 2, root, step)
        forged = Forged(root, step)
        case.forge(forged)
        forged.write()
        case.then(forged)
    return root


@pytest.fixture(scope="module")
def gallery(good: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For reading only."""
    return hang_up(good, tmp_path_factory.mktemp("gallery"))


@pytest.fixture
def root(good: Path, tmp_path: Path) -> Path:
    """Steps 1 and 2, to be changed."""
    return Path(shutil.copytree(good, tmp_path / "root"))


# --- reading what lies -------------------------------------------------------------------------


def test_a_forgery_that_says_nothing_false_is_read(root: Path) -> None:
    """The forger's tools are right: only what a case changes is refused."""
    Forged(root, 2).write()
    assert_same(load(root, 2), make_state(2))


def test_a_box_of_another_dtype_than_its_tensor_is_refused(tmp_path: Path) -> None:
    """It is shorter in bytes: the rest would be whatever lies in memory."""
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"a": torch.arange(64, dtype=torch.uint8)})
    forged = Forged(tmp_path, 1)
    forged.shard("a")["whole"] = {"tensor": "a", "shape": [64], "offset": [0]}
    box = {"rank": 0, "offset": [0], "shape": [64]}
    forged.node("a").clear()
    forged.tree["items"][0].update(kind="sharded", tensor="a", dtype="F32", shape=[64], parts=[box])
    forged.write()
    with pytest.raises(FormatError, match="differ in dtype"):
        load(tmp_path, 1)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: STEPS[step].name)
def test_load_refuses(gallery: Path, step: int) -> None:
    with pytest.raises(STEPS[step].error):
        load(gallery, step)


def test_restore_by_number_refuses_each(good: Path, tmp_path: Path) -> None:
    root = hang_up(good, tmp_path)
    wrong: dict[str, str] = {}
    with Checkpointer(root) as checkpointer:
        for step, case in STEPS.items():
            try:
                checkpointer.restore(make_state(99), step=step)
            except (IntegrityError, MismatchError, UnsupportedStateError):
                continue
            except Exception as error:
                wrong[case.name] = f"{type(error).__name__}: {error}"[:100]
            else:
                wrong[case.name] = "accepted"
    assert wrong == {}


def test_restore_passes_over_all_that_fit_the_state(good: Path, tmp_path: Path) -> None:
    """Those whose shapes say that they belong to another model are the user's to decide, not damage."""
    root = hang_up(good, tmp_path)
    state = make_state(99)
    with Checkpointer(root) as checkpointer, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        while True:
            try:
                assert checkpointer.restore(state).step == 1
                break
            except MismatchError as error:
                (step, *_) = re.findall(r"step (\d+)", str(error))
                shutil.rmtree(layout.step_dir(root, int(step)))
    assert_same(state, make_state(1))


# --- what it may not do ------------------------------------------------------------------------

WATCH = """
import json, os, resource, sys
from pathlib import Path
import torch, numpy
from stillframe import StillframeError, load

good, root, *steps = sys.argv[1:]
load(good)
modules, peak, opened = set(sys.modules), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
sys.addaudithook(lambda event, arguments: opened.append(arguments[0]) if event == "open" else None)
raised = {}
for step in steps:
    try:
        load(root, int(step))
        raised[step] = "nothing"
    except BaseException as error:
        raised[step] = type(error).__name__ if isinstance(error, StillframeError) else f"raw {error!r:.80}"
paths = [os.path.normpath(os.fsdecode(path)) for path in opened if not isinstance(path, int)]
json.dump({
    "raised": raised,
    "imported": sorted(set(sys.modules) - modules),
    "opened_outside": [path for path in paths if path != root and ("/" in path or path == "..")],  # names in it
    "opened": len(paths),
    "grown_bytes": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024,
}, sys.stdout)
"""


@pytest.fixture(scope="module")
def watched(good: Path, gallery: Path) -> dict[str, Any]:
    """A process that loads the whole gallery, with 4 GiB of address space, and tells what it did."""
    seen: dict[str, Any] = json.loads(run_fresh(WATCH, good, gallery, *STEPS))
    return seen


def test_in_little_memory_each_is_still_refused(watched: dict[str, Any]) -> None:
    wrong = {STEPS[int(step)].name: error for step, error in watched["raised"].items() if error[:4] in ("raw ", "noth")}
    assert wrong == {}


def test_nothing_is_imported_because_a_file_names_it(watched: dict[str, Any]) -> None:
    assert watched["imported"] == []


def test_nothing_outside_the_root_is_opened(watched: dict[str, Any]) -> None:
    assert watched["opened"] > len(STEPS)
    assert watched["opened_outside"] == []


def test_memory_stays_bounded(watched: dict[str, Any]) -> None:
    assert watched["grown_bytes"] < 256 * MIB


def forge_value(root: Path, value: Any) -> None:
    forged = Forged(root, 2)
    forged.seal["values"] = [value]
    forged.write()


MARKER = "open({marker!r}, 'w').close()\nimport enum\nclass Color(enum.Enum):\n    RED = 1\n"
LAZY = "def __getattr__(name):\n    open({marker!r}, 'w').close()\n    raise AttributeError(name)\n"


def test_an_enum_whose_module_is_not_loaded_is_not_imported(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hostile_enum.py").write_text(MARKER.format(marker=str(tmp_path / "marker")))
    monkeypatch.syspath_prepend(tmp_path)
    forge_value(root, {"$": "enum", "type": "hostile_enum:Color", "name": "RED"})
    with pytest.raises(UnsupportedStateError, match="import it"):
        load(root, 2)
    assert "hostile_enum" not in sys.modules
    assert not (tmp_path / "marker").exists()


def test_a_checkpoint_with_an_enum_that_is_not_loaded_is_not_damaged(root: Path) -> None:
    """The caller has to import something; stepping back would throw a good checkpoint away."""
    forge_value(root, {"$": "enum", "type": "not_loaded_here:Color", "name": "RED"})
    with Checkpointer(root) as checkpointer, pytest.raises(UnsupportedStateError, match="import it"):
        checkpointer.restore(make_state(99))
    assert Catalog(root).steps() == [1, 2]


def test_naming_an_attribute_of_a_loaded_module_runs_no_code_of_it(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lazy_module.py").write_text(LAZY.format(marker=str(tmp_path / "marker")))
    monkeypatch.syspath_prepend(tmp_path)
    __import__("lazy_module")
    forge_value(root, {"$": "enum", "type": "lazy_module:Color", "name": "RED"})
    with pytest.raises(StillframeError):
        load(root, 2)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("groups", [5, [], [{"params": 5}], [{}], {"params": [0]}], ids=str)
def test_an_optimizer_state_that_is_none_is_refused(root: Path, groups: Any) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(root) as checkpointer:
        checkpointer.save(3, {"optimizer": {"state": {}, "param_groups": groups}})
        checkpointer.wait()
        with pytest.raises((MismatchError, IntegrityError)):
            checkpointer.restore({"optimizer": optimizer}, step=3)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_thousands_of_small_chunks_are_read_like_a_few_large_ones(tmp_path: Path) -> None:
    state = {"tensor": torch.arange(2_000_001, dtype=torch.float32)}
    with Checkpointer(tmp_path / "root") as checkpointer:
        checkpointer.save(1, state)
        checkpointer.wait()
    forged = Forged(tmp_path / "root", 1)
    data = forged.paths["segment"].read_bytes()[forged.segment["data_start"] :]
    chunks = [xxhash.xxh3_128_hexdigest(data[start : start + 4096]) for start in range(0, len(data), 4096)]
    forged.segment.update(chunk_bytes=4096, chunks=chunks)
    forged.write()
    assert len(chunks) > 1000
    assert_same(load(tmp_path / "root"), state)


# --- newer versions ----------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["manifest_version", "seal_version"])
def test_a_newer_version_is_neither_damaged_nor_passed_over(root: Path, which: str) -> None:
    forged = Forged(root, 2)
    setattr(forged, which, layout.NEWER)
    forged.write()
    with Checkpointer(root) as checkpointer, pytest.raises(VersionError, match="upgrade"):
        checkpointer.restore(make_state(99))
    assert Catalog(root).steps() == [1, 2]
    with pytest.raises(VersionError, match="upgrade"):
        load(root)


def test_a_newer_version_needs_nothing_but_its_number_to_be_known(root: Path) -> None:
    layout.manifest(root, 2).write_bytes(b'{"stillframe": %d, "anything": [{"else": 1.5}]}' % layout.NEWER)
    with pytest.raises(VersionError, match="upgrade"):
        load(root, 2)


def test_a_manifest_that_names_a_rank_without_files_is_damaged(root: Path) -> None:
    forged = Forged(root, 2)
    forged.manifest["ranks"].append({**forged.rank, "rank": 1})
    forged.manifest["world_size"] = forged.seal["world_size"] = 2
    forged.write()
    either = f"{layout.segment_name(1)}|{layout.seal_name(1)}"
    with Checkpointer(root) as checkpointer, pytest.warns(RuntimeWarning, match=either):
        assert checkpointer.restore(make_state(99)).step == 1


def test_a_run_leaves_the_files_of_a_newer_version_alone(root: Path) -> None:
    forged = Forged(root, 2)
    forged.manifest_version = layout.NEWER
    forged.write()
    directory = layout.step_dir(root, 2)
    layout.stray_segment(directory, rank=7).write_bytes(b"the newer version knows why")
    before = contents(directory)
    with Checkpointer(root) as checkpointer:
        checkpointer.save(3, make_state(3))
    assert contents(directory) == before


# --- deleting and writing ----------------------------------------------------------------------


def contents(path: Path) -> dict[str, bytes]:
    return {str(each.relative_to(path)): each.read_bytes() for each in sorted(path.rglob("*")) if each.is_file()}


def save_and_prune(root: Path, *steps: int) -> None:
    with Checkpointer(root, keep=KeepLast(1)) as checkpointer:
        for step in steps:
            checkpointer.save(step, make_state(step))
            checkpointer.wait()


@pytest.mark.parametrize("state", ["never committed", "committed", "set aside"])
def test_nothing_is_deleted_through_a_linked_step(root: Path, tmp_path: Path, state: str) -> None:
    elsewhere, directory = tmp_path / "elsewhere", layout.step_dir(root, 2)
    layout.stray_segment(directory, rank=1).write_bytes(b"precious")
    if state == "never committed":
        layout.manifest(root, 2).rename(directory / "notes")
    elif state == "set aside":
        layout.set_aside(root, 2)
    shutil.move(directory, elsewhere)
    directory.symlink_to(elsewhere)
    before = contents(elsewhere)
    save_and_prune(root, 3, 4)
    assert contents(elsewhere) == before
    assert Catalog(root).steps()[-1] == 4


def test_nothing_is_written_through_a_linked_step(root: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    with Checkpointer(root) as checkpointer:
        assert checkpointer.restore(make_state(99)).step == 2
        layout.next_dir(root, 3, is_running=True).symlink_to(tmp_path / "elsewhere")
        checkpointer.save(3, make_state(3))
        with pytest.raises(StorageError):
            checkpointer.wait()
        checkpointer.save(3, make_state(3))  # again, in a directory of its own
        checkpointer.wait()
    assert contents(tmp_path / "elsewhere") == {}
    assert_same(load(root), make_state(3))


def test_an_epoch_that_something_else_is_named_for_is_not_used(root: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    layout.next_dir(root, 3).symlink_to(tmp_path / "elsewhere")
    with Checkpointer(root) as checkpointer:
        checkpointer.save(3, make_state(3))
    assert contents(tmp_path / "elsewhere") == {}
    assert_same(load(root), make_state(3))


def test_nothing_is_renamed_through_a_linked_step(root: Path, tmp_path: Path) -> None:
    elsewhere, directory = tmp_path / "elsewhere", layout.step_dir(root, 2)
    layout.manifest(root, 2).write_bytes(b"damaged")
    shutil.move(directory, elsewhere)
    directory.symlink_to(elsewhere)
    before = contents(elsewhere)
    with Checkpointer(root) as checkpointer, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        assert checkpointer.restore(make_state(99)).step == 1
    assert contents(elsewhere) == before


def test_a_root_whose_steps_are_all_links_is_no_fresh_start(root: Path, tmp_path: Path) -> None:
    for step in Catalog(root).steps():
        directory = layout.step_dir(root, step)
        shutil.move(directory, tmp_path / f"elsewhere-{step}")
        directory.symlink_to(tmp_path / f"elsewhere-{step}")
    with Checkpointer(root) as checkpointer, pytest.raises(StorageError, match="is a link or a file"):
        checkpointer.restore(make_state(99))


def test_a_linked_lock_is_not_written_to(root: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"precious")
    layout.lock(root).unlink()
    layout.lock(root).symlink_to(tmp_path / "precious")
    with contextlib.suppress(StorageError):  # to refuse to save without a lock would be as good
        save_and_prune(root, 3)
    assert (tmp_path / "precious").read_bytes() == b"precious"


FOREIGN = ["notes.txt", *layout.ALMOST_FILES]


@pytest.mark.parametrize("is_committed", [True, False], ids=["pruned", "swept"])
def test_foreign_files_in_a_step_stay_and_ours_go(root: Path, is_committed: bool) -> None:
    path = layout.step_dir(root, 2)
    for name in FOREIGN:
        (path / name).write_text("mine")
    if not is_committed:
        layout.uncommit(root, 2)
    save_and_prune(root, 3)
    tombstone = [] if is_committed else [layout.aside(root, 2).name]
    assert sorted(os.listdir(path)) == sorted([*FOREIGN, *tombstone])
    assert Catalog(root).steps() == [3]


def test_garbage_in_the_root_is_no_checkpoint_and_stays(root: Path) -> None:
    for name in layout.ALMOST_STEPS:
        (root / name).mkdir()
        (root / name / layout.MANIFEST).write_text("{}")
    (root / os.fsdecode(b"step-\xff\xfe")).write_text("")
    assert Catalog(root).steps() == [1, 2]
    before = set(os.listdir(root))
    with Checkpointer(root) as checkpointer:
        assert checkpointer.restore(make_state(99)).step == 2
        checkpointer.save(3, make_state(3))
    assert set(os.listdir(root)) - before == {layout.step_dir(root, 3).name}


def test_a_file_in_the_place_of_a_step_is_no_checkpoint(root: Path) -> None:
    with Checkpointer(root) as checkpointer:
        assert checkpointer.restore(make_state(99)).step == 2
        file = layout.next_dir(root, 3, is_running=True)
        file.write_text("not a directory")
        assert Catalog(root).steps() == [1, 2]
        with pytest.raises(NotFoundError):
            load(root, 3)
        checkpointer.save(3, make_state(3))
        with pytest.raises(StorageError):
            checkpointer.wait()
    assert file.read_text() == "not a directory"


def a_file_for_a_step(root: Path) -> None:
    layout.torn_dir(root, 0).write_text("not a directory")


def a_directory_for_a_segment(root: Path) -> None:
    (layout.stray_segment(layout.torn_dir(root, 0)) / "inside").mkdir(parents=True)


@pytest.mark.parametrize("put", [a_file_for_a_step, a_directory_for_a_segment])
def test_what_cannot_be_deleted_does_not_keep_the_rest_from_being_swept(
    root: Path, put: Callable[[Path], None]
) -> None:
    put(root)
    layout.make_torn_step(root, 5)
    save_and_prune(root, 6)
    assert not layout.has_step(root, 5)
    assert layout.has_step(root, 0)


# --- pipes: opening one waits for somebody to write to it --------------------------------------


@pytest.mark.parametrize("which", ["manifest", "seal", "segment"])
def test_a_pipe_in_the_place_of_a_file_does_not_hang_a_reader(root: Path, which: str) -> None:
    path = layout.file(root, 2, which)
    path.unlink()
    os.mkfifo(path)
    child = start_child(
        "import sys\nfrom stillframe import Catalog, IntegrityError\n"
        "try:\n    Catalog(sys.argv[1]).open(2)\nexcept IntegrityError:\n    print('refused')",
        root,
    )
    try:
        out, err = child.communicate(timeout=10)
    finally:
        child.kill()
        child.wait()
    assert out.strip() == "refused", err


@contextlib.contextmanager
def no_keeper_left(checkpointer: Checkpointer) -> Iterator[None]:
    """Closes it, after killing a keeper that hangs."""
    pid = spi.keeper_pid(checkpointer)
    assert pid is not None
    try:
        yield
    except BaseException:
        kill(pid)
        with contextlib.suppress(StillframeError):
            checkpointer.close(timeout_s=10)
        raise
    checkpointer.close()


def test_a_pipe_in_the_place_of_a_manifest_does_not_hang_the_keeper(root: Path) -> None:
    layout.manifest(root, 2).unlink()
    os.mkfifo(layout.manifest(root, 2))
    checkpointer = Checkpointer(root, keep=KeepLast(1))
    with no_keeper_left(checkpointer):
        checkpointer.save(3, make_state(3))
        checkpointer.wait(timeout_s=10)
        checkpointer.save(4, make_state(4))
        checkpointer.wait(timeout_s=10)
    assert Catalog(root).latest() == 4
