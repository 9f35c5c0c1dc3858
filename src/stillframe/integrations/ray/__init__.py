"""Ray Train (V2) on stillframe: one object inside ``train_loop_per_worker``, which restores, saves and reports::

    with stillframe.integrations.ray.checkpointer(state) as checkpoints:
        for step in range(checkpoints.next_step, steps):
            ...
            checkpoints.report(step, {"loss": loss})

``report`` saves lazily.  Ray hears of a checkpoint when it is committed, and training waits for neither.  What stays is
decided by ``CheckpointConfig``, and ``FailureConfig`` restarts from the newest that is committed, whether Ray has heard
of it or not.  ``result.checkpoint`` and ``ray.train.get_checkpoint()`` name a step of a root: :func:`locate` tells it.
"""

from __future__ import annotations

from stillframe.integrations.ray.registry import locate
from stillframe.integrations.ray.worker import RayCheckpointer, checkpointer

__all__ = ["RayCheckpointer", "checkpointer", "locate"]
