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
import dataclasses
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

import ray.train.collective
from pyarrow.fs import LocalFileSystem

from stillframe import Catalog, Checkpointer, Every, KeepLast, RestoreReport, Save, Tier, spi
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
}


def checkpointer(
    state: Any, root: str | os.PathLike[str] | None = None, *, every: Every | None = None, **options: Any
) -> RayCheckpointer:
    """In ``train_loop_per_worker``, on every worker.  Restores the newest committed step, if there is one.

    root: where the checkpoints are; by default ``_stillframe`` in the directory of the run, if that is on a file
    system.  If it is on the nodes' own disks (``{node}``, or ``shared=False``), Ray hears of what is in the first of
    the ``tiers``; without ``tiers``, that is ``_stillframe`` in the directory of the run.  ``keep`` is for such disks
    only.  ``every``: which steps :meth:`~RayCheckpointer.report` saves; by default each.  ``options``: of
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
        storage, kept = _placed_by_ray(root, options)
        place, self._tier, options = _places(storage, kept, root, options)
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
                self._registry = Registry(
                    self.checkpointer, self._catalog(place, options), storage,
                    removes=kept is not None, is_tier=self._tier is not None,
                )  # fmt: skip
                self._call()  # the last life may have ended before it could
            self._open = stack.pop_all()

    def _catalog(self, place: str, options: dict[str, Any]) -> Catalog:
        """Of what Ray hears of: all nodes see it."""
        if self._tier is not None:
            return Catalog(self._tier.root, storage_options=self._tier.storage_options)
        return Catalog(place, storage_options=options.get("storage_options"))

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
            self._wait_for_tier()
            while ray.train.collective.broadcast_from_rank_zero(self._has_more()):
                self._report()
            ray.train.collective.barrier()  # the keepers are there while rank 0 has steps removed
            if failed is not None:
                raise failed

    def _wait_for_tier(self) -> None:
        if self._tier is not None:
            try:
                self.checkpointer.wait(tier=self._tier)
            except StillframeError as error:
                logger.warning("Ray does not hear of what is not in %s: %s", self._tier.root, error)

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


def _is_shared(root: str | os.PathLike[str] | None, options: dict[str, Any]) -> bool:
    return "{node}" not in os.fspath(root or "") and options.get("shared") is not False


def _placed_by_ray(root: str | os.PathLike[str] | None, options: dict[str, Any]) -> tuple[Any, int | None]:
    """What :func:`_context` returns.  Raises :class:`ConfigError` for options that Ray decides."""
    for name, reason in _SAID_BY_RAY.items():
        if name in options and (name != "keep" or _is_shared(root, options)):
            raise ConfigError(f"checkpointer({name}=…): {reason}")
    return _context()


def _places(
    storage: Any, kept: int | None, root: str | os.PathLike[str] | None, options: dict[str, Any]
) -> tuple[str, Tier | None, dict[str, Any]]:
    """The root; the tier that Ray hears of, if the nodes do not share the root; and the options of a checkpointer."""
    if _is_shared(root, options):
        return os.fspath(root if root is not None else _beside(storage)), None, options
    if root is None:
        raise ConfigError("checkpointer(shared=False): give root=…, where the checkpoints are on each node's own disk")
    given = options.get("tiers") or [Tier(_beside(storage))]
    if not isinstance(given, Sequence) or not isinstance(given[0], Tier):
        raise ConfigError(f"checkpointer(tiers={given!r}): give a list of Tier(…)")
    first, *others = given
    if kept is not None:  # in the tier also what is on Ray's list
        options = {"keep": KeepLast(kept), **options}
        first = dataclasses.replace(first, keep=first.keep or KeepLast(1))
    return os.fspath(root), first, {**options, "tiers": [first, *others]}


def _beside(storage: Any) -> str:
    """The place in the directory of the run.  Raises :class:`ConfigError` if that is on no file system."""
    if isinstance(storage.storage_filesystem, LocalFileSystem):
        return f"{storage.experiment_fs_path}/{ROOT}"
    raise ConfigError(
        f"the storage_path of this run is not a directory, but of the kind {storage.storage_filesystem.type_name!r}: "
        'say where the checkpoints are to be, as in checkpointer(state, "s3://bucket/gpt", storage_options=…); or, if '
        "the root is on the nodes' own disks, as in tiers=[stillframe.Tier(…)]"
    )


def _context() -> tuple[Any, int | None]:
    """The storage of this worker's run, and how many checkpoints its ``CheckpointConfig`` keeps; ``None``: all."""
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
    return storage, None if config is None else config.num_to_keep
