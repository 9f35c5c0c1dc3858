"""What ranks agree on when a run starts (one root, one version, one policy, one name), and when an epoch begins."""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from stillframe import version
from stillframe.checkpoint.catalog import Catalog
from stillframe.checkpoint.epochs import next_epoch
from stillframe.errors import ConfigError, StorageError
from stillframe.ranks.group import Answer, Group, check_same
from stillframe.retention import Keep
from stillframe.store import files, is_url, root_address, root_text
from stillframe.tiers import Tier, TierConfig, check_tiers

NODE = "{node}"
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


class _Hello(msgspec.Struct, frozen=True):
    """What every rank says; all but the node must be the same."""

    node: str
    root: str
    shared: bool
    version: str
    world_size: int
    keep: str
    tiers: str
    deadline_s: float


class _Run(msgspec.Struct, frozen=True):
    run: str
    ranks_on_node: int


class _Number(msgspec.Struct, frozen=True):
    number: int


def resolve_root(
    root: str | os.PathLike[str], shared: bool | None, group: Group, storage_options: Mapping[str, Any] | None = None
) -> Catalog:
    """The root of this rank; ``rank`` in it is None if all ranks see the same one.  Raises :class:`ConfigError`."""
    if shared is not None and not isinstance(shared, bool):
        raise ConfigError(f"shared={shared!r}: give True, False or None")
    text = root_text(root)
    if NODE in text:
        if shared:
            raise ConfigError(f"root={text!r} is another one on each node, so shared=True cannot be")
        shared = False
        text = text.replace(NODE, os.environ.get("STILLFRAME_NODE") or socket.gethostname())
    if re.search(r"\{\w*\}", text):
        raise ConfigError(f"root={text!r}: {NODE} is the only thing in braces that is replaced")
    text = root_address(text)
    is_shared = shared is not False or group.world_size == 1
    catalog = Catalog(text, None if is_shared else group.rank, storage_options=storage_options)
    if not is_url(text) and files.kind_of(text) not in ("directory", "nothing"):
        raise ConfigError(f"root={catalog.root!r} is a file; give a directory")
    return catalog


def open_tiers(tiers: Sequence[Tier], root: Catalog) -> list[Catalog]:
    """Raises :class:`ConfigError`."""
    configs = check_tiers(tiers, root.root)
    return [Catalog(each.root, storage_options=each.storage_options) for each in configs]


def agree_on_run(group: Group, catalog: Catalog, keep: Keep | None, tiers: Sequence[TierConfig] = ()) -> str:
    """A name for this start of the run, the same on every rank.  Blocks until all ranks are here.

    From then on the group knows how many ranks share a node.
    Raises: :class:`ConfigError` naming the ranks that differ; :class:`DeadlineError` naming those that did not come.
    """
    is_shared = catalog.rank is None
    hello = _Hello(
        node=_node(),
        root=catalog.root if is_shared else "",
        shared=is_shared,
        version=version.VERSION,
        world_size=group.world_size,
        keep=repr(keep),
        tiers=repr(list(tiers)),
        deadline_s=group.deadline_s,
    )

    def judge(answers: list[Answer]) -> _Run:
        hellos = [msgspec.convert(each.value, _Hello, from_attributes=True) for each in answers]
        for name in _Hello.__struct_fields__[1:]:
            check_same(name, [getattr(each, name) for each in hellos])
        return _Run(secrets.token_hex(4), max(Counter(each.node for each in hellos).values()))

    agreed = group.decide(f"starting to use {catalog.root}", lambda: hello, judge, _Run)
    group.ranks_on_node = agreed.ranks_on_node
    return agreed.run


def _node() -> str:
    """The same for processes that share a machine's memory, also for those in different containers."""
    try:
        return files.read_file(_BOOT_ID).decode().strip()
    except StorageError:
        return socket.gethostname()


def agree_on_epoch(group: Group, catalog: Catalog, tiers: Sequence[Catalog], before: int = 0) -> int | None:
    """The number of the next epoch, where every rank has a root of its own; ``None`` where rank 0 claims one for all.

    ``before``: the one that this run has agreed on last.

    Blocks until every rank asks.
    """
    if catalog.rank is None:
        return None

    def say() -> int:
        return max(next_epoch(catalog, tiers), before + 1)

    return group.decide("beginning an epoch", say, _greatest, _Number).number


def do_together(group: Group, about: str, work: Callable[[], None]) -> None:
    """Every rank does its part, and returns when all have.  Raises, on every rank, what kept one from it."""

    def judge(answers: list[Answer]) -> _Number:
        _raise_first(answers)
        return _Number(len(answers))

    group.decide(about, work, judge, _Number)


def is_so_on_any(group: Group, about: str, ask: Callable[[], bool]) -> bool:
    """Whether it is so on any rank, told to all.  Raises, on every rank, what one of them raises."""
    return bool(group.decide(about, lambda: int(ask()), _greatest, _Number).number)


def _raise_first(answers: list[Answer]) -> None:
    for each in answers:
        if each.error is not None:
            raise each.error


def _greatest(answers: list[Answer]) -> _Number:
    _raise_first(answers)
    return _Number(max(each.value for each in answers))
