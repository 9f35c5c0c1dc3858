"""Carrying a save from one root to another: the part of each rank, verified on its way, then the commit there.

A part is a segment, then its seal: where the seal is, the segment is whole.  So what an interrupted promotion has
carried is not carried again, and two that carry the same part write the same bytes.  Whoever finds every part there
publishes the manifest.  It says nothing that the seals do not say, and so is the same in every root.

Before anything is carried the other root learns which run it comes from.  One that holds checkpoints of another run is
refused: of two saves with the same name one would be taken for the other.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from stillframe.checkpoint.catalog import Catalog, Checkpoint
from stillframe.checkpoint.read import read_chunks, read_header
from stillframe.checkpoint.seals import read_brief, read_seal
from stillframe.errors import BusyError, ExistsError, StorageError
from stillframe.format import limits, names
from stillframe.format.epochs import encode_parent
from stillframe.format.records import HEAD_BYTES, SealBrief, encode_manifest, make_manifest
from stillframe.latch import Latch
from stillframe.model import BLOCK_BYTES, SaveId
from stillframe.store import heads
from stillframe.store.protocol import Missing, Store, read_all
from stillframe.units import round_up


class Pace:
    """At most so many bytes a second; 0: as fast as it goes.  Thread: safe from any."""

    def __init__(self, bytes_per_s: float = 0.0) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_s = 0.0

    def take(self, nbytes: int, is_over: Latch) -> None:
        """Blocks until so many more may go, or it is over."""
        if self._bytes_per_s <= 0:
            return
        with self._lock:
            begin_s = max(self._free_s, time.monotonic())
            self._free_s = begin_s + nbytes / self._bytes_per_s
        is_over.wait(max(begin_s - time.monotonic(), 0.0))


_COMPARED = 16
"""So many of the newest epochs that both roots have are compared."""

OnBytes = Callable[[int], None]
OnPart = Callable[[int, int], None]


def promote(
    source: Catalog,
    target: Catalog,
    save: SaveId,
    *,
    pace: Pace | None = None,
    on_bytes: OnBytes = lambda _count: None,
    on_part: OnPart = lambda _rank, _sent: None,
) -> list[int]:
    """Carry all parts of a checkpoint that the source has, and commit it there if all are.  May be repeated.

    ``on_bytes`` is told, from several threads, of bytes that have been carried or were there; ``on_part`` of each rank
    whose part is there now, and how many bytes of it had to be sent.
    Returns the ranks whose parts are missing still; none: it is a checkpoint there.  Blocks.
    Raises: :class:`NotFoundError`; :class:`IntegrityError` if the source is damaged; :class:`ExistsError` if the target
    holds another run's checkpoints; :class:`BusyError` if it was removed there; :class:`StorageError`.
    """
    pace = pace or Pace()
    with source.open_save(save) as checkpoint:
        if is_there(checkpoint, target):
            on_bytes(checkpoint.manifest.bytes)
            sweep(target, save)
            return []
        introduce(source, target, save.epoch, save)
        try:
            for rank in checkpoint.ranks:
                on_part(rank, carry_part(checkpoint, target, rank, pace, on_bytes))
                checkpoint.release(rank)
            missing = publish(target, save)
        except StorageError:
            if not is_there(checkpoint, target):
                raise
            missing = []  # another one was faster, and has swept up behind us
    if not missing:
        sweep(target, save)
    return missing


def is_there(checkpoint: Checkpoint, target: Catalog) -> bool:
    """Whether the target has this checkpoint.

    Raises: :class:`ExistsError` if it has another one of the same name, or is not shared by the ranks;
    :class:`BusyError` if it was removed there.
    """
    save = checkpoint.save
    if not target.is_shared(save.epoch):
        raise ExistsError(f"{target.root} holds the parts of some ranks only (shared=False): give another place")
    if not any(target.store.list(names.step_dir(save))):  # as with most: then one request tells all
        return False
    if not target.is_committed(save):
        _check_not_aside(target, save)
        return False
    known = {entry.rank: entry.seal_digest for entry in target.manifest(save).ranks}
    if any(known.get(entry.rank) != entry.seal_digest for entry in checkpoint.manifest.ranks):
        raise _of_another_run(target, f"{save} there is another one")
    return True


# --- which run it is -------------------------------------------------------------------------


def introduce(source: Catalog, target: Catalog, epoch: int, save: SaveId | None = None) -> bool:
    """Tell the target of an epoch: who has claimed it, and what it goes on from.  May be repeated.

    Returns whether the latter is known by now.

    ``save``: what is to be carried there; it has to count there, if it is a checkpoint that counts at all.
    Raises: :class:`ExistsError` if the target is another run's, or has gone on by itself; :class:`StorageError`;
    :class:`IntegrityError`.
    """
    parent = source.parent(epoch)
    ours = {epoch, *source.epochs(), *(row.epoch for row in (parent.lineage if parent else ()))}
    _check_related(source, target, ours, save)
    claim = _read(source.store, names.claim(epoch))
    if claim is not None and not target.store.put_new(names.claim(epoch), claim):
        raise _of_another_run(target, f"start {epoch} there is another run's")
    if parent is not None:
        shared = msgspec.structs.replace(parent, is_shared=True, is_carried=True)
        if not target.store.put_new(names.parent(epoch), encode_parent(shared)):
            found = target.parent(epoch)
            if found is None or (found.run, found.sequence) != (parent.run, parent.sequence):
                raise _of_another_run(target, f"start {epoch} there is another run's")
    return parent is not None


def check_same_run(root: Catalog, tier: Catalog) -> None:
    """Whether what a tier holds may be taken for this root's.  A root without a checkpoint of its own may take any.

    Raises: :class:`ExistsError` if it is another run's; :class:`StorageError`; :class:`IntegrityError`.
    """
    view = root.look()
    if not any(root.is_committed(save) for save in view.saves):
        return
    newest = sorted(root.epochs(), reverse=True)[:_COMPARED]
    begun = next(filter(None, map(root.parent, newest)), None)
    ancestors = {row.epoch for row in begun.lineage} if begun is not None else set()
    _check_related(root, tier, {*root.epochs(), *(save.epoch for save in view.saves), *ancestors}, None)


def _check_related(source: Catalog, target: Catalog, ours: set[int], save: SaveId | None) -> None:
    """Of every epoch that both have, the newest first, both tell the same; or the target has none."""
    view = target.look()
    there = {*view.epochs, *(each.epoch for each in view.saves)}
    common = sorted(there & ours, reverse=True)
    if there and not common and any(target.is_committed(each) or target.aside(each) for each in view.saves):
        raise _of_another_run(target, f"its starts ({_few(there)}) are none of {source.root}'s ({_few(ours)})")
    for epoch in common[:_COMPARED]:
        claims = [_read(each.store, names.claim(epoch)) for each in (source, target)]
        if None not in claims and claims[0] != claims[1] and not _is_by_hand(epoch, source, target):
            raise _of_another_run(target, f"start {epoch} there is another run's")
    newest = view.branch.epoch
    is_ahead = newest is not None and newest not in ours and save is not None and newest > save.epoch
    if is_ahead and save is not None and not view.branch.has(save):
        raise ExistsError(
            f"{target.root} has gone on by itself (start {newest}): a run has saved there, or somebody has removed "
            f"steps there by hand. Step {save.step} would not count there. Nothing was changed: give another place"
        )


def _is_by_hand(epoch: int, *catalogs: Catalog) -> bool:
    """Whether in each of them somebody has removed saves under this number: that says nothing of whose they are."""
    parents = [each.parent(epoch) for each in catalogs]
    return all(parent is not None and parent.is_by_hand for parent in parents)


def _read(store: Store, key: str) -> bytes | None:
    try:
        return read_all(store, key, limits.MAX_NOTE_BYTES)
    except Missing:
        return None


def _of_another_run(target: Catalog, why: str) -> ExistsError:
    return ExistsError(
        f"{target.root} holds checkpoints of another run: {why}. Nothing was changed: give this run a place of its "
        "own, or restore() from there first, so that it goes on from them"
    )


def _few(epochs: set[int]) -> str:
    newest = sorted(epochs)[-3:]
    return ", ".join(map(str, newest)) if len(newest) == len(epochs) else f"…, {', '.join(map(str, newest))}"


# --- one part --------------------------------------------------------------------------------


def carry_part(
    checkpoint: Checkpoint, target: Catalog, rank: int, pace: Pace, on_bytes: OnBytes = lambda _count: None
) -> int:
    """Carry the part of one rank, unless it is there.  Returns how many bytes had to be sent.  Blocks.

    Raises: :class:`IntegrityError` if it is damaged here; :class:`ExistsError` if there is another one of the same
    name; :class:`NotFoundError`; :class:`StorageError`.
    """
    save, store = checkpoint.save, target.store
    seal_key, segment_key = names.key(save, names.seal(rank)), names.key(save, names.segment(rank))
    entry = next(each for each in checkpoint.manifest.ranks if each.rank == rank)
    size = entry.segment_bytes
    if store.head(seal_key) is not None:
        if read_brief(store, save, rank)[1] != entry.seal_digest:
            raise _of_another_run(target, f"the part of rank {rank} of {save} there is another one")
        on_bytes(size)
        return 0
    seal = checkpoint.seal_bytes(rank)
    found = store.head(segment_key)
    is_sent = found is None or found.size != size
    sent = _send(checkpoint, rank, store, pace, on_bytes, entry.seal_digest) if is_sent else 0
    if not is_sent:
        on_bytes(size)
    if not store.put_new(seal_key, seal):
        if store.head(seal_key) is None:
            raise StorageError(f"{store.where(seal_key)} was there, and was removed meanwhile")
        raise _of_another_run(target, f"the part of rank {rank} of {save} there is another one")
    return sent


def _send(checkpoint: Checkpoint, rank: int, store: Store, pace: Pace, on_bytes: OnBytes, digest: str) -> int:
    """``digest``: of the seal, which names the digests of all bytes.  Returns how many had to be sent."""
    part = checkpoint.of(rank)
    segment = part.seal.segment
    header = read_header(part)
    writer = store.writer(names.key(checkpoint.save, names.segment(rank)), segment.bytes, copy_of=digest)
    is_over = Latch()
    sent = segment.bytes

    def is_left(number: int) -> bool:
        """Whether an attempt before has carried this chunk: it was verified before it was sent."""
        nonlocal sent
        start = number * segment.chunk_bytes
        length = min(segment.chunk_bytes, segment.data_bytes - start)
        if not writer.reuse(segment.data_start + start, round_up(length, BLOCK_BYTES)):
            return False
        sent -= length
        on_bytes(length)
        return True

    def send(_rank: int, _shards: Sequence[int], start: int, end: int, buffer: memoryview) -> None:
        padded = round_up(end - start, BLOCK_BYTES)
        pace.take(end - start, is_over)
        with buffer[:padded] as data:
            data[end - start :] = bytes(padded - (end - start))
            writer.write_at(data, segment.data_start + start)
        on_bytes(end - start)

    try:
        with memoryview(header) as memory, memory[: segment.data_start] as data:
            writer.write_at(data, 0)
        on_bytes(segment.data_start)
        wanted = [(rank, number) for number in range(len(segment.chunks)) if not is_left(number)]
        if wanted:
            read_chunks(checkpoint, wanted, send, is_over=is_over)
        writer.finish()
    finally:
        writer.abort()
    return sent


# --- the commit ------------------------------------------------------------------------------


def missing_parts(target: Catalog, save: SaveId) -> tuple[list[int], dict[int, tuple[SealBrief, str]]]:
    """The ranks whose parts are not there, and what the seals say: all of them if no part is missing, else one.

    (Whoever waits for a thousand ranks looks often.)  If there is no seal, rank 0 counts as missing.
    Raises: :class:`StorageError`; :class:`IntegrityError`.
    """
    found = _sealed(target.store.list(names.step_dir(save)))
    seals = _briefs(target, save, found[:1])
    missing = _missing(found, seals)
    if not missing:
        seals |= _briefs(target, save, found[1:])
        missing = _missing(found, seals)
    return missing, seals


def _sealed(listed: Iterable[str]) -> list[int]:
    """The ranks whose seals are among the names of a save's files."""
    files = map(names.parse_rank_file, listed)
    return sorted(file.rank for file in files if file is not None and file.kind == "seal" and not file.is_partial)


