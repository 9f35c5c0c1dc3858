"""A root on a real S3 server: the contract, training, kills, and a server that goes away."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import stillframe
from stillframe import Catalog, Checkpointer, KeepLast, NotFoundError, StorageError, Tier, spi
from stillframe.checkpoint.survey import open_checkpoint, survey
from stillframe.integrations.dcp import Reader, Writer
from tests import layout
from tests.cli.roots import stillframe as cli
from tests.ranks.launch import run_ranks
from tests.servers.ceph import Ceph
from tests.servers.shared import (
    ITEMS,
    check_contract,
    check_killed_trainer,
    check_lost_root,
    check_resumes,
    check_stranger,
    check_tier_goes_away,
    keys,
    make_state,
    new_url,
    small,
)
from tests.support import until

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def url(ceph: Ceph) -> str:
    return new_url("s3")


def test_the_contract_holds(ceph: Ceph) -> None:
    check_contract("s3", ceph.options)


def test_a_run_is_saved_pruned_and_resumed_bit_for_bit(ceph: Ceph, url: str) -> None:
    check_resumes(url, ceph.options)
    there = keys(ceph, url)
    assert not [each for each in there if "probe" in each]
    assert len([each for each in there if each.startswith("step-000000000004") and "parts/" in each]) == 4, there


def test_a_killed_trainer_loses_nothing_that_was_staged(ceph: Ceph, url: str) -> None:
    check_killed_trainer(ceph, url)


def test_a_killed_keeper_leaves_the_checkpoint_before_and_the_next_save_works(ceph: Ceph, url: str) -> None:
    state = make_state(1.0)
    with Checkpointer(url, storage_options=ceph.options, on_error="warn") as checkpointer:
        checkpointer.save(1, state).wait(timeout_s=60)
        save = checkpointer.save(2, state)
        save.wait("staged", timeout_s=60)
        pid = spi.keeper_pid(checkpointer)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(stillframe.KeeperError):  # it may have been committed just before
            save.wait(timeout_s=60)
        checkpointer.save(3, state).wait(timeout_s=60)
    steps = Catalog(url, storage_options=ceph.options).steps()
    assert steps in ([1, 3], [1, 2, 3])
    with Checkpointer(url, storage_options=ceph.options, keep=KeepLast(1)) as checkpointer:
        checkpointer.restore(state)
        checkpointer.save(4, state).wait(timeout_s=60)
        until(lambda: not [each for each in keys(ceph, url) if "parts/" in each and "0004" not in each], "the sweep")


def test_a_server_that_is_killed_and_comes_back_costs_time_alone(ceph: Ceph, url: str) -> None:
    state = make_state(1.0)
    with Checkpointer(url, storage_options=ceph.options) as checkpointer:
        checkpointer.save(1, state).wait(timeout_s=60)
        ceph.kill_gateway()
        back = threading.Timer(2.0, ceph.start_gateway)
        back.start()
        try:
            checkpointer.save(2, state).wait(timeout_s=120)
        finally:
            back.join()
    assert Catalog(url, storage_options=ceph.options).steps() == [1, 2]


def test_what_is_wrong_is_said_and_never_taken_for_an_empty_root(ceph: Ceph, url: str) -> None:
    state = make_state()
    absent = "s3://no-such-bucket/run"
    wrong = {**ceph.options, "secret_access_key": "wrong"}
    for root, options, about in ((absent, ceph.options, "no such bucket"), (url, wrong, "credentials")):
        with Checkpointer(root, storage_options=options, on_error="warn") as checkpointer:
            with pytest.raises(StorageError, match=about):
                checkpointer.restore(state)
            with pytest.raises(StorageError, match=about):
                checkpointer.save(1, state).wait(timeout_s=60)
        with pytest.raises(StorageError, match=about):
            Catalog(root, storage_options=options).steps()
        with pytest.raises(StorageError, match=about):
            stillframe.load(root, storage_options=options)
    with pytest.raises(NotFoundError):
        stillframe.load(url, storage_options=ceph.options)


def test_every_command_takes_the_url(ceph: Ceph, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ceph.environment.items():
        monkeypatch.setenv(name, value)
    with Checkpointer(url) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {"model": {"w": torch.arange(10.0)}}).wait(timeout_s=60)

    run = partial(cli, **ceph.environment)  # type: ignore[arg-type]
    assert "3  committed" in run("list", url)
    assert "F32[10]" in run("show", url)
    assert "nothing damaged" in run("verify", url, "--all")
    assert "3 checkpoints" in run("doctor", url)
    assert "removed step 1" in run("remove", url, "1")
    assert "removed step 2" in run("prune", url, "--keep-last", "1")
    assert "pinned" in run("pin", url, "3")
    run("export", url, str(tmp_path / "w.safetensors"))
    assert "no run is active" in run("watch", url, "--once")


def test_checkpoints_are_copied_there_and_back(ceph: Ceph, url: str, tmp_path: Path) -> None:
    run = partial(cli, **ceph.environment)  # type: ignore[arg-type]
    with Checkpointer(tmp_path / "a", arena="64MiB") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, make_state(float(step))).wait(timeout_s=60)
    assert "sent 34.3 MiB" in run("copy", str(tmp_path / "a"), url, "1")
    assert "step 1: was there already" in run("copy", str(tmp_path / "a"), url, "--all")
    assert "nothing damaged" in run("verify", url, "--all")
    assert "the same root" in run("copy", url, f"{url}/", code=2)
    assert "inside the other" in run("copy", url, f"{url}/below", code=2)
    assert "no-such-bucket" in run("copy", str(tmp_path / "a"), "s3://no-such-bucket/run", code=6)
    run("copy", url, str(tmp_path / "b"), "--all")
    for step in (1, 2):
        for name in layout.files_of(tmp_path / "a", step):
            assert (tmp_path / "b" / name).read_bytes() == (tmp_path / "a" / name).read_bytes(), name
    run("remove", url, "1")
    assert "was removed there" in run("copy", str(tmp_path / "a"), url, "--all")


def test_a_profile_opens_it_in_the_keeper_too(
    ceph: Ceph, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("botocore")
    given = ceph.options
    key, secret = given.pop("access_key_id"), given.pop("secret_access_key")
    (tmp_path / "keys").write_text(f"[me]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "keys"))
    monkeypatch.setenv("AWS_PROFILE", "me")
    with Checkpointer(url, storage_options=given) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(4)}).wait(timeout_s=60)
    assert stillframe.load(url, storage_options=given)["w"].tolist() == [1.0] * 4


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning")
def test_dcp_saves_to_it_and_loads_from_it(ceph: Ceph, url: str) -> None:
    for step in (1, 2):
        writer = Writer(url, step=step, keep=KeepLast(2), storage_options=ceph.options)
        dcp_save({"model": {"w": torch.full((ITEMS,), float(step))}, "n": step}, storage_writer=writer, no_dist=True)
    other = Writer(url, storage_options={**ceph.options, "secret_access_key": "another"})
    with pytest.raises(CheckpointException, match="other storage_options") as caught:
        dcp_save({"n": 3}, storage_writer=other, no_dist=True)
    assert "another" not in str(caught.value)
    assert ceph.options["secret_access_key"] not in str(caught.value)
    writer.close()
    for step in (1, 2):
        found = {"model": {"w": torch.zeros(ITEMS)}, "n": 0}
        dcp_load(found, storage_reader=Reader(url, step=step, storage_options=ceph.options), no_dist=True)
        assert found["n"] == step
        assert bool((found["model"]["w"] == step).all())  # type: ignore[index]


def test_whatever_takes_a_root_takes_its_options(ceph: Ceph, url: str) -> None:
    """None of them finds anything in the environment."""
    options = ceph.options
    assert not spi.has_saves(url, options)
    with Checkpointer(url, storage_options=options) as checkpointer:
        checkpointer.save(1, {"w": torch.arange(4.0)}).wait(timeout_s=60)
    assert spi.has_saves(url, options)
    assert spi.load_rank(url, 1, 0, storage_options=options)["w"].tolist() == [0.0, 1.0, 2.0, 3.0]
    with spi.BoxReader(url, storage_options=options) as reader:
        assert reader.outline["w"].shape == (4,)
    assert survey(url, storage_options=options).latest == 1
    with open_checkpoint(url, 1, storage_options=options) as checkpoint:
        assert checkpoint.path.startswith(f"{url}/step-")
    with pytest.raises(NotFoundError, match="step 2"):
        open_checkpoint(url, 2, storage_options=options)


def test_two_ranks_save_to_it_and_restore_from_it(ceph: Ceph, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ceph.environment.items():
        monkeypatch.setenv(name, value)
    assert "done 2" in run_ranks(2, "../servers/s3_worker.py", url, timeout_s=150)
    catalog = Catalog(url)
    assert catalog.steps() == [1, 2]
    assert catalog.open(2).world_size == 2


def test_a_stranger_is_an_error_and_no_crash(ceph: Ceph, url: str) -> None:
    check_stranger(url, ceph.options)


# --- as a tier ---------------------------------------------------------------------------------


def test_a_lost_root_comes_back_from_it(ceph: Ceph, url: str, tmp_path: Path) -> None:
    check_lost_root(ceph, url, tmp_path / "root")


def test_as_a_tier_a_server_that_goes_away_costs_nothing_but_age(ceph: Ceph, url: str, tmp_path: Path) -> None:
    check_tier_goes_away(ceph, url, tmp_path / "root", ceph.kill_gateway, ceph.start_gateway, last=7)


@pytest.mark.parametrize("what", ["key", "bucket"])
def test_as_a_tier_a_server_that_refuses_is_told_once_and_fails_no_save(
    ceph: Ceph, url: str, tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = {**ceph.options, "secret_access_key": "wrong"} if what == "key" else ceph.options
    tier = Tier(url if what == "key" else "s3://no-such-bucket/run", storage_options=options)
    with Checkpointer(tmp_path / "root", tiers=[tier]) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, small(step)).wait()
        until(lambda: checkpointer.stats().tiers[0].failures > 1, "it is tried again")
        assert checkpointer.stats().failed == 0
        checkpointer.close(timeout_s=5)
    told = [record.message for record in caplog.records if "nothing can be carried" in record.message]
    assert len(told) == 1
    assert "wrong" not in told[0]
    assert Catalog(tmp_path / "root").steps() == [1, 2]
