"""The facade: composes walk, plan, stager, fence, keeper and restore.  Does no I/O of its own.

save()    walk, plan (cached), capture, hand over                     training thread, about a millisecond
fence()   wait until what save() handed over is copied                training thread, before the update
stager    live tensors → arena                                        thread of this process
keeper    arena → segment → seal → manifest                           process of its own
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing.util
import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal

import msgspec

from stillframe.checkpoint.catalog import Catalog
from stillframe.errors import (
    ConfigError,
    DeadlineError,
    ExistsError,
    KeeperError,
    StillframeError,
)
from stillframe.format.records import SealDraft, check_draft
from stillframe.link.sizing import arena_of
from stillframe.model import Label, Phase, RestoreReport, Stats, check_choice, check_deadline, check_step
from stillframe.ranks.agreement import agree_on_attempt, agree_on_next, resolve_root
from stillframe.ranks.group import join_group
from stillframe.restore.resume import Resume
from stillframe.retention import Keep
from stillframe.save.audit import Audit
from stillframe.save.device import DeviceTable
from stillframe.save.fence import Fence, OptimizerFence
from stillframe.save.keeper_client import Keepers
from stillframe.save.keeper_process import KeeperConfig
from stillframe.save.plan import Plan, make_plan
from stillframe.save.saves import Ledger, Save
from stillframe.save.stager import Job, Stager
from stillframe.state.spread import Seat
from stillframe.state.walk import Walk

logger = logging.getLogger("stillframe")

_EXIT_S = 60.0
_GRACE_S = 1.0


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

    Thread: ``restore`` and ``close`` from the training thread; ``save`` from it, or behind a :meth:`hold` from another,
    one at a time; the rest from any.
    """

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
    ) -> None:
        check_choice("on_error", on_error, ("raise", "warn"))
        check_choice("when_busy", when_busy, ("wait", "skip"))
        if keep is not None and not isinstance(keep, Keep):
            raise ConfigError(f"keep={keep!r}: give KeepLast(n), KeepEvery(k), both combined with |, or None")
        self._group = join_group(rank, world_size, check_deadline(deadline_s))
        if when_busy == "skip" and self._group.world_size > 1:
            raise ConfigError(
                "when_busy='skip': several ranks would skip different steps; use 'wait', and save less often"
            )
        path, is_shared = resolve_root(root, shared, self._group)
        self._catalog = Catalog(path, None if is_shared else self._group.rank)
        if self._catalog.root.exists() and not self._catalog.root.is_dir():
            raise ConfigError(f"root={str(self._catalog.root)!r} is a file; give a directory")
        self._on_error = on_error
        self._when_busy = when_busy
        self._audit = audit
        self._attempt = agree_on_attempt(self._group, self._catalog, keep)
        self._owner_pid = os.getpid()
        fixed, make_arena = arena_of(arena)
        self._devices = DeviceTable()
        self._plan: Plan | None = None
        self._known: set[int] | None = None
        self._tried: set[int] = set()
        self._is_closed = False
        self.last_restore: RestoreReport | None = None

        policy = keep or Keep()
        config = KeeperConfig(
            str(self._catalog.root), self._attempt, self._group.rank, self._group.world_size,
            keep_last=policy.last, keep_every=policy.every, is_shared=is_shared, deadline_s=deadline_s,
        )  # fmt: skip
        self._ledger = Ledger(self._before_wait)
        self._keepers = Keepers(config, self._ledger, self._saves_failed, self._committed)
        try:
            self._keepers.start()
        except BaseException:
            if fixed is not None:
                fixed.close()
            raise
        self._stager = Stager(self._ledger, self._keepers, make_arena, fixed, self._saves_failed, self._complete_step)
        self._fence = OptimizerFence(self._stager.fence)
        atexit.register(self._at_exit)
        if multiprocessing.parent_process() is not None:
            # A child of multiprocessing leaves by os._exit and runs only what is registered here.
            multiprocessing.util.Finalize(None, self._at_exit, exitpriority=100)

    # --- saving ----------------------------------------------------------------------------

    def save(self, step: int, state: Any, *, label: Label | None = None) -> Save:
        """Request a checkpoint of ``state`` as it is now.

        ``state`` is any nesting of dict, list and tuple with tensors, numpy arrays, plain Python values, and objects
        that have ``state_dict`` and ``load_state_dict``.  Parameters, optimizer state and tensors that stand in it by
        themselves are copied in the background: change them only in ``optimizer.step()`` or behind a :meth:`fence`.
        ``label``: a directory of small files that appears with the checkpoint, for those who look for it by a name.

        Blocks: for about a millisecond; never for I/O.
        Raises: :class:`ConfigError`, :class:`ExistsError`, :class:`UnsupportedStateError` (nothing was saved), and
        the error of an earlier save that failed since (this one was not taken).
        """
        began = time.monotonic()
        self._check_open("save")
        step = check_step(step)
        self._check_new(step)
        try:
            self._raise_failures()
            walk = Walk(state)
            plan = self._plan
            if plan is None or not plan.fits(walk):
                plan = self._plan = make_plan(walk, self._devices, self._seat)
        except StillframeError as error:
            self._keepers.refuse(step, error)
            raise
        draft = SealDraft(
            step=step,
            rank=self._group.rank,
            world_size=self._group.world_size,
            attempt=self._attempt,
            shards=plan.shards_json,
            tree=plan.tree_json,
            values=msgspec.Raw(msgspec.json.encode(walk.values)),
            teams=plan.teams,
        )
        check_draft(draft)
        if self._when_busy == "skip" and self._stager.is_busy(len(plan.chunks)):
            logger.warning("step %d is skipped: an earlier save still fills the arena", step)
            return self._ledger.skip(step, began)
        captured = plan.capture(walk)
        marks = [(device, device.mark()) for device in plan.devices]
        audit = Audit(plan, step) if self._audit else None
        if audit is not None:
            self._stager.begin_audit(audit, marks)
        save = self._ledger.begin(step, plan.data_bytes, began)
        try:
            self._known_steps().add(step)
            self._tried.add(step)
            job = Job(save, plan, draft, captured, marks, audit, label)
            self._ledger.returned(save, plan.captured_bytes, time.monotonic() - began)
            self._stager.submit(job)  # last: from here on the stager competes for the GIL
        except BaseException as error:  # Ctrl-C just here: a save that nobody stages must not be waited for
            self._ledger.fail(save.number, KeeperError(f"it was interrupted: {error!r}"))
            raise
        return save

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
        return self._stager.hold(hint and f": {hint}")

    def wait(self, phase: Phase = "committed", timeout_s: float | None = None) -> None:
        """Block until every save so far has reached ``phase``.

        Without a timeout it waits as long as the keeper makes progress.
        Raises: the error of a save that failed; :class:`DeadlineError`.
        """
        self._check_process("wait")
        self._ledger.wait_all(phase, timeout_s)
        self._raise_failures()

    def close(self, timeout_s: float | None = None) -> None:
        """Wait until every save is committed, let the keeper go, remove the fence.  May be called again.

        Raises: the error of a save that failed; :class:`DeadlineError` if it took longer than ``timeout_s`` (the keeper
        then finishes by itself).
        """
        if self._is_closed or os.getpid() != self._owner_pid:
            return
        self._is_closed = True
        atexit.unregister(self._at_exit)
        began = time.monotonic()
        try:
            self._ledger.wait_all("committed", timeout_s)
        except DeadlineError:
            self._stager.give_up("close() did not wait any longer")
            raise
        finally:
            left_s = None if timeout_s is None else max(timeout_s - (time.monotonic() - began), 0.0)
            self._release(left_s)
        self._raise_failures()

    def _release(self, timeout_s: float | None) -> None:
        """Everything this process holds; what is staged is the keeper's affair from here on."""
        self._fence.remove()
        self._stager.stop(None if timeout_s is None else max(timeout_s, _GRACE_S))
        self._keepers.close(timeout_s, self._stager.take_updates())
        self._plan = None
        if self._stager.arena is not None:
            self._stager.arena.close()

    def _at_exit(self) -> None:
        """Leaving the interpreter without close(): stage what was requested, the keeper does the rest."""
        if os.getpid() == self._owner_pid and not self._is_closed:
            self._is_closed = True
            try:
                self._ledger.wait_all("staged", _EXIT_S)
            except StillframeError as error:
                logger.warning("at exit: %s", error)
            for save in self._ledger.take_untold():
                if self._on_error == "raise":
                    logger.warning("saving step %d failed, and nobody was told: %s", save.step, save.error)
            self._fence.remove()

    # --- restoring -------------------------------------------------------------------------

    def restore(self, state: Any, *, step: int | None = None, strict: bool = True) -> int | None:
        """Put a checkpoint into the live objects of ``state``, in place, every byte verified.

        Without ``step``: the newest committed one; ``None`` if there is none.  A damaged one is passed over, with a
        warning, and never offered again.  With ``step``: that one, or an error.  ``strict=False`` restores what
        matches; :attr:`last_restore` says what did not.

        Of several ranks all restore the same step, and none touches anything before it fits on all.  A checkpoint of
        another number of ranks, or spread differently, is read as far as this rank needs it; what each rank had kept
        for itself, a rank that was not there takes from one that was.

        Blocks until done; first until the keeper of a run that was just killed has committed what it holds.
        Raises: :class:`MismatchError` (nothing was touched), :class:`NotFoundError`, :class:`IntegrityError`,
        :class:`VersionError`, :class:`BusyError`.
        """
        self._check_open("restore")
        resume = Resume(self._catalog, self._group, state, None if step is None else check_step(step), strict)
        self._known = None
        try:
            return resume.run(self._settle)
        finally:
            self.last_restore = resume.report or self.last_restore
            self._keepers.restored(resume.report)

    def _settle(self) -> None:
        """Before a restore: the root is ours, and what we saved is committed."""
        self._keepers.wait_ready()
        self.wait("committed")

    # --- asking ----------------------------------------------------------------------------

    def next_step(self) -> int:
        """One more than the greatest step in the root, the same on every rank: for saves that nobody numbers.

        Blocks until every rank asks and every save is committed, also those of a run that was just killed.
        """
        self._check_open("next_step")
        return agree_on_next(self._group, self._catalog, self._settle)

    def stats(self) -> Stats:
        """What has happened since this checkpointer was made."""
        arena = self._stager.arena
        return self._ledger.stats(arena_bytes=arena.nbytes if arena else 0, arena_wait_s=arena.wait_s if arena else 0.0)

    @property
    def keeper_pid(self) -> int | None:
        """Process id of the running keeper, if there is one."""
        return self._keepers.pid

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

    # --- inside ----------------------------------------------------------------------------

    def _check_open(self, doing: str) -> None:
        if self._is_closed:
            raise ConfigError(f"{doing}: this checkpointer is closed; make another")
        self._check_process(doing)

    def _check_process(self, doing: str) -> None:
        if os.getpid() != self._owner_pid:
            raise ConfigError(
                f"{doing}: this checkpointer belongs to process {self._owner_pid}, not to its forked child"
            )

    def _known_steps(self) -> set[int]:
        """Committed when first asked, and everything saved since: ``save`` itself looks at no file."""
        if self._known is None:
            self._known = set(self._catalog.steps())
        return self._known

    def _check_new(self, step: int) -> None:
        """Raises :class:`ExistsError` if the step is a checkpoint or a save of ours; retention may have removed it.

        Several ranks save a step once in a run: files of a first try could pass for those of a second.
        """
        if step in self._tried and self._group.world_size > 1:
            raise ExistsError(f"step {step} has been saved in this run already: save the next one instead")
        if step in self._known_steps() and (
            self._catalog.is_committed(step) or any(save.step == step for save in self._ledger.in_flight)
        ):
            raise ExistsError(
                f"step {step} is already a checkpoint in {self._catalog.root}, or is being saved right now: "
                "restore() first and go on after the step it returns, or use another root"
            )

    @property
    def _seat(self) -> Seat:
        """Where this rank stands among those that hold parts of the same tensors."""
        group = self._group
        knows_ranks = group.world_size > 1 and group.is_global
        return Seat(group.rank, group.world_size, knows_ranks, writes_once=knows_ranks and self._catalog.rank is None)

    def _committed(self, step: int) -> None:
        if self._catalog.rank is not None:
            self._group.note_sealed(step)

    def _complete_step(self) -> int:
        return self._group.complete_step() if self._catalog.rank is not None else -1

    def _before_wait(self) -> None:
        if self._audit:
            self._stager.fence()

    def _saves_failed(self, saves: list[Save]) -> None:
        """Called from any thread, once for each failure."""
        known = self._known
        for save in saves:
            if known is not None:
                known.discard(save.step)
            if self._on_error == "warn":
                logger.warning("saving step %d failed; training goes on: %s", save.step, save.error)

    def _raise_failures(self) -> None:
        untold = self._ledger.take_untold()
        if untold and self._on_error == "raise":
            first = untold[0]
            assert first.error is not None
            others = f" (and {len(untold) - 1} more)" if len(untold) > 1 else ""
            raise type(first.error)(f"saving step {first.step} failed{others}: {first.error}") from first.error
