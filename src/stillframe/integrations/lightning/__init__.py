"""Lightning's ``Trainer`` and ``Fabric`` on stillframe: one line, for a single device, DDP and FSDP2::

    trainer = L.Trainer(plugins=[stillframe.integrations.lightning.CheckpointIO()], …)

``ModelCheckpoint``, ``ckpt_path`` and ``trainer.save_checkpoint`` mean what they meant; but a save no longer holds
training up, cannot tear, and is resumed from bit for bit: random numbers and positions in the loaders of every rank are
part of it.  A checkpoint is a directory of the name that Lightning gave it.  It appears when it is durable, and stands
for a step in the root ``_stillframe`` beside it.  A script that only reads calls :func:`install` first, and then
``load_from_checkpoint`` opens it, too.
"""

from __future__ import annotations

from stillframe.integrations.lightning.checkpoint_io import CheckpointIO
from stillframe.integrations.lightning.hooks import install

__all__ = ["CheckpointIO", "install"]
