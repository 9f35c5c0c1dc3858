"""A small GPT under Lightning, saved at every step; kill it, run it again, and it goes on bit for bit where it was.

python examples/lightning_gpt.py
"""

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional
from torch.utils.data import DataLoader

import stillframe

PLACE, STEPS, WORDS, LENGTH = "runs/lightning_gpt", 30, 64, 32


class GPT(lightning.LightningModule):
    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True)
        self.words, self.places = torch.nn.Embedding(WORDS, width), torch.nn.Embedding(LENGTH, width)
        self.blocks = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, WORDS)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        hidden = self.words(text) + self.places(torch.arange(text.shape[1]))
        return self.head(self.blocks(hidden, mask, is_causal=True))

    def training_step(self, text: torch.Tensor, index: int) -> torch.Tensor:
        loss = functional.cross_entropy(self(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)}


if __name__ == "__main__":
    lightning.seed_everything(1)
    texts = torch.arange(LENGTH).add(torch.arange(WORDS)[:, None]) % WORDS
    loader = DataLoader(texts, batch_size=8, shuffle=True)
    newest = ModelCheckpoint(
        PLACE, "{step}", monitor="step", mode="max", save_top_k=2, every_n_train_steps=1, save_last="link"
    )
    trainer = lightning.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        logger=False,
        callbacks=[newest],
        plugins=[stillframe.integrations.lightning.CheckpointIO()],  # the one line
    )
    trainer.fit(GPT(), loader, ckpt_path="last")  # "last" may be none yet
    print(f"at step {trainer.global_step}; see {newest.last_model_path}, and `stillframe list {PLACE}/_stillframe`")
    model = GPT.load_from_checkpoint(newest.last_model_path).eval()
    print("after 5, 6, 7 comes", model(torch.tensor([[5, 6, 7]]))[0, -1].argmax().item())
