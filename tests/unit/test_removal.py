"""Removing a save from an object store: nothing that is published lacks a file, whatever becomes of a request."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from stillframe.checkpoint.catalog import Catalog
from stillframe.checkpoint.epochs import claim
from stillframe.checkpoint.removal import COMMITTED, remove_all, remove_rank_files, set_aside
from stillframe.errors import StorageError
from stillframe.format import names
from stillframe.model import SaveId
from stillframe.store.memory import MemoryBackend, MemoryStore
from tests.protocol.objects import MemoryObjects


@pytest.mark.parametrize("how", ["all", "one rank"])
def test_the_manifest_goes_before_anything_else_by_a_request_of_its_own(how: str) -> None:
    store, save = MemoryObjects(MemoryBackend(lands_late=True)), SaveId(1)
    for name in (names.segment(0), names.seal(0), names.MANIFEST, names.aside()):
        store.put(names.key(save, name), b"x")
    asked: list[list[str]] = []
    delete = store.server.delete

    def record(paths: Sequence[str]) -> None:
        asked.append([*paths])
        delete(paths)

    store.server.delete = record  # type: ignore[method-assign]
    if how == "all":
        remove_all(Catalog(store), save)
    else:
        remove_rank_files(Catalog(store), save, 0, names.MANIFEST)
    of_save = [each for each in asked if each and each[0].startswith(names.step_dir(save))]
    assert of_save[0] == [names.key(save, names.MANIFEST)]
    assert names.key(save, names.segment(0)) not in store.backend.blobs


@pytest.mark.parametrize("comes", ["before", "with the tombstone"])
def test_what_is_left_over_and_is_committed_meanwhile_stays(comes: str) -> None:
    """Whoever found that it is none was paused until another had completed it."""
    store, save = MemoryStore(MemoryBackend()), SaveId(1)
    catalog = Catalog(store)
    claim(catalog, "run", 0)
    put_new = store.put_new

    def commit_and_put(key: str, data: bytes) -> bool:
        put(names.key(save, names.MANIFEST), b"x")
        return put_new(key, data)

    put = store.put
    if comes == "before":
        put(names.key(save, names.MANIFEST), b"x")
    else:
        store.put_new = commit_and_put  # type: ignore[assignment, method-assign]
    assert set_aside(catalog, save, "left over", 1) == COMMITTED
    assert catalog.is_committed(save)


def test_what_cannot_be_told_to_be_left_over_is_not_set_aside() -> None:
    store, save = MemoryStore(MemoryBackend()), SaveId(1)
    catalog = Catalog(store)
    claim(catalog, "run", 0)
    head = store.head

    def fail(key: str) -> object:
        if key == names.key(save, names.MANIFEST) and any(store.list(names.step_dir(save))):
            raise StorageError("no answer")
        return head(key)

    store.head = fail  # type: ignore[assignment, method-assign]
    with pytest.raises(StorageError, match="no answer"):
        set_aside(catalog, save, "left over", 1)
    assert head(catalog.aside_key(save)) is None
