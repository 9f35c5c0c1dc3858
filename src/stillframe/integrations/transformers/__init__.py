"""Hugging Face's Trainer on stillframe, and TRL's trainers, which are such: one line, before ``trainer.train()``::

    stillframe.integrations.transformers.install(trainer)

``save_steps``, ``save_total_limit``, ``load_best_model_at_end`` and ``resume_from_checkpoint`` mean what they meant;
but a save no longer holds training up, cannot tear, and is resumed from bit for bit.  The root is ``_stillframe`` in
the ``output_dir``.  ``checkpoint-N`` appears beside it when the checkpoint is durable, and ``from_pretrained`` opens
it: its ``model.safetensors`` (of PEFT: ``adapter_model.safetensors``) is a link to what was saved, not a copy.
"""

from __future__ import annotations

from stillframe.integrations.transformers.install import install

__all__ = ["install"]
