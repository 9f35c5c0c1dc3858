"""A root on a stand-in for Google Cloud Storage: the contract, training, credentials, and what goes wrong.

What it stands in for, and what was never tried, is said in :mod:`tests.servers.gcs`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import stillframe
from stillframe import Catalog, Checkpointer, ConfigError, KeepLast, NotFoundError, StorageError, Tier
from stillframe.store.objects import open_objects
from tests.cli.roots import stillframe as cli
from tests.servers.gcs import TOKEN, Gcs, Object
from tests.servers.proxy import Fault, Proxy
from tests.servers.shared import (
    PLACE,
    check_contract,
    check_killed_trainer,
    check_lost_root,
    check_outages,
    check_passing_faults,
    check_resumes,
    check_stranger,
    check_tier_goes_away,
    check_whole,
    keys,
    new_url,
    small,
)
from tests.support import until

HASTY: dict[str, Any] = {"timeout": "2s", "retry_timeout": 2}
"""So that a server that does not answer is given up soon."""
NOBODY = "127.0.0.1:1"


@pytest.fixture(autouse=True)
def no_other_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has none asks nobody beyond this machine."""
    monkeypatch.setenv("GCE_METADATA_HOST", NOBODY)
    monkeypatch.setenv("GCE_METADATA_IP", NOBODY)


@pytest.fixture
def url(gcs: Gcs) -> str:
    return new_url("gs")


@pytest.fixture
def proxy(gcs: Gcs) -> Iterator[Proxy]:
    found = Proxy(gcs.options)
    yield found
    found.stop()


def test_the_contract_holds(gcs: Gcs) -> None:
    check_contract("gs", gcs.options)


def test_of_many_who_write_the_same_key_one_wins(gcs: Gcs, url: str) -> None:
    stores = [open_objects(url, gcs.options) for _ in range(8)]
    with ThreadPoolExecutor(len(stores)) as pool:
        won = [*pool.map(lambda number: stores[number].put_new("a", b"%d" % number), range(len(stores)))]
    assert won.count(True) == 1
    found = memoryview(bytearray(5))
    assert bytes(found[: stores[0].read("a", 0, found)]) == b"%d" % won.index(True)
    assert keys(gcs, url) == ["a"], "the probe is gone"


def test_a_listing_has_as_many_pages_as_it_takes(gcs: Gcs, url: str) -> None:
    store = open_objects(url, gcs.options)
    names = [f"{number:02d}" for number in range(23)]
    for name in names:
        store.put(f"d/{name}", b"")
        store.put(f"d/{name}-below/x/y", b"")
    assert sorted(store.list("d")) == sorted([*names, *(f"{name}-below/" for name in names)])
    assert [*store.list("d/07-below")] == ["x/"]
    assert [*store.list()] == ["d/"]


def test_what_a_console_makes_to_show_an_empty_directory_is_no_object(gcs: Gcs, url: str) -> None:
    _, _, above = url.rpartition("/")
    for name in (f"{above}/", f"{above}/run/"):
        gcs.buckets[PLACE][name] = Object()
    store = open_objects(url, gcs.options)
    assert [*store.list()] == ["run/"]
    assert [*store.list("run")] == []
    with pytest.raises(NotFoundError):
        stillframe.load(url, storage_options=gcs.options)
    with Checkpointer(url, storage_options=gcs.options, keep=KeepLast(1)) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, small(step)).wait(timeout_s=60)
    assert check_whole(gcs, url) == [2]


def test_a_run_is_saved_pruned_and_resumed_bit_for_bit(gcs: Gcs, url: str) -> None:
    check_resumes(url, gcs.options)
    assert len([each for each in keys(gcs, url) if "parts/" in each]) == 8, "nothing is left of steps 1 and 2"


def test_a_killed_trainer_loses_nothing_that_was_staged(gcs: Gcs, url: str) -> None:
    check_killed_trainer(gcs, url)


def test_a_stranger_is_an_error_and_no_crash(gcs: Gcs, url: str) -> None:
    check_stranger(url, gcs.options)


