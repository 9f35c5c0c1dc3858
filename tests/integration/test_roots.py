"""What a root may be, and that a process has it open in one way only."""

from __future__ import annotations

import os
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save_state

import stillframe
from stillframe import BusyError, Catalog, Checkpointer, ConfigError, KeepLast, spi
from stillframe.integrations import deepspeed
from stillframe.integrations.dcp import Reader, Writer
from stillframe.integrations.deepspeed.engine import CheckpointEngine
from stillframe.model import SaveId
from stillframe.observe.doctor import examine
from stillframe.observe.history import histories
from tests.support import until

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning")


def deepspeed_engine() -> CheckpointEngine:
    return CheckpointEngine(types.SimpleNamespace(datastates_config=types.SimpleNamespace(config={})), 0)


TAKERS: dict[str, Any] = {
    "Checkpointer": Checkpointer,
    "restore": lambda root: stillframe.restore(root, {}),
    "load": stillframe.load,
    "Catalog": Catalog,
    "doctor": examine,
    "trace": histories,
    "spi.Run": lambda root: spi.Run(root, rank=0, world_size=1),
    "spi.load_rank": lambda root: spi.load_rank(root, 1, 0),
    "spi.load_save": lambda root: spi.load_save(root, SaveId(1), 0),
    "spi.BoxReader": spi.BoxReader,
    "spi.has_saves": spi.has_saves,
    "dcp.Writer": Writer,
    "dcp.Writer.reset": lambda root: Writer("here").reset(root),
    "dcp.Reader": Reader,
    "deepspeed save": lambda root: deepspeed_engine().create(types.SimpleNamespace(save_dir=root, tag="best")),
    "deepspeed load": lambda root: deepspeed_engine().settle(root, None, is_universal=False),
    "deepspeed export": lambda root: deepspeed.export(root, "best", "out"),
}


@pytest.mark.parametrize("taker", TAKERS)
def test_a_url_of_no_object_store_is_no_root(taker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would become a directory named ``s3:`` on the local disk, which dies with the machine."""
    monkeypatch.chdir(tmp_path)
    for url in ("hdfs://host/run", "file:///tmp/run", Path("s3://bucket/run"), "my runs/s3://bucket"):
        with pytest.raises(ConfigError, match=r"cannot write to|through pathlib"):
            TAKERS[taker](url)
    if "deepspeed" in taker:
        with pytest.raises(ConfigError, match="give a directory"):
            TAKERS[taker]("s3://bucket/run")
    assert list(tmp_path.iterdir()) == []


def test_what_only_looks_like_a_url_is_a_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("lr:0.1", "./s3:/bucket", "a:/b"):
        with Checkpointer(name) as checkpointer:
            checkpointer.save(1, {"w": torch.ones(2)})
        assert Catalog(name).steps() == [1]


def dcp_save(writer: Writer) -> None:
    dcp_save_state({"w": torch.ones(8)}, storage_writer=writer, no_dist=True)


def test_options_for_a_root_that_is_open_with_others_are_refused(tmp_path: Path) -> None:
    writers = [Writer(tmp_path, step=step, keep=KeepLast(2)) for step in range(1, 5)]
    for writer in writers:
        dcp_save(writer)
    until(lambda: Catalog(tmp_path).steps() == [3, 4], "the first two are removed")
    dcp_save(Writer(tmp_path))  # nothing is asked for: as it is open
    with pytest.raises(CheckpointException, match=r"keep=KeepLast\(count=2\).*keep=KeepLast\(count=3\)") as refused:
        dcp_save(Writer(tmp_path, keep=KeepLast(3)))
    assert "ConfigError" in str(refused.value)
    until(lambda: Catalog(tmp_path).steps() == [4, 5], "the next one is removed")
    writers[0].close()
    dcp_save(Writer(tmp_path, keep=KeepLast(3)))
    assert Catalog(tmp_path).steps() == [4, 5, 6]
    Writer(tmp_path).close()


def test_retention_is_not_dropped_where_the_root_is_open_without_it(tmp_path: Path) -> None:
    dcp_save(Writer(tmp_path))
    with pytest.raises(CheckpointException, match=r"ConfigError: .* keep=None.*keep=KeepLast\(count=2\)"):
        dcp_save(Writer(tmp_path, keep=KeepLast(2)))
    Writer(tmp_path).close()


def test_a_second_checkpointer_of_the_same_process_is_told_so(tmp_path: Path) -> None:
    state = {"w": torch.ones(10)}
    with Checkpointer(tmp_path) as first:
        first.save(1, state).wait(timeout_s=60)
        second = Checkpointer(tmp_path, on_error="warn")
        with pytest.raises(BusyError, match=f"another Checkpointer of this same process .pid {os.getpid()}"):
            second.restore(state)
        second.close(timeout_s=60)
        first.save(2, state).wait(timeout_s=60)
    with Checkpointer(tmp_path) as third:  # the first is closed: nobody is in its way
        assert third.restore(state).step == 2
