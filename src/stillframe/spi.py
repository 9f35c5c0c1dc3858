"""For code that saves through stillframe inside somebody else's loop (DCP, DeepSpeed).  Training loops need none of it.

tickets      Ticket, Run, issue, save, withdraw, settle: below
updates      UpdateGate holds them back for a save that another thread has yet to request
boxes        TensorBox, BoxReader, ELSEWHERE: parts of tensors and of lists, for callers that divide a state themselves
other names  Label, read_alias, show_labels, save_of: a directory that stands for a save
             hide: parts of a state that a segment, opened by others, should not show
removal      remove: single steps, beside the run that saves there
state dicts  LiveState: one that stands still until the next update; versions_of: to tell if it did not;
             mapped, Path, path_text, tensors_in, is_tensor: what is in one
values       storable: whether a value comes back as it was; is_wrapper: whether a tensor wraps others;
             register_attributes: as register_leaf, for simple classes of frameworks;
             load_rank, load_save: what one rank, or all of them, saved in a save
roots        has_saves: whether there is anything to wait for; wait_finished: for the keepers of a run that has ended;
             go_on, settle_tier: for a run that reads its checkpoint by itself; is_tier: whether a root is one
steps        meeting: one that all ranks agree on, for what happens on one of them
endings      when_over: as Save.then, and also for a save that fails
processes    keeper_pid

A ``Checkpointer`` takes the step from its caller, who counts alike on every rank.  A loop that does not number its
saves cannot promise that: saves overlap, or fail on one rank.  But it brings the ranks together once for each save, and
there one rank issues a ticket::

    ticket = spi.issue(checkpointer)                    # on one rank, which sends it to all
    spi.save(checkpointer, state, ticket)               # on every rank

A save under a ticket is exactly one save: ranks with different tickets write to different directories, and a ticket is
used once.  A rank that got one and will not save says so with :func:`withdraw`.

Nor need the ranks meet to begin a run: one begins it (:class:`Run`), and sends its name with the tickets; the others
join it by that.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stillframe.checkpoint import labels, lock, requests
from stillframe.checkpoint.catalog import Catalog
from stillframe.checkpoint.labels import read_alias, save_of
from stillframe.checkpointer import Checkpointer
from stillframe.errors import StillframeError
from stillframe.format.tree import Path
from stillframe.format.values import ELSEWHERE
from stillframe.latch import Answer
from stillframe.model import Label, Ticket, check_step
from stillframe.ranks.agreement import is_so_on_any
from stillframe.ranks.meeting import Meeting
from stillframe.restoring.boxes import BoxReader
from stillframe.restoring.load import load_rank, load_save
from stillframe.restoring.resume import Resume
from stillframe.restoring.selection import Wanted
from stillframe.retention import Keep
from stillframe.save.fence import Holds, OptimizerFence
from stillframe.save.saves import Save
from stillframe.save.versions import Versions
from stillframe.state.boxes import TensorBox
from stillframe.state.codecs import register_attributes
from stillframe.state.live import LiveState, is_tensor, mapped, path_text, tensors_in
from stillframe.state.torch_internals import local_of
from stillframe.state.walk import storable
from stillframe.state.wrappers import is_wrapper
from stillframe.tiers import TierConfig, TierName

__all__ = [
    "ELSEWHERE",
    "BoxReader",
    "Label",
    "LiveState",
    "Meeting",
    "Path",
    "Run",
    "TensorBox",
    "Ticket",
    "UpdateGate",
    "Versions",
    "go_on",
    "has_saves",
    "hide",
    "is_tensor",
    "is_tier",
    "is_wrapper",
    "issue",
    "keeper_pid",
    "load_rank",
    "load_save",
    "mapped",
    "meeting",
    "path_text",
    "read_alias",
    "register_attributes",
    "remove",
    "save",
    "save_of",
    "settle",
    "settle_tier",
    "show_labels",
    "storable",
    "tensors_in",
    "versions_of",
    "wait_finished",
    "when_over",
    "withdraw",
]


class Run(Checkpointer):
    """A root that is open for saves with tickets.  Without a ``name``, on rank 0: a run begins; the others join it.

    Its ranks share the root, and never wait for one another; what those of a ``Checkpointer`` agree on when they make
    it, the caller sends: the ``name``.  For saving only.  Failed saves are logged.
    Raises: :class:`ConfigError`, :class:`KeeperError`.
    """

    _ranks_talk = False

    def __init__(
        self,
        root: str | os.PathLike[str],
        name: str | None = None,
        *,
        rank: int,
        world_size: int,
        arena: int | str = "auto",
        keep: Keep | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name or secrets.token_hex(4)
        given: dict[str, Any] = {"arena": arena, "keep": keep, "storage_options": storage_options}
        super().__init__(root, rank=rank, world_size=world_size, on_error="warn", shared=True, **given)

    def _name_run(self, keep: Keep | None, tiers: Sequence[TierConfig]) -> str:
        self._group.meet_as(self.name)
        return self.name


def issue(checkpointer: Checkpointer, step: int | None = None, *, least: int = 0) -> Ticket:
    """On one rank: the identity of the next save, for every rank.  Without ``step``: the next, and not below ``least``.

    Blocks until the root is ours; the keeper of a run that was just killed may be finishing there.
    Raises: :class:`BusyError`; :class:`ExistsError` if the step is a checkpoint, or being saved, or before one that is;
    :class:`StorageError`.
    """
    checkpointer._lifetime.check_open("issue")
    checkpointer._keeper.wait_ready()
    checkpointer._keeper.start_epoch()  # ranks that save before this one, or when it fails, wait for nothing
    return checkpointer._steps.issue(None if step is None else check_step(step), least)


def save(
    checkpointer: Checkpointer,
    state: Any,
    to: Ticket | int,
    *,
    metadata: Mapping[str, Any] | None = None,
    label: Label | None = None,
    since: Versions | None = None,
) -> Save:
    """As ``Checkpointer.save``: under the identity of a ticket, or, where every rank counts alike, a step.

    ``label``: a directory of small files that appears with the checkpoint, for those who look for it by a name.
    ``since``: of tensors that must not have changed either; noted when the state was taken, if that was earlier.
    Raises also: :class:`ExistsError` if this rank has used the ticket before.  If it raises, the other ranks are told.
    """
    checkpointer._lifetime.check_open("save")
    return checkpointer._saver.save(to if isinstance(to, Ticket) else check_step(to), state, metadata, label, since)


def hide(checkpointer: Checkpointer, path: str) -> None:
    """Before the first save: whoever opens a segment as a safetensors file finds the tensors under this path as bytes.

    For labels with a ``segment``: whoever looks for weights there need not be shown every tensor of an optimizer.
    Reading with stillframe is the same.
    """
    checkpointer._planner.hidden = path


def withdraw(checkpointer: Checkpointer, ticket: Ticket, error: BaseException) -> None:
    """Give the ticket up: its step is free for another attempt.  Never blocks for another rank.

    A rank that has not begun to save tells the others, which then need not wait.  So does rank 0 if it has sealed the
    save: it is not committed, unless that is done.  A save that has begun otherwise ends as it may.
    """
    is_begun = checkpointer._steps.withdraw(ticket)
    checkpointer._saver.give_up(ticket.step, ticket.attempt, error, is_begun)


def settle(checkpointer: Checkpointer) -> None:
    """Block until the root is ours, and everything that was saved here is committed or has failed.

    Raises: :class:`BusyError` if another run trains there; :class:`KeeperError`.
    """
    checkpointer._keeper.wait_ready()
    with contextlib.suppress(StillframeError):  # whoever asked for the save is told
        checkpointer.wait("committed")


def show_labels(root: str | os.PathLike[str]) -> None:
    """Let the labels of committed saves appear that a crash has prevented.  For whoever has the root to himself.

    Raises: :class:`StorageError`.
    """
    labels.publish_committed(Catalog(root))


def remove(checkpointer: Checkpointer, steps: Sequence[int], *, force: bool = False) -> None:
    """Remove every checkpoint of these steps: for loops that decide themselves what stays, and save with ``keep=None``.

    One request for all of them, which rank 0's keeper carries out, about a second later; call it on one rank, on a
    thread that may block (:meth:`Save.then`).  Those that are pinned, or are being read, stay; so does the newest,
    unless ``force`` is given.  What stays is no error: ask again.
    Raises: :class:`BusyError` if the keeper does not answer; :class:`StorageError`.
    """
    checkpointer._keeper.wait_ready()
    done = requests.remove_if_free(checkpointer._catalog, [check_step(step) for step in steps], force=force)
    if done.error is not None:
        raise done.error


def has_saves(root: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> bool:
    """Whether something was saved to this root, or has begun to be.  Raises: :class:`StorageError`."""
    return bool(Catalog(root, storage_options=storage_options).look().saves)


def wait_finished(root: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> bool:
    """Block until the keepers of a run that was killed have committed what they hold; then ``Catalog.latest`` is final.

    For those who list a root before they begin a run in it.  Reads only.  Returns whether nobody is at work there:
    ``False`` means that a run trains there.  Raises: :class:`BusyError` if a keeper hangs; :class:`StorageError`.
    """
    return lock.wait_finished(Catalog(root, storage_options=storage_options).store)


def go_on(checkpointer: Checkpointer) -> int | None:
    """Let the run go on from the newest checkpoint that every rank can read, as ``restore`` does, and read none of it.

    For loops that read the state themselves, where the ranks do not share the root: otherwise each goes on from what is
    newest on its own disk.  Returns the step; ``None`` if there is nothing.  What the tiers lack of it is carried.
    Every rank calls it, before it saves; blocks until all have.  Raises: as ``restore``.
    """
    checkpointer._lifetime.check_open("go_on")
    epochs, wanted = checkpointer._epochs, Wanted.given(None, True, None, None)
    resume = Resume(checkpointer._catalog, checkpointer._group, None, wanted, checkpointer._tiers)
    try:
        save = resume.newest(epochs.beginning(), epochs.claim_in)
    except BaseException:
        epochs.keep_on()
        raise
    epochs.resume(save)
    return None if save is None else save.step


_FIRST_ROUND_S = 1.0
_LONGEST_ROUND_S = 60.0


def settle_tier(checkpointer: Checkpointer, tier: TierName) -> None:
    """Block until the tier has what is due there, also what an earlier run has left; what cannot be carried is left.

    Every rank calls it: rank 0 waits for the tier, the others for rank 0.
    Raises, on every rank: :class:`StorageError` if nothing is carried any more; :class:`DeadlineError`.
    """
    group, done = checkpointer._group, Answer[None]()
    if group.rank == 0:
        waiting = threading.Thread(target=lambda: done.run(lambda: checkpointer.wait(tier=tier)), daemon=True)
        waiting.start()
    round_s = _FIRST_ROUND_S

    def is_done() -> bool:
        if group.rank != 0 or not done.wait(round_s):
            return False
        done.get()
        return True

    # In rounds: as long as something moves rank 0 goes on, and the others wait for one word no longer than a deadline.
    while not is_so_on_any(group, "carrying what an earlier run has left", is_done):
        round_s = min(2 * round_s, group.deadline_s / 2, _LONGEST_ROUND_S)


def is_tier(catalog: Catalog) -> bool:
    """Whether the newest start of a run there is another root's, whose checkpoints are carried there.

    Then no lock in it tells whether that run lives.  Raises: :class:`StorageError`, :class:`IntegrityError`.
    """
    begun = (catalog.parent(epoch) for epoch in sorted(catalog.epochs(), reverse=True))
    newest = next((each for each in begun if each is not None and not each.is_by_hand), None)
    return newest is not None and newest.is_carried


def meeting(checkpointer: Checkpointer, name: str, *, ahead_s: float = 0.0) -> Meeting:
    """For something that one rank learns of and all must do at the same step.  Every rank makes it, before training.

    A rank calls (:meth:`Meeting.call`).  Each asks once at every step whether this is the one (:meth:`Meeting.passed`).
    ``ahead_s``: how much later they meet, so that training does not wait while the ranks agree.
    """
    return Meeting(checkpointer._group, name, ahead_s)


def versions_of(state: Any) -> Versions:
    """Of all tensors of a state dict, for ``since``; a DTensor and its local tensor count apart."""
    found = tensors_in(state)
    return Versions([*found.values(), *map(local_of, found.values())], list(map(path_text, found)) * 2)


def when_over(save: Save, function: Callable[[Save], object]) -> None:
    """Call ``function(save)`` once this save is committed or has failed; as :meth:`Save.then`, and after its functions.

    For those whose own bookkeeping waits for the end of a save, whichever it is.
    """
    save._saves.when_over(save, function)


def keeper_pid(checkpointer: Checkpointer) -> int | None:
    """The process id of the keeper, if one runs: for those who watch its memory, or end it in tests."""
    return checkpointer._keeper.pid


class UpdateGate:
    """Holds back every optimizer's update in this process, for saves that another thread has yet to request.

    ``fence`` is called after a wait, before the update: it waits for what has been requested meanwhile.
    """

    def __init__(self, fence: Callable[[], object]) -> None:
        self._fence = fence
        self._holds_of = os.getpid(), Holds()
        self._hook = OptimizerFence(lambda _begins: self.wait())

    @property
    def _holds(self) -> Holds:
        """A forked child has its own: the threads that would release those of its parent do not exist there."""
        if self._holds_of[0] != os.getpid():
            self._holds_of = os.getpid(), Holds()
        return self._holds_of[1]

    def hold(self, hint: str) -> Callable[[], None]:
        """From now on, until the function returned is called.  After a while a wait is mentioned, with the ``hint``.

        Call it where training goes on: a save that another thread requests meanwhile is in the order of this thread's
        current streams.
        """
        return self._holds.add(hint)

    def wait(self) -> None:
        """Block until nothing is held."""
        if self._holds.wait():
            self._fence()