def test_commands_find_the_server_and_a_token_in_the_environment(gcs: Gcs, url: str) -> None:
    with Checkpointer(url, storage_options=gcs.options) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {"model": {"w": torch.arange(10.0)}}).wait(timeout_s=60)
    run = partial(cli, **gcs.environment)  # type: ignore[arg-type]
    assert "3  committed" in run("list", url)
    assert "nothing damaged" in run("verify", url, "--all")
    assert "removed steps 1–2" in run("prune", url, "--keep-last", "1")
    assert Catalog(url, storage_options=gcs.options).steps() == [3]


# --- who may, and where ------------------------------------------------------------------------


def test_a_token_of_the_machine_opens_it_in_the_keeper_too(gcs: Gcs, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GCE_METADATA_HOST", gcs.host)
    options = {"base_url": gcs.options["base_url"]}
    with Checkpointer(url, storage_options=options) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(4)}).wait(timeout_s=60)
    assert stillframe.load(url, storage_options=options)["w"].tolist() == [1.0] * 4


def test_what_is_wrong_is_said_and_never_taken_for_an_empty_root(gcs: Gcs, url: str) -> None:
    state = small(1)
    absent = "gs://no-such-bucket/run"
    wrong = {**gcs.options, "bearer_token": "another"}
    nobody = {"base_url": gcs.options["base_url"], "retry_timeout": 0.2}
    refused = r"401 Unauthorized \(AuthenticationRequired\); look at the credentials"
    none = r"no credentials were given, .*: give service_account, .* or GOOGLE_APPLICATION_CREDENTIALS"
    cases: list[tuple[str, dict[str, Any], str]] = [
        (absent, gcs.options, "there is no such bucket: make it first"), (url, wrong, refused), (url, nobody, none),
    ]  # fmt: skip
    for root, options, about in cases:
        with Checkpointer(root, storage_options=options, on_error="warn") as checkpointer:
            with pytest.raises(StorageError, match=about):
                checkpointer.restore(state)
            with pytest.raises(StorageError, match=about):
                checkpointer.save(1, state).wait(timeout_s=60)
        with pytest.raises(StorageError, match=about):
            Catalog(root, storage_options=options).steps()
        with pytest.raises(StorageError, match=about) as caught:
            stillframe.load(root, storage_options=options)
        assert "another" not in str(caught.value)
        with pytest.raises(StorageError, match=about):
            open_objects(root, options).server.delete(["a"])
    with pytest.raises(NotFoundError):
        stillframe.load(url, storage_options=gcs.options)


def test_a_file_of_credentials_is_used_or_it_is_said_why_not(
    gcs: Gcs, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key.json"
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    for text in (None, "{", '{"type": "external_account"}'):
        if text is not None:
            file.write_text(text)
        with pytest.raises(ConfigError, match=r"service account file.*; give the file of a service account's key, or"):
            Catalog(url)
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS")
    key = {"gcs_base_url": gcs.options["base_url"], "disable_oauth": True, "private_key_id": ""}
    file.write_text(json.dumps({**key, "private_key": "", "client_email": ""}))
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(file))
    with pytest.raises(StorageError, match=rf"http://{gcs.host} is refused: a server without TLS .*allow_http=True"):
        Catalog(url).steps()
    with pytest.raises(StorageError, match="AuthenticationRequired"):
        Catalog(url, storage_options={"allow_http": True}).steps()


def test_a_server_that_ignores_the_condition_is_refused_by_name(gcs: Gcs, url: str, proxy: Proxy) -> None:
    with Checkpointer(url, storage_options={**proxy.options, **HASTY}, on_error="warn") as checkpointer:
        with (
            proxy.doing(Fault(conditional=True, drops_condition=True)),
            pytest.raises(StorageError, match=rf"{url} ignores .*\(x-goog-if-generation-match: 0\).* honours it"),
        ):
            checkpointer.save(1, small(1)).wait(timeout_s=30)
        assert keys(gcs, url) == []
        checkpointer.save(2, small(2)).wait(timeout_s=30)
    assert check_whole(gcs, url) == [2]


