"""A root on a real server of Azure's blobs: the contract, training, and a server that goes away."""

from __future__ import annotations

import base64
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

import stillframe
from stillframe import Catalog, Checkpointer, NotFoundError, StorageError
from stillframe.store.objects import open_objects
from tests.cli.roots import stillframe as cli
from tests.servers.azurite import Azurite
from tests.servers.shared import check_contract, check_outages, check_resumes, check_stranger, keys, make_state, new_url

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def url(azurite: Azurite) -> str:
    return new_url("az")


def test_the_contract_holds(azurite: Azurite) -> None:
    check_contract("az", azurite.options)


def test_of_many_who_write_the_same_key_one_wins(azurite: Azurite, url: str) -> None:
    stores = [open_objects(url, azurite.options) for _ in range(8)]
    with ThreadPoolExecutor(len(stores)) as pool:
        won = [*pool.map(lambda number: stores[number].put_new("a", b"%d" % number), range(len(stores)))]
    assert won.count(True) == 1
    found = memoryview(bytearray(5))
    assert bytes(found[: stores[0].read("a", 0, found)]) == b"%d" % won.index(True)
    assert keys(azurite, url) == ["a"], "the probe is gone"


def test_a_run_is_saved_pruned_and_resumed_bit_for_bit(azurite: Azurite, url: str) -> None:
    check_resumes(url, azurite.options)
    assert len([each for each in keys(azurite, url) if "parts/" in each]) == 8, "nothing is left of steps 1 and 2"


def test_a_server_that_ends_and_comes_back_amid_saves_costs_time_alone(azurite: Azurite, url: str) -> None:
    check_outages(azurite, url)


def test_what_is_wrong_is_said_and_never_taken_for_an_empty_root(azurite: Azurite, url: str) -> None:
    state = make_state()
    absent = "az://no-such-container/run"
    key = base64.b64encode(b"another").decode()
    wrong = {**azurite.options, "account_key": key}
    for root, options, about in ((absent, azurite.options, "no such container"), (url, wrong, "credentials")):
        with Checkpointer(root, storage_options=options, on_error="warn") as checkpointer:
            with pytest.raises(StorageError, match=about):
                checkpointer.restore(state)
            with pytest.raises(StorageError, match=about):
                checkpointer.save(1, state).wait(timeout_s=60)
        with pytest.raises(StorageError, match=about):
            Catalog(root, storage_options=options).steps()
        with pytest.raises(StorageError, match=about) as caught:
            stillframe.load(root, storage_options=options)
        assert key not in str(caught.value)
        with pytest.raises(StorageError, match=about):
            open_objects(root, options).server.delete(["a"])
    with pytest.raises(NotFoundError):
        stillframe.load(url, storage_options=azurite.options)


def test_commands_find_the_account_in_the_environment(azurite: Azurite, url: str) -> None:
    with Checkpointer(url, storage_options=azurite.options) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {"model": {"w": torch.arange(10.0)}}).wait(timeout_s=60)
    run = partial(cli, **azurite.environment)  # type: ignore[arg-type]
    assert "3  committed" in run("list", url)
    assert "nothing damaged" in run("verify", url, "--all")
    assert "removed step 1" in run("remove", url, "1")
    assert "removed step 2" in run("prune", url, "--keep-last", "1")
    assert Catalog(url, storage_options=azurite.options).steps() == [3]


def test_a_stranger_is_an_error_and_no_crash(azurite: Azurite, url: str) -> None:
    check_stranger(url, azurite.options)
