"""The facade: composes the parts that save and restore.  Does no I/O of its own, and encodes nothing.

save()    walk, plan (cached), capture, hand over: about a millisecond of the training thread
fence()   wait, before the update, until what save() handed over is copied
stager    a thread of this process: live tensors → arena;  keeper, a process: arena → segment → seal → manifest
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Literal

from stillframe.errors import ConfigError, DeadlineError, StillframeError
from stillframe.link.messages import KeeperConfig
from stillframe.link.sizing import arena_of
from stillframe.model import Label, Phase, RestoreReport, Stats, check_choice, check_deadline, check_step
from stillframe.ranks.agreement import agree_on_epoch, agree_on_run, resolve_root
from stillframe.ranks.group import join_group
from stillframe.restoring.resume import Resume
from stillframe.retention import Keep, check_policy, encode_policy
from stillframe.save.capture import Planner
from stillframe.save.epochs import Epochs
from stillframe.save.fence import Fence, OptimizerFence
from stillframe.save.keeper_client import KeeperClient
from stillframe.save.lifetime import Lifetime
from stillframe.save.saver import Saver
from stillframe.save.saves import Save, Saves
from stillframe.save.seal_count import SealCount
from stillframe.save.stager import Stager
from stillframe.save.steps import TakenSteps

logger = logging.getLogger("stillframe")


class Checkpointer:
    """Saves a training state lazily, and restores it exactly.

    root: directory of the checkpoints, made if missing; one run writes to a root at a time.
    arena: host memory lent for staging (``"2GiB"``); ``"auto"`` takes the size of the first state, if there is room,
    ``"auto:16GiB"`` at most that.
    keep: retention, such as ``KeepLast(3)`` or ``KeepLast(3) | KeepEvery(1000)``; ``None`` keeps everything.
    on_error: a failed save is raised at the next ``save``, ``wait`` or ``close`` (``"raise"``) or logged (``"warn"``).
    when_busy: when earlier saves fill the arena, wait for room (``"wait"``) or drop the new save (``"skip"``).
    audit: prove at every fence that nothing changed while it was copied; slow, for finding bugs.
    rank, world_size: this process among those that save together; by default those of torch.distributed, or of its
    environment variables (torchrun sets them).  Every rank makes the checkpointer, and calls ``save`` and ``restore``.
    shared: whether all ranks see the same root.  If not, each keeps its own part there; ``{node}`` in the root (it
    becomes the name of the host, or ``STILLFRAME_NODE``) means that they do not.
    deadline_s: how long ranks wait for one another: here, in ``restore``, and before a commit is given up.
    events: record in ``<root>/run/events`` what happens, for ``stillframe watch``, ``report`` and ``trace``.

    Thread: ``restore`` and ``close`` from the training thread; ``save`` from it, or behind a :meth:`hold` from another,
    one at a time; the rest from any.
    """

    _ranks_talk = True

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        arena: int | str = "auto",
        keep: Keep | None = None,
        on_error: Literal["raise", "warn"] = "raise",
        when_busy: Literal["wait", "skip"] = "wait",
        audit: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        shared: bool | None = None,
        deadline_s: float = 600.0,
        events: bool = True,
    ) -> None:
        check_choice("on_error", on_error, ("raise", "warn"))
        check_choice("when_busy", when_busy, ("wait", "skip"))
        policy = check_policy(keep)
        self._group = group = join_group(rank, world_size, check_deadline(deadline_s), self._ranks_talk)
        if when_busy == "skip" and group.world_size > 1:
            raise ConfigError("when_busy='skip': ranks would skip different steps; use 'wait', and save less often")
        self._catalog = resolve_root(root, shared, group)
        is_shared, run = self._catalog.rank is None, self._name_run(policy)
        self.last_restore: RestoreReport | None = None
        self._saves = Saves(on_error)
        self._steps = TakenSteps(self._catalog)
        self._saves.on_end = self._steps.ended
        self._planner = Planner(group, is_shared)
        config = KeeperConfig(
            str(self._catalog.root), run, group.rank, group.world_size,
            keep=encode_policy(policy), is_shared=is_shared, deadline_s=deadline_s, has_events=events,
        )  # fmt: skip
        others = None if is_shared else SealCount(group)
        self._keeper = KeeperClient(config, self._saves, others, agree_on_epoch(group, self._catalog))
        self._epochs = Epochs(self._catalog, group, self._keeper, self._steps, self._settle)
        self._stager = Stager(self._saves, self._keeper, *arena_of(arena), others)
        self._saves.before_wait = self._stager.fence if audit else None
        self._fence = OptimizerFence(self._stager.fence)
        self._saver = Saver(
            self._steps, self._saves, self._planner, self._stager, self._keeper, self._fence,
            is_audited=audit, skips_when_busy=when_busy == "skip",
        )  # fmt: skip
        self._lifetime = Lifetime(self._at_exit)

    def _name_run(self, keep: Keep | None) -> str:
        return agree_on_run(self._group, self._catalog, keep)

    # --- saving ----------------------------------------------------------------------------

    def save(
        self, step: int, state: Any, *, metadata: Mapping[str, Any] | None = None, label: Label | None = None
    ) -> Save:
        """Request a checkpoint of ``state`` as it is now.

        ``state`` is any nesting of dict, list and tuple with tensors, numpy arrays, plain Python values, and objects
        that have ``state_dict`` and ``load_state_dict``.  Parameters, optimizer state and tensors that stand in it by
        themselves are copied in the background: change them only in ``optimizer.step()`` or behind a :meth:`fence`.
        ``metadata``: small plain values, such as a loss, that ``KeepBest`` and people judge the checkpoint by.
        ``label``: a directory of small files that appears with the checkpoint, for those who look for it by a name.

        Blocks: for about a millisecond; never for I/O.
        Raises: :class:`ConfigError`, :class:`ExistsError`, :class:`UnsupportedStateError` (nothing was saved), and
        the error of an earlier save that failed since (this one was not taken).
        """
        self._lifetime.check_open("save")
        return self._saver.save(check_step(step), state, metadata, label)

    def fence(self) -> Fence:
        """Wait until every save requested so far has been copied; then the state may change.

        Called before every ``optimizer.step()`` by itself.  For updates written by hand: as a call before the
        update, or around it as ``with checkpointer.fence():``.
        """
        self._stager.fence()
        return Fence()

    def hold(self, hint: str = "") -> Callable[[], None]:
        """Every fence waits from now on, until the function returned is called.

        For a save that another thread will request: what it may copy must not change before.  What is held must be
        released, or training stops at its next update; after a while it says so, with the ``hint``.
        """
        return self._stager.holds.add(hint)

    def wait(self, phase: Phase = "committed", timeout_s: float | None = None) -> None:
        """Block until every save so far has reached ``phase``.

        Without a timeout it waits as long as the keeper makes progress.
        Raises: the error of a save that failed; :class:`DeadlineError`.
        """
        self._lifetime.check_process("wait")
        self._saves.wait_all(phase, timeout_s)
        self._saves.raise_untold()

    def close(self, timeout_s: float | None = None) -> None:
        """Wait until every save is committed, let the keeper go, remove the fence.  May be called again.

        Raises: the error of a save that failed; :class:`DeadlineError` if it took longer than ``timeout_s`` (the keeper
        then finishes by itself).
        """
        if not self._lifetime.end():
            return
        began = time.monotonic()
        try:
            self._saves.wait_all("committed", timeout_s)
        except DeadlineError:
            self._stager.give_up("close() did not wait any longer")
            raise
        finally:
            left_s = None if timeout_s is None else max(timeout_s - (time.monotonic() - began), 0.0)
            self._fence.remove()
            self._stager.close(left_s)
            self._planner.forget()
        self._saves.raise_untold()

    def _at_exit(self) -> None:
        """Leaving the interpreter without close(): stage what was requested, the keeper does the rest."""
        self._saves.stage_at_exit()
        self._fence.remove()

    # --- restoring -------------------------------------------------------------------------

    def restore(self, state: Any, *, step: int | None = None, strict: bool = True) -> int | None:
        """Put a checkpoint into the live objects of ``state``, in place, every byte verified.

        Without ``step``: the newest committed one; ``None`` if there is none.  A damaged one is passed over, with a
        warning.  With ``step``: that one, or an error.  ``strict=False`` restores what matches; :attr:`last_restore`
        says what did not.  What is saved from here on goes on from it.

        Of several ranks all restore the same step, and none touches anything before it fits on all.  A checkpoint of
        another number of ranks, or divided differently, is read as far as this rank needs it.  Per-rank values (RNG,
        data position) of a rank that did not exist at save time are taken from rank ``r % old_world_size``.

        Blocks until done; first until the keeper of a run that was just killed has committed what it holds.
        Raises: :class:`MismatchError` (nothing was touched), :class:`NotFoundError`, :class:`IntegrityError`,
        :class:`VersionError`, :class:`BusyError`.
        """
        self._lifetime.check_open("restore")
        resume = Resume(self._catalog, self._group, state, None if step is None else check_step(step), strict)
        try:
            save = resume.run(self._epochs.beginning())
        except BaseException:
            self._epochs.keep_on()
            raise
        finally:
            self.last_restore = resume.report or self.last_restore
            self._keeper.report_restore(resume.report)
        self._epochs.resume(save)
        return None if save is None else save.step

    def rewind(self, step: int) -> None:
        """Go back: from now on training goes on from ``step``, and the steps after it are left behind.

        They never win again, not after a crash either, and go when retention comes by.  Then call :meth:`restore`,
        which gives that step.  Every rank calls this.  Blocks until it is durable.
        Raises: :class:`NotFoundError`, :class:`StorageError`, :class:`BusyError`.
        """
        self._lifetime.check_open("rewind")
        self._epochs.rewind(check_step(step))

    def _settle(self) -> None:
        """Before a restore: the root is ours, and what we saved is committed."""
        self._keeper.wait_ready()
        self.wait("committed")

    def stats(self) -> Stats:
        """What has happened since this checkpointer was made."""
        return self._stager.stats()

    @property
    def keeper_pid(self) -> int | None:
        """Process id of the running keeper, if there is one."""
        return self._keeper.pid

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