# --- a server in trouble -----------------------------------------------------------------------


def test_what_passes_costs_time_alone(gcs: Gcs, url: str, proxy: Proxy) -> None:
    check_passing_faults(gcs, url, proxy, "ServiceUnavailable")


@pytest.mark.parametrize("fault", [Fault(cut_answer=0), Fault(cut_request=0), Fault(hangs=True)])
def test_a_removal_that_nobody_hears_of_is_repeated(gcs: Gcs, url: str, proxy: Proxy, fault: Fault) -> None:
    store = open_objects(url, {**proxy.options, "timeout": "1s", "retry_timeout": 20})
    names = [f"d/{number}" for number in range(4)]
    for name in names:
        store.put(name, b"1")
    with proxy.doing(replace(fault, methods="DELETE", times=2)) as met:
        store.delete(names)
    assert met.met == 2
    assert keys(gcs, url) == []


def test_a_removal_is_given_up_in_time(gcs: Gcs, url: str, proxy: Proxy) -> None:
    store = open_objects(url, {**proxy.options, "timeout": "1s", "retry_timeout": 1})
    store.put("a", b"1")
    with (
        proxy.doing(Fault(methods="DELETE", cut_answer=0)),
        pytest.raises(StorageError, match=r"removing .*does not answer"),
    ):
        store.delete(["a"])


def test_no_object_is_replaced_more_often_than_google_allows(gcs: Gcs, url: str) -> None:
    """It writes each once a second."""
    before, gcs.replace_s = gcs.slowed, 1.0
    try:
        with Checkpointer(url, storage_options=gcs.options, keep=KeepLast(2)) as checkpointer:
            for step in range(1, 9):
                checkpointer.fence()
                checkpointer.save(step, small(step)).wait(timeout_s=60)
    finally:
        gcs.replace_s = 0.0
    assert gcs.slowed == before
    assert check_whole(gcs, url) == [7, 8]


def test_an_answer_that_it_comes_too_often_is_waited_for(gcs: Gcs, url: str) -> None:
    store = open_objects(url, gcs.options)
    before, gcs.replace_s = gcs.slowed, 0.5
    try:
        for number in range(3):
            store.put("a", b"%d" % number)
    finally:
        gcs.replace_s = 0.0
    assert gcs.slowed > before
    found = memoryview(bytearray(1))
    assert store.read("a", 0, found) == 1
    assert bytes(found) == b"2"


def test_a_server_that_ends_and_comes_back_amid_saves_costs_time_alone(gcs: Gcs, url: str) -> None:
    check_outages(gcs, url)


# --- as a tier ---------------------------------------------------------------------------------


def test_a_lost_root_comes_back_from_it(gcs: Gcs, url: str, tmp_path: Path) -> None:
    check_lost_root(gcs, url, tmp_path / "root")


def test_as_a_tier_a_server_that_goes_away_costs_nothing_but_age(gcs: Gcs, url: str, tmp_path: Path) -> None:
    check_tier_goes_away(gcs, url, tmp_path / "root", gcs.stop, gcs.start, last=5)


@pytest.mark.parametrize("what", ["token", "bucket"])
def test_as_a_tier_a_server_that_refuses_is_told_once_and_fails_no_save(
    gcs: Gcs, url: str, tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = {**gcs.options, **HASTY} | ({"bearer_token": "another"} if what == "token" else {})
    tier = Tier(url if what == "token" else "gs://no-such-bucket/run", storage_options=options)
    with Checkpointer(tmp_path / "root", tiers=[tier]) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, small(step)).wait()
        until(lambda: checkpointer.stats().tiers[0].failures > 1, "it is tried again")
        assert checkpointer.stats().failed == 0
        checkpointer.close(timeout_s=1)
    (told,) = [record.message for record in caplog.records if "nothing can be carried" in record.message]
    assert "another" not in told
    assert TOKEN not in told
    assert Catalog(tmp_path / "root").steps() == [1, 2]
