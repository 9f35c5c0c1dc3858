"""The facade: composes the parts that save and restore.  Does no I/O of its own, and encodes nothing.

save()    walk, plan (cached), capture, hand over: about a millisecond of the training thread
fence()   wait, before the update, until what save() handed over is copied
stager    a thread of this process: live tensors → arena;  keeper, a process: arena → segment → seal → manifest
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

from stillframe.errors import ConfigError, DeadlineError, StillframeError
from stillframe.link.messages import KeeperConfig
from stillframe.link.sizing import arena_of
from stillframe.model import Phase, RestoreReport, Stats, check_choice, check_deadline, check_options, check_step
from stillframe.ranks.agreement import agree_on_epoch, agree_on_run, open_tiers, resolve_root
from stillframe.ranks.joining import join_group
from stillframe.restoring.findings import warn_of_rest
from stillframe.restoring.resume import Resume
from stillframe.restoring.selection import Wanted
from stillframe.retention import Keep, check_policy, encode_policy
from stillframe.save.arrivals import Pace
from stillframe.save.capture import Planner
from stillframe.save.due import Due
from stillframe.save.epochs import Epochs
from stillframe.save.failures import Failures
from stillframe.save.fence import OptimizerFence
from stillframe.save.keeper_client import KeeperClient
from stillframe.save.lifetime import Lifetime, Parts
from stillframe.save.on_error import OnError, check_on_error
from stillframe.save.quiesce import quiesce
from stillframe.save.saver import Saver
from stillframe.save.saves import Save, Saves
from stillframe.save.seal_count import SealCount
from stillframe.save.stager import Stager
from stillframe.save.steps import TakenSteps
from stillframe.schedule import Every, check_every
from stillframe.tiers import Tier, TierConfig, TierName, check_tiers
from stillframe.units import parse_rate

logger = logging.getLogger("stillframe")

_INTERRUPTED_S, _BEHIND_S = 1.0, 5.0
"""So long ``close()`` waits for the keeper's end after Ctrl-C, and after it has left a tier behind."""


