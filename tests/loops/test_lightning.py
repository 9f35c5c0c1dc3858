"""Lightning's Trainer on stillframe.  As a program: one life of a run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from tests.loops.conformance import Conformance
from tests.loops.driving import BATCH, Life, digest_of


def module_of(life: Life) -> Any:
    import lightning
    import torch

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = life.model()

        def training_step(self, batch: Any, _: int) -> Any:
            return self.model(**batch).loss

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("loss", self.model(**batch).loss + torch.rand(1)[0], sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return Module()


def train(life: Life) -> None:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader

    import stillframe

    wish = life.wish

    class Told(ModelCheckpoint):  # type: ignore[misc]
        """Lightning calls it last: when the others have saved."""

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            super().on_train_batch_end(trainer, *args)
            life.saved(trainer.global_step)

    saves: dict[str, Any] = {"dirpath": wish.place, "filename": "{step}", "every_n_train_steps": 1}
    saves |= {"monitor": "step", "mode": "max", "save_top_k": wish.keep or -1, "save_last": "link"}
    if wish.kind == "last":
        saves |= {"save_last": True}
    data: Any = life.data()
    trainer = lightning.Trainer(
        plugins=[stillframe.integrations.lightning.CheckpointIO(on_error="warn")],
        callbacks=[Told(**saves)],
        max_steps=wish.steps,
        accumulate_grad_batches=2 if wish.kind == "accumulated" else 1,
        limit_val_batches=2 if wish.kind == "validated" else 0,
        accelerator="cpu", devices=life.ranks, strategy="ddp" if life.ranks > 1 else "auto",
        logger=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = module_of(life)
    lightning.seed_everything(3)  # a life that was killed before its first save is staged has left nothing
    loader: Any = DataLoader(data, BATCH, shuffle=True, num_workers=2)
    valid: Any = DataLoader(data, BATCH)
    trainer.fit(module, loader, valid, ckpt_path="last")
    life.ended(module, trainer.optimizers[0], trainer.lr_scheduler_configs[0].scheduler)


class TestLightning(Conformance):
    module = "tests.loops.test_lightning"
    kinds = ("", "validated", "last")

    @staticmethod
    def checkpoints(place: Path) -> dict[int, Path]:
        return {int(path.stem.rpartition("=")[2]): path for path in place.glob("step=*.ckpt")}

    @staticmethod
    def read(path: Path) -> str:
        from stillframe.integrations.lightning.directory import find, read

        found = find(str(path))
        assert found is not None
        return digest_of(read(str(path), found, None, True)["state_dict"].values())


if __name__ == "__main__":
    logging.basicConfig()
    train(Life())
