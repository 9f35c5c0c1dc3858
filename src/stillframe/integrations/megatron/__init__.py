"""Megatron-core's ``dist_checkpointing`` on stillframe: a pair of strategies::

    from stillframe.integrations.megatron import LoadStrategy, SaveStrategy, latest

    strategy = SaveStrategy()                                                      # one for all saves
    dist_checkpointing.save(state, "runs/gpt/iter_0000100", strategy)              # returns when it is committed
    request = dist_checkpointing.save(state, "runs/gpt/iter_0000200", strategy, async_sharded_save=True)
    dist_checkpointing.load(state, latest("runs/gpt"), LoadStrategy())             # on any number of ranks

The data is a step in the root ``_stillframe`` beside the directories.  A directory holds Megatron's small files and
``stillframe.json``, which names the step.  That file, ``metadata.json`` and, for directories called ``iter_0000100``,
``latest_checkpointed_iteration.txt`` are written when the step is committed, not before.

``SaveStrategy("/nvme/{node}/gpt")`` saves to the nodes' own disks first.  Then ``_stillframe`` is the tier behind them,
and a step is committed when that has it; ``strategy.latest("runs/gpt")`` carries there what a crash has left behind.
"""

from __future__ import annotations

from stillframe.integrations.megatron.directory import latest
from stillframe.integrations.megatron.strategies import LoadStrategy, SaveStrategy, register

__all__ = ["LoadStrategy", "SaveStrategy", "latest", "register"]
