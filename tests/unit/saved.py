"""Saves as keepers leave them, without a trainer: for tests of what other keepers do with them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from stillframe import Catalog
from stillframe.checkpoint import epochs
from stillframe.format import names, records
from stillframe.format.digest import digest
from stillframe.format.records import Manifest, RankEntry, SealDraft, Team, encode_manifest
from stillframe.format.segment import encode_header
from stillframe.format.tree import DictNode, RankBox, ShardedNode
from stillframe.keeper.epochs import CurrentEpoch
from stillframe.keeper.segment import SegmentWriter
from stillframe.keeper.terms import Terms
from stillframe.link.messages import Begin
from stillframe.model import SaveId
from stillframe.store.protocol import Store

RUN, OTHER = "0123abcd", "ffffffff"
"""Two runs."""
STEP = 7


def terms(root: Path | Store, world_size: int = 3, deadline_s: float = 60.0, run: str = RUN) -> Terms:
    return Terms(Catalog(root).store, run, world_size, deadline_s)


def begun(root: Path | Store, run: str = RUN, sequence: int = 0, parent: SaveId | None = None) -> int:
    """The epoch of a run, claimed and begun; the same one when asked again."""
    catalog = Catalog(root)
    number = epochs.claim(catalog, run, sequence)
    return epochs.begin(catalog, number, run, sequence, parent, is_shared=True).epoch


def unsealed(
    root: Path | Store,
    rank: int = 0,
    world_size: int = 3,
    attempt: int = 1,
    tensors: tuple[str, ...] = (),
    updates: int | None = None,
    run: str = RUN,
) -> SegmentWriter:
    """A rank's part of the step, without data, received and not yet sealed."""
    nodes = [ShardedNode(name, "F32", (4,), [RankBox(rank, (rank,), (1,))]) for name in tensors]
    teams = [Team(digest(b"all"), world_size, digest(repr(tensors).encode()))] if tensors else []
    draft = SealDraft(
        rank, world_size, 0.0, records.encode_shards([]), records.encode_tree(DictNode(list(tensors), list(nodes))),
        msgspec.Raw(b"[]"), teams, updates=updates,
    )  # fmt: skip
    header = encode_header([], {})
    begin = Begin(1, STEP, attempt, 0.0, len(header), 0, 0, "", ())
    begun(root, run)
    epoch = CurrentEpoch(Catalog(root), terms(root, world_size, run=run), rank)
    return SegmentWriter(begin, header, draft, Catalog(root), epoch, is_counted=rank > 0)


def sealed(
    root: Path | Store,
    rank: int = 0,
    world_size: int = 3,
    attempt: int = 1,
    tensors: tuple[str, ...] = (),
    updates: int | None = None,
    run: str = RUN,
) -> SegmentWriter:
    """The same, sealed."""
    save = unsealed(root, rank, world_size, attempt, tensors, updates, run)
    save.seal()
    return save


# --- files alone -------------------------------------------------------------------------------


def rank_files(rank: int) -> set[str]:
    return {names.segment(rank), names.seal(rank)}


def files(root: Path, save: SaveId) -> set[str]:
    """The names in its directory."""
    path = Path(Catalog(root).dir(save))
    return {each.name for each in path.iterdir()} if path.exists() else set()


def write(root: Path, save: SaveId, *ranks: int) -> None:
    """Something in the place of these ranks' segments and seals."""
    Path(Catalog(root).dir(save)).mkdir(exist_ok=True)
    for rank in ranks:
        for name in rank_files(rank):
            (Path(Catalog(root).dir(save)) / name).write_bytes(b"x")


def commit(root: Path, save: SaveId, world_size: int = 1) -> None:
    """A manifest beside it."""
    entries = [RankEntry(rank, 1, "0" * 32) for rank in range(world_size)]
    manifest = Manifest(save, None, world_size, 0.0, {}, entries)
    (Path(Catalog(root).dir(save)) / names.MANIFEST).write_bytes(encode_manifest(manifest))
