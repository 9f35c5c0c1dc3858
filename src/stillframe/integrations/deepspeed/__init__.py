"""DeepSpeed on stillframe: one line, before ``deepspeed.initialize``, and the key ``"datastates_ckpt"`` in its config::

    stillframe.integrations.deepspeed.install()

DeepSpeed has a place for the engine of the paper that stillframe realises; this takes it.  A ``save_dir`` is a
stillframe root, each tag a step of it.  ``<save_dir>/<tag>`` and ``latest`` appear when the step is committed; the
files in it that DeepSpeed looks for are small: ``torch.load`` of one reads what was saved as it.

The config: ``host_cache_size``, GiB of host memory at most (0: what one save takes); ``keep_last``, how many tags stay
(0: all); ``allow_pickle``: store, and load, what only pickle can hold, also DeepSpeed's own checkpoints and universal
ones.  Loading such a checkpoint runs code from it.
"""

from __future__ import annotations

from stillframe.integrations.deepspeed.install import install
from stillframe.integrations.deepspeed.pointers import export

__all__ = ["export", "install"]