class Checkpointer:
    """Saves a training state lazily, and restores it exactly.

    root: directory of the checkpoints, made if missing, or ``s3://BUCKET/DIRECTORY``; one run writes to it at a time.
    arena: the size of the buffer in host memory that saves are copied to (``"2GiB"``).  ``"auto"``: as large as the
    first state; ``"auto:16GiB"``: the same, but never more than 16 GiB.  Neither takes more than half of this rank's
    share of the memory that is free on its node and in its cgroup.
    stage_limit: how many bytes per second this rank copies from accelerators (``"20GB/s"``), to leave bandwidth to
    collectives; the fence waits on the host while copies are held back.  ``None``: no limit.
    keep: retention, such as ``KeepLast(3)`` or ``KeepLast(3) | KeepEvery(1000)``; ``None`` keeps everything.
    on_error: what happens with the error of a failed save.  ``"raise"``: the next ``save``, ``wait`` or ``close``
    raises it; ``"warn"``: it is logged; a function: it is called with the error, once, on a thread of stillframe's,
    must return soon, and must not save or wait.  Errors of a tier are logged, or given to the function, and never
    raised.
    when_busy: when earlier saves fill the arena, wait for room (``"wait"``) or skip the new save (``"skip"``).  While a
    save waits, the next update waits too; if too many wait, ``save`` itself waits.
    audit: compare the bytes at every fence, to find changes made while they were copied; slow, for finding bugs.
    rank, world_size: this process among those that save together; by default those of torch.distributed, or of its
    environment variables (torchrun sets them).  Every rank makes the checkpointer, and calls ``save`` and ``restore``.
    shared: whether all ranks see the same root.  If not, each keeps its own part there; ``{node}`` in the root (it
    becomes the name of the host, or ``STILLFRAME_NODE``) means that they do not.
    deadline_s: how long ranks wait for one another: here, in ``restore``, and before a commit is given up.
    events: record in ``<root>/run/events`` what happens, for ``stillframe watch``, ``report`` and ``trace``.
    tiers: other places that checkpoints are copied to and restored from: ``[Tier("/lustre/gpt", every=10), …]``.
    every: when :meth:`due` is true: ``Every(steps=100)``, ``Every(minutes=30)``, ``Every(steps=100, minutes=30)``.
    storage_options: for an object store, as obstore takes them (``{"endpoint": …, "access_key_id": …}``); by default
    those of the environment, as for the vendor's own tools.  ``"retry_timeout"``: for how many seconds requests to a
    server that does not answer are retried, instead of 300 for a save and 30 for calls that somebody waits for.

    Thread: call ``restore``, ``close`` and ``save`` on the training thread; ``save`` also on another one that holds
    updates back meanwhile (``spi.UpdateGate``), one at a time; everything else on any thread.
    """

    _ranks_talk = True

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        arena: int | str = "auto",
        stage_limit: int | str | None = None,
        keep: Keep | None = None,
        on_error: OnError = "raise",
        when_busy: Literal["wait", "skip"] = "wait",
        audit: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        shared: bool | None = None,
        deadline_s: float = 600.0,
        events: bool = True,
        storage_options: Mapping[str, Any] | None = None,
        tiers: Sequence[Tier] = (),
        every: Every | None = None,
    ) -> None:
        check_on_error(on_error)
        schedule = check_every(every)
        check_choice("when_busy", when_busy, ("wait", "skip"))
        policy, options = check_policy(keep), check_options(storage_options)
        pace = None if stage_limit is None else Pace(parse_rate(stage_limit, "stage_limit"))
        self._group = group = join_group(rank, world_size, check_deadline(deadline_s), self._ranks_talk)
        if when_busy == "skip" and group.world_size > 1:
            raise ConfigError("when_busy='skip': ranks would skip different steps; use 'wait', and save less often")
        self._catalog = resolve_root(root, shared, group, options)
        tier_configs = check_tiers(tiers, self._catalog.root)
        self._tiers = open_tiers(tiers, self._catalog)
        is_shared, run = self._catalog.rank is None, self._name_run(policy, tier_configs)
        self._saves = Saves(on_error)
        self._steps = TakenSteps(self._catalog)
        self._steps.look()
        self._saves.on_end.append(self._steps.ended)
        self._planner = Planner(group, is_shared)
        config = KeeperConfig(
            self._catalog.root, run, group.rank, group.world_size,
            keep=encode_policy(policy), is_shared=is_shared, deadline_s=deadline_s, has_events=events,
            storage_options=options, tiers=tier_configs,
        )  # fmt: skip
        epoch = agree_on_epoch(group, self._catalog, self._tiers)
        others = None if epoch is None else SealCount(group, epoch)
        self._saves.on_end += [others.ended] if others is not None else []
        self._keeper = KeeperClient(config, self._saves, others, epoch)
        if others is None:
            Failures(group, self._saves, self._keeper).begin()
        self._saves.tiers = self._keeper.tiers
        self._epochs = Epochs(self._catalog, group, self._keeper, self._steps, self._saves, self._tiers)
        self._stager = Stager(self._saves, self._keeper, *arena_of(arena, group.ranks_on_node), others, pace)
        self._saves.before_wait = self._stager.before_wait
        self._saves.look_after = self._stager.look_after
        self._fence = OptimizerFence(self._stager.fence)
        self._saver = Saver(
            self._steps, self._saves, self._planner, self._stager, self._keeper, self._fence,
            is_audited=audit, skips_when_busy=when_busy == "skip",
        )  # fmt: skip
        self._due = Due(schedule, group)
        parts = Parts(self._saves, self._stager, self._fence)
        self._lifetime = Lifetime(self, parts.at_exit, parts.let_go, f"a Checkpointer of {self._catalog.root}")

    def _name_run(self, keep: Keep | None, tiers: Sequence[TierConfig]) -> str:
        return agree_on_run(self._group, self._catalog, keep, tiers)

    # --- saving ----------------------------------------------------------------------------

    def save(self, step: int, state: Any, *, metadata: Mapping[str, Any] | None = None) -> Save:
        """Request a checkpoint of ``state`` as it is now.

        ``state`` is any nesting of dict, list and tuple with tensors, numpy arrays, plain Python values, and objects
        that have ``state_dict`` and ``load_state_dict``.  Parameters, optimizer state and tensors that the state
        contains directly are copied in the background: change them only in ``optimizer.step()`` or after a
        :meth:`fence`.  A save whose tensors were changed otherwise fails with :class:`TornError`, if torch counts the
        change (not through ``tensor.data``; ``audit=True`` finds those).  What forward changes is copied at once:
        buffers, and the weights of embeddings with ``max_norm``.  On an accelerator the state is saved in the order of
        the current stream, like a
        kernel: if another stream writes to it, let the current one wait for that stream first.
        ``metadata``: small plain values, such as a loss, for ``KeepBest`` and for ``stillframe list``.

        Blocks: for about a millisecond; never for I/O, unless storage falls behind: while 16 earlier saves wait for the
        arena, or have captured as much as it holds, this waits until one of them is staged or fails.
        Raises: :class:`ConfigError`, :class:`ExistsError`, :class:`UnsupportedStateError`, and :class:`BusyError` if
        earlier saves are stuck: then nothing was saved.  Also the error of an earlier save that has failed: then this
        save was made all the same.
        """
        self._lifetime.check_open("save")
        return self._saver.save(check_step(step), state, metadata, None)

    def due(self, step: int, *, last: bool = False) -> bool:
        """Whether this step should be saved, according to ``every``; the same answer on every rank.

        Call it once at each step, on every rank: ``if checkpointer.due(step): checkpointer.save(step, state)``.
        ``last``: whether the loop ends with this step; then it is due.  Otherwise what was trained after the last step
        that was due is not saved: ``due(step, last=step == steps - 1)``.

        Blocks: briefly, with several ranks and ``minutes``, once for each step that is due by the clock.
        Raises: :class:`ConfigError` if there is no ``every``.
        """
        self._lifetime.check_open("due")
        return self._due.at(check_step(step), last)

    def fence(self, *, wait: bool = False) -> None:
        """Wait until the last snapshot has been copied: after this the state may change.

        stillframe calls it before every ``optimizer.step()``.  Call it yourself before any other change of saved
        tensors.

        In host memory it returns when every save requested so far has been copied.  On an accelerator it returns when
        the copies are queued; the current stream waits for them, not the host.  Work queued on that stream afterwards
        may change the state, and so may other streams that wait for that stream first.
        ``wait=True``: the host waits until everything is copied; then any stream, thread or process may change the
        state.

        Blocks: as described.  It returns early if a save or its device fails, and does not raise that error.
        """
        self._stager.fence(wait=wait)

    def quiesce(self, timeout_s: float | None = None) -> None:
        """Wait until nothing is pending on any device: every save is copied, or has failed, and the arena is pinned.

        Call it before a graph is captured (``torch.cuda.graph``).  Copies that are under way would break the capture;
        an update within it raises :class:`ConfigError` instead.  A replayed update runs no Python: call :meth:`fence`
        before each replay that changes the state.

        Raises: :class:`DeadlineError`.  It does not raise the error of a failed save.
        """
        self._lifetime.check_open("quiesce")
        quiesce(self._saves, self._stager, timeout_s)

    def wait(
        self,
        phase: Phase = "committed",
        timeout_s: float | None = None,
        *,
        tier: TierName | None = None,
    ) -> None:
        """Block until every save so far has reached ``phase``; with ``tier``, until that tier has everything due there.

        Without a timeout it waits as long as the keeper makes progress.
        Raises: the error of a save that failed; :class:`DeadlineError`; :class:`StorageError` if nothing is carried to
        the tier any more.
        """
        self._lifetime.check_process("wait")
        self._saves.wait_all(phase, timeout_s, tier)
        self._saves.raise_untold()

    def close(self, timeout_s: float | None = None) -> None:
        """Wait until every save is committed, functions given to :meth:`Save.then` have returned, and the tiers have
        what is due; then end the keeper and remove the fence.

        May be called again.  It does not wait long for a tier that fails: the next run copies the rest there.  Ctrl-C
        ends the wait in about a second, a second Ctrl-C at once; a warning says what the keeper and the next run will
        do.

        Raises: the error of a save that failed; :class:`DeadlineError` if it took longer than ``timeout_s``: the keeper
        then finishes what is staged, and the rest is given up, as the error says.
        """
        if not self._lifetime.end():
            return
        began, limit_s = time.monotonic(), timeout_s
        try:
            self._saves.wait_all("committed", timeout_s)
            if not self._saves.callbacks.finish(None if timeout_s is None else timeout_s - _since(began)):
                raise DeadlineError(f"after {timeout_s:g} s a function given to Save.then() has not returned")
            if not self._keeper.tiers.wait_at_close(None if timeout_s is None else timeout_s - _since(began)):
                limit_s = _since(began) + _BEHIND_S if timeout_s is None else timeout_s  # the keeper still carries
        except DeadlineError as error:
            given_up = self._stager.give_up("close() did not wait any longer")
            what = f"given up: {', '.join(map(str, given_up))}; the" if given_up else "the"
            raise DeadlineError(f"{error}; {what} keeper finishes what is staged") from None
        except (KeyboardInterrupt, SystemExit):  # SystemExit: of a signal handler
            limit_s = _since(began) + _INTERRUPTED_S
            self._tell_interrupted()
            raise
        finally:
            left_s = None if limit_s is None else max(limit_s - _since(began), 0.0)
            self._fence.remove()
            self._stager.close(left_s)
            self._planner.forget()
            self._lifetime.done()
        self._saves.raise_untold()

    def _tell_interrupted(self) -> None:
        """What close() leaves undone, and who does it."""
        given_up = ", ".join(map(str, self._stager.give_up("close() was interrupted")))
        staged = ", ".join(str(save.step) for save in self._saves.in_flight)
        tiers = "; ".join(self._keeper.tiers.unfinished)
        said = [
            f"steps that are not saved: {given_up}" if given_up else "",
            f"steps that its keeper (pid {self._keeper.pid}) commits: {staged}" if staged else "",
            f"its keeper carries on as long as that works, and the next run does the rest: {tiers}" if tiers else "",
        ]
        if any(said):
            logger.warning("close() was interrupted. %s", ". ".join(filter(None, said)).capitalize())

    # --- restoring -------------------------------------------------------------------------

    def restore(
        self,
        state: Any,
        *,
        step: int | None = None,
        strict: bool = True,
        only: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
    ) -> RestoreReport:
        """Put a checkpoint into the live objects of ``state``, in place, every byte verified.

        Without ``step``: the newest committed one; if there is none, the report's ``step`` is ``None``.  A damaged one
        is skipped, with a warning.  With ``step``: that one, or an error.  ``strict=False`` restores what matches; a
        warning and the report list what did not.  Later saves continue from the restored step.

        ``only`` and ``exclude`` choose parts of the state, by paths or patterns as in :func:`load`: ``only="model"``,
        ``exclude=["model/head.*", "optimizer/param_groups"]``.  Everything else stays as it is, whether it fits or not.

        All ranks restore the same step, and none changes anything before it fits on all of them.  A checkpoint of
        another number of ranks, or of another sharding, is resharded: each rank reads what it needs.  Per-rank values
        (RNG, data position) of a rank that did not exist at save time are taken from rank ``r % old_world_size``.

        Blocks until done; first until the keeper of a run that was just killed has committed what it holds.
        Raises: :class:`MismatchError` (nothing was touched), :class:`NotFoundError`, :class:`IntegrityError`,
        :class:`VersionError`, :class:`BusyError`.
        """
        self._lifetime.check_open("restore")
        wanted = Wanted.given(step, strict, only, exclude)
        resume = Resume(self._catalog, self._group, state, wanted, self._tiers)
        try:
            save = resume.run(self._epochs.beginning(), self._epochs.claim_in)
        except BaseException:
            self._epochs.keep_on()
            raise
        finally:
            self._keeper.report_restore(resume.report)
        self._epochs.resume(save)
        warn_of_rest(resume.report)
        return resume.report

    def rewind(self, step: int) -> None:
        """Go back: training continues from ``step``, and the steps after it are abandoned.

        Abandoned steps are never restored again, not even after a crash, and retention removes them.  Call
        :meth:`restore` next: it restores ``step``.  Every rank calls this.  Blocks until it is durable.
        Raises: :class:`NotFoundError`, :class:`StorageError`, :class:`BusyError`.
        """
        self._lifetime.check_open("rewind")
        resume = Resume(self._catalog, self._group, None, Wanted.given(step, True, None, None), self._tiers)
        self._epochs.rewind(check_step(step), lambda settle: resume.find(settle, self._epochs.claim_in))

    def stats(self) -> Stats:
        """What has happened since this checkpointer was made."""
        return self._stager.stats()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except StillframeError as problem:
            if error is None:
                raise
            logger.warning("while leaving on %s: %s", type(error).__name__, problem)


def _since(began_s: float) -> float:
    return time.monotonic() - began_s
