"""Hugging Face Accelerate on stillframe: one line, after the ``Accelerator`` is made::

    stillframe.integrations.accelerate.attach(accelerator)

``accelerator.save_state()`` and ``load_state()`` are called as before; but a save no longer holds training up, cannot
tear, and is resumed from bit for bit.  What the checkpoint's directory stands for lies in the root, beside it.
"""

from __future__ import annotations

from stillframe.integrations.accelerate.install import attach

__all__ = ["attach"]
