"""What a worker of Ray Train holds: a checkpointer, and on rank 0 the way of a committed step to Ray's list.

``ray.train.report`` is a collective of Ray's, so it is called on the training thread, where all other collectives of
Ray's are, at a step that all ranks agree on (:func:`stillframe.spi.meeting`).  Rank 0 goes round::

    idle      a step is committed that Ray has not heard of: make its directory, call the ranks
    called    the ranks come to the step at which they meet: report
    reported  the controller has it on its list, and has removed what it lets go: remove those steps

Controller and storage are waited for on the thread that tells of commits (:meth:`Save.then`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal

import ray.train.collective
from pyarrow.fs import LocalFileSystem

from stillframe import Catalog, Checkpointer, Every, RestoreReport, Save, spi
from stillframe.errors import ConfigError, StillframeError
from stillframe.integrations.ray.registry import ROOT, Entry, Registry

logger = logging.getLogger("stillframe")

TESTED = "2.60"
_AHEAD_S = 1.5
"""How much later the ranks report: in that time they agree on the step."""
_SAID_BY_RAY = {
    "keep": "RunConfig(checkpoint_config=CheckpointConfig(num_to_keep=…)) says what stays",
    "rank": "Ray numbers the workers",
    "world_size": "Ray numbers the workers",
    "shared": "all workers need to see one root; `tiers` carry it elsewhere",
}


def checkpointer(
    state: Any, root: str | os.PathLike[str] | None = None, *, every: Every | None = None, **options: Any
) -> RayCheckpointer:
    """In ``train_loop_per_worker``, on every worker.  Restores the newest committed step, if there is one.

    root: where the checkpoints are; by default ``_stillframe`` in the directory of the run, if that is on a file
    system.  ``every``: which steps :meth:`~RayCheckpointer.report` saves; by default each.  ``options``: of
    :class:`stillframe.Checkpointer`.  A save that fails is logged and training goes on, unless ``on_error`` says
    otherwise.

    Blocks until all workers are here and the state is restored.
    Raises: :class:`ConfigError` for versions of Ray that were not tested, and for options that Ray's own say; what
    :meth:`stillframe.Checkpointer.restore` raises.
    """
    return RayCheckpointer(state, root, every, options)


class RayCheckpointer:
    """Made by :func:`checkpointer`, for a ``with`` statement.  Thread: the training thread's."""

    def __init__(
        self, state: Any, root: str | os.PathLike[str] | None, every: Every | None, options: dict[str, Any]
    ) -> None:
        for name, reason in _SAID_BY_RAY.items():
            if name in options:
                raise ConfigError(f"checkpointer({name}=…): {reason}")
        storage, removes = _context()
        if root is None and not isinstance(storage.storage_filesystem, LocalFileSystem):
            kind = storage.storage_filesystem.type_name
            raise ConfigError(
                f"the storage_path of this run is not a directory, but of the kind {kind!r}: say where the checkpoints "
                'are to be, as in checkpointer(state, "s3://bucket/gpt", storage_options=…)'
            )
        place = os.fspath(root if root is not None else f"{storage.experiment_fs_path}/{ROOT}")
        if "{node}" in place:
            raise ConfigError(f"root={place!r}: {_SAID_BY_RAY['shared']}")
        self._state, self._every = state, every
        self._turn: Literal["idle", "called", "reported"] = "idle"
        self._entry: Entry | None = None
        self._committed: Save | None = None
        self._lock = threading.Lock()
        """Of what happens on the thread of the commits, so that :meth:`close` comes after it."""
        self._registry: Registry | None = None
        self._is_closed = False
        with contextlib.ExitStack() as stack:
            self.checkpointer = stack.enter_context(Checkpointer(place, every=every, **{"on_error": "warn", **options}))
            self._meeting = spi.meeting(self.checkpointer, "ray", ahead_s=_AHEAD_S)
            self.restored: RestoreReport = self.checkpointer.restore(state)
            if ray.train.get_context().get_world_rank() == 0:
                catalog = Catalog(place, storage_options=options.get("storage_options"))
                self._registry = Registry(self.checkpointer, catalog, storage, removes)
                self._call()  # the last life may have ended before it could
            self._open = stack.pop_all()

    @property
    def next_step(self) -> int:
        """Where a loop that counts its steps from 0 begins, or goes on."""
        return self.restored.next_step

    def report(self, step: int, metrics: Mapping[str, Any] | None = None) -> Save | None:
        """At the end of each step, on every worker: save the state, with rank 0's ``metrics``, if the step is due.

        Ray hears of it when it is committed, but no sooner than its controller can: about every two seconds.  Of those
        committed in between it hears of the newest.
        Blocks: as :meth:`stillframe.Checkpointer.save`; and once for each report to Ray, while its workers meet.
        Raises: what ``save`` raises; :class:`DeadlineError` if the workers cannot agree when to report.
        """
        save = None
        if self._every is None or self.checkpointer.due(step):
            save = self.checkpointer.save(step, self._state, metadata=metrics)
            if self._registry is not None:
                save.then(self._note)
        if self._meeting.passed(step):
            self._report()
        return save

    def _report(self) -> None:
        mode = ray.train.CheckpointUploadMode.NO_UPLOAD
        if self._registry is None:
            ray.train.report({}, checkpoint_upload_mode=mode)
            return
        assert self._entry is not None
        self._registry.reported(self._entry)
        ray.train.report(self._entry.metrics, self._entry.checkpoint, checkpoint_upload_mode=mode)
        self._turn = "reported"
        if self._committed is not None:
            self._committed.then(self._go_on)

    # --- on rank 0, on the thread of the commits -----------------------------------------------

    def _note(self, save: Save) -> None:
        self._committed = save
        self._go_on(save)

    def _go_on(self, _: Save) -> None:
        with self._lock:
            if self._turn == "reported":
                self._settle()
            if self._turn == "idle":
                self._call()

    def _settle(self) -> None:
        assert self._registry is not None
        self._turn = "idle"
        try:
            self._registry.settle()
        except (StillframeError, OSError, ray.exceptions.RayError) as error:
            logger.warning("steps that Ray has let go stay for now: %s", error)

    def _call(self) -> None:
        """Have the newest step reported, if Ray has not heard of it."""
        assert self._registry is not None
        try:
            self._entry = self._registry.next()
        except (StillframeError, OSError) as error:
            logger.warning("Ray does not hear of the newest checkpoint for now: %s", error)
            return
        if self._entry is not None:
            self._turn = "called"
            self._meeting.call("report")

    # --- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """On every worker: wait until all is committed and Ray has the newest on its list; let the keeper go.

        May be called again.  Raises: the error of a save that failed, if ``on_error`` is ``"raise"``.
        """
        if self._is_closed:
            return
        self._is_closed = True
        with self._open:
            failed = None
            try:
                self.checkpointer.wait("committed")
            except StillframeError as error:
                failed = error
            while ray.train.collective.broadcast_from_rank_zero(self._has_more()):
                self._report()
            ray.train.collective.barrier()  # the keepers are there while rank 0 has steps removed
            if failed is not None:
                raise failed

    def _has_more(self) -> bool:
        if self._registry is None:
            return False
        with self._lock:
            if self._turn == "reported":
                self._settle()
            if self._turn == "idle":
                self._call()
            return self._turn == "called"

    def __enter__(self) -> RayCheckpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._open.__exit__(kind, error, trace)  # other workers may be elsewhere: nothing is waited for with them


def _context() -> tuple[Any, bool]:
    """The storage of this worker's run, and whether its ``CheckpointConfig`` lets any checkpoint go."""
    if ray.__version__.split(".")[:2] != TESTED.split("."):
        raise ConfigError(
            f"ray {ray.__version__} was not tested with stillframe: install ray[train] {TESTED}, or use "
            "stillframe.Checkpointer inside train_loop_per_worker, without reports to Ray"
        )
    if not hasattr(ray.train, "get_all_reported_checkpoints"):
        raise ConfigError("this is Ray Train V1: set RAY_TRAIN_V2_ENABLED=1, or leave that variable out")
    from ray.train.v2._internal.execution.context import get_train_context

    try:
        storage = ray.train.get_context().get_storage()
        config = get_train_context().train_run_context.run_config.checkpoint_config
    except (RuntimeError, NotImplementedError) as error:
        raise ConfigError(f"checkpointer(): call it in train_loop_per_worker, on Ray's workers ({error})") from error
    return storage, config is not None and config.num_to_keep is not None
