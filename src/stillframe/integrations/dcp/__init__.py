"""torch.distributed.checkpoint on stillframe's storage::

    dcp.save(state_dict, storage_writer=Writer("runs/7b"))
    dcp.load(state_dict, storage_reader=Reader("runs/7b"))

    writer = Writer("runs/7b")
    stager = Stager(writer)                                                          # one for all saves
    dcp.async_save(state_dict, storage_writer=writer, async_stager=stager)           # returns at once

What is written is an ordinary checkpoint: the ``stillframe`` command, :func:`stillframe.load` and
``Checkpointer.restore`` read it, and :class:`Reader` reads any that a ``Checkpointer`` wrote.
"""

from __future__ import annotations

from stillframe.integrations.dcp.reader import Reader
from stillframe.integrations.dcp.round import Stager
from stillframe.integrations.dcp.writer import Writer

__all__ = ["Reader", "Stager", "Writer"]