def _briefs(target: Catalog, save: SaveId, ranks: Sequence[int]) -> dict[int, tuple[SealBrief, str]]:
    by_name = {names.seal(rank): rank for rank in ranks}
    found = heads(target.store, names.step_dir(save), list(by_name), HEAD_BYTES[0])
    return {by_name[name]: read_brief(target.store, save, by_name[name], head) for name, head in found}


def _missing(found: Sequence[int], seals: dict[int, tuple[SealBrief, str]]) -> list[int]:
    world_size = max((brief.world_size for brief, _ in seals.values()), default=1)
    return sorted({*range(world_size)} - {*found})


def publish(target: Catalog, save: SaveId) -> list[int]:
    """Commit a save whose parts are all there.  Returns the ranks whose parts are missing.  May be repeated.

    Raises: :class:`BusyError` if it was removed there; :class:`ExistsError`; :class:`IntegrityError`;
    :class:`StorageError`.
    """
    missing, seals = missing_parts(target, save)
    if missing:
        _check_not_aside(target, save)  # somebody is removing what was carried
        return missing
    ordered = [seals[rank] for rank in sorted(seals)]
    manifest = make_manifest(ordered, read_seal(target.store, save, 0)[0].metadata)
    if not target.store.put_new(names.key(save, names.MANIFEST), encode_manifest(manifest)):
        raise _of_another_run(target, f"{save} there is another one")
    listed = set(target.store.list(names.step_dir(save)))  # put first, then looked: as whoever removes it does
    if names.aside(target.rank) in listed:
        _check_not_aside(target, save)
    if missing := sorted({*seals} - {*_sealed(listed)}):  # it was removed meanwhile, with its tombstone
        target.store.delete([names.key(save, names.MANIFEST), f"{names.step_dir(save)}/"])
    return missing


def sweep(target: Catalog, save: SaveId) -> None:
    """Remove what promotions that were killed have left of parts that are there by now.  Never raises."""
    directory = names.step_dir(save)
    with contextlib.suppress(StorageError):
        listed = target.store.list(directory)
        if left := [f"{directory}/{name}" for name in listed if _is_over(name)]:
            target.store.delete(left)


def _is_over(name: str) -> bool:
    """Whether nobody needs a file any more once all parts are there."""
    file = names.parse_rank_file(name)
    return names.is_unfinished(name) or (file is not None and file.kind in ("failure", "progress"))


def _check_not_aside(target: Catalog, save: SaveId) -> None:
    aside = target.aside(save)
    if aside is not None and not target.is_void(save):
        raise BusyError(
            f"{save} was set aside in {target.root} ({aside.reason}): it is not put there again as long as its "
            "tombstone is there. Choose another step, or another place"
        )
