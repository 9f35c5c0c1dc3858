"""Lightning's Trainer on stillframe.  As a program: one life of a run."""

from __future__ import annotations

import dataclasses
import logging
import types
from pathlib import Path
from typing import Any, ClassVar

from tests.loops.conformance import Conformance, assert_goes_on
from tests.loops.driving import BATCH, Life, Living, Result, Wish, digest_of


def module_of(life: Life) -> Any:
    import lightning
    import torch
    from torch.distributed.fsdp import FSDPModule, fully_shard

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = life.model()

        def configure_model(self) -> None:
            if "sharded" in life.wish.kind and not isinstance(self.model, FSDPModule):
                for each in (*self.model.transformer.h, self.model):
                    fully_shard(each, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Any, _: int) -> Any:
            return self.model(**batch).loss

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("loss", self.model(**batch).loss + torch.rand(1)[0], sync_dist=True)
            if "validated" in life.wish.kind and self.global_step:
                life.saved(self.global_step)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return Module()


def train(life: Life) -> None:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.utils.data import DataLoader

    import stillframe

    wish = life.wish

    class Told(ModelCheckpoint):  # type: ignore[misc]
        """Lightning calls it last: when the others have saved."""

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            super().on_train_batch_end(trainer, *args)
            if "validated" not in wish.kind:
                life.saved(trainer.global_step)

    saves: dict[str, Any] = {"dirpath": wish.place, "filename": "{step}", "every_n_train_steps": 1}
    saves |= {"monitor": "step", "mode": "max", "save_top_k": wish.keep or -1, "save_last": "link"}
    if wish.kind == "last":
        saves |= {"save_last": True}
    strategy: Any = "ddp" if life.ranks > 1 else "auto"
    if "sharded" in wish.kind:
        strategy = ModelParallelStrategy(data_parallel_size=life.ranks, tensor_parallel_size=1)
    data: Any = life.data()
    trainer = lightning.Trainer(
        plugins=[stillframe.integrations.lightning.CheckpointIO(on_error="warn")],
        callbacks=[Told(**saves)],
        max_steps=wish.steps,
        accumulate_grad_batches=2 if wish.kind == "accumulated" else 1,
        limit_val_batches=2 if "validated" in wish.kind else 0,
        accelerator="cpu", devices=life.ranks, strategy=strategy,
        logger=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = module_of(life)
    lightning.seed_everything(3)  # a life that was killed before its first save is staged has left nothing
    loader: Any = DataLoader(data, BATCH, shuffle=True, num_workers=2)
    valid: Any = DataLoader(data, BATCH)
    trainer.fit(module, loader, valid, ckpt_path="last")
    life.ended(whole(module), whole(trainer.optimizers[0]), trainer.lr_scheduler_configs[0].scheduler)


def whole(sharded: Any) -> Any:
    """Something with its state dict, of whole tensors.  Every rank asks for it."""
    from stillframe import spi

    state = spi.mapped(sharded.state_dict(), lambda _, each: getattr(each, "full_tensor", lambda: each)())
    return types.SimpleNamespace(state_dict=lambda: state)


class TestLightning(Conformance):
    module = "tests.loops.test_lightning"
    kinds: ClassVar[tuple[str, ...]] = ("", "last")

    @staticmethod
    def checkpoints(place: Path) -> dict[int, Path]:
        return {int(path.stem.rpartition("=")[2]): path for path in place.glob("step=*.ckpt")}

    @staticmethod
    def read(path: Path) -> str:
        from stillframe.integrations.lightning.reading import find, read

        found = find(str(path))
        assert found is not None
        return digest_of(read(str(path), found, None, True)["state_dict"].values())

    def test_killed_in_a_validation(self, tmp_path: Path) -> None:
        kind = f"{self.kinds[0]} validated"
        self.die(Wish(str(tmp_path / "run"), kill_at=8, kind=kind))
        assert_goes_on(self.live(Wish(str(tmp_path / "run"), seed=2, kind=kind)), self.calm(kind))


class TestSharded(TestLightning):
    """``ModelParallelStrategy`` with FSDP2, on two ranks."""

    kinds: ClassVar[tuple[str, ...]] = ("sharded",)

    def living(self, wish: Wish, ranks: int = 2) -> Any:
        return Living(self.module, wish, ranks)

    def live(self, wish: Wish, ranks: int = 2) -> Result:
        return super().live(wish, ranks)

    def die(self, wish: Wish, ranks: int = 2) -> None:
        super().die(wish, ranks)

    def calm(self, kind: str, ranks: int = 2) -> Result:
        return super().calm(kind, ranks)

    def test_on_several_ranks(self, tmp_path: Path) -> None:
        """One rank takes what two have saved, sharded or not; two take what that one has saved."""
        place = str(tmp_path / "run")
        first = self.live(Wish(place, steps=5, kind="sharded"))
        same = self.live(Wish(place, steps=5, seed=2), 1)
        assert dataclasses.replace(same, order=[]) == dataclasses.replace(first, order=[])
        more = self.live(Wish(place, steps=6, seed=2, kind="sharded"), 1)
        same = self.live(Wish(place, steps=6, seed=3, kind="sharded"))
        assert dataclasses.replace(same, order=[]) == dataclasses.replace(more, order=[])
        assert more.parameters != first.parameters


if __name__ == "__main__":
    logging.basicConfig()
    train(Life())
