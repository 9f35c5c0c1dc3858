"""Removing a save from an object store: nothing that is published lacks a file, whatever becomes of a request."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from stillframe.checkpoint.catalog import Catalog
from stillframe.checkpoint.removal import remove_all, remove_rank_files
from stillframe.format import names
from stillframe.model import SaveId
from stillframe.store.memory import MemoryBackend
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
