"""ModelParallelStrategy of Lightning with stillframe's plugin; tests/loops has the lives of whole runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from stillframe import MismatchError, spi
from tests.integration.test_lightning import L, Module, fit, saves, trainer
from tests.ranks.launch import run_ranks
from tests.support import assert_same

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]  # Lightning's own


@pytest.mark.parametrize("what", ["fabric", "refused", "stock", "trainer"])
def test_on_two_ranks(tmp_path: Path, what: str) -> None:
    run_ranks(2, "lightning_worker.py", tmp_path, what, timeout_s=400)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A strategy that shards a module among one rank."""

    def configure(self: Any) -> None:
        fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    monkeypatch.setattr(Module, "configure_model", configure)
    yield lambda: L.pytorch.strategies.ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1)
    torch.distributed.destroy_process_group()


def whole(made: Any) -> Any:
    """Module and optimizer."""
    state = [made.lightning_module.state_dict(), made.optimizers[0].state_dict()]
    return spi.mapped(state, lambda _, each: getattr(each, "full_tensor", lambda: each)())


def test_what_one_strategy_saves_another_goes_on_from(
    tmp_path: Path, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(first := trainer(tmp_path, 4, saves(tmp_path / "run"), strategy=alone(), devices=1), 1)
    with monkeypatch.context() as plainly:
        plainly.delattr(Module, "configure_model")
        fit(same := trainer(tmp_path, 4), 3, tmp_path / "run/step=4.ckpt")
        assert_same(whole(same), whole(first))
        fit(more := trainer(tmp_path, 6, saves(tmp_path / "plain")), 3, tmp_path / "run/step=4.ckpt")
        loaded = Module.load_from_checkpoint(tmp_path / "plain/step=6.ckpt")
        assert_same(dict(loaded.state_dict()), dict(more.lightning_module.state_dict()))
    fit(same := trainer(tmp_path, 6, strategy=alone(), devices=1), 4, tmp_path / "plain/step=6.ckpt")
    assert_same(whole(same), whole(more))


def test_weights_alone_do_not_go_on(tmp_path: Path, alone: Any) -> None:
    fit(trainer(tmp_path, 2, saves(tmp_path / "run", save_weights_only=True), strategy=alone(), devices=1), 1)
    with pytest.raises(MismatchError, match="optimizer_states"):
        fit(trainer(tmp_path, 4, strategy=alone(), devices=1), 1, tmp_path / "run/step=2.ckpt")
